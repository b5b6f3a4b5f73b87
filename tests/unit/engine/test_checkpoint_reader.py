"""Reading of a parameter with any sharding into any other sharding."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ext.engine.checkpoint.file import layer_file, write_plain, write_tensors
from ds_ext.engine.checkpoint.reader import CheckpointReader
from ds_ext.engine.parameters import LocalParameter, Shape

ROWS, COLUMNS = 10, 12
FULL = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
# (dimension, ranks); rows are padded to a multiple of four times the ranks, like a vocabulary
SHARDINGS = [(None, 1), (None, 2), (0, 1), (0, 2), (0, 4), (1, 2), (1, 3)]


def shards_of(dim: int | None, ranks: int) -> list[Tensor]:
    """Return the shards of all ranks."""
    if dim is None:
        return [FULL] * ranks
    if dim == 1:
        return list(FULL.chunk(ranks, 1))
    padded = -(-ROWS // (4 * ranks)) * 4 * ranks
    return list(torch.cat([FULL, torch.zeros(padded - ROWS, COLUMNS)]).chunk(ranks))


def write(folder: Path, dim: int | None, ranks: int) -> dict[str, Any]:
    """Write a checkpoint of one parameter. Returns its manifest.

    Two data-parallel ranks share the optimizer state, 100 times the weight.
    """
    fragments: dict[str, list[Any]] = {str(rank): [] for rank in range(ranks)}
    for rank, shard in enumerate(shards_of(dim, ranks)):
        write_plain(folder / layer_file(0, rank, ranks), {"weight": shard.clone()})
        if dim is not None or rank == 0:
            half = shard.numel() // 2 + 1
            for start, part in ((0, shard.reshape(-1)[:half]), (half, shard.reshape(-1)[half:])):
                name = f"optimizer_{rank}_{start}"
                write_tensors(folder / name, {"other/m": torch.ones(3), "0.weight/m": part * 100})
                fragments[str(rank)].append([name, start, part.numel()])
    shard = list(shards_of(dim, ranks)[0].shape)
    record = {"shape": [ROWS, COLUMNS], "shard": shard, "dim": dim, "layer": 0, "key": "weight"}
    parameter = {**record, "states": ["m"], "fragments": fragments}
    return {"job": {"tensor_parallel_size": ranks}, "parameters": {"0.weight": parameter}, "files": {}}


@pytest.mark.parametrize(("dim", "ranks"), SHARDINGS)
def test_every_sharding_is_read_into_every_other(tmp_path: Path, dim: int | None, ranks: int) -> None:
    manifest = write(tmp_path, dim, ranks)
    for to_dim, to_ranks in SHARDINGS:
        for rank, expected in enumerate(shards_of(to_dim, to_ranks)):
            shape = Shape((ROWS, COLUMNS), tuple(expected.shape), to_dim)
            local = LocalParameter("0.weight", nn.Parameter(torch.zeros(0)), 0, "weight", shape)
            reader = CheckpointReader(tmp_path, manifest, rank)
            flat = expected.reshape(-1)
            for start, stop in itertools.combinations((0, 5, 17, flat.numel()), 2):
                elements = reader.weight(local, start, stop - start)
                assert torch.equal(elements, flat[start:stop]), (to_dim, to_ranks, rank)
                states = reader.states(local, start, stop - start)
                assert states.keys() == {"m"} and torch.equal(states["m"], flat[start:stop] * 100)
