"""What computations and messages cost: the numbers that generators, the simulator and the planner share."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import ScheduleError
from .ops import ALL_KINDS, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op
from .placement import Placement

# The times as text and JSON have them, and their fields.
_TIMES = {"f": "forward", "b": "backward_input", "w": "backward_weight", "comm": "comm"}
_IN_TEXT = (*_TIMES, "stages", "jitter", "seed")
_MOST_FACTORS = 200_000
# Sums of up to ten million times, and their ratios, stay within what a float holds.
_LEAST, _MOST = 1e-15, 1e15
_LONGEST = 60  # characters of a value in an error


@dataclass(frozen=True)
class Costs:
    """Times of one D-th of the model: forward, input gradient, weight gradient; and of one message.

    Args:
        stages: a factor for every stage of the model, as the first and the last also hold the embedding and the
            loss; None for all alike.
        links: (sender, receiver) -> time of a message on that link; the others take ``comm``.
        jitter: every computation and message takes 1 + jitter * u times as long, u uniform in [-1, 1].
        seed: of the jitter. An op has the same jitter in every timetable and every order.

    Raises:
        ScheduleError: a time is neither 0 nor within 1e-15 and 1e15, the jitter is not within 0 and 1, or the seed
            is no integer.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    comm: float = 0.0
    stages: tuple[float, ...] | None = None
    links: Mapping[tuple[int, int], float] = field(default_factory=dict, hash=False)
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.stages is not None:
            object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "links", dict(self.links))
        times = {key: getattr(self, name) for key, name in _TIMES.items()}
        times |= {f"stages[{i}]": factor for i, factor in enumerate(self.stages or ())}
        times |= {f"links {a}>{b}": time for (a, b), time in self.links.items()}
        for name, time in times.items():
            if not _is_number(time) or not (time == 0 or _LEAST <= time <= _MOST):
                raise ScheduleError(
                    f"costs are finite and not negative: {', '.join(_TIMES)} (times for one D-th of the model), "
                    f"stages (factors) and links (times) are 0 or within {_LEAST:g} and {_MOST:g}; got {name} = "
                    f"{_short(time)}."
                )
        if not _is_number(self.jitter) or not 0 <= self.jitter <= 1:
            raise ScheduleError(
                f"costs: jitter must be within 0 and 1, as no time is negative; got {_short(self.jitter)}."
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ScheduleError(f"costs: seed must be an integer, for example 0; got {_short(self.seed)}.")

    def of(self, kind: str) -> float:
        """Cost of one computation of that kind on one D-th of the model."""
        whole = {
            FORWARD: self.forward,
            BACKWARD: self.backward_input + self.backward_weight,
            BACKWARD_INPUT: self.backward_input,
            BACKWARD_WEIGHT: self.backward_weight,
        }
        return self.forward if kind == RECOMPUTE else whole[kind]

    def durations(self, placement: Placement) -> dict[str, tuple[float, ...]]:
        """Kind of op -> its time at every stage, without jitter: its share of the model, times its factor.

        Raises ScheduleError when the factors or the links are not those of the placement.
        """
        self.check_fits(placement)
        share = placement.devices_per_pipe / placement.stages
        factors = self.stages or (1.0,) * placement.stages
        return {
            kind: tuple(self.of(kind) * share * factor * placement.slowdown(kind) for factor in factors)
            for kind in placement.kinds
        }

    def check_fits(self, placement: Placement) -> None:
        """Raise ScheduleError when there are not as many factors as stages, or a link joins no two ranks."""
        if self.stages is not None and len(self.stages) != placement.stages:
            raise ScheduleError(
                f"costs: stages has {len(self.stages)} factors, but the schedule cuts the model into "
                f"{placement.stages} stages. Give {placement.stages} factors."
            )
        for ends in self.links:
            if not all(0 <= rank < placement.num_devices for rank in ends) or ends[0] == ends[1]:
                last = placement.num_devices - 1
                raise ScheduleError(
                    f"costs: link {ends[0]}>{ends[1]} does not join two of the {placement.num_devices} ranks, "
                    f"which are counted from 0; give only links between ranks 0 to {last}."
                )

    def delay(self, sender: int, receiver: int) -> float:
        """Time of a message between two devices, without jitter; 0 on one device."""
        return 0.0 if sender == receiver else self.links.get((sender, receiver), self.comm)

    def factor(self, op: Op, *, message: bool = False) -> float:
        """The jitter: what the time of ``op``, or of the message that it waits for, is multiplied by."""
        if not self.jitter:
            return 1.0
        code = ((op.micro_batch << 20 | op.stage) << 3 | ALL_KINDS.index(op.kind)) << 1 | message
        u = _mix(_mix(self.seed) ^ code) / (1 << 63) - 1.0
        return 1.0 + self.jitter * u


def _mix(x: int) -> int:
    """64 bits, evenly spread, that look independent for different ``x`` (SplitMix64; Steele et al., OOPSLA 2014)."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31


def read_costs(given: str) -> Costs:
    """``"f=1,b=1,w=1,comm=0"``, or the path of a JSON file that says more. Raises ScheduleError."""
    if os.path.isfile(given) or given.endswith(".json"):
        return load_costs(given)
    return parse_costs(given)


def parse_costs(text: str) -> Costs:
    """``"f=1,b=1,w=1,comm=0,stages=0.9x7/1.7,jitter=0,seed=0"`` -> Costs; all are optional. Raises ScheduleError."""
    values: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, value = part.partition("=")
        key = key.strip()
        if key not in _IN_TEXT:
            wrong = "links are for a JSON file" if key == "links" else f"{_short(key)} is none of them"
            raise ScheduleError(
                f"costs are {', '.join(_IN_TEXT)} (times for one D-th of the model), and in a JSON file also links; "
                f"{wrong}: {_short(text)}."
            )
        if key in values:
            raise ScheduleError(f"costs: {key} is given twice in {text!r}; give it once.")
        try:
            if key == "stages":
                values[key] = _factors(value)
            else:
                values[key] = int(value) if key == "seed" else float(value)
        except ValueError:
            raise ScheduleError(
                f"costs: {_short(part)} is not of the form f=1.5, seed=1 or stages=0.9x7/1.7 (a factor for each stage)."
            ) from None
    return _costs_of(values)


def _costs_of(values: Mapping[str, Any]) -> Costs:
    """Return the costs with these keys of text and JSON."""
    return Costs(**{_TIMES.get(key, key): value for key, value in values.items()})


def _factors(text: str) -> tuple[float, ...]:
    """``"0.9x7/1.7"``: seven times 0.9, then 1.7. Raises ValueError."""
    factors: list[float] = []
    for part in text.split("/"):
        factor, x, times = part.partition("x")
        count = int(times) if x else 1
        if not 1 <= count <= _MOST_FACTORS - len(factors):
            raise ValueError(text)
        factors += [float(factor)] * count
    return tuple(factors)


def factors_text(factors: tuple[float, ...]) -> str:
    """The text that :func:`parse_costs` reads as these factors."""
    runs = [(factor, len(list(same))) for factor, same in itertools.groupby(factors)]
    return "/".join(f"{factor!r}x{count}" if count > 1 else repr(factor) for factor, count in runs)


def load_costs(path: str) -> Costs:
    """Costs from a JSON file: ``{"f": 1, "comm": 0.1, "stages": [1, 1.2], "links": {"0>1": 0.3}, "jitter": 0.1}``.

    The keys are f, b, w and the other arguments of :class:`Costs`, all optional; a link is "sender>receiver".

    Raises ScheduleError.
    """
    values = _read_json(path)
    known = [*_TIMES, *(field.name for field in fields(Costs) if field.name not in _TIMES.values())]
    if not isinstance(values, dict) or not set(values) <= set(known):
        wrong = _short(values)
        if isinstance(values, dict):
            wrong = ", ".join(sorted(set(values) - set(known)))[:_LONGEST]
        raise ScheduleError(
            f"costs {path}: expected an object with {', '.join(known)}, all optional; got {wrong}."
        )
    if "stages" in values and not isinstance(values["stages"], list | None):
        raise ScheduleError(f"costs {path}: stages is a list of factors; got {_short(values['stages'])}.")
    if "links" in values:
        values["links"] = _links(values["links"], path)
    return _costs_of(values)


def _read_json(path: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ScheduleError(f"costs {path}: {twice!r} is given twice; give it once.")
        return found

    try:
        with open(path, encoding="utf-8-sig") as file:
            return json.load(file, object_pairs_hook=once)
    except OSError as error:
        raise ScheduleError(f"costs {path}: {error.strerror}.") from None
    except RecursionError:
        raise ScheduleError(f"costs {path}: nested too deeply; expected one object of numbers.") from None
    except ScheduleError:
        raise  # it is a ValueError too
    except ValueError as error:
        raise ScheduleError(f"costs {path}: not JSON: {error}.") from None


def _links(given: object, path: str) -> dict[tuple[int, int], float]:
    """``{"0>1": 0.3}`` -> ``{(0, 1): 0.3}``."""
    pairs: dict[tuple[int, int], float] = {}
    for name, time in given.items() if isinstance(given, dict) else [(given, 0.0)]:
        ends = name.split(">") if isinstance(name, str) and isinstance(given, dict) else []
        # No pipeline has ranks of more than nine digits.
        if len(ends) != 2 or not all(re.fullmatch(r" *[0-9]{1,9} *", end) for end in ends):
            raise ScheduleError(
                f'costs {path}: a link is written "0>1" (sender, receiver); got {_short(name)}.'
            )
        link = (int(ends[0]), int(ends[1]))
        if link in pairs:
            raise ScheduleError(f"costs {path}: link {link[0]}>{link[1]} is given twice; give it once.")
        pairs[link] = time
    return pairs


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False  # an integer that is no float


def _short(value: object) -> str:
    """``repr``, cut where it is long: an error stays a sentence."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "thousands of digits or brackets"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
