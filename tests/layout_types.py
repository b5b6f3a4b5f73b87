"""Types of weights, gradients and messages over the axes of the layout, checked in every step of a test.

    with checked():
        engine.train_batch()

    LayoutError: 3.weight: partial sum over data (of ranks 0, and 0, 2 have it), expected replicated (at ds_ext/...:9).

A tensor is replicated over an axis (all ranks have equal values), sharded (they have parts), a partial sum (the sum of
the ranks has the value), or differs. The axes are tensor, tie (copies of shared weights on other stages), pipes
(replicas of a schedule) and data.

- Weights are replicated, and sharded over tensor if a layer says so. So are the settings of their groups.
- A backward makes gradients partial over data, pipes and tie. Collectives sum them: each rank once. :mod:`.layout_flow`
  follows them through memory until the optimizer reads them, whole or as shards.
- The norm counts every element of the model once.
- A message has one receiver, which gets what was sent, equal on all tensor-parallel ranks.

Values confirm the types: the ranks compare a random projection of every weight, gradient and message after each step.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor

from ds_ext.engine.checkpoint.load import load_checkpoint
from ds_ext.engine.checkpoint.save import save_checkpoint
from ds_ext.engine.deepspeed_api.names import model_groups
from ds_ext.engine.dynamic.messages import DynamicMessages
from ds_ext.engine.engine import PipelineEngine
from ds_ext.engine.executor import Observer
from ds_ext.engine.messages import StageMessages
from ds_ext.engine.parameters import LocalParameter, parameters_of
from ds_ext.parallel.layout import ParallelLayout
from ds_ext.pipe_schedules.bridge import ReduceStage
from ds_ext.pipe_schedules.ops import MessageKind
from ds_ext.tensor_parallel import is_sharded
from tests.layout_flow import (
    DIFFERS,
    PARTIAL,
    PRODUCT,
    REPLICATED,
    SHARDED,
    Fault,
    Flow,
    Piece,
    Square,
    where,
)

_SHOWN = 5  # errors of a step
_EXACT, _HALF = 1e-4, 3e-2  # tolerances relative to the sum of magnitudes
_FP16_STEP = 2.0**-24  # between the smallest numbers of fp16, to which clipping may scale gradients


class LayoutError(AssertionError):
    """A tensor has another type over an axis of the layout than its use needs.

    Attributes:
        faults: causes first.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        more = [f"{len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        super().__init__("\n".join([*map(str, faults[:_SHOWN]), *more]))
        self.faults = faults

    def __reduce__(self) -> Any:
        return LayoutError, (self.faults,)


@dataclass(frozen=True)
class Value:
    """Random projection of a tensor, which is linear, and the sum of the magnitudes in it."""

    number: float
    size: float

    def __add__(self, other: Value) -> Value:
        return Value(self.number + other.number, self.size + other.size)

    def is_close(self, other: Value, tolerance: float, floor: float = 1e-12) -> bool:
        """Return whether two values are equal within a relative and an absolute tolerance, or both are not finite."""
        if not (math.isfinite(self.number) and math.isfinite(other.number)):
            return True
        return abs(self.number - other.number) <= tolerance * (self.size + other.size) / 2 + floor


ZERO = Value(0.0, 0.0)


@dataclass(frozen=True)
class Message:
    """Message between stages: what identifies it, its ranks, and its values."""

    key: tuple[int, int, int]  # kind, receiving stage, micro-batch or slice
    source: int
    target: int
    values: tuple[Value, ...]
    line: str


@dataclass
class Record:
    """Record of one rank in a step.

    Attributes:
        coordinates: device, data-parallel and tensor-parallel index.
        flow: events, norms and faults of its gradients.
        sizes: parameter -> number of real elements.
        sharded: parameters that are sharded over tensor-parallel ranks.
        local: parameter -> projection of its gradient before all reductions.
        optimized: parameters of the optimizer, if it took a step.
        shards: the optimizer reads this rank's shards of them.
        read: pieces that the optimizer read, with their projections.
        read_at: line of the optimizer step.
        weights: parameter -> projection after the step.
        frozen: parameters that are not trained, and changed in the step.
        settings: parameter -> settings of its group; number of groups.
        sent, received: messages.
    """

    coordinates: tuple[int, int, int]
    flow: Flow = field(default_factory=Flow)
    sizes: dict[str, int] = field(default_factory=dict)
    sharded: frozenset[str] = frozenset()
    local: dict[str, Value] = field(default_factory=dict)
    optimized: frozenset[str] = frozenset()
    shards: bool = False
    read: list[tuple[Piece, Value]] = field(default_factory=list)
    read_at: str = ""
    weights: dict[str, Value] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    settings: dict[str, tuple[float, ...]] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    received: list[Message] = field(default_factory=list)


# --- one rank ---


class LayoutTypes(Observer):
    """Types of one engine's tensors on this rank.

    Args:
        engine: initialized engine.
    """

    kinds = (ds.ReduceTiedGrads, ReduceStage, ds.ReduceGrads, ds.OptimizerStep)

    def __init__(self, engine: PipelineEngine) -> None:
        self.engine, self.flow = engine, Flow()
        self.record = Record(engine.layout.coordinates(dist.get_rank()), self.flow)
        self.in_step = False
        self._parameters: dict[str, LocalParameter] = {}
        self._names: dict[int, str] = {}
        self._modes: ExitStack | None = None
        self._versions: dict[str, tuple[int, int]] = {}
        self._hooked: Any = None
        engine.executor.observers.append(self)

    # --- a step ---

    def start(self) -> None:
        """Begin a training step."""
        engine = self.engine
        self.flow.clear()
        if engine.role.has_gradients:
            self._parameters = {
                name: local
                for name, local in parameters_of(engine.module, engine.layout.tensor_parallel_size).items()
                if local.parameter.numel()
            }
        parameters = {name: local.parameter for name, local in self._parameters.items()}
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        sizes = {name: p.numel() * (2 if p.is_complex() else 1) for name, p in parameters.items()}
        self.record = Record(engine.layout.coordinates(dist.get_rank()), self.flow, sizes)
        self.record.sharded = frozenset(name for name, p in parameters.items() if is_sharded(p))
        self._versions.clear()
        self._hook()
        self.in_step = True

    def end(self) -> None:
        """End a training step, and compare the ranks. All ranks call this together."""
        self.in_step = False
        if self.engine.update.gathers is None or not self.record.weights:
            self._project_weights()
        raise_together(self.engine, self.record)
        self.flow.clear()

    def _project_weights(self) -> None:
        for name, local in self._parameters.items():
            self.record.weights[name] = project(local.parameter)

    def _hook(self) -> None:
        """Observe the optimizer of the engine, which a script may have replaced."""
        optimizer: Any = self.engine.optimizer
        base = getattr(optimizer, "optimizer", optimizer)
        if self._hooked is optimizer or not isinstance(base, torch.optim.Optimizer):
            return
        self._hooked = optimizer
        base.register_step_pre_hook(self._before_update)
        base.register_step_post_hook(self._after_update)
        if isinstance(optimizer, ZeROOptimizer):
            epilogue = optimizer.backward_epilogue

            @functools.wraps(epilogue)
            def followed(*args: Any, **kwargs: Any) -> Any:
                if not (self.in_step and self.flow.begun):
                    return epilogue(*args, **kwargs)
                self.flow.in_backward = True
                try:
                    with self.flow.mode():
                        return epilogue(*args, **kwargs)
                finally:
                    self.flow.in_backward = False

            optimizer.backward_epilogue = followed

    # --- gradients ---

    def before(self, instruction: Any) -> None:
        """Find the gradients, and follow them from here."""
        if not self.in_step or not self.engine.role.has_gradients:
            return
        self._check_versions()
        # Now, because a script may have assigned other tensors, which the step moves into the optimizer's memory.
        self.flow.weights = {
            local.parameter.data_ptr(): (name, self.record.sizes[name])
            for name, local in self._parameters.items()
        }
        stage = getattr(instruction, "stage", None)
        self._find_gradients(None if stage is None else self.engine.module.stage_parameters(stage))
        if isinstance(instruction, ds.OptimizerStep):
            self.flow.in_update = True
            if self.engine.update.gathers is not None:
                self.engine.update.wait_for_weights()
                self._project_weights()  # those of the last step: after this one, gathers are running
            self._frozen = {
                name: project(local.parameter)
                for name, local in self._parameters.items()
                if not local.parameter.requires_grad
            }
        self._follow()

    def after(self, instruction: Any) -> None:
        """Stop following."""
        if self._modes is None:
            return
        self._pause()
        if isinstance(instruction, ds.OptimizerStep):
            self.flow.in_update = False
            for name, value in self._frozen.items():
                if project(self._parameters[name].parameter) != value and not self.engine.trained.changed:
                    self.record.frozen.append(name)
            self._read_settings()
        for name, gradient in self._gradients():
            self._versions[name] = gradient.data_ptr(), gradient._version

    def failed(self, instruction: Any) -> None:
        """Stop following."""
        self._pause()

    def _follow(self) -> None:
        self._modes = ExitStack()
        self._modes.enter_context(self.flow.mode())

    def _pause(self) -> None:
        if self._modes is not None:
            self._modes.close()
            self._modes = None

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and gradient of each parameter: where DeepSpeed's optimizers sum it, or ``grad``."""
        optimizer, sums = self.engine.optimizer, dict[int, Tensor]()
        if isinstance(optimizer, BF16_Optimizer):
            for parameters, tensors in zip(
                model_groups(optimizer), optimizer.fp32_groups_gradients, strict=True
            ):
                sums |= dict(zip(map(id, parameters), tensors, strict=True))
        for name, local in self._parameters.items():
            parameter: Any = local.parameter
            gradient = sums.get(id(parameter), getattr(parameter, "grad_accum", None))
            gradient = parameter.grad if gradient is None else gradient
            if (
                gradient is not None
                and gradient.layout == torch.strided
                and gradient.numel() == parameter.numel()
            ):
                yield name, gradient

    def _find_gradients(self, parameters: Sequence[Tensor] | None) -> None:
        """Add gradients whose reduction has not begun: partial sums over data, pipes and ties. None: all."""
        ids = None if parameters is None else set(map(id, parameters))
        for name, gradient in self._gradients():
            if ids is not None and id(self._parameters[name].parameter) not in ids:
                continue
            is_followed = bool(self.flow.memory.read(gradient))
            if name not in self.flow.begun:
                self.record.local[name] = project(gradient)
            elif not is_followed and not isinstance(self.engine.optimizer, ZeROOptimizer):
                self._late(name)
            if not is_followed:
                is_half = gradient.element_size() // (2 if gradient.is_complex() else 1) == 2
                piece = Piece(name, 0, self.record.sizes[name], (), 1.0, is_half)
                self.flow.memory.write(gradient, [(0, piece)])

    def _check_versions(self) -> None:
        """Find gradients that a backward has changed after their reduction began."""
        if isinstance(self.engine.optimizer, BF16_Optimizer):
            return  # one version for all; the flow sees its backwards
        for name, gradient in self._gradients():
            address, version = self._versions.get(name, (0, 0))
            if name in self.flow.begun and address == gradient.data_ptr() and version != gradient._version:
                self._late(name)

    def _late(self, name: str) -> None:
        detail = "a backward changes it after its reduction began"
        self.flow.faults.append(Fault(name, PARTIAL, "data", REPLICATED, self.flow.begun[name], detail))

    # --- update ---

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Read the types of the gradients that the optimizer reads."""
        if not self.in_step or not self.flow.in_update:
            return
        self._pause()
        record = self.record
        zero = record.shards = isinstance(self.engine.optimizer, ZeROOptimizer)
        groups = (
            model_groups(self.engine.optimizer) if zero else [g["params"] for g in optimizer.param_groups]
        )
        ids = {id(parameter) for group in groups for parameter in group}
        names = {name for parameter, name in self._names.items() if parameter in ids}
        for name in [name for name in names if getattr(self._parameters[name].parameter, "use_muon", False)]:
            names.discard(name)  # Muon computes another gradient
            record.local.pop(name, None)
        record.optimized |= names
        record.read_at = where()
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            gradient = parameter.grad
            if gradient is None:
                continue
            flat = real(gradient)
            for element, piece in self.flow.memory.read(gradient):
                if isinstance(piece, Piece):
                    part = flat[element : element + piece.stop - piece.start]
                    record.read.append((piece, project(part, piece.start)))

    def _after_update(self, *_: Any) -> None:
        if self.in_step and self.flow.in_update:
            self._follow()

    def _read_settings(self) -> None:
        optimizer = self.engine.optimizer
        groups = getattr(optimizer, "param_groups", [])
        is_zero = isinstance(optimizer, ZeROOptimizer)
        parts = model_groups(optimizer) if is_zero else [group["params"] for group in groups]
        for group, parameters in zip(groups, parts, strict=False):
            settings = tuple(float(group[key]) for key in ("lr", "weight_decay") if key in group)
            for name in (self._names.get(id(parameter)) for parameter in parameters):
                if name is not None:
                    self.record.settings[name] = settings

    # --- messages ---

    def sent(
        self, kind: int, tensors: Sequence[Tensor], stage: int, item: int, targets: Iterable[int]
    ) -> None:
        """Note a message of this rank."""
        values = tuple(map(project, tensors))
        key, rank = (int(kind), stage, item), dist.get_rank()
        self.record.sent += [Message(key, rank, target, values, where()) for target in targets]

    def received(self, kind: int, tensors: Sequence[Tensor], stage: int, item: int, source: int) -> None:
        """Note a message to this rank."""
        values = tuple(map(project, tensors))
        self.record.received.append(
            Message((int(kind), stage, item), source, dist.get_rank(), values, where())
        )

    # --- checkpoints ---

    def check_weights(self, line: str) -> None:
        """Compare the weights of the ranks, for a save or a load at ``line``. All ranks call this together."""
        self.engine.wait_for_weights()
        self.start()
        self.in_step = False
        self._project_weights()
        self.record.read_at = line
        raise_together(self.engine, self.record)


_WEIGHTS = torch.randn(1 << 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def project(tensor: Tensor, first: int = 0) -> Value:
    """Return the projection of a tensor, whose elements begin with element ``first`` of a larger one."""
    flat = real(tensor)
    count = flat.numel()
    if not count:
        return ZERO
    weights = _WEIGHTS[first : first + count]
    if len(weights) < count:
        weights = _WEIGHTS[torch.arange(first, first + count) % len(_WEIGHTS)]
    products = flat.double() * weights
    return Value(float(products.sum()), float(products.abs().sum()))


def real(tensor: Tensor) -> Tensor:
    """Return the real numbers of a tensor as a vector."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)


# --- all ranks ---


def raise_together(engine: PipelineEngine, record: Record) -> None:
    """Compare the records of all ranks. Raises LayoutError on all of them."""
    record.flow.memory.clear()  # and not sent
    is_first = dist.get_rank() == 0
    records: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(record, records if is_first else None)
    faults = list(dict.fromkeys(Comparison(engine, records).faults())) if is_first else []
    count = torch.tensor(len(faults))
    dist.broadcast(count, 0)
    if count:
        sent: list[Any] = [faults]
        dist.broadcast_object_list(sent)
        raise LayoutError(sent[0])


class Comparison:
    """Types of all ranks in a step.

    Args:
        engine: engine of this rank.
        records: by global rank.
    """

    def __init__(self, engine: PipelineEngine, records: Sequence[Record]) -> None:
        self.records, self.layout = records, engine.layout
        self.tokens_are_sharded = engine.plan.settings.sequence_parallel
        placement = engine.layout.placement
        self.shares = (
            placement.loss_stage if placement.head_parts else None
        )  # receives shares of the vocabulary
        self.holders: dict[tuple[str, int], list[int]] = {}  # (parameter, shard) -> its ranks
        self.summing: dict[
            tuple[str, int], list[int]
        ] = {}  # (parameter, tensor index) -> ranks that sum gradients
        for rank, record in enumerate(records):
            for name in record.sizes:
                self.holders.setdefault(self.key(rank, name), []).append(rank)
                self.summing.setdefault((name, record.coordinates[2]), []).append(rank)
        self._known: dict[tuple[int, Piece | Square], Counter[tuple[int, Piece | None]]] = {}
        self._wrong: dict[tuple[int, Piece], Fault | None] = {}
        self._events = [
            {(event.ranks, event.number): event for event in record.flow.events} for record in records
        ]

    def key(self, rank: int, name: str) -> tuple[str, int]:
        """Return a parameter with the number of its shard on a rank."""
        record = self.records[rank]
        return name, record.coordinates[2] if name in record.sharded else -1

    def faults(self) -> Iterator[Fault]:
        """Yield what is wrong, causes first."""
        for record in self.records:
            yield from record.flow.faults
        yield from self._layouts()
        yield from self._messages()
        yield from self._reads()
        yield from self._values()
        yield from self._over_tensor()
        yield from self._norms()
        yield from self._weights()

    def axes(self, ranks: Iterable[int]) -> str:
        """Return the axes in which ranks differ."""
        coordinates = [self.records[rank].coordinates for rank in ranks]
        devices, data, tensor = (len(set(values)) > 1 for values in zip(*coordinates, strict=True))
        axes = ["data"] * data + ["tensor"] * tensor
        if devices:
            groups = self.layout.placement.replica_groups
            folded = {next((g for g in groups if device in g), (device,)) for device, *_ in coordinates}
            axes += ["tie"] if len(folded) > 1 else ["pipes"]
        return " and ".join(axes) or "one rank"

    # --- gradients ---

    def _layouts(self) -> Iterator[Fault]:
        """Yield collectives whose ranks pass other gradients."""
        for rank, record in enumerate(self.records):
            for event in record.flow.events:
                mine = [(i, p.name, p.start) for i, p in event.content if isinstance(p, Piece)]
                for other in event.ranks if mine else ():
                    match = self._events[other].get((event.ranks, event.number))
                    theirs = (
                        [(i, p.name, p.start) for i, p in match.content if isinstance(p, Piece)]
                        if match
                        else []
                    )
                    if theirs != mine:
                        wrong = next((a for a, b in itertools.zip_longest(mine, theirs) if a != b), None)
                        _, name, first = wrong or theirs[len(mine)]
                        detail = (
                            f"rank {rank} reduces its element {first} where rank {other} reduces another one"
                        )
                        yield Fault(name, DIFFERS, self.axes((rank, other)), PARTIAL, event.line, detail)
                        break

    def _sources(self, rank: int, value: Piece | Square) -> Counter[tuple[int, Piece | None]]:
        """Return which ranks' gradients a piece is the sum of, or the pieces in a number by rank."""
        key = rank, value
        if key not in self._known:
            self._known[key] = self._find_sources(rank, value)
        return self._known[key]

    def _find_sources(self, rank: int, value: Piece | Square) -> Counter[tuple[int, Piece | None]]:
        if not value.sums:
            if isinstance(value, Piece):
                return Counter({(rank, None): 1})
            sources: Counter[tuple[int, Piece | None]] = Counter((rank, piece) for piece in value.pieces)
            for inner in value.joined:
                sources.update(self._sources(rank, inner))
            return sources
        event, earlier = self.records[rank].flow.events[value.sums[-1]], value.sums[:-1]
        place = next(
            (i, p.start if isinstance(p, Piece) else 0)
            for i, p in event.content
            if p.sums == earlier and (not isinstance(p, Piece) or _contains(p, value))
        )
        sources = Counter()
        for other in event.ranks:
            match = self._events[other].get((event.ranks, event.number))
            for element, part in match.content if match else ():
                start = part.start if isinstance(part, Piece) else 0
                if type(part) is type(value) and element - start == place[0] - place[1]:
                    if isinstance(part, Piece) and not _contains(part, value):
                        continue
                    sources.update(self._sources(other, part))
                    break
        return sources

    def _wrong_sum(self, rank: int, piece: Piece, line: str) -> Fault | None:
        """Return why a piece is not the sum over all ranks with its parameter; None if it is."""
        key = rank, piece
        if key not in self._wrong:
            self._wrong[key] = self._find_wrong_sum(rank, piece, line)
        return self._wrong[key]

    def _find_wrong_sum(self, rank: int, piece: Piece, line: str) -> Fault | None:
        holders = self.summing[piece.name, self.records[rank].coordinates[2]]
        counts = Counter({other: n for (other, _), n in self._sources(rank, piece).items()})
        missing, twice = [r for r in holders if not counts[r]], [r for r, n in counts.items() if n > 1]
        if twice:
            event = self.records[rank].flow.events[piece.sums[-1]]
            detail = f"the gradient of rank {twice[0]} is added {counts[twice[0]]} times"
            return Fault(piece.name, REPLICATED, self.axes(event.ranks), PARTIAL, event.line, detail)
        if missing:
            detail = f"of ranks {_list(counts)}, and {_list(holders)} have it"
            nearest = [min((self.axes((other, r)) for r in counts), key=len) for other in missing]
            return Fault(piece.name, PARTIAL, max(nearest, key=len), REPLICATED, line, detail)
        others = sorted(set(counts) - set(holders))
        if others:
            detail = f"has gradients of ranks {_list(others)}, which do not have it"
            return Fault(piece.name, DIFFERS, self.axes((rank, *others)), REPLICATED, line, detail)
        return None

    def _reads(self) -> Iterator[Fault]:
        """Yield gradients that the optimizer reads with another type than replicated or sharded."""
        first: tuple[str, float] | None = None
        for rank, record in enumerate(self.records):
            if not record.read_at:
                continue
            for piece, value in record.read:
                fault = self._wrong_sum(rank, piece, record.read_at)
                if fault is not None:
                    yield fault
                elif value.size:  # an optimizer may leave out zeros
                    name, scale = first = first or (piece.name, piece.scale)
                    if not math.isclose(scale, piece.scale, rel_tol=1e-3):
                        detail = f"scaled by {piece.scale:g} on rank {rank}, and {name} by {scale:g}"
                        yield Fault(
                            piece.name, DIFFERS, "data", REPLICATED, self._last_line(record, piece), detail
                        )
            read = {piece.name for piece, _ in record.read}
            unread = [name for name in record.local if name not in record.optimized and record.shards]
            for name in unread:
                if record.local[name].size and record.read:
                    detail = "no group of the optimizer has it"
                    yield Fault(name, PARTIAL, "data", REPLICATED, record.read_at, detail)
            if not record.shards:
                for name in sorted(record.optimized & {*record.local} - read):
                    yield self._unread(record, name)

    def _unread(self, record: Record, name: str) -> Fault:
        flow = record.flow
        lost = f", not followed since {flow.lost[name]}" if name in flow.lost else ""
        lost += f", reduced at {flow.begun[name]}" if name in flow.begun else ""
        detail = f"the optimizer reads no gradient of a backward{lost}"
        return Fault(name, PARTIAL, "data", REPLICATED, record.read_at, detail)

    def _last_line(self, record: Record, piece: Piece) -> str:
        return record.flow.events[piece.sums[-1]].line if piece.sums else record.read_at

    def _values(self) -> Iterator[Fault]:
        """Yield gradients that the optimizer does not read whole, or that are another sum than their type says."""
        for (name, _), holders in self.summing.items():
            records = [self.records[rank] for rank in holders]
            if not any(name in record.optimized for record in records):
                continue
            parts = [entry for record in records for entry in record.read if entry[0].name == name]
            local = [record.local[name] for record in records if name in record.local]
            if not local or any(
                self._wrong_sum(r, p, "") for r in holders for p, _ in self.records[r].read if p.name == name
            ):
                continue
            covered, size = sum(piece.stop - piece.start for piece, _ in parts), records[0].sizes[name]
            if not covered and not any(value.size for value in local):
                continue
            if not covered or covered % size:
                record = next(record for record in records if name in record.optimized)
                if not covered:
                    yield self._unread(record, name)
                else:
                    detail = f"the optimizers read {covered} of {size} elements"
                    yield Fault(name, SHARDED, self.axes(holders), REPLICATED, record.read_at, detail)
                continue
            half = any(piece.is_half for piece, _ in parts)
            scaled = [
                Value(value.number / piece.scale, value.size / piece.scale)
                for piece, value in parts
                if piece.scale
            ]
            copies = covered // size
            found = sum(scaled, ZERO)
            found = Value(found.number / copies, found.size / copies)
            expected = sum(local, ZERO)
            tolerance, floor = _EXACT, 1e-12
            if half and scaled:
                tolerance = _HALF
                floor = size * _FP16_STEP / min(abs(piece.scale) for piece, _ in parts if piece.scale)
            if scaled and not found.is_close(expected, tolerance, floor):
                detail = (
                    f"the optimizer reads a sum of {found.number:g}, its gradients have {expected.number:g}"
                )
                line = self._last_line(next(r for r in records if r.read), parts[0][0])
                yield Fault(name, DIFFERS, self.axes(holders), REPLICATED, line, detail)

    def _over_tensor(self) -> Iterator[Fault]:
        """Yield gradients of replicated parameters that tensor-parallel ranks compute differently."""
        for name, index in self.summing:
            first, ranks = self.summing[name, index], self.summing.get((name, 0), [])
            if index == 0 or name in self.records[first[0]].sharded:
                continue
            for a, b in zip(ranks, first, strict=False):
                pair = [self.records[rank].local.get(name, ZERO) for rank in (a, b)]
                if not pair[0].is_close(pair[1], _EXACT):
                    line = self.records[a].flow.begun.get(name) or self.records[a].read_at
                    detail = f"the gradient on ranks {a} and {b}, and no layer shards the parameter"
                    yield Fault(name, DIFFERS, "tensor", REPLICATED, line, detail)
                    break

    # --- norm ---

    def _norms(self) -> Iterator[Fault]:
        """Yield parameters that the norm does not count once."""
        trained = {
            self.key(rank, name)
            for rank, record in enumerate(self.records)
            for name in {piece.name for piece, value in record.read if value.size}
        }
        for rank, record in enumerate(self.records):
            for square, line in reversed(record.flow.norms):
                sources = self._sources(rank, square)
                if not sources:
                    continue
                sums = [*square.sums, *(i for inner in square.joined for i in inner.sums)]
                line = record.flow.events[sums[-1]].line if sums else line
                ranges: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
                for (other, piece), count in sources.items():
                    assert piece is not None
                    error = self._wrong_sum(other, piece, line)
                    if error is not None:
                        yield error
                    entry = (piece.start, piece.stop, other)
                    ranges.setdefault(self.key(other, piece.name), []).extend([entry] * count)
                for key in sorted(trained | {*ranges}):
                    yield from self._counts(key, sorted(ranges.get(key, [])), line)
                break

    def _counts(
        self, key: tuple[str, int], ranges: Sequence[tuple[int, int, int]], line: str
    ) -> Iterator[Fault]:
        holders = self.holders[key]
        end, ranks = 0, []
        for start, stop, rank in ranges:
            ranks.append(rank)
            if start < end:
                detail = f"counted twice in the norm, by ranks {_list(ranks)}"
                yield Fault(key[0], REPLICATED, self.axes(ranks), SHARDED, line, detail)
                return
            if start > end:
                break
            end = stop
        if end < self.records[holders[0]].sizes[key[0]]:
            shard, axis = ("", self.axes(holders)) if key[1] < 0 else (f" of shard {key[1]}", "tensor")
            detail = f"element {end}{shard} is not counted in the norm, by ranks {_list(holders)}"
            yield Fault(key[0], DIFFERS, axis, SHARDED, line, detail)

    # --- weights ---

    def _weights(self) -> Iterator[Fault]:
        """Yield weights and settings that differ between ranks that should have the same."""
        for (name, _), holders in self.holders.items():
            first, *others = [rank for rank in holders if name in self.records[rank].weights] or [0]
            record = self.records[first]
            for rank in others:
                axis, other = self.axes((first, rank)), self.records[rank]
                values = [r.settings.get(name) for r in (record, other)]
                if values[0] != values[1] and None not in values:
                    detail = f"learning rate and weight decay {values[0]} on rank {first}, {values[1]} on rank {rank}"
                    yield Fault(name, DIFFERS, axis, REPLICATED, record.read_at, detail)
                elif not record.weights[name].is_close(other.weights[name], 1e-6):
                    yield Fault(name, DIFFERS, axis, REPLICATED, record.read_at or "the step")
                else:
                    continue
                break
        for record in self.records:
            for name in record.frozen:
                detail = "changed without requires_grad"
                yield Fault(name, DIFFERS, "steps", REPLICATED, record.read_at, detail)

    # --- messages ---

    def _messages(self) -> Iterator[Fault]:
        """Yield messages that are not received once, as they were sent, and equal over tensor."""
        received: dict[tuple[Any, ...], list[Message]] = {}
        for record in self.records:
            for message in record.received:
                received.setdefault((message.key, message.source, message.target), []).append(message)
        over_tensor: dict[tuple[Any, ...], Message] = {}
        for rank, record in enumerate(self.records):
            device, data, _ = record.coordinates
            for message in record.sent:
                copies = received.get((message.key, message.source, message.target), [])
                kind, stage, item = message.key
                name = f"{'activation' if kind == MessageKind.ACTIVATION else 'gradient'} {item} to stage {stage}"
                if len(copies) != 1:
                    detail = f"rank {message.target} receives it {len(copies)} times"
                    yield Fault(name, DIFFERS, "stages", REPLICATED, message.line, detail)
                elif repr(copies[0].values) != repr(message.values):
                    detail = f"rank {message.target} receives other values than rank {rank} sends"
                    yield Fault(name, DIFFERS, "stages", REPLICATED, copies[0].line, detail)
                place = message.key, device, data, self.records[message.target].coordinates[:2]
                first = over_tensor.setdefault(place, message)
                pairs = zip(first.values, message.values, strict=False)
                is_sharded = self.tokens_are_sharded or (
                    kind == MessageKind.ACTIVATION and stage == self.shares
                )
                if not is_sharded and not all(a.is_close(b, _EXACT) for a, b in pairs):
                    detail = f"on ranks {first.source} and {rank}"
                    yield Fault(name, DIFFERS, "tensor", REPLICATED, message.line, detail)


def _contains(piece: Piece, other: Piece | Square) -> bool:
    return isinstance(other, Piece) and (
        piece.name == other.name and piece.start <= other.start and other.stop <= piece.stop
    )


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(ranks))))


