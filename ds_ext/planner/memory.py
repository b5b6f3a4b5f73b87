"""Memory of every device for a GPT of given sizes: weights, gradients, optimizer states, activations.

Activations of a transformer layer follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198), table 2. Bytes, with sequence length s, micro-batch size b, hidden size h, heads a,
tensor-parallel size t, 16-bit activations and one-byte dropout masks:

    recompute              without sequence parallelism     with it
    none                   sbh (10 + 24/t + 5as/(ht))       sbh (34/t + 5as/(ht))
    selective              sbh (10 + 24/t)                  sbh 34/t
    full                   2sbh                             2sbh

The rows are for an MLP with 4h and as many keys and values as queries. Otherwise 24 stands for 4 (q + k + f) / h, where
q and k are the widths of the queries and of the keys, and f that of the MLP, twice with a gated MLP (SwiGLU).

Attention that does not store its scores (FlashAttention, PyTorch's SDPA) keeps as much as "selective". Not counted:
kernel workspaces, the layer being recomputed, messages in flight, fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from ..errors import ScheduleError
from ..parallel.partition import LayerWork, layer_work
from ..pipe_schedules.ops import BACKWARD_INPUT, FORWARD, RECOMPUTE
from ..pipe_schedules.placement import Placement
from ..pipe_schedules.timetables import Timetable

RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a GPT and its training settings.

    Args:
        layers: transformer layers of the whole model (a multiple of the stages), or of every stage.
        hidden: h, hidden size.
        heads: a, attention heads.
        vocab: vocabulary size.
        seq: s, sequence length.
        micro_batch: b, samples of one micro-batch.
        weight_bytes, gradient_bytes: per parameter. The defaults are for 16 bits.
        master_bytes, optimizer_bytes: per parameter, sharded by ZeRO-1. The defaults are for Adam (arXiv 1910.02054,
            section 3.1).
        tensor_parallel: t, tensor-parallel size.
        data_parallel: number of pipeline groups.
        sequence_parallel: in the regions between tensor-parallel layers, split the activations along the sequence.
        zero_stage: 0, or 1 to shard the optimizer states over replicas x data-parallel ranks.
        recompute: "none", "selective" (only the core attention) or "full" (whole layers).
        attention_scores: True if the attention stores its s x s scores.
        ffn: inner width of the MLP; None: 4h.
        query_groups: key and value heads; None: one for each head.
        kv_channels: width of a head; None: h / a.
        swiglu: the MLP has three matrices.
        untied: the head has a separate weight.
        rope: there is no table of positions.

    Raises:
        ScheduleError: a size is not positive, or two sizes are incompatible.
    """

    layers: int | tuple[int, ...]
    hidden: int
    heads: int
    vocab: int
    seq: int
    micro_batch: int = 1
    weight_bytes: int = 2
    gradient_bytes: int = 2
    master_bytes: int = 4
    optimizer_bytes: int = 8
    tensor_parallel: int = 1
    data_parallel: int = 1
    sequence_parallel: bool = False
    zero_stage: int = 0
    recompute: str = "none"
    attention_scores: bool = False
    ffn: int | None = None
    query_groups: int | None = None
    kv_channels: int | None = None
    swiglu: bool = False
    untied: bool = False
    rope: bool = False

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            least = 0 if name.endswith("_bytes") or name == "zero_stage" or isinstance(value, tuple) else 1
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int) and not isinstance(number, bool) and number < least:
                    raise ScheduleError(f"{name}: must be at least {least} (got {number}).")
        if self.recompute not in RECOMPUTATIONS:
            raise ScheduleError(
                f"recompute: unknown kind (got {self.recompute!r}). Use {', '.join(RECOMPUTATIONS)}."
            )
        if self.zero_stage > 1:
            raise ScheduleError(f"zero_stage: pipelines support 0 and 1 (got {self.zero_stage}).")
        if self.kv_channels is None and self.hidden % self.heads:
            raise ScheduleError(f"heads: must divide hidden {self.hidden} (got {self.heads}).")
        if self.heads % self.tensor_parallel:
            raise ScheduleError(
                f"tensor_parallel: must divide heads {self.heads} (got {self.tensor_parallel})."
            )
        groups = self.query_groups or self.heads
        if self.heads % groups:
            raise ScheduleError(f"query_groups: must divide heads {self.heads} (got {groups}).")
        if not self.shares_groups(self.tensor_parallel):
            raise ScheduleError(
                f"tensor_parallel: must divide query_groups {groups}, or be a multiple of it (got "
                f"{self.tensor_parallel})."
            )

    @property
    def work(self) -> LayerWork:
        """Work of one transformer layer."""
        return layer_work(
            self.hidden,
            self.seq,
            heads=self.heads,
            ffn=self.ffn,
            query_groups=self.query_groups,
            kv_channels=self.kv_channels,
            swiglu=self.swiglu,
        )

    @property
    def _widths(self) -> tuple[int, int, int]:
        """Widths of the queries, of the keys, and of the MLP's column-parallel layers."""
        size = self.kv_channels or self.hidden // self.heads
        inner = (self.ffn or 4 * self.hidden) * (2 if self.swiglu else 1)
        return self.heads * size, (self.query_groups or self.heads) * size, inner

    def shares_groups(self, tensor_parallel: int) -> bool:
        """Return whether each rank has whole query groups, or several ranks share one."""
        groups = self.query_groups or self.heads
        return groups % tensor_parallel == 0 or tensor_parallel % groups == 0

    def layer_activations(self) -> float:
        """Return the bytes that a rank keeps for one transformer layer and one micro-batch."""
        s, b, h, a, t = self.seq, self.micro_batch, self.hidden, self.heads, self.tensor_parallel
        if self.recompute == "full":
            return 2 * s * b * h
        scores = 5 * a * s / t if self.recompute == "none" and self.attention_scores else 0
        between, inside = 10 * h, 4 * sum(self._widths)
        kept = (between + inside) / t if self.sequence_parallel else between + inside / t
        return s * b * (kept + scores)

    def layers_of(self, stages: int) -> tuple[int, ...]:
        """Return the layers of every stage. Raises ScheduleError if they do not fit ``stages``."""
        if isinstance(self.layers, int):
            if self.layers % stages:
                below = self.layers // stages * stages
                near = " or ".join(str(n) for n in (below, below + stages) if n)
                raise ScheduleError(
                    f"layers: must be a multiple of {stages} stages (got {self.layers}). Use {near}."
                )
            return (self.layers // stages,) * stages
        if len(self.layers) != stages:
            raise ScheduleError(f"layers: needs {stages} numbers, one per stage (got {len(self.layers)}).")
        return self.layers

    def stage_activations(self, stages: int) -> tuple[float, ...]:
        """Return the bytes that a rank keeps at every stage for one micro-batch.

        The first stage also keeps the dropout mask of the embedding, sbh. The last stage also keeps the inputs of its
        norm and head, 4sbh, and the 32-bit logits, 4sb * vocab / t (section 4.3 of the paper).
        """
        kept = [layers * self.layer_activations() for layers in self.layers_of(stages)]
        t, sbh = self.tensor_parallel, self.seq * self.micro_batch * self.hidden
        between = sbh / t if self.sequence_parallel else sbh
        kept[0] += between
        kept[-1] += 4 * between + 4 * self.seq * self.micro_batch * self.vocab / t
        return tuple(kept)

    @property
    def layer_parameters(self) -> float:
        """Number of parameters of one transformer layer on a rank."""
        h, t = self.hidden, self.tensor_parallel
        queries, keys, inner = self._widths
        # Tensor parallelism splits matrices and the biases of column-parallel layers, not other biases and norms.
        layer = (self.work.matrices + queries + 2 * keys + inner) / t + 6 * h
        # Ranks that share a query group have the keys and values of all groups.
        return layer + (2 * keys * (h + 1) * (1 - 1 / t) if t > (self.query_groups or self.heads) else 0)

    @property
    def embedding_parameters(self) -> float:
        """Number of parameters of the embedding of tokens on a rank."""
        return self.vocab * self.hidden / self.tensor_parallel

    def device_parameters(self, placement: Placement, device: int) -> float:
        """Return the number of parameters on a rank of ``device``. Raises ScheduleError if the layers do not fit."""
        chunks, stages = placement.chunks[device], placement.stages
        h, layers = self.hidden, self.layers_of(stages)
        embedding = self.embedding_parameters
        total = sum(layers[chunk.stage] for chunk in chunks) * self.layer_parameters
        for pipe in range(placement.replicas):
            first, last = (0, pipe) in chunks, (stages - 1, pipe) in chunks
            total += first * (embedding + (0 if self.rope else self.seq * h))
            # A tied head is the embedding: one tensor.
            total += last * (2 * h + (0 if first and not self.untied else embedding))
        return total


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on each rank of a device; ``activations`` is the peak."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory(timetable: Timetable, sizes: ModelSizes) -> tuple[DeviceMemory, ...]:
    """Return the memory of every device; an evaluation needs weights only.

    A device holds its stages of all pipes, so BitPipe doubles the weights. ZeRO-1 shards the
    optimizer states over the devices that hold the same stages and their data-parallel copies.

    Raises:
        ScheduleError: the sizes do not fit the stages of the timetable.
    """
    placement = timetable.placement
    kept = sizes.stage_activations(placement.stages)
    shards = placement.replicas * sizes.data_parallel if sizes.zero_stage == 1 else 1
    state = (sizes.master_bytes + sizes.optimizer_bytes) / shards
    found = []
    for device in range(placement.num_devices):
        count = sizes.device_parameters(placement, device)
        gradients, optimizer, activations = 0.0, 0.0, 0.0
        if device in placement.forward_devices:
            # Weights only; a merged forward rank holds them unsharded.
            whole = replace(sizes, tensor_parallel=1) if placement.merged > 1 else sizes
            count = whole.device_parameters(placement, device)
        elif timetable.trains:
            gradients, optimizer = count * sizes.gradient_bytes, count * state
            activations = _peak_bytes(timetable, device, kept)
        parts = (count * sizes.weight_bytes, gradients, optimizer, activations)
        found.append(DeviceMemory(*map(math.ceil, parts)))
    return tuple(found)


def _peak_bytes(timetable: Timetable, device: int, kept: tuple[float, ...]) -> float:
    """Return the peak of the live activations of a device, in bytes."""
    live = peak = 0.0
    for kind, _, stage in timetable.orders[device]:
        if kind in (FORWARD, RECOMPUTE):
            live += kept[stage]
            peak = max(peak, live)
        elif kind != BACKWARD_INPUT:
            live -= kept[stage]
    return peak


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 50257, seq: int = 2048) -> ModelSizes:
    return ModelSizes(layers, hidden, heads, vocab, seq)


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    groups: int,
    vocab: int,
    seq: int,
    channels: int | None = None,
) -> ModelSizes:
    return ModelSizes(
        layers,
        hidden,
        heads,
        vocab,
        seq,
        ffn=ffn,
        query_groups=groups,
        kv_channels=channels,
        swiglu=True,
        untied=True,
        rope=True,
    )


