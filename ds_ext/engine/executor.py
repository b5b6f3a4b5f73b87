"""Executor of a rank: it runs the instructions of a schedule, one handler per instruction.

It has the buffers of the live slices of micro-batches, and handlers for data, passes and messages, which call the
stages of the rank. It depends on no optimizer, checkpoint or DeepSpeed engine: its owner sets the handlers of the other
instructions. Whatever measures or records instructions is an :class:`Observer`.

The calls of a step are bound once: instruction, handler and observers. In a static schedule, the receive of a message
is posted ``schedule.lookahead`` instructions ahead.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from deepspeed.runtime.pipe import schedule as ds
from torch.autograd import profiler
from torch.profiler import record_function

from ..pipe_schedules.bridge import (
    RECEIVES,
    BackwardInput,
    BackwardWeight,
    CopyActivation,
    CopyGrad,
    RecomputeForward,
    TimetableSchedule,
)
from ..pipe_schedules.ops import MessageKind
from ..tensor_parallel import WeightGradients, deferring
from .dynamic.messages import DynamicMessages
from .dynamic.order import DynamicSchedule, decided_steps
from .evaluation import Evaluation
from .messages import StageMessages
from .stages.buffer import Buffer
from .stages.sequences import Sequences, WholeSequences
from .stages.stage import Stage
from .step import BackwardContext, Step, item_of
from .step_data import StepData

Kinds = tuple[type[ds.PipeInstruction], ...]


class Observer:
    """Observer of instructions: ``before`` and ``after`` a handler, and ``failed`` if it or an observer raised.

    It observes instructions of the classes ``kinds``; None: all.
    """

    kinds: Kinds | None = None

    def before(self, instruction: Any) -> None:
        pass

    def after(self, instruction: Any) -> None:
        pass

    def failed(self, instruction: Any) -> None:
        pass


class _Call(NamedTuple):
    run: Callable[[], None]
    instruction: ds.PipeInstruction
    before: tuple[Callable[[Any], None], ...]
    after: tuple[Callable[[Any], None], ...]


class Executor:
    """Executor of the instructions of one rank.

    Args:
        stages: stages of the rank by number.
        sequences: how sequences are cut into slices; used only by schedules with several.
        on_failure: called with an instruction and its exception, before it is raised.

    Attributes:
        buffers: storage of the live slices of micro-batches at stages, by buffer id.
        messages: messages between stages; the owner sets it before each run.
        handlers: instruction class -> handler, which gets the arguments of the instruction by name. The owner adds
            those of other instructions than this class's.
        observers: observers of every run, outermost first.
        backward_context: what the backwards need of the optimizer; the owner sets it with the optimizer.
        schedule, data, current_step: those of the current or last run.
    """

    messages: StageMessages
    schedule: TimetableSchedule
    data: StepData
    current_step: Step

    def __init__(
        self,
        stages: Mapping[int, Stage],
        sequences: Sequences,
        on_failure: Callable[[Any, Exception], None] = lambda *_: None,
    ) -> None:
        self.stages, self.sequences, self.on_failure = stages, sequences, on_failure
        self.buffers: list[Buffer] = []
        self.handlers: Mapping[type[ds.PipeInstruction], Callable[..., None]] = {
            kind: getattr(self, name) for kind, name in OWN_HANDLERS.items()
        }
        self.observers: list[Observer] = []
        self.backward_context = BackwardContext()
        # Static schedule -> (messages, handlers, observers) and the calls that are bound to them.
        self._calls: WeakKeyDictionary[TimetableSchedule, tuple[Any, list[_Call]]] = WeakKeyDictionary()

    # --- the step loop ---

    def run(
        self,
        schedule: TimetableSchedule,
        data: StepData,
        steps_done: int,
        observers: Iterable[Observer] = (),
        evaluation: Evaluation | None = None,
    ) -> None:
        """Run the instructions of a step or an evaluation in order.

        Args:
            steps_done: number of the steps before this one.
            observers: observers of this run, inside those of every run.
            evaluation: what to keep; None: the loss only.

        An exception of an instruction is observed with :meth:`Observer.failed` and raised.
        """
        timetable = schedule.program.timetable
        sequences = self.sequences if schedule.slices > 1 else WholeSequences()
        self.schedule, self.data = schedule, data
        evaluation, splits = evaluation or Evaluation(), timetable.split_backwards
        self.current_step = Step(steps_done, data, sequences, evaluation, splits, self.backward_context)
        sequences.clear()
        for stage in self.stages.values():
            stage.start_step()
        self.buffers += [Buffer() for _ in range(schedule.num_pipe_buffers() - len(self.buffers))]
        active = [*self.observers, *observers]
        if profiler._is_profiler_enabled:  # creating a label takes as long as some handlers
            active.append(_ProfilerLabels())
        if isinstance(schedule, DynamicSchedule):
            assert isinstance(self.messages, DynamicMessages)
            for instructions in decided_steps(schedule, self.messages):
                self._run_calls([self._bind(instruction, active) for instruction in instructions], active)
        else:
            self._run_calls(self._bind_all(schedule, active), active)

    def _run_calls(self, calls: Iterable[_Call], observers: Sequence[Observer]) -> None:
        instruction: Any = None
        try:
            for run, instruction, before, after in calls:
                for observe in before:
                    observe(instruction)
                run()
                for observe in after:
                    observe(instruction)
        except Exception as error:
            self.on_failure(instruction, error)
            for observer in reversed(observers):
                observer.failed(instruction)
            raise

    def _bind_all(self, schedule: TimetableSchedule, observers: list[Observer]) -> list[_Call]:
        """Return the calls of a static schedule, which are bound again only if what they are bound to has changed."""
        targets = self.messages, self.handlers, observers
        last_targets, calls = self._calls.get(schedule, (None, []))
        if last_targets != targets:
            calls = list(self._calls_with_posts(schedule, observers))
            self._calls[schedule] = targets, calls
        return calls

    def _calls_with_posts(self, schedule: TimetableSchedule, observers: list[Observer]) -> Iterator[_Call]:
        """Yield the calls of a static schedule. Each receive is posted ``schedule.lookahead`` instructions ahead."""
        waiting, slices = deque[_Call](), schedule.slices
        for instruction in (instruction for step in schedule.steps() for instruction in step):
            kind: Any = RECEIVES.get(type(instruction))
            if kind is not None:
                post = functools.partial(
                    self.messages.post,
                    kind,
                    instruction.stage,
                    item_of(instruction.micro_batch, instruction.lowered.slice, slices),
                    instruction.peer,
                    instruction.other_stage,
                )
                yield _Call(post, instruction, (), ())
            waiting.append(self._bind(instruction, observers))
            if len(waiting) > schedule.lookahead:
                yield waiting.popleft()
        yield from waiting

    def _bind(self, instruction: ds.PipeInstruction, observers: Sequence[Observer]) -> _Call:
        """Return the call of an instruction, with the methods that its observers override."""
        kind = type(instruction)
        active = [watch for watch in observers if watch.kinds is None or issubclass(kind, watch.kinds)]
        return _Call(
            functools.partial(self.handlers[kind], **instruction.kwargs),
            instruction,
            tuple(watch.before for watch in active if type(watch).before is not Observer.before),
            tuple(watch.after for watch in reversed(active) if type(watch).after is not Observer.after),
        )

    # --- handlers, in the order of the table below; ``slice`` is passed for all but the first one ---

    def load(self, buffer_id: int, stage: int, micro_batch: int, slice: int = 0) -> None:
        self.stages[stage].load(self.current_step, self.buffers[buffer_id], micro_batch, slice)

    def forward(self, buffer_id: int, stage: int, micro_batch: int, slice: int = 0) -> None:
        self.stages[stage].forward(self.current_step, self.buffers[buffer_id], micro_batch, slice)

    def backward(self, buffer_id: int, stage: int, micro_batch: int, slice: int = 0) -> None:
        with self.backward_context.accumulating():
            self.stages[stage].backward(self.current_step, self.buffers[buffer_id], micro_batch, slice)

    def backward_input(self, buffer_id: int, stage: int, micro_batch: int, slice: int = 0) -> None:
        later = self.buffers[buffer_id].deferred = WeightGradients()
        with deferring(later):
            self.backward(buffer_id, stage, micro_batch, slice)

    def backward_weight(self, buffer_id: int, stage: int, micro_batch: int, slice: int = 0) -> None:
        buffer = self.buffers[buffer_id]
        later, buffer.deferred = buffer.deferred, None
        assert later is not None
        with self.backward_context.accumulating():
            later.compute()

    def send_activations(
        self, buffer_id: int, stage: int, micro_batch: int, peer: int, other_stage: int, slice: int = 0
    ) -> None:
        item = self.current_step.item(micro_batch, slice)
        tensors = self.stages[stage].outputs_for(
            other_stage, self.current_step, self.buffers[buffer_id], item
        )
        self.messages.send(MessageKind.ACTIVATION, tensors, other_stage, item, peer)

    def receive_activations(
        self, buffer_id: int, stage: int, micro_batch: int, peer: int, other_stage: int, slice: int = 0
    ) -> None:
        item = self.current_step.item(micro_batch, slice)
        tensors = self.messages.receive(MessageKind.ACTIVATION, stage, item, peer, other_stage)
        self.stages[stage].accept_activations(other_stage, self.buffers[buffer_id], tensors)

    def send_grads(
        self, buffer_id: int, stage: int, micro_batch: int, peer: int, other_stage: int, slice: int = 0
    ) -> None:
        grads = self.stages[stage].grads_for(other_stage, self.buffers[buffer_id])
        item = self.current_step.item(micro_batch, slice)
        self.messages.send(MessageKind.GRADIENT, grads, other_stage, item, peer)

    def receive_grads(
        self, buffer_id: int, stage: int, micro_batch: int, peer: int, other_stage: int, slice: int = 0
    ) -> None:
        item = self.current_step.item(micro_batch, slice)
        grads = self.messages.receive(MessageKind.GRADIENT, stage, item, peer, other_stage)
        self.stages[stage].accept_grads(other_stage, self.buffers[buffer_id], grads)

    def copy_activations(
        self, buffer_id: int, to_buffer: int, stage: int, micro_batch: int, other_stage: int, slice: int = 0
    ) -> None:
        item = self.current_step.item(micro_batch, slice)
        tensors = self.stages[stage].outputs_for(
            other_stage, self.current_step, self.buffers[buffer_id], item
        )
        tensors = tuple([tensor.detach() for tensor in tensors])
        self.stages[other_stage].accept_activations(stage, self.buffers[to_buffer], tensors)

    def copy_grads(
        self, buffer_id: int, to_buffer: int, stage: int, micro_batch: int, other_stage: int, slice: int = 0
    ) -> None:
        grads = self.stages[stage].grads_for(other_stage, self.buffers[buffer_id])
        self.stages[other_stage].accept_grads(stage, self.buffers[to_buffer], grads)


OWN_HANDLERS: dict[type[ds.PipeInstruction], str] = {
    ds.LoadMicroBatch: "load",
    ds.ForwardPass: "forward",
    RecomputeForward: "forward",
    ds.BackwardPass: "backward",
    BackwardInput: "backward_input",
    BackwardWeight: "backward_weight",
    ds.SendActivation: "send_activations",
    ds.RecvActivation: "receive_activations",
    ds.SendGrad: "send_grads",
    ds.RecvGrad: "receive_grads",
    CopyActivation: "copy_activations",
    CopyGrad: "copy_grads",
}


class _ProfilerLabels(Observer):
    """Labels of the instructions in a profile of torch."""

    _range: record_function | None = None

    def before(self, instruction: Any) -> None:
        self._range = record_function(instruction.label)
        self._range.__enter__()

    def after(self, instruction: Any) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def failed(self, instruction: Any) -> None:
        self.after(instruction)
