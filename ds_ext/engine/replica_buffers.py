"""Buffers that layers change while they train, such as the running means of BatchNorm.

Mirrors and data-parallel ranks see different samples, so their buffers differ. Before evaluations and checkpoints,
floating-point buffers get the mean of all replicas, and others the value of the first replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .all_ranks import on_all_ranks
from .module import PipelineModule
from .recovery.audit import tensor_checksum
from .wrappers import plain_name

logger = logging.getLogger(__name__)

_MAX_LAYERS = 4  # in a log line


class ReplicaBuffers:
    """Buffers of this rank's layers. ``group`` has the ranks that hold the same stages."""

    def __init__(self, module: PipelineModule, group: ProcessGroup, device: torch.device) -> None:
        self._module, self._group, self._device = module, group, device
        layout = module.layout
        self._reports_next = layout.data_parallel_size * layout.placement.replicas > 1

    def average(self) -> bool:
        """Make the buffers of all replicas equal, and return whether they differed. All replicas call this together.

        Buffers that are equal keep their bits.
        """
        data_parallel_size = dist.get_world_size(self._group)
        differing = self._differing() if data_parallel_size > 1 else []

        def average(flat: Tensor) -> None:
            dist.all_reduce(flat, group=self._group)
            flat /= data_parallel_size

        def copy_first(flat: Tensor) -> None:
            dist.broadcast(flat, dist.get_global_rank(self._group, 0), group=self._group)

        self._replace([b for b in differing if b.is_floating_point()], torch.float64, average)
        self._replace([b for b in differing if not b.is_floating_point()], torch.int64, copy_first)
        return bool(differing)

    def _differing(self) -> list[Tensor]:
        """Return the buffers that differ between replicas, complex ones as real views of the same memory."""
        buffers = list({id(buffer): buffer for _, _, buffer in self._buffers()}.values())
        if not buffers:
            return []
        checksums = torch.tensor([tensor_checksum([buffer]) for buffer in buffers], device=self._device)
        gathered = [torch.empty_like(checksums) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, checksums, group=self._group)
        differs = (torch.stack(gathered) != checksums).any(0).tolist()
        differing = [buffer for buffer, is_different in zip(buffers, differs, strict=True) if is_different]
        return [torch.view_as_real(buffer) if buffer.is_complex() else buffer for buffer in differing]

    def _replace(
        self, buffers: Sequence[Tensor], dtype: torch.dtype, reduce: Callable[[Tensor], None]
    ) -> None:
        """Replace the values of buffers by those that ``reduce`` sets, of ``dtype`` and flattened."""
        if not buffers:
            return
        flat = torch.cat([b.detach().to(self._device, dtype).reshape(-1) for b in buffers])
        reduce(flat)
        with torch.no_grad():
            for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(values.view_as(buffer))

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Context of a step. All ranks must enter it together. After the first step, rank 0 logs what it changed."""
        if not self._reports_next:
            yield
            return
        before = {(index, name): tensor_checksum([buffer]) for index, name, buffer in self._buffers()}
        yield
        self._reports_next = False
        changed: dict[int, list[str]] = {}
        for index, name, buffer in self._buffers():
            if before.get((index, name)) != tensor_checksum([buffer]):
                changed.setdefault(index, []).append(name)
        lines = {
            index: f"layer {index} ({type(layer).__name__}): {', '.join(changed[index])}"
            for stage in self._module.stages
            for index, layer in self._module.stage_modules(stage).items()
            if index in changed
        }
        all_lines = {
            index: line for by_index in on_all_ranks(lambda: lines) for index, line in by_index.items()
        }
        if all_lines and dist.get_rank() == 0:
            sorted_lines = [all_lines[index] for index in sorted(all_lines)]
            names = "; ".join([*sorted_lines[:_MAX_LAYERS], *["..."] * (len(sorted_lines) > _MAX_LAYERS)])
            logger.warning("buffers that differ between replicas until an evaluation or save: %s", names)

    def _buffers(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield layer index, name and tensor of every buffer, in the same order on all replicas."""
        for stage in self._module.stages:
            for index, layer in self._module.stage_modules(stage).items():
                for name, buffer in layer.named_buffers():
                    yield index, plain_name(name), buffer
