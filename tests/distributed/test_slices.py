"""Micro-batches in slices of their sequences: precisions, dropout, own layers, errors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_ext
from ds_ext.errors import ConfigError, PeerGone
from ds_ext.tensor_parallel import attend_slice, current_slice, earlier_slices, slice_start
from tests.engine_runs import LLAMA, UNEQUAL, Job, sliced, train
from tests.ranks import RankPool, Ranks
from tests.selection import select

REENTRANT = functools.partial(checkpoint, use_reentrant=True)
JOBS = {
    "1f1b": sliced("1f1b"),
    "zb_v unequal": sliced("zb_v", UNEQUAL),
    "data": sliced("zb_h1", 2, (2, 1, 2)),
    "full split": sliced("zb_v", UNEQUAL, model=LLAMA, recompute="full"),
}


def train_twice(rank: int, job: Job, section: dict[str, Any]) -> list[list[float]]:
    found = []
    for slices in (1, job.slices):
        run = dataclasses.replace(job, slices=slices, deepspeed=section)
        found.append(train(rank, run)["losses"])
    return found


@pytest.mark.parametrize(
    "name", select(["1f1b", "zb_v unequal", "data", "full split"], ["zb_v unequal", "data"])
)
def test_bf16_and_zero(ranks: Ranks, name: str) -> None:
    section = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    for whole, in_slices in ranks(JOBS[name].world_size).run(train_twice, JOBS[name], section, timeout_s=180):
        assert in_slices == pytest.approx(whole, rel=2e-3)


DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def test_attention_dropout_does_not_depend_on_the_schedule(ranks: Ranks) -> None:
    runs = [sliced("1f1b", 4, **DROPOUT), sliced("zb_v", 4, recompute="full", **DROPOUT)]
    first, second = (ranks(4).run(train, run, timeout_s=180)[0]["losses"] for run in runs)
    assert second == pytest.approx(first, rel=1e-5)


class Attention(nn.Module):
    """The example of docs/long_sequences.md, without ``earlier_slices`` if it is not ``aware``."""

    def __init__(self, width: int, heads: int, aware: bool) -> None:
        super().__init__()
        self.heads, self.aware = heads, aware
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)  # so the outputs do not depend on other tokens yet

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BSD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        earlier = earlier_slices(self, k, v) if self.aware else []
        context_BNSH = attend_slice(q, k, v, earlier)
        return x_BSD + self.out(context_BNSH.transpose(1, 2).flatten(2))


class Transposed(nn.Module):
    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.transpose(0, 1)


class Positions(nn.Module):
    """Adds a vector of each token's position in the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8))

    def forward(self, x_BSD: Tensor) -> Tensor:
        start = slice_start()
        return x_BSD + self.weight[start : start + x_BSD.size(1)]


