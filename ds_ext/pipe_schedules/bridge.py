"""Conversion of lowered programs to DeepSpeed's PipeSchedule and PipeInstructions.

No other file of ``pipe_schedules`` imports deepspeed. It uses DeepSpeed's instruction classes where they exist.
Buffer, stage, micro-batch and peer are keyword arguments of the instructions, so an engine needs no other state to
execute one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from deepspeed.runtime.pipe import schedule as ds

from ..errors import ScheduleError
from .draw.order import order_grid
from .lowering import lower
from .ops import COMPUTE, Instruction, MessageKind
from .registry import get_schedule
from .timetables import Program


class CopyActivation(ds.BufferOpInstruction):
    """Copy an output to the next stage on the same device.

    Effect: ``buffers[to_buffer].inputs = [output.detach() for output in buffers[buffer_id].outputs]``
    """


class CopyGrad(ds.BufferOpInstruction):
    """Copy an input gradient to the previous stage on the same device.

    Effect: ``buffers[to_buffer].grads = [input.grad for input in buffers[buffer_id].inputs]``
    """


class BackwardInput(ds.BufferOpInstruction):
    """Backward for the input of a stage; the backward for the weights runs later.

    Effect: ``with deferring(buffers[buffer_id].deferred): buffers[buffer_id].backward(...)``
    """


class BackwardWeight(ds.BufferOpInstruction):
    """Backward for the weights of a stage.

    Effect: ``buffers[buffer_id].deferred.compute()``
    """


class RecomputeForward(ds.BufferOpInstruction):
    """Repeat, with an autograd graph, a forward that a forward device computed without one (``fbd``).

    Effect: ``buffers[buffer_id].outputs = forward(buffers[buffer_id].inputs)``
    """


class ReduceStage(ds.PipeInstruction):
    """Start to average the gradients of ``stage`` over its replicas. ``ReduceGrads`` waits for it.

    Effect: ``work = all_reduce([parameter.grad for parameter in stage.parameters()], async_op=True)``
    """


class Audit(ds.PipeInstruction):
    """In an audited step, compare the weights and a repeated computation with those of the replicas.

    It comes before the optimizer step, so that a fault of the step changes no weight.
    """


class GatherStage(ds.PipeInstruction):
    """Start to gather the weights of ``stage``, which the optimizer step has updated (ZeRO stage 1).

    Effect: ``work = all_gather(stage.parameters(), async_op=True)``
    """


class WaitStage(ds.PipeInstruction):
    """Wait until the weights of ``stage`` are gathered, before its first op of the next step.

    Effect: ``work.wait()`` for the ``work`` of ``GatherStage``
    """


class SyncWeights(ds.PipeInstruction):
    """Send the new weights of ``stage`` from a backward device to a forward device (``fbd``).

    Effect: ``send(weights, peer)`` on one device, ``weights.copy_(recv(peer))`` on the other.
    """


class EndOfStep(ds.PipeInstruction):
    """End the step: advance the data, exchange the numbers of the optimizer, and take a snapshot if one is due."""


# Name -> class of every instruction.
INSTRUCTIONS: dict[str, type[ds.PipeInstruction]] = {
    cls.__name__: cls
    for cls in (
        ds.LoadMicroBatch,
        ds.ForwardPass,
        ds.BackwardPass,
        ds.SendActivation,
        ds.RecvActivation,
        ds.SendGrad,
        ds.RecvGrad,
        ds.ReduceGrads,
        ds.ReduceTiedGrads,
        ds.OptimizerStep,
        CopyActivation,
        CopyGrad,
        BackwardInput,
        BackwardWeight,
        RecomputeForward,
        ReduceStage,
        Audit,
        GatherStage,
        WaitStage,
        SyncWeights,
        EndOfStep,
    )
}


# Field of an Instruction -> keyword of DeepSpeed's instruction.
_KEYWORDS = {
    "buffer": "buffer_id",
    "to_buffer": "to_buffer",
    "stage": "stage",
    "micro_batch": "micro_batch",
    "peer": "peer",
    "other_stage": "other_stage",
}


class TimetableSchedule(ds.PipeSchedule):
    """DeepSpeed schedule that replays the instructions of one device of a program.

    A step is one computation with its messages. To post receives early, an engine may read ``lookahead`` instructions
    ahead of the one that it executes. ``stage_id`` is the device in the pipeline group, 0..D-1.
    """

    lookahead = 8  # enough to post a receive before the preceding computation starts

    def __init__(self, program: Program, stage_id: int) -> None:
        timetable = program.timetable
        super().__init__(timetable.micro_batches, timetable.placement.num_devices, stage_id)
        self.program = program
        self.loads = [
            (stage, micro_batch)
            for name, micro_batch, stage, *_ in program.instructions[stage_id]
            if name == "LoadMicroBatch" and stage is not None and micro_batch is not None
        ]
        self._steps = _split_steps([to_pipe_instruction(i) for i in program.instructions[stage_id]])

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield from self._steps

    @property
    def trains(self) -> bool:
        """True for a training step; an evaluation has forwards only."""
        return self.program.timetable.trains

    @property
    def slices(self) -> int:
        return self.program.timetable.slices

    def num_pipe_buffers(self) -> int:
        return self.program.num_buffers[self.stage_id]

    def picture(self, instruction: ds.PipeInstruction) -> str:
        instructions = self.program.instructions[self.stage_id]
        source = instruction.lowered  # pyright: ignore[reportAttributeAccessIssue]
        position = next(i for i, candidate in enumerate(instructions) if candidate is source)
        upcoming = [i.op for i in instructions[position:] if i.op is not None]
        timetable = self.program.timetable
        step = timetable.orders[self.stage_id].index(upcoming[0]) if upcoming else None
        return order_grid(timetable, device=self.stage_id, step=step)


class NamedSchedule(TimetableSchedule):
    """Schedule with DeepSpeed's constructor signature: ``BitPipeSchedule(micro_batches=8, stages=4, stage_id=0)``."""

    name: ClassVar[str]

    def __init__(self, micro_batches: int, stages: int, stage_id: int, **options: Any) -> None:
        super().__init__(lower(get_schedule(self.name).timetable(stages, micro_batches, options)), stage_id)


