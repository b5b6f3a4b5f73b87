"""What a model makes of costs: how it is cut into stages, how much work each is, and what recomputation adds.

``Costs`` are for one D-th of the model, as if all stages were alike. They are not: layers may not divide by the
stages, the head is all on the last one, and a backward that recomputes does so for its layers but not for the head.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ..errors import ConfigError, ScheduleError
from ..parallel.partition import BALANCED, end_weights, layer_boundaries
from ..pipe_schedules import Placement
from ..pipe_schedules.costs import Costs
from .memory import ModelSizes

_DIGITS = 8  # of a factor: enough for any plan, and a job's JSON stays readable


def recomputed(recompute: str, hidden: int, seq: int) -> float:
    """Share of a layer's forward that its backward computes again."""
    if recompute == "selective":
        # 4bs²h of a layer's 24bsh² + 4bs²h operations.
        return seq / (6 * hidden + seq)
    return 1.0 if recompute == "full" else 0.0


def _recomputed(sizes: ModelSizes) -> float:
    return recomputed(sizes.recompute, sizes.hidden, sizes.seq)


def cut(
    sizes: ModelSizes, placement: Placement, schedule: str, stage_layers: str | None = None
) -> ModelSizes:
    """The model with the layers of every stage, cut as the scripts cut it (:mod:`..parallel.partition`).

    Args:
        schedule: its name, for errors.
        stage_layers: ``"3,2,2,1"`` as the scripts' flag; None: by the work of layers and head.

    Raises:
        ScheduleError: there are fewer layers than stages, or layers that are given for every stage do not fit.
    """
    if not isinstance(sizes.layers, int):
        sizes.layers_of(placement.stages)
        return sizes
    if sizes.layers < placement.stages and stage_layers in (None, BALANCED):
        raise ScheduleError(
            f"{sizes.layers} layers are fewer than the {placement.stages} stages. Use as many layers, or fewer stages."
        )
    weights = end_weights(sizes.hidden, sizes.seq, sizes.vocab, _recomputed(sizes))
    try:
        # Something is in front of the first and behind the last layer, and how many does not count.
        bounds = layer_boundaries(sizes.layers, 1, 1, placement, schedule, stage_layers, weights)
    except ConfigError as error:
        raise ScheduleError(str(error)) from None
    counts = [stop - start for start, stop in pairwise(bounds)]
    counts[0] -= 1
    counts[-1] -= 1
    return replace(sizes, layers=tuple(counts))


def stage_costs(costs: Costs, sizes: ModelSizes) -> Costs:
    """``costs`` with recomputation, and for each stage its share of the model's work.

    Factors that ``costs`` already has, as they may be measured, stay.

    Args:
        sizes: from :func:`cut`.
    """
    assert not isinstance(sizes.layers, int), "cut comes before"
    again, whole = _recomputed(sizes), costs.forward + costs.backward_input + costs.backward_weight
    with_again = (
        replace(costs, backward_input=costs.backward_input + again * costs.forward) if again else costs
    )
    if costs.stages is not None or not whole:
        return with_again
    _, head = end_weights(sizes.hidden, sizes.seq, sizes.vocab)
    layer = whole + again * costs.forward
    work = [count * layer for count in sizes.layers]
    work[-1] += head * whole
    # What a stage would take if the model were one D-th on every device, and the head recomputed too.
    mean = (sum(sizes.layers) + head) * layer / len(work)
    factors = tuple(round(part / mean, _DIGITS) for part in work)
    return with_again if set(factors) == {1.0} else replace(with_again, stages=factors)