# --- hooks ---


def _types(engine: Any) -> LayoutTypes:
    if "layout_types" not in vars(engine):
        engine.layout_types = LayoutTypes(engine)
    return engine.layout_types


@contextmanager
def checked() -> Iterator[None]:
    """Context in which every training step, save and load of this rank's engines is checked."""
    if hasattr(PipelineEngine.train_batch, "__wrapped__"):
        yield  # within this context
        return
    current: list[LayoutTypes] = []  # whose step is running

    def train(original: Callable[..., Any], engine: PipelineEngine, *args: Any, **kwargs: Any) -> Any:
        types = _types(engine)
        types.start()
        current.append(types)
        try:
            result = original(engine, *args, **kwargs)
        except Exception as error:
            types.in_step = False
            for fault in types.flow.faults:
                error.add_note(f"LayoutError: {fault}")
            raise
        finally:
            current.pop()
        types.end()
        return result

    def checkpoint(function: Any) -> Callable[..., Any]:
        code = function.__code__
        line = f"ds_ext{code.co_filename[len(PRODUCT) :]}:{code.co_firstlineno}"

        def call(original: Callable[..., Any], engine: PipelineEngine, *args: Any, **kwargs: Any) -> Any:
            result = original(engine, *args, **kwargs)
            _types(engine).check_weights(line)
            return result

        return call

    def send(
        original: Any, messages: StageMessages, kind: int, tensors: Any, stage: int, item: int, device: int
    ) -> None:
        if current:
            is_dynamic = isinstance(messages, DynamicMessages)
            layout: ParallelLayout = messages.layout
            targets = (messages.global_rank(device),) if is_dynamic else layout.peers(messages.rank, device)
            current[-1].sent(kind, tensors, stage, item, targets)
        original(messages, kind, tensors, stage, item, device)

    def receive(
        original: Any, messages: StageMessages, kind: int, stage: int, item: int, device: int, source: int
    ) -> Any:
        tensors = original(messages, kind, stage, item, device, source)
        if current:
            current[-1].received(kind, tensors, stage, item, messages.global_rank(device))
        return tensors

    with ExitStack() as stack:
        wrappers: Mapping[tuple[type, str], Callable[..., Any]] = {
            (PipelineEngine, "train_batch"): train,
            (PipelineEngine, "save_checkpoint"): checkpoint(save_checkpoint),
            (PipelineEngine, "load_checkpoint"): checkpoint(load_checkpoint),
            (StageMessages, "send"): send,
            (StageMessages, "receive"): receive,
            (DynamicMessages, "send"): send,
            (DynamicMessages, "receive"): receive,
        }
        for (owner, name), wrapper in wrappers.items():
            stack.enter_context(replaced(owner, name, wrapper))
        yield


@contextmanager
def replaced(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Context in which ``owner.name`` calls ``wrapper(original, *args)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def call_checked(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function of tests on a rank with its layout checked."""
    with checked():
        return fn(rank, *args)
