"""Kinds of stages from outside ds_ext: a tower for images, and a last stage that joins it with the layers for text."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ext.engine.evaluation import Evaluation
from ds_ext.engine.executor import Executor
from ds_ext.engine.stages import RankStages, register_stage, stages_of
from ds_ext.engine.stages.body import Body, LastBody
from ds_ext.engine.stages.buffer import Buffer
from ds_ext.engine.stages.sequences import WholeSequences
from ds_ext.engine.step import BackwardContext, Step
from ds_ext.engine.step_data import StepData
from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import Op, Placement, Timetable, check, lower, simulate
from ds_ext.pipe_schedules.bridge import TimetableSchedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.files import dump
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.ops import MessageKind
from ds_ext.pipe_schedules.stage_kinds import BODY, StageKind, StageRow
from ds_ext.pipe_schedules.text import dumps
from ds_ext.tensor_parallel import let_defer
from tests.unit.engine.test_executor import NOTHING, Losses

MICRO_BATCHES, STEPS, WIDTH = 4, 3, 3
TEXT, JOINED, IMAGES = 0, 1, 2  # stages
TOWER, JOIN = StageKind("tower"), StageKind("join")
ROWS = StageRow(BODY, (), (JOINED,)), StageRow(JOIN, (TEXT, IMAGES), ()), StageRow(TOWER, (), (JOINED,))


class Tower(Body):
    """Stage that reads the images of the data."""

    def __init__(self, stage: int, rank: RankStages) -> None:
        super().__init__(stage, rank.compute, rank.losses, rank.device)
        self.reads_data = True

    def load(self, step: Step, buffer: Buffer, micro_batch: int, slice_index: int) -> None:
        (_, images), _ = step.data.take(micro_batch)
        buffer.inputs = self._slice(step, images, slice_index)


class Join(LastBody):
    """Stage with the outputs of several others as inputs, in the order of its sources."""

    def __init__(self, stage: int, rank: RankStages) -> None:
        super().__init__(stage, rank.compute, rank.losses, rank.device)
        self.sources = rank.placement.table[stage].sources

    def accept_activations(self, source: int, buffer: Buffer, tensors: tuple[Tensor, ...]) -> None:
        arrived = buffer.kept = {**(buffer.kept or {}), source: tensors}
        if len(arrived) == len(self.sources):
            buffer.set_inputs(tuple(tensor for near in self.sources for tensor in arrived[near]))

    def grads_for(self, target: int, buffer: Buffer) -> tuple[Tensor, ...]:
        if buffer.inputs is not None:
            buffer.kept = dict(zip(self.sources, buffer.take_input_grads(), strict=True))
        return (buffer.kept.pop(target),)


register_stage(TOWER, Tower)
register_stage(JOIN, Join)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.stack(inputs).sum(0)))


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in ROWS)


class Wires:
    """Messages between the threads of the devices, of which one runs at a time."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.sent: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = {}  # messages of a channel in order


class WireMessages:
    def __init__(self, wires: Wires, device: int) -> None:
        self.wires, self.device = wires, device

    def post(self, kind: MessageKind, stage: int, item: int, device: int, source: int) -> None:
        pass

    def send(self, kind: MessageKind, tensors: Sequence[Tensor], stage: int, item: int, device: int) -> None:
        key = kind, stage, item, self.device, device
        self.wires.sent.setdefault(key, []).append(tuple(tensor.detach() for tensor in tensors))
        self.wires.turn.notify_all()

    def receive(
        self, kind: MessageKind, stage: int, item: int, device: int, source: int
    ) -> tuple[Tensor, ...]:
        key = kind, stage, item, device, self.device
        assert self.wires.turn.wait_for(lambda: self.wires.sent.get(key), timeout=60)
        return self.wires.sent[key].pop(0)


def batches() -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(3, 2, WIDTH, generator=generator) for _ in range(MICRO_BATCHES)]
    return [((draw[0], draw[1]), draw[2]) for draw in draws]


def placement_with(tower: int) -> Placement:
    return Placement(((0, 1),), rows=ROWS, further_devices=((tower,),))


