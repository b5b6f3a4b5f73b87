"""Weights that a script sets after ``initialize`` are trained, although ZeRO and half precision keep fp32 copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_ext
from tests.precisions import needs
from tests.ranks import Ranks

SIZE, LAYERS = 4, 4
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
}
ALL = [pytest.param(name, marks=needs(name.partition(" ")[0])) for name in PRECISIONS]


class Layer(nn.Module):
    """Linear layer that casts its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.linear.weight.dtype)
        return x + torch.tanh(self.linear(x))


def build(precision: str, schedule: str = "bitpipe", lr: float = 0.0) -> Any:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(16, SIZE, generator=generator) for _ in range(2)))
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0, "torch_adam": True}},
        "steps_per_print": 10**9,
        **PRECISIONS[precision],
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2, "print_plan": False},
    }
    layers = [LayerSpec(Layer) for _ in range(LAYERS)]
    model = ds_ext.PipelineModule(
        layers, config, loss_fn=lambda o, y: (o.float() - y).square().mean(), partition_method="uniform"
    )
    engine, *_ = ds_ext.initialize(model=model, config=config, training_data=data)
    return engine


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def new_values(name: str, parameter: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + parameter.numel())
    return torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def set_weights(engine: Any, way: str) -> None:
    named = dict(engine.module.named_parameters())
    if way == "load_state_dict":
        engine.module.load_state_dict({name: new_values(name, p) for name, p in named.items()})
        return
    for name, parameter in named.items():
        if way == "assigned":
            parameter.data = new_values(name, parameter)
        else:
            parameter.data.copy_(new_values(name, parameter))


def kept(rank: int, precision: str, way: str, when: int) -> list[bool]:
    """Set weights before the first step or after some, and take a step with learning rate 0."""
    engine = build(precision)
    for _ in range(when):
        engine.train_batch()
    set_weights(engine, way)
    engine.train_batch()
    expected = {name: new_values(name, p) for name, p in engine.module.named_parameters()}
    found = weights_of(engine)
    engine.transport.close()
    return [torch.equal(found[name], expected[name]) for name in expected]


@pytest.mark.parametrize("precision", ALL)
@pytest.mark.parametrize("way", ["load_state_dict", "assigned", "copied"])
def test_weights_set_by_the_script_are_trained(ranks: Ranks, precision: str, way: str) -> None:
    for when in (0, 2):
        assert all(all(same) for same in ranks(2).run(kept, precision, way, when))


def set_with_another_scheduler(rank: int, precision: str) -> bool:
    """Set weights in two ways, each with another scheduler, and train. Returns whether the weights are equal."""
    engines = [build(precision, lr=0.1) for _ in range(2)]
    for engine, way in zip(engines, ("assigned", "copied"), strict=True):
        engine.train_batch()
        set_weights(engine, way)
        engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer.optimizer, 1, gamma=0.5)
        for _ in range(2):
            engine.train_batch()
    assigned, copied = map(weights_of, engines)
    for engine in engines:
        engine.transport.close()
    return all(torch.equal(assigned[name], copied[name]) for name in assigned)


@pytest.mark.parametrize("precision", ALL)
def test_weights_are_set_together_with_another_scheduler(ranks: Ranks, precision: str) -> None:
    assert all(ranks(2).run(set_with_another_scheduler, precision))


def from_folder(rank: int, folder: str) -> list[bool]:
    """Load the layer files of another engine."""
    source = build("bf16", lr=0.1)
    source.train_batch()
    source.module.save_state_dict(folder, TorchCheckpointEngine())
    torch.distributed.barrier()
    engine = build("bf16")
    engine.module.load_state_dir(folder, TorchCheckpointEngine())
    engine.train_batch()
    pairs = zip(weights_of(engine).values(), weights_of(source).values(), strict=True)
    same = [torch.equal(one, other) for one, other in pairs]
    engine.transport.close()
    source.transport.close()
    return same


