"""Dependencies between the ops of a step. Lowering, checks, simulation and engine all use this one definition."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Generic, Protocol, TypeVar

from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op
from .placement import Placement

T = TypeVar("T")
_Rule = tuple[
    tuple[str, int, int, int], ...
]  # (kind, stage, device, later slices) of ops of the same micro-batch


_new = tuple.__new__  # half the time of the constructor of a named tuple


class Graph(Protocol[T]):
    """Inputs and consumers of ops; by default, no op depends on another one."""

    def device(self, op: T) -> int: ...

    def count(self, op: T) -> int:
        return 0

    def consumers(self, op: T) -> Sequence[tuple[T, int]]:
        return ()


class Dependencies:
    """Ops of one step: the inputs and consumers of each op, and its device.

    With slices, attention reads the keys and values of earlier slices: the forward of a slice follows that of the slice
    before it at the same stage. Its backward needs the gradients that later slices have for its keys and values, so it
    follows the backward of the slice after it (Seq1F1B, arXiv 2406.03488, section 3.2).

    Args:
        micro_batches: N, summed over the pipes.
        split: True if every backward is two ops; a set of (stage, micro-batch) if only some are.
        trains: False for an evaluation, which has no backwards.
    """

    def __init__(
        self,
        placement: Placement,
        micro_batches: int,
        *,
        split: bool | frozenset[tuple[int, int]] = False,
        trains: bool = True,
        slices: int = 1,
    ) -> None:
        self.placement = placement
        self.slices = slices
        self.split = split
        self.trains = trains
        self.pipes = placement.pipes_of(micro_batches)
        self._table = placement.table
        self._sources = [stage for stage, row in enumerate(self._table) if not row.sources]
        # Rules by (kind, stage, pipe, whether there is an earlier and a later slice), computed on first use.
        self._needs: dict[tuple[str, int, int, bool, bool], _Rule] = {}
        self._feeds: dict[tuple[str, int, int, bool, bool], _Rule] = {}

    def device(self, op: Op) -> int:
        return self.placement.device(op.kind, op.stage, self.pipes[op.micro_batch])

    def gradient_kind(self, stage: int, micro_batch: int) -> str:
        split = self.split if isinstance(self.split, bool) else (stage, micro_batch) in self.split
        return BACKWARD_INPUT if split else BACKWARD

    def forward_kinds(self, stage: int) -> tuple[str, ...]:
        """Return the kinds of forwards at ``stage``. In training, ``fbd`` only repeats that of the last stage."""
        if self.placement.graph_kind == FORWARD or not self.trains:
            return (FORWARD,)
        return (RECOMPUTE,) if not self._table[stage].gradients else (FORWARD, RECOMPUTE)

    def backward_kinds(self, stage: int) -> tuple[tuple[str, ...], ...]:
        """Return the valid sets of kinds of backwards that every micro-batch has at ``stage``."""
        return self._table[stage].kind.backwards if self.trains else ((),)

    def entries(self, micro_batch: int) -> list[Op]:
        """Return the ops of a micro-batch that depend on no other op."""
        return [Op(kind, micro_batch, stage) for stage in self._sources for kind in self.forward_kinds(stage)]

    def needs(self, op: Op) -> list[tuple[Op, int]]:
        """Return the ops that must end before ``op`` starts, each with its device."""
        return self._ops(self._input_rule(op), op)

    def tensors(self, op: Op) -> int:
        """Return the number of tensors of hidden states in a message that ``op`` receives."""
        kind = self._table[op.stage].kind
        return kind.activations if op.kind in (FORWARD, RECOMPUTE) else kind.gradients

    def count(self, op: Op) -> int:
        """Return the number of ops that ``op`` depends on."""
        return len(self._input_rule(op))

    def consumers(self, op: Op) -> list[tuple[Op, int]]:
        """Return the ops that depend on ``op``, each with its device: the inverse of :meth:`needs`."""
        kind, m, stage, j = op
        key = kind, stage, self.pipes[m], j > 0, j < self.slices - 1
        rule = self._feeds.get(key)
        if rule is None:
            neighbor = self.slice_before(kind)  # of its consumer
            later = [(kind, stage, -neighbor)] if neighbor and 0 <= j - neighbor < self.slices else []
            rule = self._feeds[key] = self._with_devices(self._consumers(kind, stage), later, key[2])
        return self._ops(rule, op)

    @staticmethod
    def slice_before(kind: str) -> int:
        """Return -1 if an op of this kind follows that of the slice before it, 1: of the slice after it; 0: neither."""
        return -1 if kind == FORWARD else 1 if kind in (BACKWARD, BACKWARD_INPUT) else 0

    def _input_rule(self, op: Op) -> _Rule:
        kind, m, stage, j = op
        key = kind, stage, self.pipes[m], j > 0, j < self.slices - 1
        rule = self._needs.get(key)
        if rule is None:
            neighbor = self.slice_before(kind)
            earlier = [(kind, stage, neighbor)] if neighbor and 0 <= j + neighbor < self.slices else []
            rule = self._needs[key] = self._with_devices(self._inputs(kind, stage), earlier, key[2])
        return rule

    def _inputs(self, kind: str, stage: int) -> list[tuple[str, int]]:
        """Return the (kind, stage) pairs that an op depends on; BACKWARD also stands for BACKWARD_INPUT."""
        kinds, sources, gradients = self._table[stage]
        if kind in (FORWARD, RECOMPUTE):
            return [(FORWARD, source) for source in sources]
        if kind == BACKWARD_WEIGHT and (BACKWARD,) in kinds.backwards:
            return [(BACKWARD_INPUT, stage)]
        own = self.placement.graph_kind, stage
        return [own, *((self._table[near].kind.gradient_kind, near) for near in gradients)]

    def _consumers(self, kind: str, stage: int) -> list[tuple[str, int]]:
        """Return the (kind, stage) pairs that depend on an op, its own stage first."""
        names = {(kind, stage), (BACKWARD, stage)} if kind == BACKWARD_INPUT else {(kind, stage)}
        last, readers = len(self._table) - 1, self.placement.readers[stage]
        # The two stages next to it come before the others.
        return [
            (consumer, near)
            for near in dict.fromkeys((stage, max(stage - 1, 0), min(stage + 1, last), *readers))
            for consumer in (*self.forward_kinds(near), *self._backwards(near))
            if not names.isdisjoint(self._inputs(consumer, near))
        ]

    def _backwards(self, stage: int) -> tuple[str, ...]:
        """Return the kinds of backwards at a stage; BACKWARD also stands for BACKWARD_INPUT."""
        kinds = [kind for kinds in self.backward_kinds(stage) for kind in kinds if kind != BACKWARD_INPUT]
        return tuple(kinds)

    def _with_devices(
        self, ops: list[tuple[str, int]], of_other_slices: list[tuple[str, int, int]], pipe: int
    ) -> _Rule:
        """Add the devices. Replace BACKWARD by the right kind if that is the same for all micro-batches."""
        uniform = isinstance(self.split, bool)
        kinds = {BACKWARD: self.gradient_kind(0, 0)} if uniform else {}
        return tuple(
            (kinds.get(kind, kind), stage, self.placement.device(kind, stage, pipe), shift)
            for kind, stage, shift in (*((kind, stage, 0) for kind, stage in ops), *of_other_slices)
        )

    def _ops(self, rule: _Rule, op: Op) -> list[tuple[Op, int]]:
        """Return the ops of a rule for the micro-batch and slice of ``op``."""
        _, m, _, j = op
        if isinstance(self.split, bool):
            return [(_new(Op, (kind, m, stage, j + shift)), device) for kind, stage, device, shift in rule]
        return [
            (Op(self.gradient_kind(stage, m) if kind == BACKWARD else kind, m, stage, j + shift), device)
            for kind, stage, device, shift in rule
        ]


class Inputs(Generic[T]):
    """Counter of the inputs that each op still waits for. Ops in ``one_more`` have an input besides other ops."""

    def __init__(self, dependencies: Graph[T], one_more: Container[T] = ()) -> None:
        self._count, self._one_more = dependencies.count, one_more
        self._missing: dict[T, int] = {}  # only ops that have some, but not all, of their inputs

    def deliver(self, op: T) -> bool:
        """Count one more input of ``op``. Return True if it was the last one."""
        missing = self._missing.pop(op, 0)
        if not missing:
            missing = self._count(op) + (op in self._one_more if self._one_more else 0)
        if missing > 1:
            self._missing[op] = missing - 1
        return missing == 1
