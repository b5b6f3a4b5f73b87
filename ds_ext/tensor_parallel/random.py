"""Random numbers that depend on a key and not on the order of the draws.

Pipeline schedules run micro-batches in different orders and on different ranks. With a global generator, dropout masks
would depend on the schedule and initial weights on the partition of the model. Here every draw has a 64-bit key (Salmon
et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), and the global generators keep their state. torch's CPU
generator uses the low 32 bits of a key, a CUDA generator all 64.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_ext.tensor_parallel.slices import current_slice

_WORD = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """Return one step of SplitMix64 from state ``x``, a 64-bit bijection (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def mix_key(*parts: int | str) -> int:
    """Mix an ordered list of integers and names into a 64-bit key, the same in every process."""
    key = 0
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
        key = splitmix64(key ^ (part & _WORD))
    return key


def layer_key(seed: int, step: int, micro_batch: int, layer: int) -> int:
    """Return the key from which the forward of one layer draws.

    ``step`` is ``engine.global_steps``, the number of steps before this one. ``micro_batch`` counts over all pipes and
    data-parallel ranks of the step, ``layer`` over the whole model.
    """
    return mix_key("layer", seed, step, micro_batch, layer)


def keyed_generator(key: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(key)


@contextmanager
def keyed_rng(key: int, device: torch.device) -> Iterator[None]:
    """Seed the default generator of ``device`` with ``key`` for one block, then restore its state.

    For operations without a generator argument, such as the dropout of scaled_dot_product_attention.
    """
    generator = _default_generator(device)
    state = generator.get_state()
    generator.manual_seed(key)
    try:
        yield
    finally:
        generator.set_state(state)


class KeyedLayers:
    """Runs layers that draw from keyed default generators, those of the CPU and of ``device``.

    Before each layer, the generators are seeded with its key. Afterwards they have their states again.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators = (torch.default_generator,)
        if device.type != "cpu":
            self._generators += (_default_generator(device),)

    def run(
        self,
        layers: Iterable[Callable[[Any], Any]],
        x: Any,
        *,
        seed: int,
        step: int,
        micro_batch: int,
        first: int,
    ) -> Any:
        """Return the output of consecutive layers. ``first`` is the index of the first in the whole model.

        The other arguments are those of :func:`layer_key`.
        """
        micro_batch_key = splitmix64(_step_key(seed, step) ^ micro_batch)
        current = current_slice()
        if current is not None and current.index:
            micro_batch_key = mix_key("slice", micro_batch_key, current.index)
        states = [generator.get_state() for generator in self._generators]
        try:
            for index, layer in enumerate(layers, first):
                key = splitmix64(micro_batch_key ^ index)  # that of layer_key()
                for generator in self._generators:
                    generator.manual_seed(key)
                x = layer(x)
            return x
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


@functools.lru_cache(maxsize=1)
def _step_key(seed: int, step: int) -> int:
    return mix_key("layer", seed, step)


def keyed_normal(std: float, *key: int | str) -> Callable[[Tensor], Tensor]:
    """Return a function that fills a CPU tensor with normal(0, ``std``) values, determined by ``key`` and shape."""
    seed = mix_key("init", *key)
    return lambda full: full.normal_(0.0, std, generator=keyed_generator(seed, full.device))


@dataclass
class DropoutClock:
    """Step and micro-batch of the current forward, read by the dropout layers.

    The training script creates the clock, and the engine sets it before each forward. ``micro_batch`` counts within the
    step over all pipes and data-parallel ranks, so that no two replicas share a mask.
    """

    step: int = 0
    micro_batch: int = 0

    def set(self, step: int, micro_batch: int) -> None:
        self.step, self.micro_batch = step, micro_batch

    @contextmanager
    def at(self, step: int, micro_batch: int) -> Iterator[None]:
        """Set a different step and micro-batch for one block, as recomputation in a backward requires."""
        previous = self.step, self.micro_batch
        self.set(step, micro_batch)
        try:
            yield
        finally:
            self.set(*previous)


class KeyedDropout(nn.Module):
    """Dropout whose mask depends only on (seed, step, micro-batch, layer, site, shard) and the shape.

    Args:
        p: probability of zeroing an element, in [0, 1).
        layer: number of the transformer layer; negative for layers before the first.
        site: name of the dropout within the layer.
        shard: tensor-parallel rank if the input is sharded; 0 if it is replicated, so that all ranks use one mask.
    """

    def __init__(
        self, p: float, seed: int, layer: int, site: str, clock: DropoutClock, shard: int = 0
    ) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.layer = layer
        self.site = site
        self.clock = clock
        self.shard = shard

    def key(self, shard: int | None = None) -> int:
        """Return the 64-bit key of the current mask of this shard, or of ``shard``. Later slices have other keys."""
        shard = self.shard if shard is None else shard
        current = current_slice()
        return self._key(shard, current.index if current is not None else 0)

    def _key(self, shard: int, slice_index: int) -> int:
        clock = self.clock
        later = (slice_index,) if slice_index else ()
        return mix_key(
            "dropout", self.seed, clock.step, clock.micro_batch, self.layer, self.site, shard, *later
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, of any shape, with elements zeroed at random and the others scaled by 1 / (1 - p).

        A slice of the tokens, dimension 1, has its part of the sample's mask.
        """
        if not self.training or self.p == 0.0:
            return x
        current = current_slice()
        if current is None or x.dim() < 2 or x.size(1) != current.length:
            keep = self._mask(x.shape, self.key(), x.device)
        else:
            whole = self._mask((x.size(0), current.total, *x.shape[2:]), self._key(self.shard, 0), x.device)
            keep = whole[:, current.start : current.stop]
        return (x * keep).mul_(1.0 / (1.0 - self.p))

    def _mask(self, shape: Sequence[int], key: int, device: torch.device) -> Tensor:
        keep = torch.empty(shape, dtype=torch.bool, device=device)
        return keep.bernoulli_(1.0 - self.p, generator=keyed_generator(key, device))

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}, site={self.site!r}, shard={self.shard}"


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]
