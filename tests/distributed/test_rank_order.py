"""Replicas, checkpoints and topologies under other rank orders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

from ds_ext.engine import PipelineModule
from ds_ext.errors import ConfigError
from tests.distributed.test_checkpoint import AT, EXACT, STEPS, go_on, same_contents, settings, train_and_save
from tests.engine_runs import MODEL, WITH_DROPOUT, Job, train, zero_keys
from tests.ranks import Ranks
from tests.selection import select

ON_4_DEVICES, ON_8_RANKS = (4, 1, 1), (2, 2, 2)
Layout = tuple[int, int, int]


@pytest.mark.parametrize(
    ("layout", "order"), [(ON_4_DEVICES, "tp-mirror-dp-pp"), *select([(ON_8_RANKS, "tp-mirror-pp-dp")], [])]
)
def test_replicas_are_bitwise_equal_after_every_step(ranks: Ranks, layout: Layout, order: str) -> None:
    job = Job("bitpipe", *layout, 8, WITH_DROPOUT, steps=3, deepspeed=zero_keys(1), rank_order=order)
    results = ranks(job.world_size).run(train, job, timeout_s=120)
    for mirror in job.layout.groups()["mirror"]:
        for step in range(job.steps):
            assert len({results[rank]["digests"][step] for rank in mirror}) == 1


def test_a_checkpoint_loads_in_another_order(ranks: Ranks, tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, vocab_size=84)
    first, second = (
        Job("bitpipe", 4, 1, 1, 4, model, STEPS, deepspeed=settings("fp32", 1), rank_order=order)
        for order in ("tp-dp-pp", "tp-mirror-pp-dp")
    )
    straight = ranks(4).run(train_and_save, first, str(tmp_path), timeout_s=120)[0]
    for losses, _ in ranks(4).run(go_on, second, str(tmp_path), None, "again", timeout_s=120):
        assert losses == pytest.approx(straight[AT:], rel=EXACT)
    same_contents(tmp_path / "saved", tmp_path / "again")


def module(rank: int, axes: list[str], dims: list[int], section: dict[str, Any]) -> list[int]:
    """Return [device, group] of this rank in a module with DeepSpeed's topology of ``axes`` and ``dims``."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(4)]
    config = {"ds_ext": section} if section else None
    built = PipelineModule(layers, config, topology=ProcessTopology(axes, dims), loss_fn=nn.MSELoss())
    return [built.device_index, built.data_index]


def test_a_topology_and_the_rank_order_must_agree(ranks: Ranks) -> None:
    data_first, pipe_first = (["pipe", "data"], [2, 2]), (["data", "pipe"], [2, 2])
    default = [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert ranks(4).run(module, *data_first, {}) == default
    assert ranks(4).run(module, *pipe_first, {"rank_order": "tp-pp-dp"}) == [[d, g] for g, d in default]
    with pytest.raises(ConfigError, match=r'topology: .*"tp-dp-pp".*"tp-pp-dp"'):
        ranks(4).run(module, *pipe_first, {})
    with pytest.raises(ConfigError, match=r'topology: .*"tp-pp-dp".*"tp-dp-pp"'):
        ranks(4).run(module, *data_first, {"rank_order": "tp-pp-dp"})


def differing(rank: int) -> None:
    """Build a module whose rank order is another one on rank 1."""
    order = "tp-pp-dp" if rank == 1 else "tp-dp-pp"
    module(rank, ["pipe", "data"], [4, 1], {"rank_order": order})


def test_ranks_with_different_orders_are_refused(ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"ds_ext\.rank_order: .*tp-pp-dp"):
        ranks(4).run(differing)
