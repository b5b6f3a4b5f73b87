"""Memory of every device for a GPT of given sizes: weights, gradients, optimizer states, activations.

:mod:`.activations` gives the activations of a stage. Not counted: kernel workspaces, messages in flight, fragmentation.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from ..errors import ScheduleError
from ..pipe_schedules.ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from ..pipe_schedules.placement import Placement, linear
from ..pipe_schedules.timetables import Timetable
from ..recipes.models.config import TransformerConfig
from ..recipes.models.field_flags import NO_FLAG, flag
from .activations import Activations, layer_activations, stage_activations
from .parameter_bytes import BUCKET, PRECISIONS, ParameterBytes, parameter_bytes

RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True)
class TrainingSizes(TransformerConfig):
    """Sizes of a model and settings of the job that trains it. See TransformerConfig for the other fields.

    Args:
        stage_layers: transformer layers of every stage; None: the same number, so that ``num_layers`` is a multiple of
            the stages.
        micro_batch: b, samples of one micro-batch.
        precision: of weights and activations: "bf16", "fp16" or "fp32".
        optimizer: implementation of Adam: "fused", "foreach" or "for-loop"; see :mod:`.parameter_bytes`.
        reduced_bytes: bytes of a gradient in a reduction; None: those of the precision.
        bucket: elements of a bucket of ZeRO, reduce_bucket_size.
        tensor_parallel: t, tensor-parallel size.
        data_parallel: number of pipeline groups.
        zero_stage: 0, or 1 to shard the optimizer states over replicas x data-parallel ranks. Half precision always
            shards them.
        attention_scores: the attention stores its s x s scores; selective recomputation drops them.

    Raises:
        ConfigError: sizes of the model are wrong.
        ScheduleError: a setting is not positive, or does not fit the model.
    """

    stage_layers: tuple[int, ...] | None = field(default=None, metadata=NO_FLAG)
    micro_batch: int = field(default=1, metadata=flag("micro_batch_size", metavar="B"))
    precision: str = field(default="bf16", metadata=flag(choices=PRECISIONS))
    optimizer: str = field(default="fused", metadata=NO_FLAG)
    reduced_bytes: int | None = field(default=None, metadata=NO_FLAG)
    bucket: int = field(default=BUCKET, metadata=NO_FLAG)
    tensor_parallel: int = field(default=1, metadata=flag(metavar="T"))
    data_parallel: int = field(default=1, metadata=flag(metavar="DP"))
    zero_stage: int = field(default=0, metadata=flag("zero", choices=(0, 1)))
    attention_scores: bool = False

    _unchecked = (*TransformerConfig._unchecked, "zero_stage")

    def __post_init__(self) -> None:
        super().__post_init__()
        parameter_bytes(self.precision, self.zero_stage, self.optimizer)
        for name, total in (
            ("num_attention_heads", self.num_attention_heads),
            ("ffn_hidden_size", self.ffn_size),
        ):
            if total % self.tensor_parallel:
                raise ScheduleError(
                    f"tensor_parallel: must divide {name} {total} (got {self.tensor_parallel})."
                )
        if not self.shares_groups(self.tensor_parallel):
            raise ScheduleError(
                f"tensor_parallel: must divide num_query_groups {self.query_groups}, or be a multiple of it (got "
                f"{self.tensor_parallel})."
            )

    @classmethod
    def of_model(cls, model: TransformerConfig, **settings: Any) -> Self:
        """Return the sizes of a model with the settings of a job. Raises ConfigError and ScheduleError."""
        values = {entry.name: getattr(model, entry.name) for entry in fields(TransformerConfig)}
        return cls(**{**values, **settings})

    @property
    def bytes(self) -> ParameterBytes:
        """Bytes per parameter."""
        sizes = parameter_bytes(self.precision, self.zero_stage, self.optimizer)
        return sizes if self.reduced_bytes is None else replace(sizes, reduced=self.reduced_bytes)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.seq_length * self.micro_batch

    @property
    def token_bytes(self) -> int:
        """Bytes of an element of an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def attention_widths(self) -> tuple[int, int]:
        """Widths of the queries and of the keys."""
        return self.num_attention_heads * self.head_size, self.query_groups * self.head_size

    def layer_activations(self) -> float:
        """Return the bytes that a rank keeps for one transformer layer and one micro-batch."""
        return layer_activations(self, self.recompute).kept

    def stage_layer_counts(self, stages: int) -> tuple[int, ...]:
        """Return the transformer layers of every stage. Raises ScheduleError if they do not fit ``stages``."""
        if self.stage_layers is not None:
            if len(self.stage_layers) != stages:
                raise ScheduleError(
                    f"stage_layers: needs {stages} numbers, one per stage (got {len(self.stage_layers)})."
                )
            return self.stage_layers
        per_stage, surplus = divmod(self.num_layers, stages)
        if surplus:
            near = " or ".join(str(n * stages) for n in (per_stage, per_stage + 1) if n)
            raise ScheduleError(
                f"num_layers: must be a multiple of {stages} stages (got {self.num_layers}). Use {near}."
            )
        return (per_stage,) * stages

    def stage_activations(self, stages: int) -> tuple[Activations, ...]:
        """Return the activations of every stage for one micro-batch."""
        return stage_activations(self, self.stage_layer_counts(stages))

    @property
    def layer_parameters(self) -> float:
        """Number of parameters of one transformer layer on a rank."""
        h, t = self.hidden_size, self.tensor_parallel
        queries, keys = self.attention_widths
        inner = self.ffn_size * (2 if self.swiglu else 1)
        # Tensor parallelism splits matrices and the biases of column-parallel layers, not other biases and norms.
        layer = (self.layer_work.matrices + queries + 2 * keys + inner) / t + 6 * h
        # Ranks that share a query group have the keys and values of all groups.
        return layer + (2 * keys * (h + 1) * (1 - 1 / t) if t > self.query_groups else 0)

    @property
    def embedding_parameters(self) -> float:
        """Number of parameters of the embedding of tokens on a rank."""
        return self.vocab_size * self.hidden_size / self.tensor_parallel

    @property
    def position_parameters(self) -> int:
        """Number of parameters of the table of positions."""
        return 0 if self.position_embedding_type == "rope" else self.positions * self.hidden_size

    def stage_parameters(self, placement: Placement) -> tuple[float, ...]:
        """Return the parameters that a rank reduces with every stage, without weights tied to other devices.

        A weight of two stages on one device is reduced with the later one, which is the first stage of the model.
        """
        parameters = [layers * self.layer_parameters for layers in self.stage_layer_counts(placement.stages)]
        untied = self.untie_embeddings_and_output_weights
        parameters[0] += self.position_parameters
        parameters[-1] += 2 * self.hidden_size
        parameters[0] += self.embedding_parameters if untied or not placement.split_ends else 0
        parameters[-1] += self.embedding_parameters if untied else 0
        return tuple(parameters)

    def device_parameters(self, placement: Placement, device: int) -> float:
        """Estimate the parameters on a rank of ``device``, with biases and LayerNorms even if the model has none.

        Raises ScheduleError if the layers do not fit.
        """
        chunks, stages = placement.chunks[device], placement.stages
        layers, untied = self.stage_layer_counts(stages), self.untie_embeddings_and_output_weights
        embedding = self.embedding_parameters
        total = sum(layers[chunk.stage] for chunk in chunks) * self.layer_parameters
        for pipe in range(placement.replicas):
            first, last = (0, pipe) in chunks, (stages - 1, pipe) in chunks
            total += first * (embedding + self.position_parameters)
            # A tied head is the embedding: one tensor.
            total += last * (2 * self.hidden_size + (0 if first and not untied else embedding))
        return total


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
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def memory(timetable: Timetable, sizes: TrainingSizes) -> tuple[DeviceMemory, ...]:
    """Return the memory of every device; an evaluation needs weights only.

    A device holds its stages of all pipes, so BitPipe doubles the weights. ZeRO-1 shards the
    optimizer states over the devices that hold the same stages and their data-parallel copies.

    Raises:
        ScheduleError: the sizes do not fit the stages of the timetable.
    """
    placement = timetable.placement
    kept = sizes.stage_activations(placement.stages)
    copies = placement.replicas * sizes.data_parallel
    # With one rank per stage, reductions are not eager.
    reduced_bytes = sizes.bytes.reduced if copies > 1 else 0
    reduced = [count * reduced_bytes for count in sizes.stage_parameters(placement)]
    devices = []
    for device, count in enumerate(rank_parameters(sizes, placement)):
        if device in placement.forward_devices or not timetable.trains:
            devices.append(DeviceMemory(math.ceil(count * sizes.bytes.weights), 0, 0, 0))
            continue
        is_tied = not sizes.untie_embeddings_and_output_weights and any(
            device in pair for pair in placement.split_ends
        )
        late = sizes.embedding_parameters * reduced_bytes if is_tied else 0.0
        peaks = _peaks(timetable, device, kept, reduced, late)
        devices.append(_training_memory(sizes, count, copies, *peaks))
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
    timetable: Timetable, device: int, stages: tuple[Activations, ...], reduced: list[float], late: float
) -> tuple[float, float]:
    """Return the peaks of the live activations of a device, without and with the copies of eager reductions.

    The reduction of a stage starts after its last backward. Two copies exist at a time: one is being reduced, and the
    next one waits. On slow links, more of them may wait. A weight tied to another device comes last.

    Args:
        stages: activations of a micro-batch at every stage.
        reduced: bytes of the copy of every stage.
        late: bytes of the copy of a weight tied to another device, else 0.
    """
    ops = timetable.orders[device]
    backwards = Counter(stage for kind, _, stage in ops if kind in (BACKWARD, BACKWARD_WEIGHT))
    changes = [_changes(stage) for stage in stages]
    live = peak = both = copies = 0.0
    started: list[float] = []
    for kind, _, stage in ops:
        rise, change = changes[stage][kind]
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
        BACKWARD: (stage.backward, -stage.kept),
        BACKWARD_INPUT: (stage.backward_input, stage.deferred - stage.kept),
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
