"""Executor of a rank: it runs the instructions of a schedule, one handler per instruction.

It has the buffers of the live (stage, micro-batch) pairs, and handlers for data, passes and messages. It knows no
optimizer, no checkpoint and no DeepSpeed engine: its owner gives it the handlers of the other instructions. Whatever
measures or records instructions is an :class:`Observer`.

The calls of a step are bound once: instruction, handler and observers. In a static schedule, the receive of a message
is posted ``schedule.lookahead`` instructions ahead.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from ..pipe_schedules.bridge import (
    BackwardInput,
    BackwardWeight,
    CopyActivation,
    CopyGrad,
    RecomputeForward,
    TimetableSchedule,
)
from ..tensor_parallel import WeightGradients, deferrable, deferring
from .batches import StepData
from .dynamic.messages import DynamicMessages
from .dynamic.order import DynamicSchedule, decided_steps
from .evaluation import Evaluation
from .losses.step import Loss, mean_of
from .messages import MessageKind, StageMessages, pack
from .stage import Buffer

Kinds = tuple[type[ds.PipeInstruction], ...]
Forward = Callable[[int, tuple[Tensor, ...], int, int], Any]  # such as :class:`.stage.StageForward`
_RECEIVES = {ds.RecvActivation: MessageKind.ACTIVATION, ds.RecvGrad: MessageKind.GRADIENT}


class Observer:
    """Observer of instructions. A subclass overrides what it needs.

    Attributes:
        kinds: classes of the instructions that it observes; None: all.
    """

    kinds: Kinds | None = None

    def before(self, instruction: Any) -> None:
        """Observe an instruction whose handler is called next."""

    def after(self, instruction: Any) -> None:
        """Observe an instruction whose handler has returned."""

    def failed(self, instruction: Any) -> None:
        """Observe an instruction whose handler or observer has raised an exception."""


class Losses(Protocol):
    """Losses of a step, such as :class:`.losses.step.StepLosses`."""

    def compute(self, outputs: Any, labels: tuple[Tensor, ...] | None) -> Loss:
        """Return the loss of a micro-batch."""
        ...

    def add(self, loss: Loss, weight: float) -> None:
        """Add the loss of a micro-batch to those of the step."""
        ...


class _Call(NamedTuple):
    """Call of a handler with its arguments, and of the observers before and after it."""

    run: Callable[[], None]
    instruction: ds.PipeInstruction
    before: tuple[Callable[[Any], None], ...]
    after: tuple[Callable[[Any], None], ...]


class Executor:
    """Executor of the instructions of one rank.

    Args:
        forward: returns the outputs of a stage for (stage, inputs, step, global number of the micro-batch).
        losses: losses of the micro-batches.
        last_stage: last stage of the model.
        device: device of the tensors.
        on_failure: called with an instruction and its exception, before it is raised.

    Attributes:
        buffers: storage of the live (stage, micro-batch) pairs, by buffer id.
        messages: messages between stages; the owner sets it before each run.
        handlers: instruction class -> handler, which gets the arguments of the instruction by name. The owner adds
            those of other instructions than this class's.
        observers: observers of every run, outermost first.
        scale: function of a loss; returns what its backward starts from. The owner sets it and the next two with the
            optimizer.
        accumulating: context of a backward; None: without one.
        parameters: parameters that keep gradients between the micro-batches of a step.
        schedule: schedule of the current or last run.
        data: micro-batches of the current or last run.
    """

    messages: StageMessages
    schedule: TimetableSchedule
    data: StepData

    def __init__(
        self,
        forward: Forward,
        losses: Losses,
        last_stage: int,
        device: torch.device,
        on_failure: Callable[[Any, Exception], None] = lambda *_: None,
    ) -> None:
        self.forward_stage, self.losses, self.last_stage, self.device = forward, losses, last_stage, device
        self.on_failure = on_failure
        self.buffers: list[Buffer] = []
        self.handlers: Mapping[type[ds.PipeInstruction], Callable[..., None]] = {
            kind: getattr(self, name) for kind, name in OWN_HANDLERS.items()
        }
        self.observers: list[Observer] = []
        self.scale: Callable[[Loss], Tensor]
        self.accumulating: Callable[[], AbstractContextManager[None]] | None = None
        self.parameters: Sequence[Tensor] = ()
        self._step = 0
        self._splits: frozenset[tuple[int, int]] = frozenset()  # (stage, micro-batch) of split backwards
        self._evaluation = Evaluation()
        # Static schedule -> (messages, handlers, observers) and the calls that are bound to them.
        self._calls: WeakKeyDictionary[TimetableSchedule, tuple[Any, list[_Call]]] = WeakKeyDictionary()

    # --- the step loop ---

    def run(
        self,
        schedule: TimetableSchedule,
        data: StepData,
        step: int,
        observers: Iterable[Observer] = (),
        evaluation: Evaluation | None = None,
    ) -> None:
        """Run the instructions of a step or an evaluation in order.

        Args:
            data: micro-batches.
            step: number of the steps before this one.
            observers: observers of this run, inside those of every run.
            evaluation: what to keep; None: the loss only.

        An exception of an instruction is observed with :meth:`Observer.failed` and raised.
        """
        self.schedule, self.data, self._step = schedule, data, step
        self._evaluation = evaluation or Evaluation()
        self._splits = schedule.program.timetable.split_backwards
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
        waiting: deque[_Call] = deque()
        for instruction in (instruction for step in schedule.steps() for instruction in step):
            kind: Any = _RECEIVES.get(type(instruction))
            if kind is not None:
                post = functools.partial(
                    self.messages.post, kind, instruction.stage, instruction.micro_batch, instruction.peer
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

    # --- handlers, in the order of the table below ---

    def load(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        """Load a micro-batch's inputs at the first stage, and its labels at the last one."""
        inputs, labels = self.data.take(micro_batch)
        buffer = self.buffers[buffer_id]
        if stage == 0:
            buffer.inputs = self._to_device(inputs)
        if stage == self.last_stage:
            buffer.labels = None if labels is None else self._to_device(labels)

    def _to_device(self, batch: Any) -> tuple[Tensor, ...]:
        return tuple([t.to(self.device, non_blocking=True).detach() for t in pack(batch, "the data")])

    def forward(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        """Run the forward of a stage; with the loss at the last one."""
        if self._splits and (stage, micro_batch) in self._splits:
            with deferrable():
                self._forward(self.buffers[buffer_id], stage, micro_batch)
        else:
            self._forward(self.buffers[buffer_id], stage, micro_batch)

    def _forward(self, buffer: Buffer, stage: int, micro_batch: int) -> None:
        assert buffer.inputs is not None
        outputs = self.forward_stage(stage, buffer.inputs, self._step, self.data.first_id + micro_batch)
        if stage == self.last_stage:
            self._store_loss(buffer, micro_batch, outputs)
        buffer.outputs = pack(outputs, f"stage {stage}")
        if not torch.is_grad_enabled():
            buffer.inputs = None

    def _store_loss(self, buffer: Buffer, micro_batch: int, outputs: Any) -> None:
        """Store the loss of a micro-batch, and what an evaluation keeps."""
        labels, buffer.labels = buffer.labels, None
        evaluation, weight = self._evaluation, self.data.weight(micro_batch)
        if evaluation.outputs is not None and weight:
            evaluation.outputs[micro_batch] = outputs
        if evaluation.computes_loss:
            loss = self.losses.compute(outputs, labels)
            self.losses.add(loss, weight)
            if evaluation.losses is not None and weight:
                evaluation.losses[micro_batch] = mean_of(loss)
            if torch.is_grad_enabled():
                buffer.loss = loss

    def backward(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        """Run the backward of a stage."""
        if self.accumulating is None:
            self._backward(buffer_id, stage)
        else:
            with self.accumulating():
                self._backward(buffer_id, stage)

    def backward_input(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        """Run the first half of a split backward."""
        later = self.buffers[buffer_id].weights = WeightGradients()
        with deferring(later):
            self.backward(buffer_id, stage, micro_batch)

    def backward_weight(self, buffer_id: int, stage: int, micro_batch: int) -> None:
        """Compute the weight gradients that the first half deferred."""
        buffer = self.buffers[buffer_id]
        later, buffer.weights = buffer.weights, None
        assert later is not None
        if self.accumulating is None:
            later.compute()
        else:
            with self.accumulating():
                later.compute()

    def _backward(self, buffer_id: int, stage: int) -> None:
        buffer = self.buffers[buffer_id]
        buffer.backward(self.scale, self.parameters)
        if stage == 0:
            buffer.inputs = None

    def send_activations(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        """Send the outputs of a stage to the next one."""
        outputs = self.buffers[buffer_id].take_outputs()
        self.messages.send(MessageKind.ACTIVATION, outputs, stage + 1, micro_batch, peer)

    def receive_activations(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        """Receive the inputs of a stage."""
        tensors = self.messages.receive(MessageKind.ACTIVATION, stage, micro_batch)
        self.buffers[buffer_id].set_inputs(tensors)

    def send_grads(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        """Send the gradients of the inputs to the previous stage."""
        grads = self.buffers[buffer_id].take_input_grads()
        self.messages.send(MessageKind.GRADIENT, grads, stage - 1, micro_batch, peer)

    def receive_grads(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        """Receive the gradients of the outputs."""
        self.buffers[buffer_id].grads = self.messages.receive(MessageKind.GRADIENT, stage, micro_batch)

    def copy_activation(self, buffer_id: int, to_buffer: int, stage: int, micro_batch: int) -> None:
        """Pass the outputs on to the next stage, on this rank."""
        outputs = self.buffers[buffer_id].take_outputs()
        self.buffers[to_buffer].set_inputs(tuple([t.detach() for t in outputs]))

    def copy_grad(self, buffer_id: int, to_buffer: int, stage: int, micro_batch: int) -> None:
        """Pass the gradients of the inputs back to the previous stage, on this rank."""
        self.buffers[to_buffer].grads = self.buffers[buffer_id].take_input_grads()


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
    CopyActivation: "copy_activation",
    CopyGrad: "copy_grad",
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
