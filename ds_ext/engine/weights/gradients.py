"""Gradients of a rank: storage, and reduction over data-parallel ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import get_total_norm

from ...errors import ConfigError
from ..deepspeed_api.attributes import set_attribute
from ..deepspeed_api.names import model_groups
from ..types import Optimizer
from .norm import correcting_zero, counts_here, measuring_bf16_norm, multiply

logger = logging.getLogger(__name__)


class Gradients:
    """Gradients of a rank's parameters, summed over micro-batches, in the storage of the optimizer.

    Args:
        optimizer: DeepSpeed's or torch's; None on a rank without gradients.
        group: data-parallel ranks, over which gradients are reduced; None: all ranks.
        names: parameter -> name in the warning about a missing gradient.
    """

    def __init__(
        self, optimizer: Optimizer, group: ProcessGroup | None, names: Mapping[nn.Parameter, str]
    ) -> None:
        self.optimizer, self.group = optimizer, group
        self._names = names
        self._has_warned = False
        self.data_parallel_size = dist.get_world_size(group)
        self._is_partitioned = isinstance(optimizer, ZeROOptimizer)
        self._is_zero_1_or_2 = isinstance(optimizer, DeepSpeedZeroOptimizer)
        self._is_bf16 = isinstance(optimizer, BF16_Optimizer)
        # Parameter -> indices in the lists of the bf16 optimizer.
        self._places = {
            parameter: (i, j)
            for i, parameters in enumerate(model_groups(optimizer) if self._is_bf16 else ())
            for j, parameter in enumerate(parameters)
        }

    @property
    def needs_reduction(self) -> bool:
        """True if gradients are averaged over replicas, or moved to the partitions of an optimizer."""
        return self._is_partitioned or self.data_parallel_size > 1

    def get(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter; None if no micro-batch used it (zero with the bf16 optimizer)."""
        if self._is_zero_1_or_2 and parameter.numel() > 0:  # ZeRO leaves out parameters without elements
            return self.optimizer.get_gradient_for_reduction(parameter)
        if not self._is_bf16:
            return parameter.grad
        place = self._places.get(parameter)
        return None if place is None else self.optimizer.fp32_groups_gradients[place[0]][place[1]]

    def _is_used(self, parameter: nn.Parameter) -> bool:
        """Return whether a micro-batch of this step used a parameter, or one of an earlier step with bf16."""
        if not self._is_bf16:
            return self.get(parameter) is not None
        place = self._places.get(parameter)
        return place is None or self.optimizer.fp32_groups_has_gradients[place[0]][place[1]]

    @property
    def share_memory(self) -> bool:
        """True if the gradients of a parameter group are parts of one tensor, in the order of the parameters."""
        return self._is_bf16

    @property
    def may_be_missing(self) -> bool:
        """True if the optimizer skips a parameter without gradient; ZeRO and bf16 optimizers treat it as zero."""
        return not self._is_partitioned

    def fill_missing(self, parameters: Iterable[nn.Parameter]) -> list[bool]:
        """Set missing gradients to zero, because another replica may have a gradient.

        Replicas must reduce the same parameters in the same order. DeepSpeed fills them too, except with ZeRO.
        Returns which parameters had a gradient.
        """
        parameters = list(parameters)
        used = [self._is_used(parameter) for parameter in parameters]
        if not all(used):
            self._warn(parameter for parameter, is_used in zip(parameters, used, strict=True) if not is_used)
            if self.data_parallel_size > 1:
                self._fill(parameters)
        return used

    def _warn(self, unused: Iterable[nn.Parameter]) -> None:
        """Log the first parameter that the optimizer moves although no micro-batch used it.

        A parameter that the script has frozen or unfrozen is left to the error of the step.
        """
        parameter = next((p for p in unused if not getattr(p, "was_trained", False)), None)
        if self.may_be_missing or self._has_warned or parameter is None:
            return
        self._has_warned = True
        logger.warning(
            "%s: no micro-batch used it on rank %d, so it has no gradient. ZeRO and half precision treat it as zero, "
            "and AdamW still moves the parameter by its momentum and weight decay. Later cases are not reported.",
            self._names.get(parameter, "parameter"),
            dist.get_rank(),
        )

    def drop_unused(self, parameters: Iterable[nn.Parameter], used: Iterable[bool]) -> None:
        """Remove the gradients of parameters that no replica used, so that the optimizer skips them."""
        for parameter, is_used in zip(parameters, used, strict=True):
            if not is_used:
                parameter.grad = None

    def drop_unused_by_all(self, parameters: Sequence[nn.Parameter], used: Sequence[bool]) -> None:
        """Share which parameters have a gradient, and drop those that no replica used. For reductions of DeepSpeed."""
        if self.may_be_missing and self.data_parallel_size > 1 and parameters:
            flags = torch.tensor(used, dtype=torch.uint8, device=parameters[0].device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
            self.drop_unused(parameters, flags.tolist())

    def reduce(self, gradients: Sequence[Tensor], average: bool, dtype: torch.dtype) -> None:
        """Replace gradients by their sums or averages over replicas, computed in ``dtype`` or a wider one."""
        for own in sorted({gradient.dtype for gradient in gradients}, key=str):
            same = [gradient for gradient in gradients if gradient.dtype == own]
            flat = flatten(same).to(torch.promote_types(own, dtype))
            dist.all_reduce(flat, group=self.group)
            copy_parts(flat / self.data_parallel_size if average else flat, same)

    def sum_tied(self, tied: Iterable[tuple[nn.Parameter, ProcessGroup]]) -> None:
        """Sum the gradients of tied parameters over the ranks that hold them. A missing gradient counts as zero."""
        for parameter, group in tied:
            used = self._is_used(parameter)
            if not used:
                self._fill([parameter])
            gradient = self.get(parameter)
            assert gradient is not None
            if self.may_be_missing:
                flag = torch.tensor(float(used), device=gradient.device)
                dist.all_reduce(flag, group=group)
                if not flag:
                    self.drop_unused([parameter], [False])
                    continue
            dist.all_reduce(gradient, group=group)

    def groups_within(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """Return the parameter groups of ZeRO that have no other parameters, and whose parts follow their order."""
        if not self._is_partitioned:
            return []
        ids = {id(parameter) for parameter in parameters}
        groups = enumerate(model_groups(self.optimizer))
        return [i for i, group in groups if group and all(id(parameter) in ids for parameter in group)]

    def flat_group(self, index: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of a parameter group as one padded vector of ``dtype``, and those of this rank's part.

        With the bf16 optimizer, whose memory it is, the vector has all averages itself and the list is empty.
        """
        if self._is_bf16:
            flat = self.optimizer.fp32_groups_gradients_flat[index]
            part = self.optimizer.fp32_groups_gradient_flat_partition[index]
            return (flat, []) if flat.dtype == dtype else (flat.to(dtype), [part])
        gradients = []
        for parameter in model_groups(self.optimizer)[index]:
            gradient = self.get(parameter)
            assert gradient is not None, "fill_missing() comes first"
            gradient.data = gradient.contiguous()
            gradients.append(gradient.view(-1))
        size = self.optimizer.bit16_groups_flat[index].numel()
        flat = torch.cat([*gradients, gradients[0].new_zeros(size - sum(g.numel() for g in gradients))])
        return flat.to(dtype), [piece for _, piece in self._own_pieces(gradients, size)]

    def _own_pieces(self, tensors: Sequence[Tensor], size: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, elements) of the tensors in this rank's part of ``size`` elements, the tensors one by one."""
        length = size // self.data_parallel_size
        first, offset = dist.get_rank(self.group) * length, 0
        for i, tensor in enumerate(tensors):
            flat = tensor.view(-1)
            start, stop = max(first - offset, 0), min(first + length - offset, flat.numel())
            if start < stop:
                yield i, flat[start:stop]
            offset += flat.numel()

    @contextmanager
    def norm_of_partitions(self) -> Iterator[None]:
        """Context of an optimizer step in which only the parts of the ranks hold averages.

        The norm of the bf16 optimizer would read all gradients of a rank; ZeRO's reads its parts.
        """
        if not self._is_bf16:
            yield
            return
        with measuring_bf16_norm(self.optimizer, self._norm_over_ranks):
            yield

    def _norm_over_ranks(self) -> Tensor:
        """Return the norm of the gradients that this rank counts, over the parts of all replicas."""
        optimizer = self.optimizer
        tensor_rank = bwc_tensor_model_parallel_rank(mpu=optimizer.mpu)
        groups = zip(
            optimizer.bf16_groups,
            optimizer.fp32_groups_gradients,
            optimizer.fp32_groups_gradients_flat,
            strict=True,
        )
        pieces = [
            piece
            for group, gradients, flat in groups
            for i, piece in self._own_pieces(gradients, flat.numel())
            if counts_here(group[i], tensor_rank)
        ]
        square = get_total_norm(pieces).to(get_accelerator().current_device_name()).square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    @property
    def accumulating(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Context of a backward, in which ZeRO and bf16 optimizers move its gradients to their buffers."""
        return functools.partial(_zero_backward, self.optimizer) if self._is_partitioned else None

    @contextmanager
    def corrected(self, factor: float, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Context of an optimizer step that multiplies the reduced gradients by ``factor``; 0: it changes no weight.

        The product is fp32. Overflows are found before it, the norm is that of the product.
        """
        if factor == 1:
            yield
        elif factor == 0:
            torch_optimizer = self.optimizer.optimizer if self._is_partitioned else self.optimizer
            with set_attribute(torch_optimizer, "step", _no_step):
                yield
        elif self._is_partitioned and not self._is_bf16:
            with correcting_zero(self.optimizer, factor):
                yield
        else:
            gradients = [gradient for gradient in map(self.get, parameters) if gradient is not None]
            half = sorted({str(g.dtype) for g in gradients if g.dtype in (torch.bfloat16, torch.float16)})
            if half:
                raise ConfigError(
                    f"loss_fn: a pair (sum, count) without a method counts(labels) needs gradients summed in fp32 (got "
                    f"{half[0]}). Add the method, use ZeRO stage 1, or remove grad_accum_dtype."
                )
            multiply(gradients, factor)
            yield

    def _fill(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._is_bf16:
            # Its sums are zeros from its construction on, but it leaves unused ones out of its norm.
            for i, j in (self._places[parameter] for parameter in parameters if parameter in self._places):
                self.optimizer.fp32_groups_has_gradients[i][j] = True
            return
        sums = self._is_zero_1_or_2 and self.optimizer.use_grad_accum_attribute
        for parameter in parameters:
            name, dtype = "grad", None
            if sums and parameter.numel() > 0:
                name, dtype = "grad_accum", self.optimizer.gradient_accumulation_dtype
            if parameter.requires_grad and getattr(parameter, name) is None:
                setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype))


def _no_step(*args: object, **kwargs: object) -> None:
    pass


@contextmanager
def _zero_backward(optimizer: ZeROOptimizer) -> Iterator[None]:
    optimizer.backward_prologue()
    yield
    optimizer.backward_epilogue()


def as_real(gradient: Tensor) -> Tensor:
    """Return a real view of a complex gradient, whose dtype a reduction cannot convert; others unchanged."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors as one vector: a new one, or a view of a single contiguous tensor."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


def copy_parts(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the elements of a vector, which may be padded, to tensors in the order of :func:`flatten`."""
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, part in zip(tensors, flat[: sum(sizes)].split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))
