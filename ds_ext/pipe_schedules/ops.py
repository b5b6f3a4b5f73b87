"""The vocabulary of schedules: kinds of computations, ops, and the instructions that they are lowered to."""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
RECOMPUTE = "R"  # where forwards have devices of their own: the forward again, with its graph
ALL_KINDS = (*KINDS, RECOMPUTE)


class Op(NamedTuple):
    """One computation: ``Op(FORWARD, micro_batch, stage)``, in the order in which it prints (``F3@1``).

    ``kind`` is F forward, B whole backward, I input gradient, W weight gradient, or R: the forward that a backward
    device repeats with its graph when forwards have devices of their own.
    """

    kind: str
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        """``F3@1``: forward of micro-batch 3 at stage 1. Traces and errors use the same text."""
        return f"{self.kind}{self.micro_batch}@{self.stage}"


class Instruction(NamedTuple):
    """One lowered instruction of one rank; ``name`` is the DeepSpeed class it becomes.

    ``peer`` is the other device of a message. ``buffer`` is the buffer that holds the tensors of (stage,
    micro_batch), ``to_buffer`` the destination of a hand-over on the same rank. Fields that mean nothing for an
    instruction are None.
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
        """The computation this instruction performs, or None."""
        kind = COMPUTE.get(self.name)
        if kind is None or self.stage is None or self.micro_batch is None:
            return None
        return Op(kind, self.micro_batch, self.stage)

    def __str__(self) -> str:
        op = self.op
        if op is not None:
            return str(op)
        where = "" if self.micro_batch is None else f" {self.micro_batch}@{self.stage}"
        peer = (
            ""
            if self.peer is None
            else f" {'from' if self.name.startswith('Recv') else 'to'} rank {self.peer}"
        )
        return f"{self.name}{where}{peer}"


COMPUTE = {
    "ForwardPass": FORWARD,
    "BackwardPass": BACKWARD,
    "BackwardInput": BACKWARD_INPUT,
    "BackwardWeight": BACKWARD_WEIGHT,
    "RecomputeForward": RECOMPUTE,
}
COMPUTE_NAME = {kind: name for name, kind in COMPUTE.items()}
