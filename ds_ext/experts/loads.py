"""Loads of experts in a step, and biases of routers that balance them without a loss (arXiv 2408.15664, algorithm 1).

An expert with fewer tokens than the mean of its layer gets a higher bias, by a fixed rate, and one with more a lower
bias. The bias only decides which experts a token takes.

E: experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .modules import COUNTS, has_interface

BIAS = "e_score_correction_bias"  # of transformers' DeepSeek-V3, GLM-4.5 and others


class Loads(NamedTuple):
    """Loads of the experts of some layers.

    Attributes:
        largest: tokens of an expert relative to the mean of its layer; 0 without experts.
        idle: experts without a token.
        experts: all experts.
    """

    largest: float = 0.0
    idle: float = 0.0
    experts: float = 0.0


class ExpertLoads:
    """Tokens of the experts in a module, which it counts from now on; those of a recomputation once.

    Args:
        rate: change of the biases in a step; 0: none.
        group: ranks with the same layers and other samples.

    Attributes:
        biased: routers with a bias.
    """

    def __init__(self, module: nn.Module, rate: float, group: ProcessGroup) -> None:
        self._rate, self._group = rate, group
        self._experts: list[Any] = []
        self.biased: list[tuple[nn.Module, Any]] = []  # with its experts
        for block in module.modules():
            children = tuple(block.children())
            # Skeletons of a model have experts without weights.
            experts = [child for child in children if has_interface(child) and [*child.parameters()]]
            routers = [child for child in children if BIAS in child._buffers]
            self._experts += experts
            self.biased += zip(routers, experts, strict=False)
        for experts in self._experts:
            weight = next(experts.parameters())
            tokens_E = torch.zeros(experts.num_experts, dtype=torch.int64, device=weight.device)
            experts.register_buffer(COUNTS, tokens_E, persistent=False)

    def read(self) -> Loads:
        """Return the loads of this rank's micro-batches since the last :meth:`update_biases_and_reset`."""
        layers = [experts.get_buffer(COUNTS) for experts in self._experts]
        if not layers:
            return Loads()
        largest = torch.stack(
            [tokens_E.max() / tokens_E.double().mean().clamp_min(1e-9) for tokens_E in layers]
        )
        idle = torch.stack([(tokens_E == 0).sum() for tokens_E in layers])
        return Loads(float(largest.max()), float(idle.sum()), float(sum(map(len, layers))))

    @torch.no_grad()
    def update_biases_and_reset(self) -> None:
        """Change the biases by the tokens of all micro-batches, on all ranks of the group, and count anew."""
        if self._rate and self.biased:
            layers = [experts.get_buffer(COUNTS) for _, experts in self.biased]
            sums = torch.cat(layers)
            dist.all_reduce(sums, group=self._group)
            for (router, _), tokens_E in zip(self.biased, sums.split([*map(len, layers)]), strict=True):
                _change(router.get_buffer(BIAS), tokens_E, self._rate)
        for experts in self._experts:
            experts.get_buffer(COUNTS).zero_()


def _change(bias_E: Tensor, tokens_E: Tensor, rate: float) -> None:
    bias_E += rate * (tokens_E.double().mean() - tokens_E).sign().to(bias_E.dtype)
