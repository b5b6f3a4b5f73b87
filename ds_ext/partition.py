"""Which layers each stage of the model holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .errors import ConfigError
from .pipe_schedules import Placement

# What the layers in front of the first and behind the last transformer layer weigh, in transformer layers: enough to
# send one that is left over elsewhere.
_END = 0.5


def layer_boundaries(
    num_layers: int,
    before: int,
    after: int,
    placement: Placement,
    schedule: str,
    stage_layers: str | None = None,
) -> list[int]:
    """Cut ``num_layers`` equal layers into stages, as evenly as it goes.

    Layers that are left over go where the busiest device stays the least busy (with two pipes a device holds stages of
    both, which are cut alike), and among equals to later stages, which keep fewer activations.

    Args:
        before, after: layers of other kinds, which join the first and the last stage.
        placement: where the stages live.
        schedule: its name, for errors.
        stage_layers: the layers of every stage, ``"3,2,2,1"``, for example by measured time; None: evenly.

    Returns:
        The stages + 1 boundaries among before + num_layers + after layers.

    Raises:
        ConfigError: there are fewer layers than stages, or ``stage_layers`` does not fit.
    """
    stages = placement.stages
    if stage_layers is not None:
        counts = _given(stage_layers, num_layers, (before, after), stages, schedule)
    elif num_layers < stages:
        raise ConfigError(
            f"{schedule} cuts the model into {stages} stages, and num_layers is {num_layers}: some would be without a "
            f"layer. Use at least {stages} layers, or a smaller pipeline_parallel_size."
        )
    else:
        counts = _even(num_layers, (before, after), placement)
    inner = [before + sum(counts[:stage]) for stage in range(1, stages)]
    return [0, *inner, before + num_layers + after]


def stage_weights(boundaries: Sequence[int], before: int, after: int) -> tuple[float, ...] | None:
    """The layers of every stage as factors of their mean, as ``Costs.stages`` takes them; None if all are alike."""
    ends = [boundaries[0] + before, *boundaries[1:-1], boundaries[-1] - after]
    counts = [stop - start for start, stop in pairwise(ends)]
    mean = sum(counts) / len(counts)
    return None if len(set(counts)) == 1 else tuple(count / mean for count in counts)


def _even(num_layers: int, ends: tuple[int, int], placement: Placement) -> list[int]:
    stages = placement.stages
    counts = [num_layers // stages] * stages
    weights = [float(count) for count in counts]
    weights[0] += _END * bool(ends[0])
    weights[-1] += _END * bool(ends[1])
    homes = [[pipe[stage] for pipe in placement.pipes] for stage in range(stages)]
    loads = [0.0] * placement.ranks
    for stage, devices in enumerate(homes):
        for device in devices:
            loads[device] += weights[stage]
    for _ in range(num_layers % stages):
        stage = min(
            (stage for stage in range(stages) if counts[stage] == num_layers // stages),
            key=lambda stage: (max(loads[device] for device in homes[stage]), -stage),
        )
        counts[stage] += 1
        for device in homes[stage]:
            loads[device] += 1
    return counts


def _given(text: str, num_layers: int, ends: tuple[int, int], stages: int, schedule: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f'--stage-layers is a list of numbers with commas, for example "2,3,2"; got {text!r}.'
        ) from None
    if len(counts) != stages or sum(counts) != num_layers:
        raise ConfigError(
            f"--stage-layers {text} gives {len(counts)} stages {sum(counts)} layers in all; {schedule} cuts the model "
            f"into {stages} stages, and num_layers is {num_layers}."
        )
    # A stage at an end may do with the layers of other kinds.
    least = [
        int(not ((ends[0] and stage == 0) or (ends[1] and stage == stages - 1))) for stage in range(stages)
    ]
    bad = [stage for stage in range(stages) if counts[stage] < least[stage]]
    if bad:
        raise ConfigError(
            f"--stage-layers {text} leaves stage {bad[0]} with {counts[bad[0]]} layers. Give it at least "
            f"{least[bad[0]]}."
        )
    return counts
