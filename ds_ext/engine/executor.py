"""Executor of a rank: it runs the instructions of a schedule, one handler per instruction.

It has the buffers of the live slices of micro-batches, and handlers for data, passes and messages. It depends on no
optimizer, checkpoint or DeepSpeed engine: its owner sets the handlers of the other instructions. Whatever measures or
records instructions is an :class:`Observer`.

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
from ..tensor_parallel import (
    HeadShare,
    WeightGradients,
    backward,
    computing,
    current_slice,
    deferrable,
    deferring,
)
from .batches import StepData
from .dynamic.messages import DynamicMessages
from .dynamic.order import DynamicSchedule, decided_steps
from .evaluation import Evaluation
from .head import PipelineHead
from .losses.step import Loss, join_losses, require_pairs
from .messages import MessageKind, StageMessages, join_outputs, pack
from .slices import StageSlices
from .stage import Buffer

Kinds = tuple[type[ds.PipeInstruction], ...]
Forward = Callable[[int, tuple[Tensor, ...], int, int], Any]  # such as :class:`.stage.StageForward`
_RECEIVES = {ds.RecvActivation: MessageKind.ACTIVATION, ds.RecvGrad: MessageKind.GRADIENT}


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


class Losses(Protocol):
    """Losses of a step, such as :class:`.losses.step.StepLosses`."""

    def shift_labels(self, labels: Any) -> Any:
        """Return the labels of a micro-batch from which those of its slices are cut."""
        ...

    def return_logits(self, outputs: Any) -> Any:
        """Return what an evaluation returns for outputs of the last layer."""
        ...

    def compute(self, outputs: Any, labels: tuple[Tensor, ...] | None) -> Loss: ...

    def add(self, loss: Loss, weight: float) -> None: ...


class _Call(NamedTuple):
    run: Callable[[], None]
    instruction: ds.PipeInstruction
    before: tuple[Callable[[Any], None], ...]
    after: tuple[Callable[[Any], None], ...]


class Executor:
    """Executor of the instructions of one rank.

    Args:
        forward: returns the outputs of a stage for (stage, inputs, step, global number of the micro-batch).
        on_failure: called with an instruction and its exception, before it is raised.
        slices: slices of the sequences; None: schedules have none.
        head: head that is divided over the devices; None: the last stage has the head.

    Attributes:
        loss_stage: stage whose forward computes the loss.
        slices: the same; None also in a run without slices.
        buffers: storage of the live slices of micro-batches at stages, by buffer id.
        messages: messages between stages; the owner sets it before each run.
        handlers: instruction class -> handler, which gets the arguments of the instruction by name. The owner adds
            those of other instructions than this class's.
        observers: observers of every run, outermost first.
        scale: function of a loss; returns what its backward starts from. The owner sets it and the next two with the
            optimizer.
        accumulating: context of a backward; None: without one.
        parameters: parameters that keep gradients between the micro-batches of a step.
        schedule, data: those of the current or last run.
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
        slices: StageSlices | None = None,
        head: PipelineHead | None = None,
    ) -> None:
        self.forward_stage, self.losses, self.last_stage, self.device = forward, losses, last_stage, device
        self.on_failure = on_failure
        self._all_slices, self.slices = slices, slices
        self.head = head
        self.loss_stage = last_stage if head is None else head.loss_stage
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
            step: number of the steps before this one.
            observers: observers of this run, inside those of every run.
            evaluation: what to keep; None: the loss only.

        An exception of an instruction is observed with :meth:`Observer.failed` and raised.
        """
        self.schedule, self.data, self._step = schedule, data, step
        self._evaluation = evaluation or Evaluation()
        timetable = schedule.program.timetable
        self._splits = timetable.split_backwards
        self.slices = self._all_slices if timetable.slices > 1 else None
        if self.slices is not None:
            self.slices.clear()
        if self.head is not None:
            self.head.start_step()
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
                    self.messages.post,
                    kind,
                    instruction.stage,
                    self._item(instruction.micro_batch, instruction.source.slice),
                    instruction.peer,
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

    def _item(self, micro_batch: int, index: int) -> int:
        """Return the number of a slice in the step, as in the tags of messages."""
        return micro_batch if self.slices is None else micro_batch * self.slices.count + index

    # --- handlers, in the order of the table below; ``slice`` is passed for all but the first one ---

    def load(self, buffer_id: int, stage: int, micro_batch: int, slice: int = 0) -> None:
        inputs, labels = self.data.take(micro_batch)
        buffer = self.buffers[buffer_id]
        if stage == 0:
            buffer.inputs = self._to_device(inputs, slice)
        if stage == self.last_stage:
            if labels is not None and self.slices is not None:
                labels = self.losses.shift_labels(labels)
            buffer.labels = None if labels is None else self._to_device(labels, slice)

    def _to_device(self, batch: Any, index: int) -> tuple[Tensor, ...]:
        tensors = pack(batch, "the data")
        if self.slices is not None:
            tensors = self.slices.cut(tensors, index)
        return tuple([t.to(self.device, non_blocking=True).detach() for t in tensors])

    def forward(self, buffer_id: int, stage: int, micro_batch: int, slice: int = 0) -> None:
        """Run the forward of a stage, with the loss at the last one, or of a part of the head or its loss."""
        if stage > self.last_stage:
            self._forward_head(self.buffers[buffer_id], stage, micro_batch, slice)
        elif self._splits and (stage, micro_batch) in self._splits:
            with deferrable():
                self._forward(self.buffers[buffer_id], stage, micro_batch, slice)
        else:
            self._forward(self.buffers[buffer_id], stage, micro_batch, slice)

    def _forward(self, buffer: Buffer, stage: int, micro_batch: int, index: int) -> None:
        assert buffer.inputs is not None
        inputs, number = buffer.inputs, self.data.first_id + micro_batch

        def run() -> Any:
            outputs = self.forward_stage(stage, inputs, self._step, number)
            if stage == self.loss_stage:
                self._store_loss(buffer, micro_batch, outputs, index)
            return outputs

        slices = self.slices
        outputs = run() if slices is None else slices.forward(run, stage, micro_batch, index, inputs)
        buffer.outputs, buffer.head_inputs = pack(outputs, f"stage {stage}"), None
        if not torch.is_grad_enabled():
            buffer.inputs = None

    def _forward_head(self, buffer: Buffer, stage: int, micro_batch: int, index: int) -> None:
        """Compute the share of a part of the head, or join the shares to the loss."""
        assert self.head is not None
        if stage != self.loss_stage:
            self.head.forward_part(stage, buffer)
            return
        joined, losses_BS = self.head.join(buffer, self._item(micro_batch, index))
        with computing(self.slices and self.slices.slices_of(losses_BS.size(1))[index]):
            self._store_loss(buffer, micro_batch, losses_BS, index)
        loss, buffer.loss = buffer.loss, None
        if loss is not None:
            backward([self.scale(loss)], [None])
            self.head.set_gradients(buffer, joined, losses_BS)

    def _store_loss(self, buffer: Buffer, micro_batch: int, outputs: Any, index: int) -> None:
        labels, buffer.labels = buffer.labels, None
        evaluation, weight, part = self._evaluation, self.data.weight(micro_batch), current_slice()
        if evaluation.outputs is not None and weight:
            joined = self.losses.return_logits(outputs)
            if index and part is not None:
                joined = join_outputs(evaluation.outputs[micro_batch], joined, part.length)
            evaluation.outputs[micro_batch] = joined
        if evaluation.computes_loss:
            if self.slices is not None:
                self.slices.try_loss(self.losses.compute, outputs, labels)
            loss = self.losses.compute(outputs, labels)
            if self.slices is not None:
                require_pairs(loss)
            self.losses.add(loss, weight if part is None else weight * part.length / part.total)
            if evaluation.losses is not None and weight:
                earlier = (evaluation.losses[micro_batch],) if index else ()
                evaluation.losses[micro_batch] = join_losses((*earlier, loss))
            if torch.is_grad_enabled():
                buffer.loss = loss

    def backward(self, buffer_id: int, stage: int, micro_batch: int, slice: int = 0) -> None:
        if self.accumulating is None:
            self._backward(buffer_id, stage, micro_batch, slice)
        else:
            with self.accumulating():
                self._backward(buffer_id, stage, micro_batch, slice)

    def backward_input(self, buffer_id: int, stage: int, micro_batch: int, slice: int = 0) -> None:
        later = self.buffers[buffer_id].weights = WeightGradients()
        with deferring(later):
            self.backward(buffer_id, stage, micro_batch, slice)

    def backward_weight(self, buffer_id: int, stage: int, micro_batch: int, slice: int = 0) -> None:
        buffer = self.buffers[buffer_id]
        later, buffer.weights = buffer.weights, None
        assert later is not None
        if self.accumulating is None:
            later.compute()
        else:
            with self.accumulating():
                later.compute()

    def _backward(self, buffer_id: int, stage: int, micro_batch: int, index: int) -> None:
        buffer = self.buffers[buffer_id]
        if self.slices is None:
            buffer.backward(self.scale, self.parameters)
        else:
            with self.slices.backward(stage, micro_batch, index) as (roots, leaves):
                buffer.backward(self.scale, self.parameters, roots, leaves)
        if stage == 0:
            buffer.inputs = None

    def send_activations(
        self,
        buffer_id: int,
        stage: int,
        micro_batch: int,
        peer: int,
        slice: int = 0,
        other_stage: int | None = None,
    ) -> None:
        """Send the outputs of a stage to the next one, or to or from a part of the head."""
        item, target = self._item(micro_batch, slice), stage + 1 if other_stage is None else other_stage
        outputs = self._outputs(buffer_id, stage, item, other_stage)
        self.messages.send(MessageKind.ACTIVATION, outputs, target, item, peer)

    def _outputs(self, buffer_id: int, stage: int, item: int, other_stage: int | None) -> tuple[Tensor, ...]:
        buffer = self.buffers[buffer_id]
        if stage == self.last_stage and other_stage is not None:
            assert self.head is not None
            return self.head.inputs(buffer, item, are_shifted=self.slices is not None)
        return buffer.take_outputs()

    def receive_activations(
        self,
        buffer_id: int,
        stage: int,
        micro_batch: int,
        peer: int,
        slice: int = 0,
        other_stage: int | None = None,
    ) -> None:
        tensors = self.messages.receive(MessageKind.ACTIVATION, stage, self._item(micro_batch, slice), peer)
        self._set_inputs(buffer_id, tensors, stage, other_stage)

    def _set_inputs(
        self, buffer_id: int, tensors: tuple[Tensor, ...], stage: int, source: int | None
    ) -> None:
        """Set the inputs of ``stage``; at the loss of a head, those from the part ``source``."""
        buffer = self.buffers[buffer_id]
        if source is None:
            buffer.set_inputs(tensors)
        elif stage == self.loss_stage:
            buffer.shares[source] = HeadShare(*tensors)
        else:
            buffer.inputs = tensors

    def send_grads(
        self,
        buffer_id: int,
        stage: int,
        micro_batch: int,
        peer: int,
        slice: int = 0,
        other_stage: int | None = None,
    ) -> None:
        """Send the gradients of the inputs to the previous stage, or those of the losses to a part of the head."""
        buffer, target = self.buffers[buffer_id], stage - 1 if other_stage is None else other_stage
        grads = buffer.take_input_grads() if other_stage is None else buffer.head_grads
        self.messages.send(MessageKind.GRADIENT, grads, target, self._item(micro_batch, slice), peer)

    def receive_grads(
        self,
        buffer_id: int,
        stage: int,
        micro_batch: int,
        peer: int,
        slice: int = 0,
        other_stage: int | None = None,
    ) -> None:
        grads = self.messages.receive(MessageKind.GRADIENT, stage, self._item(micro_batch, slice), peer)
        self._set_grads(buffer_id, grads, stage)

    def _set_grads(self, buffer_id: int, grads: tuple[Tensor, ...], stage: int) -> None:
        if stage > self.last_stage:
            assert self.head is not None
            self.head.defer_weight_gradient(stage, self.buffers[buffer_id], grads)
        else:
            self.buffers[buffer_id].grads = grads

    def copy_activation(
        self,
        buffer_id: int,
        to_buffer: int,
        stage: int,
        micro_batch: int,
        slice: int = 0,
        other_stage: int | None = None,
    ) -> None:
        outputs = self._outputs(buffer_id, stage, self._item(micro_batch, slice), other_stage)
        target, source = (stage + 1, None) if other_stage is None else (other_stage, stage)
        self._set_inputs(to_buffer, tuple([t.detach() for t in outputs]), target, source)

    def copy_grad(
        self,
        buffer_id: int,
        to_buffer: int,
        stage: int,
        micro_batch: int,
        slice: int = 0,
        other_stage: int | None = None,
    ) -> None:
        buffer, target = self.buffers[buffer_id], stage - 1 if other_stage is None else other_stage
        if other_stage is None:
            grads = buffer.take_input_grads()
        else:
            grads = buffer.take_grads() if target == self.last_stage else buffer.head_grads
        self._set_grads(to_buffer, grads, target)


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