class Summed(nn.Module):
    """Mean squared error, as a pair or as a mean."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        self.pairs = pairs

    def forward(self, outputs: Tensor, labels: Tensor) -> Any:
        loss = (outputs - labels).square()
        return (loss.sum(), torch.tensor(float(loss.numel()))) if self.pairs else loss.mean()


PAIRS, MEANS = Summed(pairs=True), Summed(pairs=False)


class Shifted(nn.Module):
    """Squared error of each token's prediction of the next one, of which :class:`ShiftedFirst` shifts whole samples."""

    def forward(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = (outputs[:, :-1] - labels[:, 1:]).square()
        return loss.sum(), torch.tensor(float(loss.numel()))


class ShiftedFirst(nn.Module):
    def shift_labels(self, labels: Tensor) -> Tensor:
        return nn.functional.pad(labels[:, 1:], (0, 0, 0, 1), value=float("nan"))

    def forward(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if current_slice() is None:
            labels = self.shift_labels(labels)
        counted = ~labels.isnan()
        return (outputs - labels)[counted].square().sum(), counted.sum()


class LastLayer(nn.Module):
    """Loss in the last layer, of pairs of activations and labels."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor) -> Any:
        return self.loss(x, torch.ones_like(x))


def train_own_layers(
    rank: int,
    slices: int,
    fields: dict[str, Any],
    aware: bool = True,
    loss: nn.Module = PAIRS,
    in_layer: bool = False,
    layers: Sequence[type[nn.Module]] = (),
) -> tuple[list[float], list[Tensor]]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
        "ds_ext": {
            "schedule": "1f1b",
            "pipeline_parallel_size": dist.get_world_size(),
            "sequence_slices": slices,
        },
    }
    specs = [spec for _ in range(2) for spec in (LayerSpec(Attention, 8, 2, aware), nn.functional.gelu)]
    specs = [LayerSpec(layer) for layer in layers] or specs
    if in_layer:
        specs.append(LayerSpec(LastLayer, loss))
    loss_fn = None if in_layer else loss
    model = ds_ext.PipelineModule(specs, config, loss_fn=loss_fn, partition_method="uniform", **fields)
    engine, *_ = ds_ext.initialize(model=model, config=config, model_parameters=model.parameters())
    generator = torch.Generator().manual_seed(0)
    batches = iter([tuple(torch.randn(2, 12, 8, generator=generator) for _ in range(2)) for _ in range(12)])
    losses = [float(engine.train_batch(batches)) for _ in range(3)]
    return losses, [parameter.detach() for parameter in model.parameters()]


RECOMPUTED = {"activation_checkpoint_interval": 1}


@pytest.mark.parametrize(
    "arguments",
    [({},), (RECOMPUTED,), ({}, True, ShiftedFirst()), ({}, True, PAIRS, True)],
    ids=["plain", "recomputed", "labels shifted first", "loss in the last layer"],
)
def test_own_layers_that_keep_keys_and_values(ranks2: RankPool, arguments: tuple[Any, ...]) -> None:
    whole, sliced = (ranks2.run(train_own_layers, slices, *arguments) for slices in (1, 3))
    for (losses, weights), (sliced_losses, sliced_weights) in zip(whole, sliced, strict=True):
        assert sliced_losses == pytest.approx(losses, rel=1e-6)
        for weight, sliced_weight in zip(weights, sliced_weights, strict=True):
            torch.testing.assert_close(sliced_weight, weight, rtol=1e-5, atol=1e-6)


def test_stages_pass_on_the_sequence_in_dimension_1(ranks: Ranks) -> None:
    """Otherwise the next stage takes the samples for tokens, and its layers start at other positions."""
    run = ranks(2).run
    inside = [Transposed, Transposed, nn.Identity, Positions]
    whole, sliced = (run(train_own_layers, k, {}, True, PAIRS, False, inside) for k in (1, 3))
    assert sliced[0][0] == pytest.approx(whole[0][0], rel=1e-6)
    with pytest.raises((ConfigError, PeerGone), match="layer 1"):
        between = [nn.Identity, Transposed, Transposed, Positions]
        run(train_own_layers, 3, {}, True, PAIRS, False, between)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((3, {}, False), r"sequence_slices: layer 0 \(Attention\)"),
        ((3, {}, True, MEANS), r"loss_fn: .*\(sum, count\)"),
        ((3, {}, True, Shifted()), r"loss_fn .*48 and 32 labels"),
        ((3, {}, True, Shifted(), True), r"layer 4 \(LastLayer\) .*48 and 32 labels"),
        ((5, {}), r"sequence_slices: .*multiple of 5 .*12"),
        ((3, {**RECOMPUTED, "activation_checkpoint_func": REENTRANT}), "reentrant"),
    ],
    ids=[
        "mixes tokens",
        "mean",
        "shifted labels",
        "shifted in the last layer",
        "does not divide",
        "reentrant",
    ],
)
def test_what_slices_cannot_train_is_refused(ranks: Ranks, arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ranks(1).run(train_own_layers, *arguments)
