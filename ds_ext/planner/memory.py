"""Bytes that every device of a timetable needs for a GPT of given sizes: weights, gradients, optimizer, activations.

Activations of a transformer layer after Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv 2205.05198), table 2, in bytes, with s the sequence length, b the micro-batch size, h the hidden size, a
the heads and t the tensor-parallel size; 16-bit activations and dropout masks of a byte:

    recompute              without sequence parallelism     with it
    none                   sbh (10 + 24/t + 5as/(ht))       sbh (34/t + 5as/(ht))
    selective              sbh (10 + 24/t)                  sbh 34/t
    full                   2sbh                             2sbh

Attention that never stores the scores (FlashAttention, PyTorch's SDPA) keeps what "selective" keeps. Not counted:
what a kernel works in, the layer that is just being recomputed, messages under way, the allocator's waste.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from ..errors import ScheduleError
from ..pipe_schedules.ops import BACKWARD_INPUT, FORWARD, RECOMPUTE
from ..pipe_schedules.placement import Placement
from ..pipe_schedules.simulate import Simulation
from ..pipe_schedules.timetables import Timetable

_RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class ModelSizes:
    """A GPT, and how it is trained.

    Args:
        layers: transformer layers: of the whole model, a multiple of the stages, or of every stage.
        hidden, heads, vocab, seq: h, a, tokens of the vocabulary, s. The MLP is 4h wide.
        micro_batch: b, samples of one micro-batch.
        parameters: of every stage, where they are known better than the sizes above say.
        tied: whether the head is the embedding; the two are one tensor where one device holds both.
        weight_bytes, gradient_bytes, master_bytes, optimizer_bytes: for each parameter. The defaults are those of
            Adam with 16-bit weights: 2 + 2, and 4 + 8 that ZeRO-1 shards (arXiv 1910.02054, section 3.1).
        tensor_parallel, data_parallel: t, and the copies of the pipeline group.
        sequence_parallel: whether what lies between the tensor-parallel parts is split over the sequence.
        zero_stage: 0, or 1 to shard the optimizer over replicas x data-parallel ranks.
        recompute: "none", "selective" (the attention's core) or "full" (whole layers).
        attention_scores: whether the attention stores its s x s scores.

    Raises:
        ScheduleError: a size is not positive, or two do not fit.
    """

    layers: int | tuple[int, ...]
    hidden: int
    heads: int
    vocab: int
    seq: int
    micro_batch: int = 1
    parameters: tuple[int, ...] | None = None
    tied: bool = True
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

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            least = 0 if name.endswith("_bytes") or name == "zero_stage" or isinstance(value, tuple) else 1
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int) and not isinstance(number, bool) and number < least:
                    raise ScheduleError(f"model sizes: {name} must be at least {least}; got {number}.")
        if self.recompute not in _RECOMPUTE:
            raise ScheduleError(
                f"model sizes: recompute is one of the {len(_RECOMPUTE)} {', '.join(_RECOMPUTE)}; "
                f"got {self.recompute!r}."
            )
        if self.zero_stage > 1:
            raise ScheduleError(
                f"model sizes: zero_stage must be 0 or 1 with pipelines; got {self.zero_stage}."
            )
        if self.hidden % self.heads or self.heads % self.tensor_parallel:
            raise ScheduleError(
                f"model sizes: heads must divide hidden, and tensor_parallel the heads; got hidden {self.hidden}, "
                f"heads {self.heads}, tensor_parallel {self.tensor_parallel}."
            )

    def layer_activations(self) -> float:
        """Bytes that a rank keeps of one transformer layer for one micro-batch."""
        s, b, h, a, t = self.seq, self.micro_batch, self.hidden, self.heads, self.tensor_parallel
        if self.recompute == "full":
            return 2 * s * b * h
        scores = 5 * a * s / (h * t) if self.recompute == "none" and self.attention_scores else 0
        return s * b * h * ((34 / t if self.sequence_parallel else 10 + 24 / t) + scores)

    def layers_of(self, stages: int) -> tuple[int, ...]:
        """Layers of every stage. Raises ScheduleError with both numbers when they do not fit."""
        if isinstance(self.layers, int):
            if self.layers % stages:
                near = [n for n in (self.layers // stages * stages, -(-self.layers // stages) * stages) if n]
                raise ScheduleError(
                    f"model sizes: {self.layers} layers do not divide into {stages} stages. Use "
                    f"{' or '.join(map(str, near))} layers, or say the layers of every stage."
                )
            return (self.layers // stages,) * stages
        return _one_a_stage("layers", self.layers, stages)

    def stage_activations(self, stages: int) -> tuple[float, ...]:
        """Bytes that a rank keeps of every stage for one micro-batch.

        The first stage also keeps the embedding's dropout mask, sbh; the last one the inputs of its norm and head,
        4sbh, and the logits in 32 bits, 4sb * vocab / t (the paper's section 4.3).
        """
        found = [layers * self.layer_activations() for layers in self.layers_of(stages)]
        t, sbh = self.tensor_parallel, self.seq * self.micro_batch * self.hidden
        between = sbh / t if self.sequence_parallel else sbh
        found[0] += between
        found[-1] += 4 * between + 4 * self.seq * self.micro_batch * self.vocab / t
        return tuple(found)

    def device_parameters(self, placement: Placement, device: int) -> float:
        """Parameters that one rank of ``device`` holds, of all pipes. Raises ScheduleError."""
        chunks, stages = placement.chunks[device], placement.stages
        if self.parameters is not None:
            given = _one_a_stage("parameters", self.parameters, stages)
            return sum(given[chunk.stage] for chunk in chunks) / self.tensor_parallel
        h, t, layers = self.hidden, self.tensor_parallel, self.layers_of(stages)
        # Matrices and the biases of column-parallel layers are split; other biases and the norms are not.
        layer = (12 * h * h + 7 * h) / t + 6 * h
        embedding = self.vocab * h / t
        total = sum(layers[chunk.stage] for chunk in chunks) * layer
        for pipe in range(placement.replicas):
            first, last = (0, pipe) in chunks, (stages - 1, pipe) in chunks
            total += first * (embedding + self.seq * h)
            total += last * (2 * h + (0 if first and self.tied else embedding))
        return total


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank; ``activations`` at their peak."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory(made: Timetable | Simulation, sizes: ModelSizes) -> tuple[RankMemory, ...]:
    """What every device needs. An evaluation has no gradients and no optimizer, and keeps no activations.

    Device d holds the stages of all pipes that the placement gives it, with BitPipe both pipes': twice the weights.
    ZeRO-1 shards the optimizer over the devices that hold the same stages and their data-parallel copies.

    Raises:
        ScheduleError: the sizes do not fit the timetable's stages.
    """
    timetable = made.timetable if isinstance(made, Simulation) else made
    placement = timetable.placement
    kept = sizes.stage_activations(placement.stages)
    shards = placement.replicas * sizes.data_parallel if sizes.zero_stage == 1 else 1
    state = (sizes.master_bytes + sizes.optimizer_bytes) / shards
    found = []
    for device in range(placement.num_devices):
        count = sizes.device_parameters(placement, device)
        gradients, optimizer, activations = 0.0, 0.0, 0.0
        if device in placement.forward_devices:
            # Weights, whole where one rank does the work of several; neither gradients nor optimizer nor a graph.
            whole = replace(sizes, tensor_parallel=1) if placement.merged > 1 else sizes
            count = whole.device_parameters(placement, device)
        elif timetable.trains:
            gradients, optimizer = count * sizes.gradient_bytes, count * state
            activations = _peak_bytes(timetable, device, kept)
        parts = (count * sizes.weight_bytes, gradients, optimizer, activations)
        found.append(RankMemory(*map(math.ceil, parts)))
    return tuple(found)


def _peak_bytes(timetable: Timetable, device: int, kept: tuple[float, ...]) -> float:
    """Most bytes alive at once: from a forward to the end of its backward."""
    live = peak = 0.0
    for kind, _, stage in timetable.orders[device]:
        if kind in (FORWARD, RECOMPUTE):
            live += kept[stage]
            peak = max(peak, live)
        elif kind != BACKWARD_INPUT:
            live -= kept[stage]
    return peak


def _one_a_stage(name: str, given: tuple[int, ...], stages: int) -> tuple[int, ...]:
    if len(given) != stages:
        raise ScheduleError(
            f"model sizes: {name} has {len(given)} numbers, but the schedule cuts the model into {stages} stages."
        )
    return given


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 50257, seq: int = 2048) -> ModelSizes:
    return ModelSizes(layers, hidden, heads, vocab, seq)


# GPT-2 (Radford et al. 2019), GPT-3 (arXiv 2005.14165, table 2.1; 1.3b with 16 heads as usual, 13b with 5120), 10b from
# ZeRO-Offload (arXiv 2101.06840, table 2), 22b to 1t from arXiv 2205.05198, table 3.
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
    }
)


def model_sizes(name: str) -> ModelSizes:
    """The sizes of a model in ``MODELS``; ``dataclasses.replace`` changes how it is trained. Raises ScheduleError."""
    found = MODELS.get(name.lower())
    if found is None:
        raise ScheduleError(f"model {name!r} is none of the {len(MODELS)} known: {', '.join(MODELS)}.")
    return found