class GPipeSchedule(NamedSchedule):
    name = "gpipe"


class OneFOneBSchedule(NamedSchedule):
    name = "1f1b"


class InterleavedSchedule(NamedSchedule):
    """1F1B with several chunks per device; option ``chunks``."""

    name = "interleaved"


class ChimeraSchedule(NamedSchedule):
    name = "chimera"


class BitPipeSchedule(NamedSchedule):
    name = "bitpipe"


class ZeroBubbleH1Schedule(NamedSchedule):
    name = "zb_h1"


class ZeroBubbleVSchedule(NamedSchedule):
    name = "zb_v"


class ForwardBackwardDisaggregation(NamedSchedule):
    """Forwards and backwards on separate devices; ``stage_id`` numbers the devices of both roles."""

    name = "fbd"


class ZeroBubbleBitPipeSchedule(NamedSchedule):
    """BitPipe with split backwards; options ``waves`` and ``max_activations``."""

    name = "bitpipe_zb"


def to_pipe_instruction(instruction: Instruction) -> ds.PipeInstruction:
    """Return the DeepSpeed instruction. Its ``label`` is the text that traces and errors print."""
    cls = INSTRUCTIONS.get(instruction.name)
    if cls is None:
        raise ScheduleError(
            f"instruction: unknown name {instruction.name!r} (got {instruction}). Names: {', '.join(INSTRUCTIONS)}."
        )
    fields = {name: getattr(instruction, field) for field, name in _KEYWORDS.items()}
    fields["slice"] = instruction.slice or None
    converted = cls(**{name: value for name, value in fields.items() if value is not None})
    converted.label = str(instruction)  # pyright: ignore[reportAttributeAccessIssue]
    converted.lowered = instruction  # pyright: ignore[reportAttributeAccessIssue]
    return converted


COMPUTATIONS = tuple(INSTRUCTIONS[name] for name in COMPUTE)
RECEIVES = {INSTRUCTIONS[f"Recv{kind.suffix}"]: kind for kind in MessageKind}


def _split_steps(instructions: list[ds.PipeInstruction]) -> list[list[ds.PipeInstruction]]:
    steps: list[list[ds.PipeInstruction]] = [[]]
    before = (ds.LoadMicroBatch, *RECEIVES, WaitStage)
    for instruction in instructions:
        begins = isinstance(instruction, (*before, *COMPUTATIONS))
        if begins and steps[-1] and not isinstance(steps[-1][-1], before):
            steps.append([])
        steps[-1].append(instruction)
    return steps
