"""Train and evaluation modes of layers: those that a script sets, against one process."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_ext
from tests.ranks import Ranks

SIZE, STEPS = 4, 4
HOWS = ["before", "after", "each step", "eval of all", "trained norm"]


class Block(nn.Module):
    """Layer with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(SIZE, SIZE, False), nn.BatchNorm1d(SIZE)
        self.norm.running_mean.fill_(0.3)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def make_layers(how: str) -> list[nn.Module]:
    torch.manual_seed(0)
    encoder = nn.Sequential(Block(), nn.Dropout(0.5)).requires_grad_(False)
    if how == "before":
        encoder.eval()
    return [encoder, *(Block() for _ in range(3)), *(nn.Linear(SIZE, SIZE) for _ in range(4))]


def samples() -> TensorDataset:
    return TensorDataset(*torch.randn(2, 64, SIZE, generator=torch.Generator().manual_seed(0)) + 2)


def set_modes(whole: Any, layers: dict[int, Any], how: str, step: int) -> None:
    """Set the modes as a script does before a step."""
    if how == "eval of all" and step == 2:
        whole.eval()
    if 0 in layers and (how == "each step" or (step == 0 and how != "before")):
        layers[0].eval()
    if how == "trained norm" and step == 1 and 1 in layers:
        layers[1].norm.eval()


def train(rank: int, schedule: str, zero: int, dp: int, how: str) -> tuple[list[float], dict[int, Any]]:
    config = {
        "train_batch_size": 8 * dp,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2, "print_plan": False},
    }
    layers = make_layers(how)
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    mine = {i: layer for stage in model.stages for i, layer in model.stage_modules(stage).items()}
    engine, *_ = ds_ext.initialize(model=model, config=config, training_data=samples())
    losses = []
    for step in range(STEPS):
        set_modes(engine, mine, how, step)
        losses.append(float(engine.train_batch()))
        engine.eval_batch(samples())
        assert engine.module.training
    engine.transport.close()
    state = {i: (layer.training, *map(Tensor.detach, layer.buffers())) for i, layer in mine.items()}
    return losses, state


def reference(how: str, dp: int) -> tuple[list[float], dict[int, Any]]:
    layers = make_layers(how)
    model, data, losses = nn.Sequential(*layers), samples(), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for step in range(STEPS):
        set_modes(nn.Identity(), dict(enumerate(layers)), how, step)
        total, batch = 0.0, 8 * dp
        for first in range(batch * step, batch * (step + 1), 4):
            x, y = data[first : first + 4]
            loss = nn.functional.mse_loss(model(x), y) * 4 / batch
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {i: (layer.training, *layer.buffers()) for i, layer in enumerate(layers)}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 0), ("1f1b", 1), ("bitpipe", 0), ("zb_v", 1)])
def test_modes_are_those_of_the_script(ranks: Ranks, schedule: str, zero: int, how: str) -> None:
    losses, state = reference(how, 1)
    for found, of_rank in ranks(2).run(train, schedule, zero, 1, how):
        # Forwards of another order, and buffers that the replicas of bitpipe average before evaluations.
        assert found == pytest.approx(losses, rel=1e-4)
        for index, (training, *buffers) in of_rank.items():
            assert training == state[index][0]
            if not training or schedule == "1f1b":
                for buffer, one in zip(buffers, state[index][1:], strict=True):
                    torch.testing.assert_close(buffer, one)


class Adapted(nn.Module):
    """Frozen layer with a trained adapter, as peft builds it, and a frozen part with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.rest = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5))
        for part in (self.base, self.rest):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.base(x) + self.adapter(x))


class Wrapper(nn.Module):
    """Layer of a script around a pretrained one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def modes_at_the_start(rank: int) -> tuple[list[list[bool]], list[str]]:
    """Return the modes of all modules of pretrained layers, by layer, and the names in the warning."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(str(record.args[0] if record.args else ""))  # pyright: ignore[reportArgumentType, reportCallIssue]
    logging.getLogger("ds_ext.engine.modes").addHandler(handler)
    pretrained = [Adapted().eval(), nn.Dropout(0.5).eval(), Adapted().requires_grad_(False).eval()]
    layers = [*pretrained, *map(Wrapper, copy.deepcopy(pretrained)), nn.Linear(SIZE, SIZE), nn.Tanh()]
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "ds_ext": {"print_plan": False}}
    model = ds_ext.PipelineModule(layers, config, num_stages=2, loss_fn=nn.functional.mse_loss)
    engine, *_ = ds_ext.initialize(model=model, training_data=samples())
    engine.train_batch()
    engine.transport.close()
    mine = [layers[i] for i in range(model.parts[rank], model.parts[rank + 1])]
    return [[module.training for module in layer.modules()] for layer in mine], lines


def test_pretrained_layers_train_unless_they_are_frozen(ranks: Ranks) -> None:
    (first, lines), (second, others) = ranks(2).run(modes_at_the_start)
    adapted, dropout, frozen, *wrapped = first + second
    assert all(adapted + dropout + wrapped[0] + wrapped[1]) and all(wrapped[3] + wrapped[4])
    assert not any(frozen) and wrapped[2][0] and not any(wrapped[2][1:])
    assert [len(lines), len(others)] == [1, 1] or [len(lines + others)] == [1]
    named = ", ".join(lines + others).split(", ")
    assert sorted(named) == ["2 (Adapted)", "5.inner (Adapted)"]
