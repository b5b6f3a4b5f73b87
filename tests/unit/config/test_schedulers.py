"""MegatronLR against Megatron's own scheduler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_ext.config.schedulers import DECAY_STYLES, MegatronLR

STEPS, BATCH = 14, 8


def rates(scheduler: Any, optimizer: torch.optim.Optimizer, *increment: int) -> list[float]:
    """Return the learning rates of the first steps."""
    found = []
    for _ in range(STEPS):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step(*increment)
    return found


def adam(lr: float = 6e-4) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)


CASES = [(0, 0.0, 0.0), (4, 0.0, 6e-5), (3, 1e-5, 1e-4), (2.5, 0.0, 6e-5)]


@pytest.mark.parametrize(
    ("style", "warmup", "init", "least"),
    [(style, *case) for style in DECAY_STYLES for case in CASES if case[0] or style != "inverse-square-root"],
)
def test_equals_megatrons(style: str, warmup: float, init: float, least: float) -> None:
    megatron = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    theirs, ours = adam(), adam()
    theirs.param_groups[0] |= {"max_lr": 6e-4, "min_lr": least, "wd_mult": 1.0}
    reference = megatron.OptimizerParamScheduler(
        theirs,
        init_lr=init,
        max_lr=6e-4,
        min_lr=least,
        lr_warmup_steps=warmup * BATCH,
        lr_decay_steps=10 * BATCH,
        lr_decay_style=style,
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=10 * BATCH,
        wd_incr_style="constant",
    )
    scheduler = MegatronLR(ours, 10, style, least, warmup, init)
    found = rates(scheduler, ours)
    expected = rates(reference, theirs, BATCH)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_a_resumed_scheduler_continues_with_the_arguments_of_its_job() -> None:
    optimizer, other = adam(), adam()
    scheduler = MegatronLR(optimizer, 10, "linear", 0.0)
    whole = rates(scheduler, optimizer)
    first = MegatronLR(other, 10, "linear", 0.0)
    for _ in range(3):
        other.step()
        first.step()
    resumed = adam()
    again = MegatronLR(resumed, 10, "linear", 0.0)
    again.load_state_dict(first.state_dict())
    assert rates(again, resumed)[: STEPS - 3] == pytest.approx(whole[3:])
    longer = adam()
    MegatronLR(longer, 100, "linear", 0.0).load_state_dict(first.state_dict())
    assert longer.param_groups[0]["lr"] == pytest.approx(6e-4 * 0.97)


@pytest.mark.parametrize(
    "arguments",
    [
        {"decay_style": "exponential"},
        {"warmup_num_steps": 10},
        {"warmup_num_steps": -1},
        {"min_lr": 1e-3},
        {"warmup_init_lr": -1e-3},
        {"warmup_num_steps": 0.5, "decay_style": "inverse-square-root"},
    ],
)
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        MegatronLR(adam(), **{"total_num_steps": 10, **arguments})
