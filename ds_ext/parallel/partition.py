"""Which layers each stage of the model holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..errors import ConfigError
from ..pipe_schedules import Placement

# What the layers in front of the first and behind the last transformer layer weigh, in transformer layers, when that is
# not known: enough to send one that is left over elsewhere.
_END = 0.5
BALANCED = "balanced"  # in place of the layers of every stage: count the head's work too


def end_weights(hidden: int, seq: int, vocab: int, again: float = 0.0) -> tuple[float, float]:
    """The work of embedding and head, in transformer layers, as :func:`layer_boundaries` takes it.

    Looking up an embedding is no work. A head's forward is 2bshV operations against 24bsh² + 4bs²h of a layer (arXiv
    2104.04473, appendix; s the sequence length, h the hidden size, V the vocabulary), its backward twice as many.

    Args:
        again: share of a layer's forward that its backward computes again; 1 for full recomputation.
    """
    return 0.0, vocab / (12 * hidden + 2 * seq) * 3 / (3 + again)


def layer_boundaries(
    num_layers: int,
    before: int,
    after: int,
    placement: Placement,
    schedule: str,
    stage_layers: str | None = None,
    weights: tuple[float, float] | None = None,
) -> list[int]:
    """Cut ``num_layers`` equal layers into stages, as evenly as it goes.

    Each goes where the busiest device stays the least busy (with two pipes a device holds stages of both, which are cut
    alike), there to the smallest stage if ``weights`` are known, and among equals to later ones, which keep fewer
    activations.

    Args:
        before, after: layers of other kinds, which join the first and the last stage.
        placement: where the stages live.
        schedule: its name, for errors.
        stage_layers: the layers of every stage, ``"3,2,2,1"``, for example by measured time; None or ``BALANCED``:
            evenly, as far as ``weights`` tell.
        weights: of the layers of other kinds, in transformer layers, from :func:`end_weights`: stages at the ends then
            hold as many fewer. None: not known, and only layers that are left over are kept from the ends.

    Returns:
        The stages + 1 boundaries among before + num_layers + after layers.

    Raises:
        ConfigError: there are fewer layers than stages, or ``stage_layers`` does not fit.
    """
    stages = placement.stages
    if stage_layers is not None and stage_layers != BALANCED:
        counts = _given(stage_layers, num_layers, (before, after), placement, schedule)
    elif num_layers < stages:
        raise ConfigError(_too_few(num_layers, placement, schedule))
    else:
        counts = _even(num_layers, (before, after), placement, weights)
    inner = [before + sum(counts[:stage]) for stage in range(1, stages)]
    return [0, *inner, before + num_layers + after]


def stage_weights(
    boundaries: Sequence[int], before: int, after: int, weights: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, ...] | None:
    """The work of every stage as factors of its mean, as ``Costs.stages`` takes them; None if all are alike.

    ``weights`` are those of the layers of other kinds, as for :func:`layer_boundaries`.
    """
    ends = [boundaries[0] + before, *boundaries[1:-1], boundaries[-1] - after]
    counts: list[float] = [stop - start for start, stop in pairwise(ends)]
    counts[0] += weights[0]
    counts[-1] += weights[1]
    mean = sum(counts) / len(counts)
    return None if len(set(counts)) == 1 else tuple(count / mean for count in counts)


def _stages(placement: Placement, schedule: str) -> str:
    """Into how many stages, and where these come from."""
    each = placement.stages // placement.width
    on_each = f", {each} for each of {placement.width} devices" if each > 1 else ""
    return f"{schedule} cuts the model into {placement.stages} stages{on_each}"


def _too_few(num_layers: int, placement: Placement, schedule: str) -> str:
    """Both numbers and the ways out."""
    stages, devices = placement.stages, placement.width
    ways, most = f"at least {stages} layers", num_layers // (stages // devices)
    if placement.replicas == 2 and placement.pipes[1] == tuple(devices - 1 - d for d in placement.pipes[0]):
        most -= most % 2  # devices work in mirrored pairs
    if most:
        ways += f", or a pipeline_parallel_size of at most {most} (now {devices})"
    return (
        f"{_stages(placement, schedule)}, and num_layers is {num_layers}: a stage needs at least 1 transformer layer. "
        f"Use {ways}."
    )


def _even(
    num_layers: int, ends: tuple[int, int], placement: Placement, weights: tuple[float, float] | None
) -> list[int]:
    stages = placement.stages
    first, last = weights or (_END * bool(ends[0]), _END * bool(ends[1]))
    counts = [num_layers // stages if weights is None else 1] * stages
    if weights is not None:
        # A stage with as much other work as a layer may do without one.
        counts[0] -= bool(ends[0]) and first >= 1
        counts[-1] -= bool(ends[1]) and last >= 1 and stages > 1
    work = [float(count) for count in counts]
    work[0] += first
    work[-1] += last
    homes = [[pipe[stage] for pipe in placement.pipes] for stage in range(stages)]
    loads = [0.0] * placement.ranks
    for stage, devices in enumerate(homes):
        for device in devices:
            loads[device] += work[stage]

    def busy(stage: int) -> tuple[float, float, int]:
        # Rounded, as sums of the same weights in another order differ.
        own = 0.0 if weights is None else round(work[stage], 9)
        return round(max(loads[device] for device in homes[stage]), 9), own, -stage

    base = num_layers // stages
    for _ in range(num_layers - sum(counts)):
        # Where the ends are only guessed at, no stage gets two layers more than another.
        free = (stage for stage in range(stages) if weights is not None or counts[stage] == base)
        stage = min(free, key=busy)
        counts[stage] += 1
        work[stage] += 1
        for device in homes[stage]:
            loads[device] += 1
    return counts


def _given(
    text: str, num_layers: int, ends: tuple[int, int], placement: Placement, schedule: str
) -> list[int]:
    stages = placement.stages
    # Where the layers can be cut evenly, that is an example of what to give.
    even = _even(num_layers, ends, placement, None) if num_layers >= stages else []
    example = f", for example --stage-layers {','.join(map(str, even))}" if even else ""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f'--stage-layers is a list of numbers with commas, for example "2,3,2", or "{BALANCED}"; got {text!r}.'
        ) from None
    if len(counts) != stages or sum(counts) != num_layers:
        raise ConfigError(
            f"--stage-layers {text} gives {len(counts)} stages {sum(counts)} layers in all; "
            f"{_stages(placement, schedule)}, and num_layers is {num_layers}. Give one number a stage, {num_layers} "
            f'layers in all{example}, or "{BALANCED}".'
        )
    # A stage at an end may do with the layers of other kinds.
    least = [
        int(not ((ends[0] and stage == 0) or (ends[1] and stage == stages - 1))) for stage in range(stages)
    ]
    bad = [stage for stage in range(stages) if counts[stage] < least[stage]]
    if bad:
        may = [name for name, end in zip(("first", "last"), ends, strict=True) if end and stages > 1]
        which = (
            f" (only the {' and the '.join(may)} may do without: other layers are there too)" if may else ""
        )
        raise ConfigError(
            f"--stage-layers {text} gives stage {bad[0]}, counted from 0 to {stages - 1}, {counts[bad[0]]} layers, and "
            f"it needs at least {least[bad[0]]}{which if least[bad[0]] else ''}. Move some there{example}, or leave "
            f"--stage-layers out."
        )
    return counts
