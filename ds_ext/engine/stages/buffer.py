"""Storage of one live slice of a micro-batch at a stage, and its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...tensor_parallel import WeightGradients, address, backward
from ..losses.local import Loss
from ..messages import is_marker, marker
from ..step import BackwardContext

Root = tuple[Tensor | GradientEdge, Tensor | None]
"""Start of a backward, with its gradient; None: the gradient of a scalar is 1."""


@dataclass(slots=True)
class Buffer:
    """Storage for one live slice of a micro-batch at a stage.

    Attributes:
        inputs: inputs of the stage, the leaves of its graph.
        labels: labels of the micro-batch; last stage only.
        outputs: outputs of the stage, with their graph, until they are passed on.
        edges: afterwards, the edge of every differentiable output in the graph; None for one without a gradient.
        loss: loss of the micro-batch, with its graph; last stage only.
        grads: gradients of the outputs; a marker for an output that the loss does not depend on.
        deferred: weight gradients of a split backward, until its second half.
        kept: what a kind of stage keeps for a later op or message of the same slice.
    """

    inputs: tuple[Tensor, ...] | None = None
    labels: tuple[Tensor, ...] | None = None
    outputs: tuple[Tensor, ...] | None = None
    edges: tuple[GradientEdge | None, ...] = ()
    loss: Loss | None = None
    grads: tuple[Tensor, ...] | None = None
    deferred: WeightGradients | None = None
    kept: Any = None

    def set_inputs(self, tensors: tuple[Tensor, ...]) -> None:
        """Set the inputs. In training, they become the leaves of the stage's graph."""
        trains = torch.is_grad_enabled()
        self.inputs = tuple(t.requires_grad_(trains and _differentiable(t)) for t in tensors)

    def take_outputs(self) -> tuple[Tensor, ...]:
        """Return the outputs. In training they are not kept: a backward needs only their edges."""
        outputs = self.outputs
        assert outputs is not None
        if torch.is_grad_enabled():  # forward ranks send them twice
            differentiable = [tensor for tensor in outputs if _differentiable(tensor)]
            self.edges = tuple([get_gradient_edge(t) if t.requires_grad else None for t in differentiable])
            self.outputs = None
        return outputs

    def take_input_grads(self) -> tuple[Tensor, ...]:
        """Return the gradients of the differentiable inputs, a marker for an unused input, and drop the inputs."""
        assert self.inputs is not None
        inputs, self.inputs = self.inputs, None
        return tuple(_take_grad(t) for t in inputs if _differentiable(t))

    def take_grads(self) -> tuple[Tensor, ...]:
        grads, self.grads = self.grads, None
        assert grads is not None
        return grads

    def take_roots(self, backward_root: Callable[[Loss], Tensor]) -> list[Root]:
        """Return what a backward starts from: the scaled loss, or the edges of the outputs and their gradients."""
        if self.loss is not None:
            return [(backward_root(self.loss), None)]
        if self.outputs is not None:
            self.take_outputs()  # a repeated forward, which nothing is sent after
        assert self.grads is not None
        pairs = zip(self.edges, self.grads, strict=True)
        return [(edge, grad) for edge, grad in pairs if edge is not None and not is_marker(grad)]

    def backward(
        self,
        context: BackwardContext,
        more_roots: Iterable[Root] = (),
        leaves: Iterable[Tensor] = (),
    ) -> None:
        """Run the backward and drop the graph.

        ``more_roots`` are started from together with :meth:`take_roots`; ``leaves`` are further leaves of the graph.

        Autograd may keep one tensor, without a copy, as the gradient of an input and of several parameters. The next
        micro-batch adds to a parameter's gradient in place, which would change the others too, and what the other
        stage and deferred gradients read. So no two of them keep the same memory.
        """
        roots = [*self.take_roots(context.backward_root), *more_roots]
        self.outputs = None  # the loss has read them
        without_grad = [parameter for parameter in context.parameters if parameter.grad is None]
        if roots:  # none if all layers up to here are frozen, or the loss does not depend on them
            backward(*zip(*roots, strict=True))
        self.grads = self.loss = self.kept = None
        self.edges = ()
        read = set() if self.deferred is None else self.deferred.memory
        _separate_grads((*(self.inputs or ()), *leaves, *without_grad), read)


def _differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _separate_grads(tensors: Iterable[Tensor], taken: set[int]) -> None:
    """Copy the gradients of ``tensors`` whose memory is in ``taken`` or is that of an earlier one."""
    for tensor in tensors:
        if not tensor.is_leaf or tensor.grad is None:  # a layer may change the data in place
            continue
        if address(tensor.grad) in taken:
            tensor.grad = tensor.grad.clone()
        else:
            taken.add(address(tensor.grad))


def _take_grad(tensor: Tensor) -> Tensor:
    # Remove the gradient: a split backward keeps the tensor for the weight gradients.
    grad, tensor.grad = tensor.grad, None
    return marker(tensor) if grad is None else grad
