"""Op order at run time: a policy chooses each op from the arrivals and the admitted micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule as ds

from ...pipe_schedules import Op, Program
from ...pipe_schedules.bridge import TimetableSchedule, to_pipe_instruction
from ...pipe_schedules.dependencies import Inputs
from ...pipe_schedules.dynamic import DynamicRules
from ...pipe_schedules.gathers import StageWaits
from ...pipe_schedules.lowering import Lowering, after_the_ops
from ...pipe_schedules.ops import FORWARD, MessageKind
from ...pipe_schedules.reductions import StageReductions
from .messages import Arrival, DynamicMessages

_MAX_SHOWN = 12  # ops in an error


class DynamicSchedule(TimetableSchedule):
    """Schedule of one rank whose ops are chosen at run time; see :func:`decided_steps`.

    Args:
        program: program of a simulated step, for links and sizes.
        stage_id: device of this rank.

    Attributes:
        executed: ops of the current or last step so far.
    """

    lookahead = 0  # execute each instruction before the next op is chosen

    def __init__(self, program: Program, stage_id: int, rules: DynamicRules) -> None:
        super().__init__(program, stage_id)
        self.rules = rules
        self.executed: list[Op] = []

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers for the live activations and the waiting inputs of admitted micro-batches."""
        return 2 * self.rules.max_live[self.stage_id]

    def picture(self, instruction: ds.PipeInstruction | None) -> str:
        """Return the last ops of this device in the step. The order of other devices is unknown here."""
        omitted = len(self.executed) - _MAX_SHOWN
        ops = " ".join(map(str, self.executed[-_MAX_SHOWN:])) or "nothing"
        before = f"({omitted} more) " if omitted > 0 else ""
        arrow = "   <-- ERROR HERE" if instruction is not None else ""
        total = self.rules.num_ops(self.stage_id)
        return f"device {self.stage_id}  {before}{ops}{arrow}   ({len(self.executed)} of {total} decided)"


def decided_steps(schedule: DynamicSchedule, messages: DynamicMessages) -> Iterator[list[ds.PipeInstruction]]:
    """Yield the instructions op by op. The caller executes them before it takes the next ones."""
    lowering = Lowering(schedule.stage_id, schedule.program.timetable)
    waits = StageWaits(schedule.program, schedule.stage_id)
    reductions = StageReductions(schedule.program, schedule.stage_id)
    schedule.executed = []
    try:
        for op in _chosen_ops(schedule, messages) if messages.decides else _received_ops(schedule, messages):
            schedule.executed.append(op)
            yield list(
                map(to_pipe_instruction, (*waits.before(op), *lowering.add(op), *reductions.after(op)))
            )
    except Exception as error:
        error.add_note(f"while waiting for the next op:\n{schedule.picture(None)}")
        messages.transport.abort(f"{type(error).__name__}: {error}")
        raise
    yield list(map(to_pipe_instruction, after_the_ops(schedule.program, schedule.stage_id)))


def _chosen_ops(schedule: DynamicSchedule, messages: DynamicMessages) -> Iterator[Op]:
    """Yield the ops that this rank chooses, and send each to the other ranks of its tensor-parallel group.

    The caller computes each op before it takes the next.
    """
    rules, device = schedule.rules, schedule.stage_id
    dependencies = schedule.program.timetable.dependencies
    policy, inputs = rules.device(device), Inputs(dependencies)

    def deliver(arrivals: list[Arrival]) -> None:
        for kind, stage, m in arrivals:
            consumer = FORWARD if kind == MessageKind.ACTIVATION else dependencies.gradient_kind(stage, m)
            if inputs.deliver(op := Op(consumer, m, stage)):
                policy.add_ready(op)

    for op in rules.entry_ops(device):
        policy.add_ready(op)
    for _ in range(rules.num_ops(device)):
        deliver(messages.poll())
        while (op := policy.choose()) is None:
            deliver(messages.wait())
        messages.choices.send(op)
        yield op
        policy.mark_done(op)
        for consumer, consumer_device in dependencies.consumers(op):
            if consumer_device == device and inputs.deliver(consumer):
                policy.add_ready(consumer)


def _received_ops(schedule: DynamicSchedule, messages: DynamicMessages) -> Iterator[Op]:
    """Yield the ops that the first rank of the tensor-parallel group chooses."""
    for _ in range(schedule.rules.num_ops(schedule.stage_id)):
        yield messages.choices.receive()
