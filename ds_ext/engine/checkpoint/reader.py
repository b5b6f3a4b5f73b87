"""Reads weights and optimizer states for this rank's sizes out of a checkpoint that was written under any."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .file import TensorFile, layer_file, read_plain
from .states import MASTER, Held, Shape

# Gives elements start .. start + numel of a tensor-parallel shard of the checkpoint, flat.
_ReadShard = Callable[[int, int, int], Tensor]


class CheckpointReader:
    """One checkpoint, for one rank.

    Args:
        folder: of the checkpoint.
        manifest: its manifest.
        tensor_rank: this rank's place in its tensor-parallel group.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], tensor_rank: int) -> None:
        self.tensor_ranks = manifest["job"]["tensor_parallel_size"]
        self._parameters, self._files = manifest["parameters"], manifest["files"]
        self._tensor_rank = tensor_rank
        self._layer = cache(
            lambda layer, shard: read_plain(folder / layer_file(layer, shard, self.tensor_ranks))
        )
        self._file = cache(lambda name: TensorFile(folder / name))

    def weight(self, held: Held, start: int, numel: int) -> Tensor:
        """Elements of a weight as this rank cuts it, flat, in the best precision that there is."""
        record = self._parameters[held.name]
        if MASTER in record["states"]:
            return self.state(held, MASTER, start, numel)

        def read(shard: int, first: int, count: int) -> Tensor:
            return self._layer(record["layer"], shard)[record["key"]].view(-1)[first : first + count]

        return self._part(held, read, start, numel)

    def states(self, held: Held, start: int, numel: int) -> dict[str, Tensor]:
        """Elements of all of a parameter's optimizer states but the master weights, by the optimizer's names."""
        keys = [key for key in self._parameters[held.name]["states"] if key != MASTER]
        return {key: self.state(held, key, start, numel) for key in keys}

    def state(self, held: Held, key: str, start: int, numel: int) -> Tensor:
        """Elements of one state, flat; zeros where no rank had one."""
        fragments = self._parameters[held.name]["fragments"]

        def read(shard: int, first: int, count: int) -> Tensor:
            out = torch.zeros(count)
            for name, begin, length in fragments[str(shard)]:
                low, high = max(first, begin), min(first + count, begin + length)
                if low < high:
                    found = self._file(name).read(f"{held.name}/{key}", low - begin, high - low)
                    out = out.to(found.dtype)
                    out[low - first : high - first] = found
            return out

        return self._part(held, read, start, numel)

    def other(self, layer: int, key: str, same_cut: bool) -> Any:
        """A layer's buffer or extra state, as this rank had it; rank 0's under other tensor-parallel sizes.

        None if the checkpoint has none.
        """
        shard = self._tensor_rank if same_cut else 0
        known = layer_file(layer, shard, self.tensor_ranks) in self._files
        return self._layer(layer, shard).get(key) if known else None

    def _part(self, held: Held, read: _ReadShard, start: int, numel: int) -> Tensor:
        """Elements ``start`` to ``start + numel`` of this rank's shard, from the shards of the checkpoint."""
        record, ours = self._parameters[held.name], held.shape
        theirs = Shape(tuple(record["shape"]), tuple(record["shard"]), record["dim"])
        if ours == theirs:
            # Cut alike: no more is read than is asked for.
            return read(self._tensor_rank if ours.dim is not None else 0, start, numel)
        whole = self._window(ours, theirs, read)
        return whole.reshape(-1)[start : start + numel]

    def _window(self, ours: Shape, theirs: Shape, read: _ReadShard) -> Tensor:
        """This rank's whole shard, padding included, out of the shards that overlap it."""

        def shard(number: int) -> Tensor:
            return read(number, 0, math.prod(theirs.shard)).view(theirs.shard)

        dim = ours.dim if ours.dim is not None else theirs.dim
        assert dim is not None, "two parameters of one size that are cut nowhere are cut alike"
        length = ours.shard[dim]
        first = self._tensor_rank * length if ours.dim is not None else 0
        last = min(first + length, ours.full[dim])  # behind it is padding
        if first >= last:
            return torch.zeros(ours.shard)
        if theirs.dim == dim:
            each = theirs.shard[dim]
            numbers = range(first // each, -(-last // each))
            read_from = numbers[0] * each
        else:
            numbers, read_from = range(1 if theirs.dim is None else self.tensor_ranks), 0
        joined = torch.cat([shard(n) for n in numbers], theirs.dim or 0)
        found = joined.narrow(dim, first - read_from, last - first)
        if theirs.dim is not None and theirs.dim != dim:
            found = found.narrow(theirs.dim, 0, ours.full[theirs.dim])
        if last - first == length:
            return found
        window = torch.zeros(ours.shard, dtype=found.dtype)
        window.narrow(dim, 0, last - first).copy_(found)
        return window
