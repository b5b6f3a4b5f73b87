"""State of one step, which the stages of a rank share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .evaluation import Evaluation
from .losses.local import Loss
from .stages.sequences import Sequences
from .types import Batch


class Data(Protocol):
    """Micro-batches of a step. ``first_id`` is the global number of the first one."""

    first_id: int

    def take(self, micro_batch: int) -> tuple[Batch, Batch]:
        """Return the inputs and labels for one stage."""
        ...

    def weight(self, micro_batch: int) -> float:
        """Return the weight of the loss in that of the step; 0: it does not count."""
        ...


def _require_optimizer(loss: Loss) -> Tensor:
    raise AssertionError("only an engine with an optimizer scales losses")


@dataclass(frozen=True, slots=True)
class BackwardContext:
    """Functions and parameters of the optimizer, for the backwards of a rank.

    Attributes:
        backward_root: function of a loss; returns what its backward starts from.
        accumulating: context of a backward.
        parameters: parameters that keep gradients between the micro-batches of a step.
    """

    backward_root: Callable[[Loss], Tensor] = _require_optimizer
    accumulating: Callable[[], AbstractContextManager[None]] = nullcontext
    parameters: Sequence[Tensor] = ()


def item_of(micro_batch: int, slice_index: int, slices: int) -> int:
    """Return the number of a slice in the step, as in the tags of messages."""
    return micro_batch * slices + slice_index


@dataclass(frozen=True, slots=True)
class Step:
    """A training step or an evaluation.

    Args:
        steps_done: steps before this one.
        data: micro-batches of the step.
        sequences: how the sequences of its micro-batches are cut.
        evaluation: what to keep. The default is that of a training step: the loss only.
        splits: (stage, micro-batch) of split backwards.
        backwards: what its backwards need of the optimizer.
    """

    steps_done: int
    data: Data
    sequences: Sequences
    evaluation: Evaluation
    splits: frozenset[tuple[int, int]]
    backwards: BackwardContext

    def item(self, micro_batch: int, slice_index: int) -> int:
        return item_of(micro_batch, slice_index, self.sequences.count)
