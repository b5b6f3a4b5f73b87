"""Kinds of computations, ops, and the instructions of lowered programs."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
RECOMPUTE = "R"  # `fbd`: a backward device repeats the forward, this time with an autograd graph
ALL_KINDS = (*KINDS, RECOMPUTE)


class MessageKind(IntEnum):
    """Kind of a message or copy between two stages. Its number is in the tags of messages."""

    ACTIVATION = 0
    GRADIENT = 1

    @property
    def suffix(self) -> str:
        """End of the names of its instructions, which begin with ``Send``, ``Recv`` and ``Copy``."""
        return _SUFFIXES[self]


_SUFFIXES = {MessageKind.ACTIVATION: "Activation", MessageKind.GRADIENT: "Grad"}
# Kind of an op -> kind of the messages that it receives.
RECEIVED: dict[str, MessageKind] = {
    **dict.fromkeys((FORWARD, RECOMPUTE), MessageKind.ACTIVATION),
    **dict.fromkeys((BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT), MessageKind.GRADIENT),
}


class Op(NamedTuple):
    """One computation: ``Op(FORWARD, 3, 1)`` is printed as ``F3@1``, and ``Op(FORWARD, 3, 1, 2)`` as ``F3.2@1``.

    Kinds: F forward, B whole backward, I backward for the input, W backward for the weights, R repeated forward.
    ``slice`` is the part of the sequence, of all samples of the micro-batch, that the op computes; 0 if there is one.
    """

    kind: str
    micro_batch: int
    stage: int
    slice: int = 0

    def __str__(self) -> str:
        """Return ``F3@1`` for the forward of micro-batch 3 at stage 1. Traces and errors use this text."""
        return f"{self.kind}{self.where}"

    @property
    def where(self) -> str:
        """Micro-batch, slice and stage, such as ``3.2@1``."""
        return f"{slice_text(self.micro_batch, self.slice)}@{self.stage}"


def slice_text(micro_batch: int, slice: int) -> str:
    """Return ``3.2`` for slice 2 of micro-batch 3. The first slice has the text of the micro-batch."""
    return f"{micro_batch}.{slice}" if slice else str(micro_batch)


class Instruction(NamedTuple):
    """Lowered instruction of one device; ``name`` is the name of its DeepSpeed class.

    Messages between stages have names of their direction and kind, such as ``SendGrad``; see :class:`MessageKind`.

    ``peer`` is the other device of a message. ``buffer`` holds the tensors of a slice of a micro-batch at a stage.
    ``to_buffer`` is the destination of a copy on the same device. ``other_stage`` is the stage at the other end of a
    message or copy. Fields that do not apply are None, ``slice`` is 0.
    """

    name: str
    micro_batch: int | None = None
    stage: int | None = None
    pipe: int | None = None
    chunk: int | None = None
    peer: int | None = None
    buffer: int | None = None
    to_buffer: int | None = None
    slice: int = 0
    other_stage: int | None = None

    @property
    def op(self) -> Op | None:
        kind = COMPUTE.get(self.name)
        if kind is None or self.stage is None or self.micro_batch is None:
            return None
        return Op(kind, self.micro_batch, self.stage, self.slice)

    def __str__(self) -> str:
        op = self.op
        if op is not None:
            return str(op)
        if self.stage is None:
            where = ""
        elif self.micro_batch is None:
            where = f" @{self.stage}"
        else:
            where = f" {Op('', self.micro_batch, self.stage, self.slice).where}"
        way = "from" if self.name.startswith("Recv") else "to"
        peer = "" if self.peer is None else f" {way} device {self.peer}"
        return f"{self.name}{where}{peer}"


REDUCE_STAGE = "ReduceStage"
GATHER_STAGE = "GatherStage"
WAIT_STAGE = "WaitStage"
AUDIT = "Audit"
OPTIMIZER_STEP = "OptimizerStep"
COMPUTE = {
    "ForwardPass": FORWARD,
    "BackwardPass": BACKWARD,
    "BackwardInput": BACKWARD_INPUT,
    "BackwardWeight": BACKWARD_WEIGHT,
    "RecomputeForward": RECOMPUTE,
}
COMPUTE_NAME = {kind: name for name, kind in COMPUTE.items()}
