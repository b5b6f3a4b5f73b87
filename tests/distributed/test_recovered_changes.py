"""What a script changes between steps is there after a recovery: the next step is that of the undisturbed run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.errors import ConfigError
from tests.distributed.test_keeper import end_keeper
from tests.ranks import Ranks

SIZE, LAYERS, SAMPLES, STEPS = 4, 8, 4, 4
ADDED = (2, 5)  # layers that are frozen at first
BF16 = {"bf16": {"enabled": True}}
JOBS: list[tuple[str, dict[str, Any]]] = [
    ("bitpipe", {}),
    ("zb_v", {"zero_optimization": {"stage": 1}}),
    ("1f1b", {**BF16, "zero_optimization": {"stage": 1}}),
    ("1f1b", BF16),
]


class Running(nn.Linear):
    """Layer with non-persistent buffers: a running mean, one that the first forward makes, and a table."""

    mean: Tensor
    last: Tensor | None
    table: Tensor

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.register_buffer("mean", torch.zeros(SIZE), persistent=False)
        self.register_buffer("last", None, persistent=False)
        self.register_buffer("table", torch.polar(torch.ones(9), torch.arange(9.0)), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        last = 0 if self.last is None else self.last
        y = super().forward(input) - self.mean + last
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            self.last = y.detach()[0]
        return y


def build(
    rank: int, schedule: str, more: dict[str, Any], layer: Callable[..., nn.Module], frozen: bool
) -> tuple[Any, dict[int, nn.Module]]:
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"  # as from torchrun; nothing restarts these ranks
    config: dict[str, Any] = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "steps_per_print": 10**9,
        **more,
        "ds_ext": {
            **{"schedule": schedule, "pipeline_parallel_size": 2, "print_plan": False},
            "recovery": {"every": 1},
        },
    }
    sizes = () if layer is Running else (SIZE, SIZE)
    model = ds_ext.PipelineModule(
        [LayerSpec(layer, *sizes) for _ in range(LAYERS)],
        config,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    modules = {i: one for stage in model.stages for i, one in model.stage_modules(stage).items()}
    for index in ADDED:
        if frozen and index in modules:
            modules[index].requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(2, SAMPLES * STEPS, SIZE, generator=generator)
    data = torch.utils.data.TensorDataset(*samples.to(torch.bfloat16 if "bf16" in more else torch.float32))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = ds_ext.initialize(model=model, model_parameters=trained, training_data=data)
    return engine, modules


def clamp(engine: Any, modules: dict[int, nn.Module]) -> None:
    for index, layer in modules.items():
        for parameter in layer.parameters():
            if index % 2:
                parameter.data = parameter.data.clamp(-0.3, 0.3)
            else:
                parameter.data.clamp_(-0.3, 0.3)


def lower_rate(engine: Any, modules: dict[int, nn.Module]) -> None:
    if engine.global_steps == STEPS - 1:
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.1


def freeze(engine: Any, modules: dict[int, nn.Module]) -> None:
    if engine.global_steps in (1, STEPS - 1):
        index = ADDED[engine.global_steps == 1]
        if index in modules:
            modules[index].requires_grad_(False)


def draw(engine: Any, modules: dict[int, nn.Module]) -> None:
    torch.rand(3)
    noise = torch.randn(SIZE)
    with torch.no_grad():
        for layer in modules.values():
            layer.bias += 0.1 * noise  # pyright: ignore[reportOperatorIssue]


def add_group(engine: Any, modules: dict[int, nn.Module]) -> None:
    if engine.global_steps == 1:
        added = [p for index in ADDED if index in modules for p in modules[index].parameters()]
        for parameter in added:
            parameter.requires_grad_(True)
        engine.optimizer.add_param_group({"params": added, "lr": 0.03, "betas": (0.5, 0.9), "amsgrad": True})


def nothing(engine: Any, modules: dict[int, nn.Module]) -> None:
    pass


Change = Callable[[Any, dict[int, nn.Module]], None]


def last_step(engine: Any, modules: dict[int, nn.Module], change: Change) -> list[Any]:
    """Return loss, weights, learning rates and what is trained after the last step."""
    loss = 0.0
    while engine.global_steps < STEPS:
        loss = float(engine.train_batch())
        change(engine, modules)
    engine.wait_for_weights()
    weights = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in getattr(engine.optimizer, "param_groups", ())
    ]
    return [loss, weights, groups, [parameter.requires_grad for parameter in engine.module.parameters()]]


def runs(
    rank: int, schedule: str, more: dict[str, Any], change: Change, layer: Callable[..., nn.Module]
) -> tuple[list[Any], list[Any], int, set[str]]:
    """(undisturbed and recovered :func:`last_step`, step of the recovery, names of saved non-persistent buffers)."""
    try:
        frozen = change is add_group
        engine, modules = build(rank, schedule, more, layer, frozen)
        undisturbed = last_step(engine, modules, change)
        saved = {key.split(".")[-1] for key in engine.recovery._slots._slots[0].views if "transient" in key}
        engine.transport.close()
        dist.barrier()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        engine, modules = build(rank, schedule, more, layer, frozen)
        recovered = engine.recover()
        found = last_step(engine, modules, change)
        engine.transport.close()
        dist.barrier()
        return undisturbed, found, recovered.step, saved
    finally:
        os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
        if rank == 0:
            end_keeper()


def assert_same(results: list[tuple[list[Any], list[Any], int, set[str]]]) -> None:
    for (loss, weights, *others), (loss_again, weights_again, *others_again), step, _ in results:
        assert step == STEPS - 1 and loss_again == loss and others_again == others
        for name, weight in weights.items():
            assert torch.equal(weights_again[name], weight), name


@pytest.mark.parametrize("change", [clamp, lower_rate, draw])
@pytest.mark.parametrize(("schedule", "more"), JOBS)
def test_changes_between_steps_survive(
    ranks: Ranks, schedule: str, more: dict[str, Any], change: Change
) -> None:
    assert_same(ranks(2).run(runs, schedule, more, change, nn.Linear))


@pytest.mark.parametrize("change", [freeze, add_group])
@pytest.mark.parametrize(("schedule", "size"), [("bitpipe", 2), ("1f1b", 4)])
def test_frozen_parameters_and_added_groups_survive(
    ranks: Ranks, schedule: str, size: int, change: Change
) -> None:
    assert_same(ranks(size).run(runs, schedule, {}, change, nn.Linear))


@pytest.mark.parametrize("schedule", ["1f1b", "fbd"])
def test_non_persistent_buffers_survive(ranks: Ranks, schedule: str) -> None:
    results = ranks(4 if schedule == "fbd" else 2).run(runs, schedule, {}, nothing, Running)
    assert_same(results)
    assert set().union(*(saved for *_, saved in results)) == {"mean", "last"}


def add_before(rank: int) -> tuple[str, int]:
    """(error, steps) of a recovery for which a script has added a group that the snapshot lacks."""
    try:
        engine, modules = build(rank, "bitpipe", {}, nn.Linear, True)
        last_step(engine, modules, nothing)
        engine.transport.close()
        dist.barrier()
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
        engine, modules = build(rank, "bitpipe", {}, nn.Linear, True)
        if rank == 1:
            add = [p for index in ADDED if index in modules for p in modules[index].parameters()]
            engine.optimizer.add_param_group({"params": add})
        with pytest.raises(ConfigError) as caught:
            engine.recover()
        engine.transport.close()
        dist.barrier()
        return str(caught.value), engine.global_steps
    finally:
        os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
        if rank == 0:
            end_keeper()


def test_a_group_that_the_snapshot_lacks_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for error, steps in ranks(2).run(add_before):
        assert error.startswith("optimizer.param_groups: ") and "(got [12, 4]" in error and steps == 0
