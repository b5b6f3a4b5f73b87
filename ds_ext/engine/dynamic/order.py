"""Schedule whose steps are decided while they run, from the arrivals and the admitted micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule as ds

from ...parallel.layout import ParallelLayout
from ...pipe_schedules import Instruction, Op, Program
from ...pipe_schedules.bridge import TimetableSchedule, to_pipe_instruction
from ...pipe_schedules.dependencies import Inputs
from ...pipe_schedules.events import Policy
from ...pipe_schedules.lower import AFTER_BACKWARDS, Lowering
from ...pipe_schedules.ops import FORWARD
from ...pipe_schedules.registry import DynamicRules
from ..messages import Kind, StageMessages
from .messages import Arrival, DynamicMessages

_SHOWN = 12  # computations in an error


class DynamicSchedule(TimetableSchedule):
    """Instructions of one rank, decided one computation at a time.

    Args:
        program: a run of the same rules under the costs of the JSON: links and sizes.
        stage_id: the device inside the pipeline group.
        rules: runtime scheduling rules.
    """

    lookahead = 0  # an instruction is executed before the next one is asked for
    dynamic = True

    def __init__(self, program: Program, stage_id: int, rules: DynamicRules) -> None:
        super().__init__(program, stage_id)
        self.rules = rules
        self.ran: list[Op] = []
        self._messages: DynamicMessages | None = None

    def start(self, messages: StageMessages) -> DynamicMessages:
        """Return the messages of this order, on the transport of ``messages``."""
        self._messages = DynamicMessages.on(messages, senders(self.rules, self.stage_id))
        return self._messages

    def num_pipe_buffers(self) -> int:
        """Return enough buffers for kept activations and for the waiting inputs of admitted micro-batches."""
        return 2 * self.rules.room(self.stage_id)

    def links(self, layout: ParallelLayout) -> dict[tuple[int, int], int]:
        """(sender, receiver) global ranks -> how many messages the receiver holds at most, as in link_slots."""
        found: dict[tuple[int, int], int] = {}
        for device in range(layout.placement.ranks):
            peers = {peer: self.rules.room(device) + 1 for peer in senders(self.rules, device)}
            for data in range(layout.data_parallel_size):
                first = layout.rank(device, data, 0)
                for tensor in range(layout.tensor_parallel_size):
                    rank = layout.rank(device, data, tensor)
                    found |= {(layout.rank(peer, data, tensor), rank): n for peer, n in peers.items()}
                    if tensor:
                        found[first, rank] = 1
        return found

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:
        """Yield the instructions of each computation as soon as it is decided."""
        messages = self._messages
        assert messages is not None, "start() comes before"
        lowering = Lowering(self.stage_id, self.program.timetable)
        self.ran = []
        try:
            for op in self._decided(messages) if messages.decides else self._followed(messages):
                self.ran.append(op)
                yield list(map(to_pipe_instruction, lowering.add(op)))
        except Exception as error:
            error.add_note(f"while it waited for work:\n{self.picture(None)}")
            messages.transport.abort(f"{type(error).__name__}: {error}")
            raise
        yield [to_pipe_instruction(Instruction(name)) for name in AFTER_BACKWARDS]

    def _decided(self, messages: DynamicMessages) -> Iterator[Op]:
        """Yield the ops that this rank chooses; the caller computes each before it asks for the next."""
        dependencies = self.program.timetable.dependencies
        policy, inputs = self.rules.device(self.stage_id), Inputs(dependencies)
        for op in self.rules.entering(self.stage_id):
            policy.arrive(op)
        for _ in range(self.rules.count(self.stage_id)):
            self._arrive(policy, inputs, messages.poll())
            while (op := policy.choose()) is None:
                self._arrive(policy, inputs, messages.wait())
            messages.choices.tell(op)
            yield op
            policy.done(op)
            for consumer, device in dependencies.consumers(op):
                if device == self.stage_id and inputs.deliver(consumer):
                    policy.arrive(consumer)

    def _followed(self, messages: DynamicMessages) -> Iterator[Op]:
        """Yield the ops that the first rank of the tensor-parallel group chooses."""
        for _ in range(self.rules.count(self.stage_id)):
            yield messages.choices.hear()

    def _arrive(self, policy: Policy, inputs: Inputs, arrivals: list[Arrival]) -> None:
        dependencies = self.program.timetable.dependencies
        for arrival in arrivals:
            m, stage = arrival.micro_batch, arrival.stage
            kind = FORWARD if arrival.kind == Kind.ACTIVATION else dependencies.gradient_kind(stage, m)
            if inputs.deliver(op := Op(kind, m, stage)):
                policy.arrive(op)

    def picture(self, instruction: ds.PipeInstruction | None) -> str:
        """Return the ops that this device has computed in the step; other devices keep their own order."""
        left = len(self.ran) - _SHOWN
        ran = " ".join(map(str, self.ran[-_SHOWN:])) or "nothing"
        before = f"({left} more) " if left > 0 else ""
        arrow = "   <-- ERROR HERE" if instruction is not None else ""
        total = self.rules.count(self.stage_id)
        return f"rank {self.stage_id}  {before}{ran}{arrow}   ({len(self.ran)} of {total} decided)"


def senders(rules: DynamicRules, device: int) -> list[int]:
    """Return the devices whose messages ``device`` receives: its neighbours in the pipes."""
    found: set[int] = set()
    for devices in rules.placement.pipes:
        for stage, at in enumerate(devices):
            if at == device:
                found |= set(devices[max(0, stage - 1) : stage + 2])
    return sorted(found - {device})
