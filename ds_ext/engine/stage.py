"""Compute of one stage for one micro-batch: its buffer, forward, loss and backward."""

from __future__ import annotations

import functools
import logging
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from ..tensor_parallel import Deferral, DeferralWatch, WeightGradients, backward, let_defer
from .messages import unpack
from .module import PipelineModule

logger = logging.getLogger(__name__)

# How torch refuses to write to a tensor whose gradient it is to give.
_WRITES_TO_LEAF = "leaf Variable that requires grad"
# How torch and its layers refuse inputs of another precision than their weights.
_OTHER_DTYPE = re.compile(r"dtype|scalar type|should be the same")
_WORTH_SPLITTING = 0.5  # share of the deferred elements
_NAMED = 4  # parameters in a message


@dataclass(slots=True)
class Buffer:
    """Storage of one live (stage, micro-batch).

    Attributes:
        inputs: inputs of the stage; leaves of its graph.
        labels: labels of the micro-batch; last stage only.
        outputs: outputs of the stage, with their graph.
        loss: loss of the micro-batch, with its graph; last stage only.
        grads: gradients of the outputs.
        weights: weight gradients that a split backward has left to compute.
    """

    inputs: tuple[Tensor, ...] | None = None
    labels: tuple[Tensor, ...] | None = None
    outputs: tuple[Tensor, ...] | None = None
    loss: Tensor | None = None
    grads: tuple[Tensor, ...] | None = None
    weights: WeightGradients | None = None

    def set_inputs(self, tensors: tuple[Tensor, ...]) -> None:
        """Make ``tensors`` the start of the stage's graph, where training needs one."""
        trains = torch.is_grad_enabled()
        self.inputs = tuple(t.requires_grad_(trains and _differentiable(t)) for t in tensors)

    def take_input_grads(self) -> tuple[Tensor, ...]:
        """Return and drop the gradients of the inputs that can have one; zeros for an input without use."""
        assert self.inputs is not None
        inputs, self.inputs = self.inputs, None
        return tuple(_take_grad(t) for t in inputs if _differentiable(t))

    def backward(self, scale: Callable[[Tensor], Tensor]) -> None:
        """Go back through the graph from the scaled loss, or from the gradients of the outputs; drop the graph."""
        roots: list[tuple[Tensor, Tensor | None]]
        if self.loss is not None:
            roots = [(scale(self.loss), None)]
        else:
            assert self.outputs is not None and self.grads is not None
            outputs = [t for t in self.outputs if _differentiable(t)]
            pairs = zip(outputs, self.grads, strict=True)
            roots = [(output, grad) for output, grad in pairs if output.requires_grad]
        backward([output for output, _ in roots], [grad for _, grad in roots])
        self.outputs = self.grads = self.loss = None


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _take_grad(tensor: Tensor) -> Tensor:
    # A split backward keeps the tensor for the weight gradients, so its gradient is removed from it.
    grad, tensor.grad = tensor.grad, None
    return torch.zeros_like(tensor) if grad is None else grad


class StageForward:
    """Forward of this rank's stages.

    Args:
        module: holds the stages.
    """

    def __init__(self, module: PipelineModule) -> None:
        self._module = module
        self._writing_stages: set[int] = set()  # those that begin with an operation in place

    def __call__(self, stage: int, inputs: tuple[Tensor, ...], step: int, micro_batch: int) -> Any:
        """Return the outputs of a stage.

        Args:
            step, micro_batch: global ids, for layers that draw random numbers.

        Raises:
            ConfigError: the inputs of the first stage have another precision than its weights.
        """
        # Inputs are leaves, and torch refuses to write to a leaf: a stage that does gets them behind an identity.
        if stage not in self._writing_stages:
            try:
                return self._module.forward_stage(stage, unpack(inputs), step, micro_batch)
            except RuntimeError as error:
                if _WRITES_TO_LEAF not in str(error):
                    self._refuse_dtypes(error, stage, inputs)
                    raise
                self._writing_stages.add(stage)
        return self._module.forward_stage(stage, unpack(map(_enter, inputs)), step, micro_batch)

    def _refuse_dtypes(self, error: RuntimeError, stage: int, inputs: tuple[Tensor, ...]) -> None:
        """Raise ConfigError where the model failed because its inputs have another precision."""
        if stage != 0 or not _OTHER_DTYPE.search(str(error)):
            return
        received = {t.dtype for t in inputs if t.is_floating_point()}
        weights = {p.dtype for p in self._module.stage_parameters(0) if p.is_floating_point()}
        if weights and received - weights:
            theirs, ours = (", ".join(sorted(map(str, kinds))) for kinds in (received, weights))
            raise ConfigError(
                f"inputs: the first stage computes in {ours} (got inputs of {theirs}). Cast them with "
                f"inputs.to({ours}) in the first layer, in the data set or in collate_fn."
            ) from error


