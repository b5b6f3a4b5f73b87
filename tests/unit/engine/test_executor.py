"""The executor runs a program on one rank, without an engine of DeepSpeed, an optimizer or a process group."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor, nn

from ds_ext.engine.evaluation import Evaluation
from ds_ext.engine.executor import Executor, Observer
from ds_ext.engine.losses.local import LocalLosses, Term, mean_of
from ds_ext.engine.stages.body import LastBody
from ds_ext.engine.stages.sequences import WholeSequences
from ds_ext.engine.step import BackwardContext
from ds_ext.engine.step_data import StepData
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.bridge import EndOfStep, TimetableSchedule
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.ops import MessageKind

MICRO_BATCHES, STAGES = 4, 2
# Handlers of the instructions for the weights.
NOTHING = dict.fromkeys((ds.ReduceTiedGrads, ds.ReduceGrads, ds.OptimizerStep, EndOfStep), lambda: None)
LINEAR = [nn.Linear(3, 3) for _ in range(STAGES)]


class Loopback:
    """Messages of the device 1: device 0 is played by its layers."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.inputs, self.posted, self.sent = inputs, [], {}

    def post(self, kind: MessageKind, stage: int, micro_batch: int, device: int, source: int) -> None:
        self.posted.append((kind, micro_batch))

    def receive(
        self, kind: MessageKind, stage: int, micro_batch: int, device: int, source: int
    ) -> tuple[Tensor, ...]:
        assert (kind, micro_batch) in self.posted
        return (LINEAR[0](self.inputs[micro_batch]).detach(),)

    def send(
        self, kind: MessageKind, tensors: Sequence[Tensor], stage: int, micro_batch: int, device: int
    ) -> None:
        self.sent[kind, micro_batch] = tensors


class Losses(LocalLosses):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def compute(self, outputs: Any, labels: Any) -> dict[str, Term]:
        return {"": Term((outputs - labels[0]).square().mean(), None)}

    def add(self, loss: dict[str, Term], weight: float = 1.0) -> None:
        assert weight == 1
        self.seen.append(float(loss[""].sum.detach()))

    def return_logits(self, outputs: Any) -> Any:
        return outputs

    def shift_labels(self, labels: Any) -> Any:
        return labels


class Record(Observer):
    kinds = (ds.ForwardPass, ds.OptimizerStep)

    def __init__(self) -> None:
        self.seen: list[str] = []

    def before(self, instruction: Any) -> None:
        self.seen.append(f"before {instruction.label}")

    def after(self, instruction: Any) -> None:
        self.seen.append(f"after {instruction.label}")

    def failed(self, instruction: Any) -> None:
        self.seen.append(f"failed {instruction.label}")


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(2, 3, generator=generator), torch.ones(2, 3)) for _ in range(MICRO_BATCHES)]


def executor_of_the_last_stage(**options: Any) -> tuple[Executor, Losses, Loopback]:
    losses, messages = Losses(), Loopback([inputs for inputs, _ in batches()])
    last = STAGES - 1
    stage = LastBody(
        last, lambda stage, inputs, step, number: LINEAR[stage](inputs[0]), losses, torch.device("cpu")
    )
    executor = Executor({last: stage}, WholeSequences(), **options)
    executor.messages = messages  # pyright: ignore[reportAttributeAccessIssue]
    executor.backward_context = BackwardContext(lambda loss: loss[""].sum / MICRO_BATCHES)
    return executor, losses, messages


def schedule_and_data(name: str) -> tuple[TimetableSchedule, StepData]:
    schedule = TimetableSchedule(lower(get_schedule(name).timetable(STAGES, MICRO_BATCHES)), 1)
    return schedule, StepData(SimpleNamespace(get=lambda m: batches()[m]), 0, schedule, 0)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1"])
