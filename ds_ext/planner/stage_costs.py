"""Work of a model: layers and costs of each stage, operations, size of a message.

``Costs`` are for 1/D of the model, as if all stages were equal. They are not: layers may not divide evenly, the head is
on the last stage, and recomputation repeats the layers but not the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from ..errors import ConfigError, ScheduleError
from ..model.config import TransformerConfig
from ..parallel.partition import BALANCED as BALANCED_LAYERS
from ..parallel.partition import layer_boundaries
from ..parallel.slices import BALANCED, EQUAL, balanced_lengths, slice_bounds
from ..pipe_schedules import Placement
from ..pipe_schedules.costs import Costs, Factors
from ..pipe_schedules.stage_kinds import HEAD_PART
from .training_sizes import TrainingSizes

# A further slice takes as long as this many tokens in the matrix products of a layer: its kernels are shorter, and its
# attention joins blocks. Fitted to the layers of Llama 3 8B on an H200, in 2 to 8 slices of 8,192 and 32,768 tokens.
SLICE_TOKENS = 1300
_TILE, _LONG_SLICE = 128, 1024  # tokens of a kernel's tile, and of slices with whole tiles
_DIGITS = 8  # of a factor: precise enough for any plan, short enough for a readable JSON


def message_bytes(sizes: TrainingSizes) -> int:
    ranks = sizes.tensor_parallel if sizes.sequence_parallel else 1
    return sizes.token_bytes * sizes.tokens * sizes.hidden_size // ranks


def slice_slowdown(sizes: TrainingSizes, slices: int) -> float:
    """Return the time of the kernels of a micro-batch in slices, relative to that of a whole one."""
    work = sizes.layer_work
    return 1 + SLICE_TOKENS * (slices - 1) / sizes.tokens * work.matrices / work.total


def split_layers(
    sizes: TrainingSizes, placement: Placement, schedule: str, stage_layers: str | None = None
) -> TrainingSizes:
    """Return the model with the layers of each stage, assigned as in the scripts (:mod:`..parallel.partition`).

    Args:
        schedule: name of the schedule, for errors.
        stage_layers: value of the scripts' flag, such as ``"3,2,2,1"``; None: balanced by the work of layers and head.
    """
    if sizes.stage_layers is not None:
        sizes.stage_layer_counts(placement.stages)
        return sizes
    if sizes.num_layers < placement.stages and stage_layers in (None, BALANCED_LAYERS):
        raise ScheduleError(
            f"{sizes.num_layers} layers are fewer than {placement.stages} stages. Use more layers or fewer stages."
        )
    weights = 0.0, 0.0 if HEAD_PART in placement.stage_kinds else sizes.head_work(sizes.repeated_share)
    try:
        # One layer before the first transformer layer and one after the last; their number does not matter.
        bounds = layer_boundaries(sizes.num_layers, 1, 1, placement, schedule, stage_layers, weights)
    except ConfigError as error:
        raise ScheduleError(str(error)) from None
    counts = [stop - start for start, stop in pairwise(bounds)]
    counts[0] -= 1
    counts[-1] -= 1
    return replace(sizes, stage_layers=tuple(counts))


def slice_tokens(
    sizes: TransformerConfig, count: int, lengths: str | Sequence[int] = EQUAL, shards: int = 1
) -> tuple[int, ...]:
    """Return the tokens of every slice; balanced long ones are multiples of a kernel's tile.

    Args:
        lengths: value of ``"slice_lengths"``.
        shards: ranks over which sequence parallelism distributes the tokens of a slice.
    """
    tokens = sizes.seq_length
    if lengths == BALANCED:
        in_tiles = tokens % (_TILE * shards) == 0 and tokens >= _LONG_SLICE * count
        lengths = balanced_lengths(sizes.work_until, tokens, count, shards * (_TILE if in_tiles else 1))
    return tuple(stop - start for start, stop in slice_bounds(tokens, count, lengths, shards))


def slice_costs(costs: Costs, sizes: TransformerConfig, lengths: Sequence[float]) -> Costs:
    """Return ``costs`` with the work of every slice, unless they have it. Later tokens attend to more keys.

    ``lengths`` are the tokens of every slice.
    """
    if len(lengths) < 2 or costs.slices is not None:
        return costs
    mean = sizes.work_until(sum(lengths)) / len(lengths)
    ends = map(sizes.work_until, accumulate(lengths, initial=0))
    return replace(costs, slices=tuple(round((end - start) / mean, _DIGITS) for start, end in pairwise(ends)))


def stage_costs(costs: Costs, sizes: TrainingSizes, parts: int = 0) -> Costs:
    """Return ``costs`` with recomputation and the share of each stage in the model's work.

    One factor applies to forward and backward alike. Factors in ``costs`` are kept, because they may be measured.

    Args:
        sizes: model with the layers of each stage, from :func:`split_layers`.
        parts: parts of the head, one per device; 0: the last stage has the head.
    """
    assert sizes.stage_layers is not None, "split_layers() comes first"
    repeated, is_included = sizes.repeated_share, bool(costs.measured.get("recomputes"))
    recomputes = is_included and bool(repeated)  # else it is added here
    costs.check_measured({"tensor_parallel_size": sizes.tensor_parallel, "recomputes": recomputes})
    repeated = 0.0 if is_included else repeated
    whole = costs.forward + costs.backward_input + costs.backward_weight
    recomputed = costs.with_recompute(repeated)
    if costs.stages is not None or not whole:
        return recomputed
    head_layers = replace(sizes, chunked_loss=False).head_work()  # in the operations that the rate is for
    # Only ratios matter: a layer costs as much as 1/D of the model in ``costs``.
    layer_cost = whole + repeated * costs.forward
    added = repeated * sizes.recompute_interval * costs.forward
    every = sizes.recompute_interval
    stage_cost = []
    for first, end in pairwise(accumulate(sizes.stage_layers, initial=0)):
        recomputing = -(-end // every) - -(-first // every)  # multiples of the interval
        stage_cost.append((end - first) * whole + recomputing * added)
    if not parts:
        stage_cost[-1] += sizes.head_work() * whole
    # Cost of a stage if the model were divided evenly and the head recomputed too.
    even_share = (sizes.num_layers + head_layers) * layer_cost / len(stage_cost)
    factors = tuple(round(cost / even_share, _DIGITS) for cost in stage_cost)
    if parts and not costs.head:
        share = head_layers / (sizes.num_layers + head_layers) * parts  # of 1/D of the model
        head = _head_factors(costs, recomputed, share)
        recomputed = replace(recomputed, head=tuple(round(factor, _DIGITS) for factor in head))
    return recomputed if set(factors) == {1.0} else replace(recomputed, stages=factors)


def _head_factors(costs: Costs, recomputed: Costs, share: float) -> Factors:
    """Return the factors of a head with this share of 1/D of the model, which is not recomputed.

    ``recomputed`` are the costs with the recomputation of layers, to which the factors apply.
    """
    times = costs.forward, costs.backward_input, costs.backward_weight
    units = recomputed.forward, recomputed.backward_input, recomputed.backward_weight
    forward, backward_input, weight = (share * t / u if u else 0.0 for t, u in zip(times, units, strict=True))
    return forward, backward_input, weight
