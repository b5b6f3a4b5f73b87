"""Description of a kind of layers, shared by the files of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_ext.tensor_parallel import TensorParallel

WIDTH = 8
LENGTH = 5
HEADS = 2
VOCABULARY = 11


@dataclass(frozen=True)
class Place:
    """Position of a block in a model.

    Attributes:
        number: unique number of the block in its model, for the keys of ties.
        tp: tensor-parallel group of the rank.
    """

    number: int
    tp: TensorParallel


@dataclass(frozen=True)
class Kind:
    """Block of consecutive layers that maps (B, S, WIDTH) to (B, S, WIDTH).

    Attributes:
        layers: function that returns the layers of a block.
        fixed_length: the block needs S = LENGTH.
        statistics: the block changes buffers that its outputs in training depend on.
        rounds: the block computes in bf16 in an fp32 model, so that small errors become large ones.
        fp32: the block does not support bf16.
        changes_input: a layer changes its input in place, so that the layer cannot be recomputed from it.
        doubles: the block has fp64 weights, which ZeRO does not support.
        random: the block draws random numbers in training.
        weight: relative frequency in draws; more for kinds that only some schedules train incorrectly. 0: only habits
            draw it.
        changes_saved: the block changes a tensor that a backward needs, which torch or split backwards may refuse.
        inner_backward: the block calls torch.autograd.grad, which split backwards may refuse.
        changes_gradient: the block changes the gradient of its output in place, which torch forbids to functions.
        mixed: dtype of weights of the block, whatever that of the model is; None: that of the model.
        plain: function that returns the layers of a block in one process; None: ``layers``.
        keeps_gradient: with one sample, autograd keeps the memory of the gradient of the block's input as the gradient
            of a parameter.
    """

    layers: Callable[[Place], list[Any]]
    fixed_length: bool = False
    statistics: bool = False
    rounds: bool = False
    fp32: bool = False
    changes_input: bool = False
    doubles: bool = False
    random: bool = False
    weight: int = 1
    changes_saved: bool = False
    inner_backward: bool = False
    changes_gradient: bool = False
    keeps_gradient: bool = False
    mixed: torch.dtype | None = None
    plain: Callable[[Place], list[Any]] | None = None


class Made(nn.Module):
    """Module made by a function, because a LayerSpec needs a class."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = make()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def layer(layer_class: type[nn.Module], *args: Any, **options: Any) -> Kind:
    """Return a kind of one layer; ``options`` are fields of :class:`Kind`."""
    return Kind(lambda place: [LayerSpec(layer_class, *args)], **options)


def chain(*layer_classes: type[nn.Module], **options: Any) -> Kind:
    """Return a kind of consecutive layers without arguments; ``options`` are fields of :class:`Kind`."""
    return Kind(lambda place: [LayerSpec(layer_class) for layer_class in layer_classes], **options)