class _Enter(torch.autograd.Function):
    """Identity on the same memory, whose result is no leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _enter(tensor: Tensor) -> Tensor:
    return _Enter.apply(tensor) if tensor.requires_grad else tensor


def loss_of(loss_fn: Callable[..., Any] | None, outputs: Any, labels: tuple[Tensor, ...] | None) -> Tensor:
    """Return the loss of a micro-batch; without a loss function the outputs are the loss, as in DeepSpeed.

    Raises:
        ConfigError: the loss is not one number, or has no gradient in training.
    """
    loss = outputs if loss_fn is None else loss_fn(outputs, None if labels is None else unpack(labels))
    if isinstance(loss, int | float):
        raise ConfigError(
            f"loss_fn: it must return a tensor, which has a gradient (got the {type(loss).__name__} {loss}). Return "
            f"the loss itself, without .item() or float()."
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else None
        raise ConfigError(
            f"the loss of a micro-batch must be one number; loss_fn (or, without one, the last layer) gives "
            f"{shape or f'a {type(loss).__name__}'}. Take its mean."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ConfigError(
            "loss_fn: its loss has no gradient (got a tensor without grad_fn). Compute it from the outputs, "
            "without detach() or torch.no_grad()."
        )
    return loss.reshape(())


class DeferralReport:
    """Weight gradients that the split backwards of the first step deferred; rank 0 logs them once.

    A schedule that splits backwards gains by them alone; other gradients are computed with the input gradient.

    Args:
        module: its layers are made able to defer.
        schedule: name, for the log.
    """

    def __init__(self, module: PipelineModule, schedule: str) -> None:
        self._module, self._schedule = module, schedule
        let_defer(module)
        self._watch = DeferralWatch(module.parameters())

    def add(self, later: WeightGradients) -> None:
        """Record what a first half deferred; call it before ``later.compute()``."""
        self._watch.add(later)

    def finish(self) -> float:
        """Log and return the share of the deferred elements; a collective call of all ranks."""
        self._watch.close()
        named = (
            (f"{name} of layer {index} ({type(layer).__name__})", parameter)
            for stage in self._module.stages
            for index, layer in self._module.stage_modules(stage).items()
            for name, parameter in layer.named_parameters()
        )
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self._watch.deferral(named))
        total: Deferral = functools.reduce(operator.add, found)
        if dist.get_rank() == 0:
            self._log(total)
        return total.share

    def _log(self, total: Deferral) -> None:
        percent, at_once = 100 * total.share, ", ".join(total.largest_at_once[:_NAMED]) or "none"
        if total.share >= _WORTH_SPLITTING:
            logger.info(
                "%s: deferred weight gradients: %.1f%%, at once: %s", self._schedule, percent, at_once
            )
            return
        logger.warning(
            "%s: deferred weight gradients: %.1f%% of the elements, so splitting backwards gains little. Computed "
            "with the input gradient: %s. In these layers use nn.Linear, nn.Embedding or "
            "ds_ext.tensor_parallel.linear (docs/schedules.md).",
            self._schedule,
            percent,
            at_once,
        )
