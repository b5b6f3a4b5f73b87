"""The bridge to DeepSpeed: lowered programs as PipeSchedule subclasses and PipeInstructions.

The one file of this package that imports deepspeed. DeepSpeed's own instruction classes are used wherever it has
them; their keyword arguments carry what a handler needs (buffer, stage, micro-batch, peer), so that an engine has
no modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from deepspeed.runtime.pipe import schedule as ds

from ..errors import ScheduleError
from .draw.order import order_grid
from .lower import lower
from .ops import Instruction
from .registry import get_schedule
from .timetables import Program


class CopyActivation(ds.BufferOpInstruction):
    """Hand an output to the next stage on the same device.

    Roughly: ``buffers["inputs"][to_buffer] = buffers["outputs"][buffer_id].detach()``
    """


class CopyGrad(ds.BufferOpInstruction):
    """Hand an input gradient to the previous stage on the same device.

    Roughly: ``buffers["grads"][to_buffer] = buffers["inputs"][buffer_id].grad``
    """


class BackwardInput(ds.BufferOpInstruction):
    """The first half of a backward: the gradient of the stage's input; the weights' is left for later.

    Roughly: ``autograd.backward(buffers["outputs"][buffer_id], buffers["grads"][buffer_id], inputs=...)``
    """


class BackwardWeight(ds.BufferOpInstruction):
    """The second half of a backward: the gradients of the stage's weights.

    Roughly: ``buffers["weights"][buffer_id].compute()``
    """


class RecomputeForward(ds.BufferOpInstruction):
    """A forward that another device has computed without a graph, here with its graph, for the backward.

    Roughly: ``buffers["outputs"][buffer_id] = forward(buffers["inputs"][buffer_id])``
    """


class SyncWeights(ds.PipeInstruction):
    """New weights of ``stage`` go from the device that has stepped to ``peer``, which only computes forwards.

    Roughly: ``send(weights, peer)`` on the one, ``weights.copy_(recv(peer))`` on the other.
    """


_CLASSES: dict[str, type[ds.PipeInstruction]] = {
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
        SyncWeights,
    )
}


# Field of an Instruction -> keyword of the DeepSpeed instruction.
_KEYWORDS = {
    "buffer": "buffer_id",
    "to_buffer": "to_buffer",
    "stage": "stage",
    "micro_batch": "micro_batch",
    "peer": "peer",
}


class TimetableSchedule(ds.PipeSchedule):
    """A DeepSpeed schedule that replays one rank of a lowered program.

    One step is one computation with the messages around it. An engine may take ``lookahead`` instructions before it
    executes the first, to post receives early.

    Args:
        program: the lowered timetable.
        stage_id: the device inside the pipeline group, 0..D-1.
    """

    lookahead = 8  # far enough that a receive is posted before the computation in front of it starts

    def __init__(self, program: Program, stage_id: int) -> None:
        timetable = program.timetable
        super().__init__(timetable.micro_batches, timetable.placement.num_devices, stage_id)
        self.program = program
        self._steps = _group([to_pipe_instruction(i) for i in program.instructions[stage_id]])

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield the instructions of each step."""
        yield from self._steps

    def num_pipe_buffers(self) -> int:
        """Most (stage, micro-batch) pairs alive at once on this device."""
        return self.program.num_buffers[self.stage_id]

    def picture(self, instruction: ds.PipeInstruction) -> str:
        """The rank x step grid with an arrow at the computation that ``instruction`` belongs to."""
        mine = self.program.instructions[self.stage_id]
        source = instruction.source  # pyright: ignore[reportAttributeAccessIssue]
        at = next(i for i, other in enumerate(mine) if other is source)
        upcoming = [i.op for i in mine[at:] if i.op is not None]
        timetable = self.program.timetable
        step = timetable.orders[self.stage_id].index(upcoming[0]) if upcoming else None
        return order_grid(timetable, rank=self.stage_id, step=step)


class NamedSchedule(TimetableSchedule):
    """A schedule with DeepSpeed's constructor: ``BitPipeSchedule(micro_batches=8, stages=4, stage_id=0)``."""

    name: ClassVar[str]

    def __init__(self, micro_batches: int, stages: int, stage_id: int, **options: Any) -> None:
        super().__init__(lower(get_schedule(self.name).timetable(stages, micro_batches, options)), stage_id)


class GPipeSchedule(NamedSchedule):
    """All forwards, then all backwards."""

    name = "gpipe"


class OneFOneBSchedule(NamedSchedule):
    """DeepSpeed's own order, in our instructions."""

    name = "1f1b"


class InterleavedSchedule(NamedSchedule):
    """1F1B over several chunks a device; option ``chunks``."""

    name = "interleaved"


class ChimeraSchedule(NamedSchedule):
    """Two opposing linear pipes."""

    name = "chimera"


class BitPipeSchedule(NamedSchedule):
    """Two opposing V-shaped pipes."""

    name = "bitpipe"


class ZeroBubbleH1Schedule(NamedSchedule):
    """1F1B with split backwards."""

    name = "zb_h1"


class ZeroBubbleVSchedule(NamedSchedule):
    """A V-shaped pipe with split backwards."""

    name = "zb_v"


class ForwardBackwardDisaggregation(NamedSchedule):
    """Forwards on devices of their own; ``stage_id`` counts forward and backward devices of all stages."""

    name = "fbd"


class ZeroBubbleBitPipeSchedule(NamedSchedule):
    """BitPipe with split backwards; options ``waves`` and ``max_activations``."""

    name = "bitpipe_zb"


def to_pipe_instruction(instruction: Instruction) -> ds.PipeInstruction:
    """The DeepSpeed instruction; ``label`` is the text that traces and errors use.

    Raises ScheduleError for an instruction that DeepSpeed's engine and ours do not have.
    """
    made_of = _CLASSES.get(instruction.name)
    if made_of is None:
        raise ScheduleError(
            f"{instruction} is a {instruction.name}, which the engine cannot run; it runs {', '.join(_CLASSES)}."
        )
    fields = {name: getattr(instruction, field) for field, name in _KEYWORDS.items()}
    made = made_of(**{name: value for name, value in fields.items() if value is not None})
    made.label = str(instruction)  # pyright: ignore[reportAttributeAccessIssue]
    made.source = instruction  # pyright: ignore[reportAttributeAccessIssue]
    return made


_COMPUTATIONS = (ds.ForwardPass, ds.BackwardPass, BackwardInput, BackwardWeight, RecomputeForward)


def _group(instructions: list[ds.PipeInstruction]) -> list[list[ds.PipeInstruction]]:
    """Cut the stream so that a step is a computation with the messages before and after it."""
    steps: list[list[ds.PipeInstruction]] = [[]]
    before = (ds.LoadMicroBatch, ds.RecvActivation, ds.RecvGrad)
    for instruction in instructions:
        begins = isinstance(instruction, (*before, *_COMPUTATIONS))
        if begins and steps[-1] and not isinstance(steps[-1][-1], before):
            steps.append([])
        steps[-1].append(instruction)
    return steps