def training(placement: Placement, backwards: str) -> Timetable:
    """Return an order that a device can compute, with backwards as early as possible."""
    kinds, stages = "F" + backwards, range(placement.op_stages)
    left = [Op(kind, m, s) for kind in reversed(kinds) for m in range(MICRO_BATCHES) for s in stages]
    made = Timetable("towers", placement, MICRO_BATCHES, (tuple(left),))
    orders: list[list[Op]] = [[] for _ in range(placement.num_devices)]
    while left:
        done = {op for order in orders for op in order}
        ready = next(op for op in left if done.issuperset(need for need, _ in made.dependencies.needs(op)))
        left.remove(ready)
        orders[made.dependencies.device(ready)].append(ready)
    return Timetable("towers", placement, MICRO_BATCHES, tuple(map(tuple, orders)))


def run_devices(
    timetable: Timetable, model: nn.ModuleList, evaluation: Evaluation | None = None
) -> list[float]:
    """Run a step or an evaluation on a thread per device. Returns the losses."""
    program, losses, wires = lower(timetable), Losses(), Wires()
    check(program)
    placement, failures = timetable.placement, list[BaseException]()

    def compute(stage: int, inputs: tuple[Tensor, ...], step: int, number: int) -> Tensor:
        return model[stage](*(inputs[:1] if stage == TEXT else inputs))

    def device_thread(device: int) -> None:
        module: Any = SimpleNamespace(
            stages=placement.stages_of(device),
            layout=SimpleNamespace(placement=placement),
            device_index=device,
        )
        executor = Executor(stages_of(module, compute, losses, torch.device("cpu")), WholeSequences())
        executor.messages = WireMessages(wires, device)  # pyright: ignore[reportAttributeAccessIssue]
        executor.handlers = {**executor.handlers, **NOTHING}
        executor.backward_context = BackwardContext(
            lambda loss: loss[""].sum / MICRO_BATCHES, parameters=list(model.parameters())
        )
        schedule = TimetableSchedule(program, device)
        source: Any = SimpleNamespace(get=lambda m: batches()[m])
        try:
            with wires.turn, torch.set_grad_enabled(timetable.trains):
                executor.run(schedule, StepData(source, 0, schedule, 0), 0, evaluation=evaluation)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=device_thread, args=(d,)) for d in range(placement.num_devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return losses.seen


def plain_loss(model: nn.ModuleList, batch: tuple[tuple[Tensor, Tensor], Tensor]) -> Tensor:
    (text, images), labels = batch
    return (model[JOINED](model[TEXT](text), model[IMAGES](images)) - labels).square().mean()


@pytest.mark.parametrize("tower", [0, 1, 2], ids=lambda device: f"tower on device {device}")
@pytest.mark.parametrize("backwards", ["B", "IW"])
def test_a_tower_trains_as_one_process(tower: int, backwards: str) -> None:
    timetable = training(placement_with(tower), backwards)
    model, plain = layers(), layers()
    let_defer(model)
    for _ in range(STEPS):
        got = run_devices(timetable, model)
        expected = [plain_loss(plain, batch) for batch in batches()]
        torch.stack(expected).mean().backward()
        assert got == pytest.approx([loss.item() for loss in expected])
        for trained in (model, plain):
            torch.optim.SGD(trained.parameters(), lr=0.5).step()
            trained.zero_grad()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("tower", [0, 1, 2], ids=lambda device: f"tower on device {device}")
def test_an_evaluation_with_a_tower(tower: int) -> None:
    model, evaluation = layers(), Evaluation(outputs={}, losses={})
    got = run_devices(forward_timetable(placement_with(tower), MICRO_BATCHES), model, evaluation)
    assert got == pytest.approx([plain_loss(model, batch).item() for batch in batches()])
    assert evaluation.outputs is not None and sorted(evaluation.outputs) == list(range(MICRO_BATCHES))


def test_a_tower_is_simulated_but_not_written() -> None:
    """It takes as long as a stage of layers. Files, which have no such stages, are refused."""
    placement = placement_with(2)
    assert [placement.stage_text(stage) for stage in range(3)] == ["0", "1", "tower 0"]
    simulation = simulate(training(placement, "B"), Costs())
    assert simulation.messages == 4 * MICRO_BATCHES
    for write in (dumps, lambda timetable: dump(lower(timetable))):
        with pytest.raises(ScheduleError, match="got join, tower"):
            write(simulation.timetable)
    assert len({round(busy, 6) for busy in simulation.busy}) == 1
