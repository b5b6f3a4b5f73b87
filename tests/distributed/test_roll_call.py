"""Own scripts: PipelineModule and initialize() refuse ranks whose settings, optimizers, layers or data differ."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

import ds_ext
from ds_ext.errors import ConfigError
from tests.ranks import RankPool

pytestmark = pytest.mark.quick

WIDTH = 4


def build(rank: int, what: str) -> str | None:
    """The error of a rank when ``what`` differs on rank 1; None when the job is accepted."""
    other = rank == 1
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2 if other and what == "lr" else 0.1}},
        "ds_ext": {
            "schedule": "gpipe" if other and what == "schedule" else "bitpipe",
            "pipeline_parallel_size": 2,
            "transport_options": {"timeout_s": 30},
        },
    }
    wide = WIDTH + (other and what == "sizes")
    widths = [WIDTH, wide, WIDTH, WIDTH, WIDTH]
    layers: list[nn.Module] = [nn.Linear(*pair) for pair in pairwise(widths)]
    if other and what == "layers":
        layers[3] = nn.Sequential(layers[3])
    targets = torch.ones(8, WIDTH) * (2 if other and what == "data" else 1)
    data = torch.utils.data.TensorDataset(
        torch.zeros(8, WIDTH), targets[: 7 if other and what == "length" else 8]
    )
    if what in ("random data", "objects"):
        data = Random(what == "objects")
    if what == "spec":
        layers[3] = LayerSpec(nn.Softplus, 2 if other else 1)
    try:
        model = ds_ext.PipelineModule(layers, config, loss_fn=nn.MSELoss(), partition_method="uniform")
        rate = 0.2 if other and what in ("group", "client") else 0.1
        groups = [{"params": model.parameters(), "lr": rate}]
        client = torch.optim.SGD(model.parameters(), lr=rate) if what == "client" else None
        given = None if client else groups
        engine, *_ = ds_ext.initialize(
            model=model, optimizer=client, model_parameters=given, config=config, training_data=data
        )
        before = [parameter.detach().clone() for parameter in model.parameters()]
        engine.train_batch()
        assert not all(map(torch.equal, before, model.parameters()))  # groups of generators are not used up
        engine.transport.close()
    except ConfigError as error:
        assert error.reported_by == 0
        return str(error)
    return None


class Random(torch.utils.data.Dataset[Any]):
    """Data set with random inputs, from the global generator or from a private one."""

    def __init__(self, with_objects: bool) -> None:
        self.generator = None if with_objects else torch.Generator()
        if self.generator is not None:
            self.generator.seed()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.randn(WIDTH, generator=self.generator), torch.zeros(WIDTH)


KEYS = {
    "schedule": "ds_ext.schedule",
    "layers": "PipelineModule.layers",
    "lr": "optimizer.params.lr",
    "group": "stage 0: parameters",
    "client": "optimizer.defaults.lr",
    "spec": "PipelineModule.layers",
    "sizes": "PipelineModule.layers",
    "data": "training_data: first sample",
}


@pytest.mark.parametrize("what", KEYS)
def test_a_rank_that_differs_is_refused_on_every_rank(ranks2: RankPool, what: str) -> None:
    first, second = ranks2.run(build, what)
    assert first is not None and first == second
    assert f"{KEYS[what]}: " in first and "rank 0" in first and "rank 1" in first


@pytest.mark.parametrize("what", ["nothing", "random data", "objects"])
def test_equal_ranks_and_data_augmented_at_random_are_accepted(ranks2: RankPool, what: str) -> None:
    assert ranks2.run(build, what) == [None, None]
