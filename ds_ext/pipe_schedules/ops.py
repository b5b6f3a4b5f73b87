"""Kinds of computations, ops, and the instructions of lowered programs."""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
RECOMPUTE = "R"  # `fbd`: a backward device repeats the forward, this time with an autograd graph
ALL_KINDS = (*KINDS, RECOMPUTE)


class Op(NamedTuple):
    """One computation, printed in the order of its fields: ``Op(FORWARD, 3, 1)`` is ``F3@1``.

    Kinds: F forward, B whole backward, I backward for the input, W backward for the weights, R repeated forward.
    """

    kind: str
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        """Return ``F3@1`` for the forward of micro-batch 3 at stage 1. Traces and errors use this text."""
        return f"{self.kind}{self.micro_batch}@{self.stage}"


class Instruction(NamedTuple):
    """Lowered instruction of one device; ``name`` is the name of its DeepSpeed class.

    Messages between stages have names that begin with ``Send`` or ``Recv``, from which other code takes the direction.

    ``peer`` is the other device of a message. ``buffer`` holds the tensors of (stage, micro_batch). ``to_buffer`` is
    the destination of a copy on the same device. Fields that do not apply are None.
    """

    name: str
    micro_batch: int | None = None
    stage: int | None = None
    pipe: int | None = None
    chunk: int | None = None
    peer: int | None = None
    buffer: int | None = None
    to_buffer: int | None = None

    @property
    def op(self) -> Op | None:
        """Op that the instruction computes, or None."""
        kind = COMPUTE.get(self.name)
        if kind is None or self.stage is None or self.micro_batch is None:
            return None
        return Op(kind, self.micro_batch, self.stage)

    def __str__(self) -> str:
        op = self.op
        if op is not None:
            return str(op)
        where = "" if self.micro_batch is None else f" {self.micro_batch}@{self.stage}"
        way = "from" if self.name.startswith("Recv") else "to"
        peer = "" if self.peer is None else f" {way} device {self.peer}"
        return f"{self.name}{where}{peer}"


COMPUTE = {
    "ForwardPass": FORWARD,
    "BackwardPass": BACKWARD,
    "BackwardInput": BACKWARD_INPUT,
    "BackwardWeight": BACKWARD_WEIGHT,
    "RecomputeForward": RECOMPUTE,
}
COMPUTE_NAME = {kind: name for name, kind in COMPUTE.items()}
