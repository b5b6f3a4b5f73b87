"""Weights that a script sets after ``initialize``, by ``load_state_dict``, ``.data`` or in place.

ZeRO and half precision keep fp32 master weights in DeepSpeed's optimizer, and every step overwrites the model's weights
with them. So before a step, master weights that do not round to the model's weights take their values. All others keep
their precision. A write through ``.data`` changes no version counter, so the values are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ..deepspeed_api.names import model_groups
from ..types import Optimizer

_CHUNK = 1 << 22  # elements that are compared at a time, to bound the memory


class MasterWeights:
    """Master weights of this rank's partition; empty without ZeRO and half precision."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # the model's weights and the master weights, flat
        self._views: list[tuple[torch.nn.Parameter, Tensor]] = []  # with their parts of flat buffers
        if isinstance(optimizer, BF16_Optimizer):
            low, high = optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            low, high = optimizer.parallel_partitioned_bit16_groups, optimizer.single_partition_of_fp32_groups
        else:
            return
        ranks = [dist.get_rank(group) for group in optimizer.real_dp_process_group]
        parts = zip(low, high, ranks, strict=True)
        self._pairs = [(partitions[rank].detach(), master.detach()) for partitions, master, rank in parts]
        self._views = [
            (parameter, parameter.data) for group in model_groups(optimizer) for parameter in group
        ]

    @torch.no_grad()
    def adopt_changes(self) -> Tensor | int:
        """Take over the weights that a script set. Returns the number of changed elements on this rank."""
        self.adopt_assigned()
        changed: Tensor | int = 0
        for weights, master, differs in self._compared():
            number = differs.sum()
            changed = number + changed
            if number.device.type != "cpu" or number:  # on a GPU, reading it would wait
                torch.where(differs, weights.to(master.dtype), master, out=master)
        return changed

    @torch.no_grad()
    def adopt_assigned(self) -> None:
        """Copy tensors that the script assigned to ``parameter.data`` into the flat buffers."""
        for parameter, view in self._views:
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view

    def _compared(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for low, high in self._pairs:
            for weights, master in zip(low.split(_CHUNK), high.split(_CHUNK), strict=True):
                weights = weights.to(master.device)
                yield weights, master, master.to(weights.dtype) != weights

    @contextmanager
    def with_changes(self) -> Iterator[None]:
        """Context with the weights that a script set, for a save: it may restore the others, in full precision."""
        self.adopt_assigned()
        if not any(differs.any() for _, _, differs in self._compared()):
            yield
            return
        before = [master.clone() for _, master in self._pairs]
        self.adopt_changes()
        try:
            yield
        finally:
            for (_, master), values in zip(self._pairs, before, strict=True):
                master.copy_(values)
