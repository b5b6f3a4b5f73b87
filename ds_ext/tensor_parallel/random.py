"""Random numbers that depend on what they are for, never on the order in which they are drawn.

Pipeline schedules run micro-batches in different orders and on different ranks. A global generator would give
each schedule other dropout masks, and each partition of the model other start values. Here every draw has its
own key (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), mixed to 64 bits, and the global
generators are left as they were. torch's CPU generator starts from the low 32 bits of a key, a CUDA generator
from all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_WORD = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """One step of the SplitMix64 generator from state ``x`` (Steele, Lea, Flood 2014): a 64-bit bijection."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def mix_key(*parts: int | str) -> int:
    """A 64-bit seed from an ordered list of integers and names, the same in every process."""
    key = 0
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
        key = splitmix64(key ^ (part & _WORD))
    return key


def keyed_generator(key: int, device: torch.device) -> torch.Generator:
    """A fresh generator on ``device`` that starts from ``key``."""
    return torch.Generator(device=device).manual_seed(key)


@contextmanager
def keyed_rng(key: int, device: torch.device) -> Iterator[None]:
    """Run a block with the default generator of ``device`` started from ``key``, then put its state back.

    For operations that take no generator of their own, such as the dropout of scaled_dot_product_attention.
    """
    generator = _default_generator(device)
    state = generator.get_state()
    generator.manual_seed(key)
    try:
        yield
    finally:
        generator.set_state(state)


def keyed_normal(std: float, *key: int | str) -> Callable[[Tensor], Tensor]:
    """A function that fills a CPU tensor with normal(0, ``std``), decided by ``key`` and shape alone."""
    seed = mix_key("init", *key)
    return lambda full: full.normal_(0.0, std, generator=keyed_generator(seed, full.device))


@dataclass
class DropoutClock:
    """What the dropout layers need to know about the present: the step and the micro-batch being computed.

    A plain object that the script makes, the layers read, and the engine sets before each forward pass of a
    micro-batch. ``micro_batch`` is the global number of the micro-batch within its step, over all pipes and
    data-parallel replicas, so that two replicas never share a mask.
    """

    step: int = 0
    micro_batch: int = 0

    def set(self, step: int, micro_batch: int) -> None:
        """Move to the given micro-batch of the given step."""
        self.step, self.micro_batch = step, micro_batch

    @contextmanager
    def at(self, step: int, micro_batch: int) -> Iterator[None]:
        """Be at another micro-batch for a while: what a recomputation in a backward pass needs."""
        now = self.step, self.micro_batch
        self.set(step, micro_batch)
        try:
            yield
        finally:
            self.set(*now)


class KeyedDropout(nn.Module):
    """Dropout whose mask depends only on (seed, step, micro-batch, layer, site, shard), and on the shape.

    Args:
        p: probability of zeroing an element, in [0, 1).
        seed: the run's seed.
        layer: number of the transformer layer; negative for what comes before the first.
        site: name of the place inside the layer.
        clock: tells the step and the micro-batch.
        shard: tensor-parallel rank where the input is sharded; 0 where it is replicated, since
            the ranks must then agree.
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
        """The 64-bit key of the mask at the clock's present step and micro-batch; of another ``shard`` if given."""
        clock, shard = self.clock, self.shard if shard is None else shard
        return mix_key("dropout", self.seed, clock.step, clock.micro_batch, self.layer, self.site, shard)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        generator = keyed_generator(self.key(), x.device)
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        keep.bernoulli_(1.0 - self.p, generator=generator)
        return (x * keep).mul_(1.0 / (1.0 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}, site={self.site!r}, shard={self.shard}"


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]