# GPT-2: Radford et al. 2019. GPT-3: arXiv 2005.14165, table 2.1, with the usual 16 heads for 1.3b and hidden size 5120
# for 13b. 10b: ZeRO-Offload (arXiv 2101.06840, table 2). 22b to 1t: arXiv 2205.05198, table 3. Llama 2: arXiv
# 2307.09288. Llama 3: arXiv 2407.21783, table 3. Mistral: arXiv 2310.06825, table 1. Qwen3: arXiv 2505.09388, table 1.
MODELS: Mapping[str, ModelSizes] = MappingProxyType(
    {
        "gpt-124m": _gpt(12, 768, 12, seq=1024),
        "gpt-355m": _gpt(24, 1024, 16, seq=1024),
        "gpt-774m": _gpt(36, 1280, 20, seq=1024),
        "gpt-1.5b": _gpt(48, 1600, 25, seq=1024),
        "gpt-1.3b": _gpt(24, 2048, 16),
        "gpt-2.7b": _gpt(32, 2560, 32),
        "gpt-6.7b": _gpt(32, 4096, 32),
        "gpt-10b": _gpt(50, 4096, 32, seq=1024),
        "gpt-13b": _gpt(40, 5120, 40),
        "gpt-22b": _gpt(48, 6144, 64, vocab=51200),
        "gpt-175b": _gpt(96, 12288, 96, vocab=51200),
        "gpt-530b": _gpt(105, 20480, 128, vocab=51200),
        "gpt-1t": _gpt(128, 25600, 160, vocab=51200),
        "llama-2-7b": _llama(32, 4096, 32, 11008, 32, 32000, 4096),
        "llama-2-70b": _llama(80, 8192, 64, 28672, 8, 32000, 4096),
        "llama-3-8b": _llama(32, 4096, 32, 14336, 8, 128256, 8192),
        "llama-3-70b": _llama(80, 8192, 64, 28672, 8, 128256, 8192),
        "mistral-7b": _llama(32, 4096, 32, 14336, 8, 32000, 8192),
        "qwen3-8b": _llama(36, 4096, 32, 12288, 8, 151936, 8192, channels=128),
        "qwen3-32b": _llama(64, 5120, 64, 25600, 8, 151936, 8192, channels=128),
    }
)


def model_sizes(name: str) -> ModelSizes:
    """Return the sizes of a model in ``MODELS``. Raises ScheduleError for an unknown name."""
    sizes = MODELS.get(name.lower())
    if sizes is None:
        raise ScheduleError(f"model: unknown name (got {name!r}). Use one of {', '.join(MODELS)}.")
    return sizes