def test_a_step_of_one_rank(name: str) -> None:
    executor, losses, messages = executor_of_the_last_stage()
    executor.handlers = {**executor.handlers, **NOTHING}
    nn.Sequential(*LINEAR).zero_grad()
    executor.run(*schedule_and_data(name), 0)
    got = LINEAR[1].weight.grad
    nn.Sequential(*LINEAR).zero_grad()
    middles = [LINEAR[0](inputs).detach().requires_grad_() for inputs, _ in batches()]
    expected = [(LINEAR[1](x) - y).square().mean() for x, (_, y) in zip(middles, batches(), strict=True)]
    (torch.stack(expected).sum() / MICRO_BATCHES).backward()
    assert losses.seen == pytest.approx([loss.item() for loss in expected])
    assert got is not None and LINEAR[1].weight.grad is not None
    torch.testing.assert_close(got, LINEAR[1].weight.grad)
    for number, x in enumerate(middles):
        torch.testing.assert_close(messages.sent[MessageKind.GRADIENT, number][0], x.grad)


def test_an_evaluation_keeps_outputs_and_losses() -> None:
    placement = get_schedule("1f1b").timetable(STAGES, MICRO_BATCHES).placement
    schedule = TimetableSchedule(lower(forward_timetable(placement, MICRO_BATCHES)), 1)
    executor, _, _ = executor_of_the_last_stage()
    evaluation = Evaluation(outputs={}, losses={})
    data = StepData(SimpleNamespace(get=lambda m: batches()[m]), 0, schedule, 0)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        executor.run(schedule, data, 0, evaluation=evaluation)
    assert evaluation.outputs is not None and evaluation.losses is not None
    losses = {number: mean_of(loss) for number, loss in evaluation.losses.items()}
    for number, (inputs, labels) in enumerate(batches()):
        outputs = LINEAR[1](LINEAR[0](inputs))
        torch.testing.assert_close(evaluation.outputs[number], outputs)
        assert float(losses[number]) == pytest.approx(float((outputs - labels).square().mean()))


def test_observers_see_their_instructions_and_a_failure() -> None:
    failures: list[tuple[str, str]] = []
    executor, _, _ = executor_of_the_last_stage(
        on_failure=lambda instruction, error: failures.append((instruction.label, type(error).__name__))
    )

    def fail() -> None:
        raise ZeroDivisionError

    executor.handlers = {**executor.handlers, **NOTHING, ds.OptimizerStep: fail}
    outer, inner = Record(), Record()
    outer.seen = inner.seen
    executor.observers.append(outer)
    with pytest.raises(ZeroDivisionError):
        executor.run(*schedule_and_data("1f1b"), 0, [inner])
    forwards = [
        f"{when} F{m}@1" for m in range(MICRO_BATCHES) for when in ("before", "before", "after", "after")
    ]
    end = ["before OptimizerStep"] * 2 + ["failed OptimizerStep"] * 2
    assert inner.seen == [*forwards, *end]
    assert failures == [("OptimizerStep", "ZeroDivisionError")]


def test_an_observer_of_an_earlier_run_is_not_kept() -> None:
    executor, _, _ = executor_of_the_last_stage()
    executor.handlers = {**executor.handlers, **NOTHING}
    schedule, data = schedule_and_data("1f1b")
    observer = Record()
    executor.run(schedule, data, 0, [observer])
    seen, dead = list(observer.seen), weakref.ref(observer)
    del observer
    executor.run(*schedule_and_data("gpipe"), 0)
    executor.run(schedule, schedule_and_data("1f1b")[1], 1)
    gc.collect()
    assert dead() is None and seen


def test_a_failure_in_a_profile() -> None:
    failures: list[str] = []
    executor, _, messages = executor_of_the_last_stage(
        on_failure=lambda instruction, error: failures.append(type(error).__name__)
    )

    class Broken(Loopback):
        def post(self, kind: MessageKind, stage: int, micro_batch: int, device: int, source: int) -> None:
            raise ZeroDivisionError

    executor.handlers = {**executor.handlers, **NOTHING}
    executor.messages = Broken(messages.inputs)  # pyright: ignore[reportAttributeAccessIssue]
    with torch.profiler.profile(), pytest.raises(ZeroDivisionError):
        executor.run(*schedule_and_data("1f1b"), 0)
    assert failures == ["ZeroDivisionError"]
