"""Reader of weights and optimizer states for this rank, from a checkpoint with any schedule and parallel sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..parameters import LocalParameter, Shape, unique_name
from ..types import Json, Saved
from ..wrappers import plain_names
from .file import TensorFile, layer_file, read_plain
from .optimizer_states import MASTER

# (shard, start, numel) -> elements of a flattened tensor-parallel shard of the checkpoint
_ReadShard = Callable[[int, int, int], Tensor]


class CheckpointReader:
    """Reader of a checkpoint for one rank.

    ``target_ranks`` is the tensor-parallel size of this job, on which only parts of a head depend.
    """

    def __init__(self, folder: Path, manifest: Json, tensor_rank: int, target_ranks: int = 1) -> None:
        self.tensor_ranks = manifest["job"]["tensor_parallel_size"]
        self._parameters, self._files = manifest["parameters"], manifest["files"]
        self._tensor_rank, self._target_ranks = tensor_rank, target_ranks
        self._layer = cache(
            lambda layer, shard, shards: plain_names(read_plain(folder / layer_file(layer, shard, shards)))
        )
        self._file = cache(lambda name: TensorFile(folder / name))

    def weight(self, local: LocalParameter, start: int, numel: int) -> Tensor:
        """Return elements of this rank's flattened shard of a weight, from the master weights if present."""
        return self._part(local, self._weight(local.name), start, numel)

    def full_weight(self, name: str) -> Tensor:
        """Return a weight joined from the shards of all ranks, without padding."""
        shape = tuple(self._parameters[name]["shape"])
        whole, read = Shape(shape, shape, None), self._weight(name)
        return self._elements(name, whole, 0, read, 0, math.prod(shape)).view(shape)

    def states(self, local: LocalParameter, start: int, numel: int) -> dict[str, Tensor]:
        keys = [key for key in self._parameters[local.name]["states"] if key != MASTER]
        return {key: self._part(local, self._state(local.name, key), start, numel) for key in keys}

    def _weight(self, name: str) -> _ReadShard:
        record = self._parameters[name]
        if MASTER in record["states"]:
            return self._state(name, MASTER)

        def read(shard: int, first: int, count: int) -> Tensor:
            layer = self._layer(record["layer"], shard, self._num_shards(record))
            return layer[record["key"]].view(-1)[first : first + count]

        return read

    def _state(self, name: str, key: str) -> _ReadShard:
        """Return the reader of one state, which gives zeros if no rank had the state."""
        record = self._parameters[name]
        fragments, parts = record["fragments"], record.get("parts", 1)

        def read(shard: int, first: int, count: int) -> Tensor:
            elements = torch.zeros(count)
            saved_name = unique_name(record.get("saved_name", name), shard // self.tensor_ranks, parts)
            for file, begin, length in fragments[str(shard)]:
                low, high = max(first, begin), min(first + count, begin + length)
                if low < high:
                    part = self._file(file).read(f"{saved_name}/{key}", low - begin, high - low)
                    elements = elements.to(part.dtype)
                    elements[low - first : high - first] = part
            return elements

        return read

    def other(self, layer: int, key: str, same_size: bool) -> Saved:
        """Return a buffer or an extra state of a layer; None if the checkpoint does not contain it.

        ``layer`` is a global index, and ``key`` that in the layer's ``state_dict()``. With another tensor-parallel size
        than the checkpoint's (not ``same_size``), the value is that of the checkpoint's rank 0.
        """
        shard = self._tensor_rank if same_size else 0
        exists = layer_file(layer, shard, self.tensor_ranks) in self._files
        return self._layer(layer, shard, self.tensor_ranks).get(key) if exists else None

    def _num_shards(self, record: Json) -> int:
        return self.tensor_ranks * record.get("parts", 1)

    def _part(self, local: LocalParameter, read: _ReadShard, start: int, numel: int) -> Tensor:
        """Return elements of this rank's flattened shard, from the shards of the checkpoint."""
        is_sharded = local.shape.dim is not None
        number = local.shard(self._tensor_rank, self._target_ranks) if is_sharded else 0
        return self._elements(local.name, local.shape, number, read, start, numel)

    def _elements(
        self, name: str, target: Shape, number: int, read: _ReadShard, start: int, numel: int
    ) -> Tensor:
        """Return elements of the flattened shard ``number`` of those with the shape ``target``."""
        record = self._parameters[name]
        saved = Shape(tuple(record["shape"]), tuple(record["shard"]), record["dim"])
        if target == saved:
            # The shards are the same: read only these elements.
            return read(number, start, numel)
        shards = 1 if saved.dim is None else self._num_shards(record)
        return self._reshard(target, number, saved, shards, read).reshape(-1)[start : start + numel]

    def _reshard(
        self, target: Shape, target_number: int, saved: Shape, shards: int, read: _ReadShard
    ) -> Tensor:
        """Return shard ``target_number``, with padding, from the saved shards that overlap with it."""

        def shard(number: int) -> Tensor:
            return read(number, 0, math.prod(saved.shard)).view(saved.shard)

        dim = target.dim if target.dim is not None else saved.dim
        assert dim is not None, "replicated parameters of the same shape have the same shards"
        length = target.shard[dim]
        first = target_number * length
        last = min(first + length, target.full[dim])  # behind it, the shard is padding
        if first >= last:
            return torch.zeros(target.shard)
        numbers = range(shards)
        offset = 0  # of the first shard that is read, along dim
        if saved.dim == dim:
            saved_length = saved.shard[dim]
            numbers = range(first // saved_length, -(-last // saved_length))
            offset = numbers[0] * saved_length
        joined = torch.cat([shard(number) for number in numbers], saved.dim or 0)
        unpadded = joined.narrow(dim, first - offset, last - first)
        if saved.dim is not None and saved.dim != dim:
            unpadded = unpadded.narrow(saved.dim, 0, target.full[saved.dim])
        if last - first == length:
            return unpadded
        padded = torch.zeros(target.shard, dtype=unpadded.dtype)
        padded.narrow(dim, 0, last - first).copy_(unpadded)
        return padded
