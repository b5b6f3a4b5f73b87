"""Costs of computations and messages, shared by generators, the simulator and the planner."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..errors import ScheduleError
from .ops import ALL_KINDS, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op
from .placement import Placement
from .stage_kinds import HEAD_PART

# Key of a time in text and JSON -> field of Costs.
_TIMES = {
    "f": "forward",
    "b": "backward_input",
    "w": "backward_weight",
    **{k: k for k in ("comm", "overhead")},
}
_TEXT_KEYS = (*_TIMES, "stages", "head", "slices", "jitter", "seed")
_MAX_FACTORS = 200_000
# With these limits, sums of ten million times and ratios of times do not overflow.
_MIN_TIME, _MAX_TIME = 1e-15, 1e15
_ROUNDING = 1e-7  # of a mean of rounded factors
_MAX_CHARACTERS = 60  # of a value in an error
TYPICAL_HEAD = 0.5  # cost factor of a head in parts, if the costs have none
# Sizes that a traced run and its measured costs record. Values: those of a file without them; None: unknown.
MEASURED_SIZES: Mapping[str, Any] = {
    "tensor_parallel_size": 1,
    "recomputes": False,
    "micro_batch_size": None,
    "stage_layers": None,
}

Factors = tuple[float, float, float]  # of forward, backward_input and backward_weight
_EVEN = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Costs:
    """Times of a forward, an input gradient and a weight gradient of 1/D of the model, and of a message.

    Args:
        stages: cost factor of every stage, for example to include the embedding and the head; or three factors, of
            forward, backward_input and backward_weight. None: all 1.
        head: cost factor, or three, of the model's whole head relative to 1/D of the model, if every device holds a
            part of it; 0: TYPICAL_HEAD.
        links: (sender, receiver) -> time of a message on that link; ``comm`` for the others.
        jitter: each computation and message takes 1 + jitter * u times as long, with u uniform in [-1, 1].
        seed: seed of the jitter. An op has the same jitter in every timetable.
        overhead: time of every op besides its computation, at any size of its stage.
        measured: description of the traced run whose times in milliseconds these are, with its number of "devices"
            and its MEASURED_SIZES; empty: not measured.
        slices: times of the slices of a sequence, which are divided by their mean, for example because attention makes
            later ones dearer. None: all 1.

    Raises:
        ScheduleError: a time is neither 0 nor between 1e-15 and 1e15, the jitter is not between 0 and 1, or the seed or
            the number of devices is not an integer.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    comm: float = 0.0
    stages: tuple[float | Factors, ...] | None = None
    links: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)
    jitter: float = 0.0
    seed: int = 0
    overhead: float = 0.0
    measured: Mapping[str, Any] = field(default_factory=dict, hash=False)
    slices: tuple[float, ...] | None = None
    head: float | Factors = 0.0

    def __post_init__(self) -> None:
        self._copy_collections()
        for name, time in self._named_times().items():
            if not _is_number(time) or not (time == 0 or _MIN_TIME <= time <= _MAX_TIME):
                raise ScheduleError(
                    f"costs: {name} must be 0 or between {_MIN_TIME:g} and {_MAX_TIME:g} (got {_short(time)})."
                )
        self._scale_slices()
        if not _is_number(self.jitter) or not 0 <= self.jitter <= 1:
            raise ScheduleError(f"costs: jitter must be between 0 and 1 (got {_short(self.jitter)}).")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ScheduleError(f"costs: seed must be an integer (got {_short(self.seed)}).")
        devices = self.measured.get("devices") if isinstance(self.measured, Mapping) else None
        if self.measured != {} and (type(devices) is not int or devices < 1):
            raise ScheduleError(f"costs: measured needs the number of devices (got {_short(self.measured)}).")

    def _copy_collections(self) -> None:
        if self.stages is not None:
            stages = (tuple(stage) if isinstance(stage, list) else stage for stage in self.stages)
            object.__setattr__(self, "stages", tuple(stages))
        if isinstance(self.head, list):
            object.__setattr__(self, "head", tuple(self.head))
        object.__setattr__(self, "links", dict(self.links))

    def _named_times(self) -> dict[str, Any]:
        """Return all times and factors by their names in errors."""
        times = {key: getattr(self, name) for key, name in _TIMES.items()}
        factors = {f"stages[{i}]": stage for i, stage in enumerate(self.stages or ())} | {"head": self.head}
        for name, factor in factors.items():
            if isinstance(factor, tuple):
                if len(factor) != len(_EVEN):
                    raise ScheduleError(
                        f"costs: {name} must be one factor, or three for f, b and w (got {_short(factor)}). "
                        f"Example: {name.partition('[')[0]}=4:4:8."
                    )
                times |= {f"{name}[{k}]": value for k, value in enumerate(factor)}
            else:
                times[name] = factor
        times |= {f"slices[{j}]": time for j, time in enumerate(self.slices or ())}
        return times | {f"links {a}>{b}": time for (a, b), time in self.links.items()}

    def _scale_slices(self) -> None:
        """Divide the times of the slices by their mean, unless that is 1 but for rounding, as of printed costs."""
        if self.slices is not None:
            mean = statistics.fmean(self.slices) if self.slices else 0.0
            if not mean:
                raise ScheduleError(f"costs: slices must have a time above 0 (got {_short(self.slices)}).")
            if abs(mean - 1) > _ROUNDING:
                object.__setattr__(self, "slices", tuple(time / mean for time in self.slices))

    @property
    def free_messages(self) -> bool:
        """True if no message takes time."""
        return not self.comm and not any(self.links.values())

    @property
    def stage_factors(self) -> tuple[Factors, ...] | None:
        """Three factors of every stage; None: all 1."""
        if self.stages is None:
            return None
        return tuple(map(_three, self.stages))

    def time(self, kind: str, factors: Factors = _EVEN) -> float:
        """Return the time of a computation of ``kind`` for 1/D of the model, at a stage with these factors."""
        times = (self.forward, self.backward_input, self.backward_weight)
        forward, backward_input, backward_weight = (t * x for t, x in zip(times, factors, strict=True))
        return {
            FORWARD: forward,
            RECOMPUTE: forward,
            BACKWARD: backward_input + backward_weight,
            BACKWARD_INPUT: backward_input,
            BACKWARD_WEIGHT: backward_weight,
        }[kind]

    def with_recompute(self, share: float) -> Costs:
        """Return the costs if every backward first repeats this share of its forward."""
        repeated = self.backward_input + share * self.forward
        stages, head = self.stage_factors, self.head
        if stages is not None and repeated:
            stages = tuple(
                (f, (self.backward_input * b + share * self.forward * f) / repeated, w) for f, b, w in stages
            )
        if head and repeated:  # the forward of a part includes its input gradient, and is not repeated
            f, b, w = _three(head)
            head = (f, self.backward_input * b / repeated, w)
        measured = {**self.measured, "recomputes": True} if self.measured else {}
        costs = replace(self, backward_input=repeated, stages=stages, head=head, measured=measured)
        return costs if share else self

    def ratios(self) -> Costs:
        """Return the costs, of measured ones only f, b and w, for times that come from a rate and a model.

        Raises ScheduleError if they include tensor-parallel messages or recomputation, which the model adds.
        """
        if not self.measured:
            return self
        self.check_measured({"tensor_parallel_size": 1, "recomputes": False})
        return Costs(self.forward, self.backward_input, self.backward_weight)

    def check_measured(self, sizes: Mapping[str, Any]) -> None:
        """Raise ScheduleError for costs measured with other sizes than a job's. Unknown sizes are not compared.

        Args:
            sizes: values of some of MEASURED_SIZES. The stages of ``stage_layers`` are those of these costs.
        """
        measured = {name: self.measured.get(name, MEASURED_SIZES[name]) for name in sizes}
        other = [n for n, size in sizes.items() if None not in (size, measured[n]) and size != measured[n]]
        if self.measured and other:
            raise ScheduleError(
                f"costs: must be measured with {_sizes_text(sizes, other)} (got {_sizes_text(measured, other)}). "
                f"Trace a run with these sizes."
            )

    def durations(self, placement: Placement, slices: int = 1) -> dict[str, tuple[float, ...]]:
        """Return the time of every kind of op at every stage, for the mean of the slices, without jitter.

        Raises ScheduleError if the costs do not fit the placement or the slices.
        """
        if self.slices is not None and len(self.slices) != slices:
            raise ScheduleError(
                f"costs: slices must have {slices} times, one per slice (got {len(self.slices)})."
            )
        costs = self.fit(placement)
        share = placement.devices_per_pipe / placement.stages / slices
        stages = costs.stage_factors or (_EVEN,) * placement.stages
        durations = {
            kind: tuple(
                costs.time(kind, factors) * share * placement.slowdown(kind) + costs.overhead
                for factors in stages
            )
            for kind in placement.kinds
        }
        further = [row.kind for row in placement.table[placement.stages :]]
        parts = costs._head_part_times(further.count(HEAD_PART), slices) if HEAD_PART in further else {}
        for kind, row in durations.items() if further else ():
            times = {HEAD_PART: parts.get(kind, 0.0) + costs.overhead}
            even = costs.time(kind, _EVEN) * share + costs.overhead
            durations[kind] = (*row, *(times.get(of, even) if of.has_weights else 0.0 for of in further))
        return durations

    def _head_part_times(self, count: int, slices: int) -> dict[str, float]:
        """Return the times of a slice of a head part, one of ``count``, whose forward computes an input gradient too.

        Bounds of orders with whole backwards count the weight gradient as one.
        """
        forward, backward_input, weight = (
            self.time(kind, _three(self.head)) / count / slices
            for kind in (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
        )
        return {FORWARD: forward + backward_input, BACKWARD: weight, BACKWARD_WEIGHT: weight}

    def fit(self, placement: Placement) -> Costs:
        """Return the costs for a placement, which differ from these if they are measured, or lack those of head parts.

        Measured times carry over to another number of devices, and to stages that each join several measured ones.

        Raises ScheduleError if the number of factors is not the number of stages, a link has an unknown device, there
        is a factor of the head without head parts, or measured times do not carry over, as those of a head on the last
        stage to parts of it.
        """
        in_parts = HEAD_PART in placement.stage_kinds
        if self.measured and bool(self.head) != in_parts:
            known = ("without", "with")
            raise ScheduleError(
                f"costs: must be measured {known[in_parts]} vocabulary_parallel_head (got a run "
                f"{known[bool(self.head)]} it on {self.measured['devices']} devices). Trace another run."
            )
        if self.head and not in_parts:
            raise ScheduleError(
                f"costs: head needs vocabulary_parallel_head (got head={factors_text([self.head], 'g')} without it). "
                f"Add it, or leave out head{self._last_stage_text(placement)}."
            )
        costs = self._carry_over(placement) if self.measured else self
        if in_parts and not costs.head:
            costs = replace(costs, head=TYPICAL_HEAD)
        if costs.stages is not None and len(costs.stages) != placement.stages:
            raise ScheduleError(
                f"costs: stages must have {placement.stages} factors, one per stage (got {len(costs.stages)}). "
                "Remove the costs, or use those of a plan with as many stages."
            )
        for sender, receiver in costs.links:
            in_range = all(0 <= device < placement.num_devices for device in (sender, receiver))
            if not in_range or sender == receiver:
                raise ScheduleError(
                    f"costs: a link must join two different devices from 0 to {placement.num_devices - 1} "
                    f"(got {sender}>{receiver})."
                )
        return costs

    def _last_stage_text(self, placement: Placement) -> str:
        """Return the text of stages for the head on the last one, for an error; empty if stages have factors."""
        if self.stages is not None:
            return ""
        chunks = placement.stages / placement.devices_per_pipe
        f, b, w = (1 + chunks * factor for factor in _three(self.head))
        stages = [*[1.0] * (placement.stages - 1), f if f == b == w else (f, b, w)]
        return f"; for the same head on the last stage: stages={factors_text(stages, 'g')}"

    def _carry_over(self, placement: Placement) -> Costs:
        """Return measured costs for the number of devices and stages of a placement."""
        devices, stages = placement.devices_per_pipe, self.stage_factors or ()
        costs, ratio = self, self.measured["devices"] / devices
        if ratio != 1 and self.links:
            raise ScheduleError(
                f"costs: links between hosts were measured for {self.measured['devices']} devices (got {devices}). "
                f"Trace a run with {devices}."
            )
        if ratio != 1:
            names = ("forward", "backward_input", "backward_weight")
            times = {name: getattr(self, name) * ratio for name in names}
            head = tuple(round(factor / ratio, 8) for factor in _three(self.head)) if self.head else 0.0
            costs = replace(self, **times, head=head, measured={**self.measured, "devices": devices})
        if len(stages) % placement.stages:
            raise ScheduleError(
                f"costs: the {len(stages)} measured stages cannot be joined to {placement.stages} (got "
                f"{self.measured.get('schedule')}). Trace a schedule with {placement.stages} stages or a multiple."
            )
        size = len(stages) // placement.stages
        if size <= 1:
            return costs
        groups = (zip(*stages[i : i + size], strict=True) for i in range(0, len(stages), size))
        measured, layers = dict(costs.measured), costs.measured.get("stage_layers")
        if layers is not None:
            measured["stage_layers"] = [sum(layers[i : i + size]) for i in range(0, len(layers), size)]
        factors = tuple(tuple(map(statistics.fmean, group)) for group in groups)
        return replace(costs, stages=factors, measured=measured)

    def delay(self, sender: int, receiver: int) -> float:
        """Return the time of a message between two devices, without jitter; 0 on one device."""
        return 0.0 if sender == receiver else self.links.get((sender, receiver), self.comm)

    def jitter_factor(self, op: Op, *, message: bool = False) -> float:
        """Return the jitter factor of ``op``, or of the message that it receives."""
        if not self.jitter:
            return 1.0
        code = ((op.micro_batch << 20 | op.stage) << 3 | ALL_KINDS.index(op.kind)) << 1 | message
        u = _mix(_mix(self.seed) ^ code ^ _mix(op.slice) * (op.slice > 0)) / (1 << 63) - 1.0
        return 1.0 + self.jitter * u


def _three(factor: float | Factors) -> Factors:
    return factor if isinstance(factor, tuple) else (factor, factor, factor)


def _mix(x: int) -> int:
    """Return 64 pseudo-random bits for ``x`` (SplitMix64; Steele et al., OOPSLA 2014)."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31


def read_costs(text: str) -> Costs:
    """Return the costs of an option or a flag: text, or the path of a file."""
    return load_costs(text) if os.path.isfile(text) or text.endswith(".json") else parse_costs(text)


def parse_costs(text: str) -> Costs:
    """Return the costs in ``"f=1,b=1,w=1,comm=0,stages=0.9x7/1.7:1.8:1.6,slices=1/3,jitter=0"``, keys optional."""
    pairs: list[tuple[str, Any]] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, value = part.partition("=")
        key = key.strip()
        try:
            if key in ("stages", "slices", "head"):
                factors = _parse_factors(value)
                pairs.append((key, factors[0] if key == "head" and len(factors) == 1 else factors))
            elif key in _TEXT_KEYS:
                pairs.append((key, int(value) if key == "seed" else float(value)))
            else:
                pairs.append((key, value))
        except ValueError:
            raise ScheduleError(
                f"costs: invalid value (got {_short(part)}). Examples: f=1.5, seed=1, stages=0.9x7/1.7."
            ) from None
    return _make_costs(_as_unique_keys(pairs, "costs"), _TEXT_KEYS, "costs")


def load_costs(path: str) -> Costs:
    """Return the costs in a JSON file: ``{"f": 1, "stages": [1, 1.2], "links": {"0>1": 0.3}, "jitter": 0.1}``.

    The keys are f, b, w and the other arguments of :class:`Costs`, all optional. A link is "sender>receiver".
    """
    known = [*_TIMES, *(field.name for field in fields(Costs) if field.name not in _TIMES.values())]
    subject = f"costs {path}"
    try:
        with open(path, encoding="utf-8-sig") as file:
            values = json.load(file, object_pairs_hook=lambda pairs: _as_unique_keys(pairs, subject))
    except OSError as error:
        raise ScheduleError(f"{subject}: {error.strerror}.") from None
    except RecursionError:
        raise ScheduleError(f"{subject}: nested too deeply.") from None
    except ScheduleError:
        raise  # ScheduleError is a ValueError
    except ValueError as error:
        raise ScheduleError(f"{subject}: not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ScheduleError(f"{subject}: must be an object with {', '.join(known)} (got {_short(values)}).")
    for key in {"stages", "slices"} & set(values):
        if not isinstance(values[key], list | None):
            raise ScheduleError(f"{subject}: {key} must be a list of factors (got {_short(values[key])}).")
    if "links" in values:
        values["links"] = _parse_links(values["links"], subject)
    return _make_costs(values, known, subject)


def _make_costs(values: Mapping[str, Any], known: Sequence[str], subject: str) -> Costs:
    """Return the costs for values by key. Raises ScheduleError for an unknown key."""
    if unknown := sorted(set(values) - set(known)):
        fix = "Put links into a JSON file" if "links" in unknown else f"Keys: {', '.join(known)}"
        raise ScheduleError(f"{subject}: unknown keys (got {', '.join(unknown)[:_MAX_CHARACTERS]}). {fix}.")
    return Costs(**{_TIMES.get(key, key): value for key, value in values.items()})


def _as_unique_keys(pairs: Sequence[tuple[str, Any]], subject: str) -> dict[str, Any]:
    """Return a dictionary of the pairs. Raises ScheduleError for a repeated key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ScheduleError(f"{subject}: {next(k for k in keys if keys.count(k) > 1)!r} is repeated.")
    return values


def _parse_links(links: Any, subject: str) -> dict[tuple[int, int], float]:
    """Return ``{(0, 1): 0.3}`` for ``{"0>1": 0.3}``."""
    pairs: dict[tuple[int, int], float] = {}
    for name in links if isinstance(links, dict) else [links]:
        devices = isinstance(links, dict) and re.fullmatch(r" *([0-9]{1,9}) *> *([0-9]{1,9}) *", name)
        if not devices:
            raise ScheduleError(
                f'{subject}: a link must be "sender>receiver" (got {_short(name)}). Example: "0>1".'
            )
        link = (int(devices[1]), int(devices[2]))
        if link in pairs:
            raise ScheduleError(f"{subject}: link {link[0]}>{link[1]} is repeated.")
        pairs[link] = links[name]
    return pairs


def _parse_factors(text: str) -> tuple[float | tuple[float, ...], ...]:
    """Return the factors in ``"0.9x7/1.7:1.8:1.6"``: seven times 0.9, then three of one stage. Raises ValueError."""
    stages: list[float | tuple[float, ...]] = []
    for part in text.split("/"):
        factors, x, times = part.partition("x")
        count = int(times) if x else 1
        if not 1 <= count <= _MAX_FACTORS - len(stages):
            raise ValueError(text)
        first, *others = map(float, factors.split(":"))
        stages += [(first, *others) if others else first] * count
    return tuple(stages)


def factors_text(stages: Sequence[float | Factors], form: str = "") -> str:
    """Return factors in the format of :func:`parse_costs`; ``form`` is the format of a number."""

    def text(stage: float | Factors) -> str:
        return ":".join(f"{factor:{form}}" for factor in (stage if isinstance(stage, tuple) else (stage,)))

    runs = [(stage, len(list(same))) for stage, same in itertools.groupby(map(text, stages))]
    return "/".join(f"{stage}x{count}" if count > 1 else stage for stage, count in runs)


def dump_costs(costs: Costs) -> dict[str, Any]:
    """Return the object that :func:`load_costs` reads."""
    names = {name: key for key, name in _TIMES.items()}
    values = {names.get(field.name, field.name): getattr(costs, field.name) for field in fields(Costs)}
    values["links"] = {f"{a}>{b}": time for (a, b), time in costs.links.items()}
    return {key: value for key, value in values.items() if value or key in ("f", "b", "w")}


def _sizes_text(sizes: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return sizes such as ``micro batch size 4, stage layers 5,5`` for an error."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return ",".join(map(str, value))
        return str(value).lower()  # true and false, as in JSON

    return ", ".join(f"{name.replace('_', ' ')} {text(sizes[name])}" for name in names)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False  # the integer is too large for a float


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits, or lists nested too deeply
        return "thousands of digits or brackets"
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
