"""Kinds of stages, as schedules see them: their ops, weights and messages. The engine has a class for each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

_WHOLE_OR_SPLIT = (BACKWARD,), (BACKWARD_INPUT, BACKWARD_WEIGHT)


@dataclass(frozen=True)
class StageKind:
    """Kind of a stage.

    Args:
        name: text of a stage in tables, with a number if the kind has weights.
        backwards: valid sets of kinds of backwards that a micro-batch has at the stage. If one of them is a whole
            backward, it passes gradients to the sources of the stage; otherwise the forward does.
        has_weights: whether a device reduces, gathers and saves weights of the stage.
        activations, gradients: tensors of hidden states in a message that the stage receives.
    """

    name: str
    backwards: tuple[tuple[str, ...], ...] = _WHOLE_OR_SPLIT
    has_weights: bool = True
    activations: int = 1
    gradients: int = 1

    @property
    def gradient_kind(self) -> str:
        """Kind of the op that passes gradients on; BACKWARD also stands for BACKWARD_INPUT."""
        return BACKWARD if (BACKWARD,) in self.backwards else FORWARD


BODY = StageKind("layers")
# The forward of a head part also computes its share of the input gradient, so only its weight gradient remains. It
# gets a few numbers per token back, and the loss two tensors of hidden states from each part.
HEAD_PART = StageKind("head part", ((BACKWARD_WEIGHT,),), gradients=0)
HEAD_LOSS = StageKind("loss", ((),), has_weights=False, activations=2)


class StageRow(NamedTuple):
    """Stage in the table of a placement.

    Args:
        sources: stages whose outputs it reads; none: it reads the data.
        gradients: stages that pass it the gradients of its outputs; none: it computes the loss.
    """

    kind: StageKind
    sources: tuple[int, ...]
    gradients: tuple[int, ...]


def chain(stages: int) -> tuple[StageRow, ...]:
    """Return the table of stages of layers, each of which reads the one before."""
    return tuple(
        StageRow(BODY, (stage - 1,) if stage else (), (stage + 1,) if stage + 1 < stages else ())
        for stage in range(stages)
    )


def chain_to_parts(stages: int, parts: int) -> tuple[StageRow, ...]:
    """Return the table of stages of layers, of the parts of the head, and of the loss that joins them."""
    last, loss = stages - 1, stages + parts
    return (
        *chain(stages)[:-1],
        StageRow(BODY, (last - 1,) if last else (), (loss,)),
        *(StageRow(HEAD_PART, (last,), (loss,)) for _ in range(parts)),
        StageRow(HEAD_LOSS, tuple(range(stages, loss)), ()),
    )
