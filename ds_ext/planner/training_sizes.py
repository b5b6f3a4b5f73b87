"""Sizes of a model together with the settings of the job that trains it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from ..errors import ScheduleError
from ..model.config import TransformerConfig
from ..model.field_flags import NO_FLAG, flag
from ..pipe_schedules.placement import Placement, linear
from ..pipe_schedules.stage_kinds import HEAD_PART
from .parameter_bytes import BUCKET, PRECISIONS, ParameterBytes, parameter_bytes

# torch's attention with dropout on CPUs keeps fp32 scores before and after it, the mask, and copies of its inputs.
SCORES_ON_CPU = {"attention_scores": True, "score_bytes": 12, "score_copies": 12}
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
        overlap_across_steps: reduce-scatter the gradients of a stage, and gather its weights beside the next step.
        attention_scores: the attention stores its s x s scores; selective recomputation drops them.
        score_bytes: bytes per score that are stored.
        score_copies: bytes of copies of queries, keys and values with the scores, per element of the queries.
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
    overlap_across_steps: bool = False
    attention_scores: bool = False
    score_bytes: int = field(default=5, metadata=NO_FLAG)
    score_copies: int = field(default=0, metadata=NO_FLAG)

    _unchecked = (*TransformerConfig._unchecked, "zero_stage", "score_copies")

    def __post_init__(self) -> None:
        super().__post_init__()
        parameter_bytes(self.precision, self.zero_stage, self.optimizer)
        for name, total in self.divided_sizes:
            if total % self.tensor_parallel:
                raise ScheduleError(
                    f"tensor_parallel: must divide {name} {total} (got {self.tensor_parallel})."
                )
        if not self.shares_groups(self.tensor_parallel):
            raise ScheduleError(
                f"tensor_parallel: must divide num_query_groups {self.query_groups}, or be a multiple of it (got "
                f"{self.tensor_parallel})."
            )

    @property
    def divided_sizes(self) -> list[tuple[str, int]]:
        """Names and values of what tensor parallelism divides."""
        sizes = [("num_attention_heads", self.num_attention_heads)]
        if self.experts is None or self.experts.dense_layers:
            sizes.append(("ffn_hidden_size", self.ffn_size))
        if self.experts is not None:
            sizes += [("experts", self.experts.number), ("shared_width", self.experts.shared_width)]
        return sizes

    @classmethod
    def of_model(cls, model: TransformerConfig, **settings: Any) -> Self:
        values = {entry.name: getattr(model, entry.name) for entry in fields(TransformerConfig)}
        return cls(**{**values, **settings})

    @property
    def bytes(self) -> ParameterBytes:
        """Bytes per parameter. Adapters are too small to count."""
        sizes = parameter_bytes(self.precision, self.zero_stage, self.optimizer)
        if self.lora_rank is not None:
            return ParameterBytes(sizes.weights, 0, 0, 0, 0, sizes.sharded, bucketed=False)
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
        """Widths of the queries and of the keys on all ranks that share an attention; with latent one, means."""
        if self.latent is not None:
            width = self.num_attention_heads * (self.latent.head_size + self.latent.value) // 2
            return width, width
        return self.num_attention_heads * self.head_size, self.query_groups * self.head_size

    @property
    def is_of_folder(self) -> bool:
        """True if only layers of transformers, from a folder, have these sizes."""
        return self.experts is not None or self.transformer_impl == "transformers"

    @property
    def attention_shards(self) -> int:
        """Ranks that share an attention: transformers' plans do not divide a latent one."""
        return self.tensor_parallel if self.latent is None else 1

    @property
    def rank_flops(self) -> float:
        """FLOPs of a forward for one sample on each tensor-parallel rank."""
        attention = 2 * self.seq_length * self.num_layers * self.attention_work.total
        return attention / self.attention_shards + (self.forward_flops - attention) / self.tensor_parallel

    def stage_layer_counts(self, stages: int) -> tuple[int, ...]:
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

    @property
    def layer_parameters(self) -> float:
        """Number of parameters of one transformer layer on a rank, a mean over layers with and without experts."""
        return self._layer_parameters(self.experts.number if self.experts is not None else 0)

    @property
    def active_parameters(self) -> float:
        """Number of parameters that compute a token, if tensor parallelism divides none."""
        per_token = self.experts.per_token if self.experts is not None else 0
        idle = self.layer_parameters - self._layer_parameters(per_token)
        return self.device_parameters(linear(1), 0) - self.num_layers * idle

    def _layer_parameters(self, experts: int) -> float:
        h, t = self.hidden_size, self.tensor_parallel
        queries, keys = self.attention_widths
        inner, routed = self.inner_width(experts), self.sparse_share * experts
        has_biases, has_qkv_biases = self.add_bias_linear, self.add_bias_linear or self.add_qkv_bias
        biases = has_qkv_biases * (queries + 2 * keys) + has_biases * routed * h
        biases += has_biases * inner * (2 if self.swiglu else 1)
        # Tensor parallelism splits matrices and the biases of column-parallel layers, not other biases, norms, routers.
        matrices = h * (3 if self.swiglu else 2) * inner
        layer = (matrices + biases) / t + has_biases * (2 - self.sparse_share) * h
        layer += self.attention_work.matrices / self.attention_shards
        if self.latent is not None:
            layer += self._norm_parameters(self.latent.query_rank) + self._norm_parameters(
                self.latent.kv_rank
            )
        if self.experts is not None:
            layer += self.sparse_share * self.experts.number * (h + has_biases)
        layer += 2 * self._norm_parameters(h)
        layer += 2 * self._norm_parameters(self.head_size) if self.qk_layernorm else 0
        # Ranks that share a query group have the keys and values of all groups.
        return layer + (2 * keys * (h + has_qkv_biases) * (1 - 1 / t) if t > self.query_groups else 0)

    def _norm_parameters(self, size: int) -> int:
        return size if self.normalization == "RMSNorm" else 2 * size

    @property
    def embedding_parameters(self) -> float:
        """Number of parameters of the embedding of tokens on a rank."""
        return self.vocab_size * self.hidden_size / self.tensor_parallel

    @property
    def position_parameters(self) -> int:
        return 0 if self.position_embedding_type == "rope" else self.positions * self.hidden_size

    def stage_parameters(self, placement: Placement) -> tuple[float, ...]:
        """Return the parameters that a rank reduces with every stage, without weights tied to other devices.

        A weight of two stages on one device is reduced with the later one, which is the first stage of the model.
        """
        parameters = [layers * self.layer_parameters for layers in self.stage_layer_counts(placement.stages)]
        untied = self.untie_embeddings_and_output_weights
        parameters[0] += self.position_parameters
        parameters[-1] += self._norm_parameters(self.hidden_size)
        parameters[0] += self.embedding_parameters - self.tied_parameters(placement, placement.pipes[0][0])
        if parts := placement.stages_of_kind(HEAD_PART):
            parameters += [untied * self.head_part_parameters(placement)] * len(parts)
        else:
            parameters[-1] += self.embedding_parameters if untied else 0
        return tuple(parameters)

    def tied_parameters(self, placement: Placement, device: int) -> float:
        """Return the parameters on a rank of ``device`` that are tied to other devices."""
        if self.untie_embeddings_and_output_weights:
            return 0.0
        # A replica of the other device is in the pair of another pipe.
        devices = placement.replicas_of(device)
        pairs = sum(any(device in pair for device in devices) for pair in placement.tied_pairs)
        return pairs / placement.replicas * self.head_part_parameters(placement)

    def head_part_parameters(self, placement: Placement) -> float:
        """Return the parameters of a part of the head on a rank, or of the whole head."""
        return self.embedding_parameters / (len(placement.stages_of_kind(HEAD_PART)) or 1)

    def device_parameters(self, placement: Placement, device: int) -> float:
        """Return the parameters on a rank of ``device``, without those that a head of BERT has beside its weight."""
        held = [chunk.stage for chunk in placement.chunks[device] if chunk.stage < placement.stages]
        layers = self.stage_layer_counts(placement.stages)
        firsts, lasts = held.count(0), held.count(placement.stages - 1)
        total = sum(layers[stage] for stage in held) * self.layer_parameters
        total += firsts * self.position_parameters + lasts * self._norm_parameters(self.hidden_size)
        if HEAD_PART in placement.stage_kinds:
            # The parts of a tied head are rows of the embedding, on a device with both.
            is_inside = firsts and not self.untie_embeddings_and_output_weights
            parts = 0 if is_inside else len(placement.chunks[device]) - len(held)
            return total + firsts * self.embedding_parameters + parts * self.head_part_parameters(placement)
        # A tied head is the embedding: one tensor, also if they belong to two pipes.
        embeddings = firsts + lasts if self.untie_embeddings_and_output_weights else bool(firsts + lasts)
        total += embeddings * self.embedding_parameters
        return total
