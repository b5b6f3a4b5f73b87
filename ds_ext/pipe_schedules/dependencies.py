"""Dependencies between the ops of a step. Lowering, checks, simulation and engine all use this one definition."""

from __future__ import annotations

from collections.abc import Container

from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op
from .placement import Placement

_Rule = tuple[
    tuple[str, int, int, int], ...
]  # (kind, stage, device, later slices) of ops of the same micro-batch


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
        self._last = placement.stages - 1
        self._parts = range(placement.stages, placement.stages + placement.head_parts)
        self._loss = placement.loss_stage
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
        return (RECOMPUTE,) if stage == self._last else (FORWARD, RECOMPUTE)

    def backward_kinds(self, stage: int) -> tuple[tuple[str, ...], ...]:
        """Return the valid sets of kinds of backwards that every micro-batch has at ``stage``.

        The forward of a head part also computes its share of the input gradient, so only its W remains.
        """
        if not self.trains or self._last < stage == self._loss:
            return ((),)
        if stage in self._parts:
            return ((BACKWARD_WEIGHT,),)
        return (BACKWARD,), (BACKWARD_INPUT, BACKWARD_WEIGHT)

    def entries(self, micro_batch: int) -> list[Op]:
        """Return the ops of a micro-batch that depend on no other op."""
        return [Op(kind, micro_batch, 0) for kind in self.forward_kinds(0)]

    def needs(self, op: Op) -> list[tuple[Op, int]]:
        """Return the ops that must end before ``op`` starts, each with its device."""
        return self._ops(self._input_rule(op), op)

    def tensors(self, op: Op) -> int:
        """Return the number of tensors of hidden states in a message that ``op`` receives.

        The loss gets two from each head part, which gets a few numbers per token back.
        """
        if op.stage <= self._last:
            return 1
        return (0 if op.kind == BACKWARD_WEIGHT else 1) if op.stage in self._parts else 2

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
        loss = [(FORWARD, self._loss)] if self._parts else []
        if stage > self._last:  # a head part, or the loss that joins all parts
            if kind == BACKWARD_WEIGHT:
                return [(FORWARD, stage), *loss]
            return [(FORWARD, near) for near in ((self._last,) if stage in self._parts else self._parts)]
        if kind in (FORWARD, RECOMPUTE):
            return [(FORWARD, stage - 1)] if stage else []
        if kind == BACKWARD_WEIGHT:
            return [(BACKWARD_INPUT, stage)]
        forward = (self.placement.graph_kind, stage)
        return [forward, *loss] if stage == self._last else [forward, (BACKWARD, stage + 1)]

    def _consumers(self, kind: str, stage: int) -> list[tuple[str, int]]:
        """Return the (kind, stage) pairs that depend on an op, its own stage first."""
        names = {(kind, stage), (BACKWARD, stage)} if kind == BACKWARD_INPUT else {(kind, stage)}
        # With head parts, the last stage, all parts and the loss depend on each other.
        head = range(self._last, self._loss + 1) if self._last <= stage else ()
        return [
            (consumer, near)
            for near in dict.fromkeys((stage, stage - 1, stage + 1, *head))
            if 0 <= near <= self._loss
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
            return [(Op(kind, m, stage, j + shift), device) for kind, stage, device, shift in rule]
        return [
            (Op(self.gradient_kind(stage, m) if kind == BACKWARD else kind, m, stage, j + shift), device)
            for kind, stage, device, shift in rule
        ]


class Inputs:
    """Counter of the inputs that each op still waits for. Ops in ``one_more`` have an input besides other ops."""

    def __init__(self, dependencies: Dependencies, one_more: Container[Op] = ()) -> None:
        self._dependencies, self._one_more = dependencies, one_more
        self._missing: dict[Op, int] = {}  # only ops that have some, but not all, of their inputs

    def deliver(self, op: Op) -> bool:
        """Count one more input of ``op``. Return True if it was the last one."""
        missing = self._missing.pop(op, 0)
        if not missing:
            missing = self._dependencies.count(op) + (op in self._one_more if self._one_more else 0)
        if missing > 1:
            self._missing[op] = missing - 1
        return missing == 1
