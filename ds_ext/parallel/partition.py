"""Assignment of layers to stages. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..errors import ConfigError
from ..pipe_schedules import Placement
from ..pipe_schedules.definition import REGISTERED

# Default work, in transformer layers, of the layers before the first and after the last transformer layer. It is large
# enough to keep surplus layers away from the ends.
_DEFAULT_END_WORK = 0.5
BALANCED = "balanced"  # value of --stage-layers: include the head's work


@dataclass(frozen=True)
class LayerWork:
    """Multiplications of a transformer layer's forward for one token.

    Attributes:
        matrices: those of the linear layers; without experts the number of their weights.
        attention: those of the attention scores and of the weighted sums of values.
    """

    matrices: float
    attention: int

    @property
    def total(self) -> float:
        return self.matrices + self.attention


def layer_boundaries(
    num_layers: int,
    before: int,
    after: int,
    placement: Placement,
    schedule: str,
    stage_layers: str | None = None,
    weights: tuple[float, float] | None = None,
) -> list[int]:
    """Divide ``num_layers`` identical layers into stages as evenly as possible.

    If the layers do not divide evenly, they are assigned to minimize the maximum device load. With two pipes, both have
    the same boundaries, and a device's load includes its stages of both. Ties go to the stage with the least work if
    ``weights`` are known, then to the last stage, which keeps the fewest activations.

    Args:
        before, after: numbers of other layers at the start of the first stage, and at the end of the last one.
        schedule: name of the schedule, for errors.
        stage_layers: transformer layers of every stage, as ``"3,2,2,1"``; None or ``BALANCED``: even.
        weights: work of the other layers at both ends, in transformer layers; the stages at
            the ends then hold fewer transformer layers. None: only surplus layers avoid the ends.

    Returns:
        Boundaries of the stages (stages + 1 numbers) among before + num_layers + after layers.
    """
    stages = placement.stages
    if stage_layers is not None and stage_layers != BALANCED:
        counts = _parse_stage_layers(stage_layers, num_layers, (before, after), placement, schedule)
    elif num_layers < stages:
        raise ConfigError(_too_few_layers(num_layers, placement, schedule))
    else:
        counts = _even_counts(num_layers, (before, after), placement, weights)
    inner = [before + sum(counts[:stage]) for stage in range(1, stages)]
    return [0, *inner, before + num_layers + after]


@dataclass(frozen=True)
class StageWork:
    """Work of the stages and slices of a model; that of stages is relative to the mean, from :func:`stage_weights`.

    Attributes:
        stages: as the layers are divided; None: equal.
        balanced: as ``BALANCED`` divides them; None: equal.
        slices: work of every slice of a sequence; None: equal.
        head: work of a head in parts, relative to 1/D of the layers.
        parts: work if the head, which the last stage has, were in parts; None: it cannot be, or is.
    """

    stages: tuple[float, ...] | None
    balanced: tuple[float, ...] | None
    slices: tuple[float, ...] | None = None
    head: float = 0.0
    parts: StageWork | None = None

    @property
    def is_balanced(self) -> bool:
        """True if ``BALANCED`` divides the layers in the same way."""
        return self.stages == self.balanced


def stage_weights(
    boundaries: Sequence[int], before: int, after: int, weights: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, ...] | None:
    """Return the work of every stage divided by the mean, for ``Costs.stages``; None if all are equal.

    ``boundaries`` is the result of :func:`layer_boundaries`, which has the other arguments too.
    """
    ends = [boundaries[0] + before, *boundaries[1:-1], boundaries[-1] - after]
    counts: list[float] = [stop - start for start, stop in pairwise(ends)]
    counts[0] += weights[0]
    counts[-1] += weights[1]
    mean = sum(counts) / len(counts)
    return None if len(set(counts)) == 1 else tuple(count / mean for count in counts)


def _describe_stages(placement: Placement, schedule: str) -> str:
    per_device = placement.stages // placement.devices_per_pipe
    detail = f" ({per_device} per device)" if per_device > 1 else ""
    return f"{schedule} with {placement.stages} stages{detail}"


def _too_few_layers(num_layers: int, placement: Placement, schedule: str) -> str:
    stages, devices = placement.stages, placement.devices_per_pipe
    fix = f"at least {stages} layers"
    most = num_layers // (stages // devices)
    limit = f"{most} or less"
    if placement.replicas == 2 and placement.pipes[1] == tuple(devices - 1 - d for d in placement.pipes[0]):
        most -= most % 2  # mirrored pairs need an even number of devices
        limit = f"an even number up to {most}"
    if most:
        fix += f", or set pipeline_parallel_size to {limit} (now {devices})"
    known = REGISTERED[schedule].options if schedule in REGISTERED else {}
    options = [name for name in ("chunks", "waves") if name in known]
    if stages > 2 * devices and options:
        fix += f", or fewer {options[0]} in schedule_options"
    return (
        f"num_layers: {_describe_stages(placement, schedule)} needs at least 1 transformer layer per stage (got "
        f"{num_layers}). Use {fix}."
    )


def _even_counts(
    num_layers: int, ends: tuple[int, int], placement: Placement, weights: tuple[float, float] | None
) -> list[int]:
    """Return the transformer layers of every stage; ``ends`` count other layers. See :func:`layer_boundaries`."""
    stages = placement.stages
    first, last = weights or (_DEFAULT_END_WORK * bool(ends[0]), _DEFAULT_END_WORK * bool(ends[1]))
    counts = _first_counts(num_layers, ends, stages, weights)
    # Without known weights, no stage gets two more layers than another.
    most = max(counts) + 1 if weights is None else num_layers
    work = [float(count) for count in counts]
    work[0] += first
    work[-1] += last
    stage_devices = [[pipe[stage] for pipe in placement.pipes] for stage in range(stages)]
    loads = [0.0] * placement.num_devices
    for stage, devices in enumerate(stage_devices):
        for device in devices:
            loads[device] += work[stage]

    def priority(stage: int) -> tuple[float, float, int]:
        # Round: sums of the same weights in different orders differ in the last bits.
        own_work = 0.0 if weights is None else round(work[stage], 9)
        return round(max(loads[device] for device in stage_devices[stage]), 9), own_work, -stage

    for _ in range(num_layers - sum(counts)):
        stage = min((stage for stage in range(stages) if counts[stage] < most), key=priority)
        counts[stage] += 1
        work[stage] += 1
        for device in stage_devices[stage]:
            loads[device] += 1
    return counts


def _first_counts(
    num_layers: int, ends: tuple[int, int], stages: int, weights: tuple[float, float] | None
) -> list[int]:
    """Return the transformer layers that every stage has in any case."""
    if weights is None:
        return [num_layers // stages] * stages
    # A stage whose other work is at least one layer may have no transformer layer.
    counts = [1] * stages
    counts[0] -= bool(ends[0]) and weights[0] >= 1
    counts[-1] -= bool(ends[1]) and weights[1] >= 1 and stages > 1
    return counts


def _parse_stage_layers(
    text: str, num_layers: int, ends: tuple[int, int], placement: Placement, schedule: str
) -> list[int]:
    stages = placement.stages
    even = _even_counts(num_layers, ends, placement, None) if num_layers >= stages else []
    example = f"for example {','.join(map(str, even))} or" if even else "for example"
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--stage-layers: must be a comma-separated list of integers (got {text!r}). Use {example} {BALANCED}."
        ) from None
    if len(counts) != stages or sum(counts) != num_layers:
        raise ConfigError(
            f"--stage-layers: {_describe_stages(placement, schedule)} needs {stages} numbers that sum to num_layers "
            f"{num_layers} (got {text}: {len(counts)} numbers, sum {sum(counts)}). Use {example} {BALANCED}."
        )
    for stage, count in enumerate(counts):
        # A stage with other layers needs no transformer layer.
        least = int(not ((ends[0] and stage == 0) or (ends[1] and stage == stages - 1)))
        if count < least:
            raise ConfigError(
                f"--stage-layers: the number for stage {stage} (of 0..{stages - 1}) must be at least {least} (got "
                f"{count} in {text}). Use {example} {BALANCED}."
            )
    return counts
