"""Memory of every device for a GPT of given sizes: weights, gradients, optimizer states, activations.

:mod:`.activations` gives the activations of a stage. Not counted: kernel workspaces, messages in flight, fragmentation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ..parallel.slices import EQUAL
from ..pipe_schedules.ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from ..pipe_schedules.placement import Placement, linear
from ..pipe_schedules.timetables import Timetable
from .activations import Activations, stage_activations
from .parameter_bytes import BUCKET, ParameterBytes
from .training_sizes import TrainingSizes


def model_parameters(sizes: TrainingSizes) -> float:
    """Return the parameters of the model, each counted once."""
    whole = replace(sizes, tensor_parallel=1, stage_layers=(sizes.num_layers,))
    return whole.device_parameters(linear(1), 0)


def rank_parameters(sizes: TrainingSizes, placement: Placement) -> list[float]:
    """Return the parameters on each rank of every device. A merged forward rank holds the weights unsharded."""
    unsharded = replace(sizes, tensor_parallel=1)
    return [
        (
            unsharded if device in placement.forward_devices and placement.merged > 1 else sizes
        ).device_parameters(placement, device)
        for device in range(placement.num_devices)
    ]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on each rank of a device.

    Attributes:
        gradients: gradients and their fp32 sums.
        activations: peak of the live activations.
        buffers: bytes by which temporary copies raise the peak of the rank: those of reductions and of the optimizer
            step. These follow the last backward, so they first use the memory of the activations.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def memory(
    timetable: Timetable, sizes: TrainingSizes, lengths: str | Sequence[int] = EQUAL
) -> tuple[DeviceMemory, ...]:
    """Return the memory of every device; an evaluation needs weights only.

    A device holds its stages of all pipes, so BitPipe doubles the weights. ZeRO-1 shards the optimizer states over the
    devices that hold the same stages and their data-parallel copies. ``lengths`` are the tokens of every slice.
    """
    placement, slices = timetable.placement, timetable.slices
    tokens = [-(-sizes.seq_length // slices)] * slices if isinstance(lengths, str) else lengths
    changes = []
    for end, length in zip(accumulate(tokens), tokens, strict=True):
        part = (
            replace(sizes, seq_length=length, max_position_embeddings=sizes.positions)
            if slices > 1
            else sizes
        )
        stages = stage_activations(part, placement, end - length, sum(tokens) - end)
        changes.append([_changes(stage) for stage in stages])
    rotary = sizes.position_embedding_type == "rope"  # a rank keeps cosines and sines of a whole sequence
    tables = 2 * sizes.seq_length * sizes.rotary_size * sizes.token_bytes if rotary else 0
    copies = placement.replicas * sizes.data_parallel
    # With one rank per stage, reductions are not eager. The fp32 sums of the bf16 optimizer are reduced in place.
    in_place = sizes.precision == "bf16" and sizes.bytes.reduced == 4
    reduced_bytes = sizes.bytes.reduced if copies > 1 and not in_place else 0
    reduced = [count * reduced_bytes for count in sizes.stage_parameters(placement)]
    devices = []
    for device, count in enumerate(rank_parameters(sizes, placement)):
        if device in placement.forward_devices or not timetable.trains:
            devices.append(DeviceMemory(math.ceil(count * sizes.bytes.weights), 0, 0, 0))
            continue
        late = sizes.tied_parameters(placement, device) * reduced_bytes
        peaks = _peaks(timetable, device, changes, reduced, late)
        devices.append(_training_memory(sizes, count, copies, *(peak + tables for peak in peaks)))
    return tuple(devices)


def _training_memory(
    sizes: TrainingSizes, count: float, copies: int, activations: float, with_copies: float
) -> DeviceMemory:
    """Return the memory of a device that trains ``count`` parameters, which ``copies`` ranks hold.

    ``activations`` and ``with_copies`` are the results of :func:`_peaks`.
    """
    per_parameter = sizes.bytes
    shards = copies if per_parameter.sharded else 1
    if per_parameter.bucketed:
        with_copies += sizes.bucket * per_parameter.reduced
    reductions = _reduction_bytes(sizes, count, shards, copies)
    after = max(reductions, _step_bytes(per_parameter, count, shards))  # after the last backward
    return DeviceMemory(
        math.ceil(count * per_parameter.weights),
        math.ceil(count * per_parameter.gradients),
        math.ceil(count * per_parameter.optimizer / shards),
        math.ceil(activations),
        math.ceil(max(with_copies, after) - activations),
    )


def _peaks(
    timetable: Timetable,
    device: int,
    changes: list[list[dict[str, tuple[float, float]]]],
    reduced: list[float],
    late: float,
) -> tuple[float, float]:
    """Return the peaks of the live activations of a device, without and with the copies of eager reductions.

    The reduction of a stage starts after its last backward. Two copies exist at a time: one is being reduced, and the
    next one waits. On slow links, more of them may wait. A weight tied to another device comes last.

    Args:
        changes: results of :func:`_changes` for every slice and stage.
        reduced: bytes of the copy of every stage.
        late: bytes of the copy of a weight tied to another device, else 0.
    """
    ops = timetable.orders[device]
    backwards = Counter(stage for kind, _, stage, _ in ops if kind in (BACKWARD, BACKWARD_WEIGHT))
    live = peak = both = copies = 0.0
    started: list[float] = []
    for kind, _, stage, j in ops:
        rise, change = changes[j][stage][kind]
        high = live + rise
        if high > peak:
            peak = high
        if high + copies > both:
            both = high + copies
        live += change
        if kind in (BACKWARD, BACKWARD_WEIGHT):
            backwards[stage] -= 1
            if not backwards[stage]:
                started = sorted([*started, reduced[stage]])[-2:]
                copies = sum(started)
                both = max(both, live + copies)
    return peak, max(both, live + sum(sorted([*started, late])[-2:]))


def _changes(stage: Activations) -> dict[str, tuple[float, float]]:
    """Return the bytes by which each op raises the live activations at most, and those by which it changes them."""
    return {
        FORWARD: (stage.forward, stage.kept),
        RECOMPUTE: (stage.forward, stage.kept),
        BACKWARD: (stage.backward, stage.gradients - stage.kept),
        BACKWARD_INPUT: (stage.backward_input, stage.gradients + stage.deferred - stage.kept),
        BACKWARD_WEIGHT: (stage.backward_weight, -stage.deferred),
    }


def _reduction_bytes(sizes: TrainingSizes, count: float, shards: int, copies: int) -> float:
    """Return the bytes of reductions after the last backward, beside the gradients of ``count`` parameters."""
    per_parameter = sizes.bytes
    if per_parameter.bucketed:
        # Two buckets and the partition; the first gradients have moved into a bucket.
        buckets, moved = (
            2 * sizes.bucket * per_parameter.reduced,
            min(sizes.bucket, count) * per_parameter.gradients,
        )
        return buckets - moved + count * per_parameter.gradients / shards
    # With one rank per stage, the bf16 optimizer still copies the gradients into a bucket.
    return min(BUCKET, count) * per_parameter.reduced if copies == 1 and per_parameter.sharded else 0.0


def _step_bytes(per_parameter: ParameterBytes, count: float, shards: int) -> float:
    """Return the bytes of the optimizer step, beside the gradients of ``count`` parameters."""
    if not per_parameter.bucketed:
        return count * per_parameter.temporaries / shards
    # The gradients are free. Their partition and its fp32 copy remain, also in fp16 a flat copy while they are made.
    return count * (
        max(8, per_parameter.gradients + 4 + per_parameter.temporaries) / shards - per_parameter.gradients
    )