@needs("bf16")
def test_load_state_dir(ranks: Ranks, tmp_path: Path) -> None:
    assert all(all(same) for same in ranks(2).run(from_folder, str(tmp_path)))


def averaged_around_a_save(rank: int, folder: str, way: str) -> tuple[bool, bool, bool]:
    """Train; save with other weights and restore them; train on. Then load what was saved.

    Returns whether training went on as without the save, and whether the checkpoint has the other weights.
    """
    plain, engine = build("bf16", lr=0.01), build("bf16", lr=0.01)
    for _ in range(2):
        plain.train_batch()
        engine.train_batch()
    own = weights_of(engine)
    data = {name: parameter.data for name, parameter in engine.module.named_parameters()}
    set_weights(engine, way)
    other = weights_of(engine)
    engine.save_checkpoint(folder, "averaged")
    for name, parameter in engine.module.named_parameters():
        parameter.data = data[name]
        parameter.data.copy_(own[name])
    losses = [float(one.train_batch()) for one in (plain, engine) for _ in range(3)]
    masters = [
        [group["params"][0] for group in one.optimizer.optimizer.param_groups] for one in (plain, engine)
    ]
    loaded = build("bf16")
    loaded.load_checkpoint(folder, "averaged")
    after_load = weights_of(loaded)
    for group in loaded.optimizer.optimizer.param_groups:
        group["lr"] = 0.0  # not that of the checkpoint
    loaded.train_batch()
    after_step = weights_of(loaded)
    for one in (plain, engine, loaded):
        one.transport.close()
    return (
        losses[:3] == losses[3:] and all(map(torch.equal, *masters)),
        all(torch.equal(after_load[name], other[name]) for name in other),
        all(torch.equal(after_step[name], other[name]) for name in other),
    )


@needs("bf16")
@pytest.mark.parametrize("way", ["copied", "assigned"])
def test_weights_swapped_in_for_a_save(ranks: Ranks, tmp_path: Path, way: str) -> None:
    assert ranks(2).run(averaged_around_a_save, str(tmp_path), way) == [(True, True, True)] * 2


def assigned_before_a_load(rank: int, folder: str, precision: str) -> tuple[bool, bool]:
    """Assign weights, load a checkpoint, and take a step. Returns whether the weights are those of the checkpoint."""
    source = build(precision)
    source.save_checkpoint(folder, "saved")
    saved = weights_of(source)
    engine = build(precision)
    set_weights(engine, "assigned")
    engine.load_checkpoint(folder, "saved")
    loaded = weights_of(engine)
    engine.train_batch()
    trained = weights_of(engine)
    for one in (source, engine):
        one.transport.close()
    return all(torch.equal(loaded[n], saved[n]) for n in saved), all(
        torch.equal(trained[n], saved[n]) for n in saved
    )


@pytest.mark.parametrize("precision", ALL)
def test_a_checkpoint_replaces_weights_that_were_set(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    assert ranks(2).run(assigned_before_a_load, str(tmp_path), precision) == [(True, True)] * 2


def one_row(rank: int) -> tuple[bool, bool]:
    """Set one row. Returns whether the other fp32 weights keep their bits, and whether the row is the new one."""
    engine = build("bf16", lr=0.01)
    engine.train_batch()
    (group,) = engine.optimizer.optimizer.param_groups
    before = group["params"][0].detach().clone()
    row = next(engine.module.parameters()).data[0]
    row.fill_(3.0)
    engine.optimizer.optimizer.param_groups[0]["lr"] = 0.0
    engine.train_batch()
    after = group["params"][0].detach()
    same = int((after == before).sum())
    found = torch.equal(next(engine.module.parameters())[0], torch.full((SIZE,), 3.0, dtype=torch.bfloat16))
    engine.transport.close()
    return same >= len(after) - SIZE, found


@needs("bf16")
def test_other_weights_keep_their_precision(ranks: Ranks) -> None:
    assert ranks(2).run(one_row) == [(True, True)] * 2
