"""A loss that is not finite ends the training after some steps, and names the first gradient at fault."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR

import ds_ext
from ds_ext.engine.losses.watch import LossWatch
from ds_ext.errors import NonFiniteLoss, TransportError
from tests.distributed.test_own_layers import Batches, bf16_numbers, build, job
from tests.precisions import needs
from tests.ranks import Ranks

WIDTH, LAYERS, FAULTY, STEP, LIMIT = 4, 8, 5, 3, 4


class _Explode(torch.autograd.Function):
    """Gradients become infinite behind it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * torch.inf


class Faulty(nn.Module):
    """Its gradient is infinite in step STEP, or from then on."""

    def __init__(self, once: bool) -> None:
        super().__init__()
        self.linear, self.step, self.once = nn.Linear(WIDTH, WIDTH), 0, once

    def forward(self, x: Tensor) -> Tensor:
        bad = self.step == STEP or (self.step > STEP and not self.once)
        out = self.linear(x)
        return _Explode.apply(out) if bad and torch.is_grad_enabled() else out


def train(
    rank: int, schedule: str, zero: int, limit: int, steps: int, where: str, replaces_scheduler: bool = False
) -> tuple[int, Any]:
    """(steps done, the first bad gradient)."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 16,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "ds_ext": {
            "schedule": schedule,
            "pipeline_parallel_size": 4,
            "max_nonfinite_losses": limit,
            "transport_options": {"timeout_s": 30},
        },
    }
    if zero:
        config["zero_allow_untested_optimizer"] = True
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    if where != "data":
        layers[FAULTY] = Faulty(once=where == "gradient")
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.MSELoss(), partition_method="uniform")
    data = Data(where)
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), config=config)
    error: NonFiniteLoss | None = None
    done = 0
    try:
        for step in range(1, steps + 1):
            data.step = step
            for module in model.modules():
                if isinstance(module, Faulty):
                    module.step = step
            if replaces_scheduler:
                engine.lr_scheduler = ConstantLR(engine.optimizer, factor=1.0)
            engine.train_batch(data)
            done = step
    except NonFiniteLoss as stop:
        error = stop
        assert stop.reported_by == 0
    with contextlib.suppress(TransportError):  # fbd's weights of the last step are under way
        engine.transport.close()
    return done, None if error is None else error.first


class Data:
    """Micro-batches by id; infinite from step STEP on if the fault lies in the data."""

    def __init__(self, where: str) -> None:
        self.where, self.step = where, 0

    def get(self, micro_batch: int) -> Any:
        bad = self.where == "data" and self.step >= STEP
        return torch.full((2, WIDTH), torch.inf if bad else 1.0), torch.zeros(2, WIDTH)

    def advance(self, micro_batches: int) -> None:
        pass


@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe_zb", "dpp"])
def test_training_stops_and_names_the_gradient_that_was_bad_first(ranks: Ranks, schedule: str) -> None:
    results = ranks(4).run(train, schedule, 0, LIMIT, 50, "gradient")
    # The gradient of step STEP spoils the weights, and the losses from the next step on.
    assert {done for done, _ in results} == {STEP + LIMIT - 1}
    (first,) = {first for _, first in results}
    assert first is not None and (first[0], first[2]) == (STEP, f"{FAULTY}.linear.weight")


def test_training_stops_when_zero_skips_every_step(ranks: Ranks) -> None:
    """The loss stays finite, as the weights stay as they are."""
    results = ranks(4).run(train, "bitpipe", 1, LIMIT, 50, "gradients")
    assert {done for done, _ in results} == {STEP + LIMIT - 2}
    assert {first[2] for _, first in results} == {f"{FAULTY}.linear.weight"}


def test_a_scheduler_that_a_script_replaces_in_every_step_does_not_restart_the_count(ranks: Ranks) -> None:
    results = ranks(4).run(train, "1f1b", 0, LIMIT, 50, "gradient", True)
    assert {done for done, _ in results} == {STEP + LIMIT - 1}


def test_forward_ranks_stop_too(ranks: Ranks) -> None:
    results = ranks(8).run(train, "fbd", 0, LIMIT, 50, "gradient", timeout_s=120)
    assert [done for done, _ in results] == [STEP + LIMIT - 1] * 8
    assert {first[2] for _, first in results} == {f"{FAULTY}.linear.weight"}


def test_a_bad_batch_is_found_in_its_step_and_zero_is_no_limit(ranks: Ranks) -> None:
    (first,) = {first for _, first in ranks(4).run(train, "1f1b", 0, 1, 50, "data")}
    assert first is not None and first[0] == STEP
    results = ranks(4).run(train, "1f1b", 0, 0, STEP + 3, "data")
    assert [(done, first) for done, first in results] == [(STEP + 3, None)] * 4


def test_steps_that_fp16_skips_do_not_count(ranks: Ranks) -> None:
    assert ranks(2).run(count_skipped) == [3, 3]


def count_skipped(rank: int) -> int:
    watch = LossWatch([], 4, allows_zeros=False)
    for step in range(1, 10):
        watch.check_loss(step, float("inf"), skipped=True, searches_scale=True)
    assert watch.in_a_row == 0
    for step in range(10, 13):
        watch.check_loss(step, float("nan"), skipped=False)
    count = watch.in_a_row
    with pytest.raises(NonFiniteLoss):
        watch.check_loss(13, float("nan"), skipped=False)
    watch.check_loss(14, 1.0, skipped=False)
    assert watch.in_a_row == 0
    return count


class FaultyOnARank(nn.Linear):
    """Its gradient is infinite on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.rank = rank

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return _Explode.apply(output) if torch.distributed.get_rank() == self.rank else output  # pyright: ignore[reportReturnType]


def bad_rank(rank: int, faulty: int) -> int:
    """Return the rank that the error of a step names."""
    config = job("bitpipe", 2, bf16={"enabled": True}, ds_ext={"max_nonfinite_losses": 1})
    engine = build(
        [*(LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(3)), LayerSpec(FaultyOnARank, faulty)], config
    )
    with pytest.raises(NonFiniteLoss) as caught:
        engine.train_batch(Batches(bf16_numbers))
    assert caught.value.first is not None
    return caught.value.first[1]


@needs("bf16")
@pytest.mark.parametrize("faulty", [0, 1])
def test_the_named_rank_is_the_one_whose_gradient_was_bad(ranks: Ranks, faulty: int) -> None:
    """Its gradients are reduced while others are computed: soon they are bad on both replicas."""
    assert ranks(2).run(bad_rank, faulty) == [faulty] * 2
