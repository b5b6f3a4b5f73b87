"""Bytes of activations that a stage of a GPT keeps between its passes, and those that exist only during a pass.

A layer keeps the tensors that its backward reads (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", arXiv 2205.05198, section 4). Elements per token, on one of t tensor-parallel ranks:

    tensors                                          read by            elements
    inputs of both norms                             norms              2c
    inputs of the column-parallel layers             qkv, fc1           2c
    queries, keys, values and their context          attention, proj    2q + 2k
    input and output of the activation function      gelu, fc2          2f, with a gated MLP 4f

h is the hidden size, and c the same, or h/t with sequence parallelism. q, k and f are the widths of the queries, of the
keys, and of the MLP, divided by t. Further tensors: a byte per element of c for every dropout mask; rotated queries and
keys; the fp32 copies of an RMSNorm; with attention that stores its s x s scores, 5 bytes per score (FlashAttention and
torch's SDPA do not, but on CPUs SDPA with dropout keeps three tensors of fp32 scores). "selective" drops what attention
adds; "full" keeps the input of the layer only. The table of the paper is the sum for q = k = h, f = 4h and two masks.
With sequence parallelism, the backward gathers the inputs of the column-parallel layers again, except in a layer that
was recomputed.

The first half of a split backward frees everything but the inputs and the output gradients of the linear layers, which
the second half reads. These are about as many bytes, also for a layer that was recomputed. The second half computes a
weight gradient, which autograd copies if the engine sums it elsewhere, in fp32 for bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .training_sizes import TrainingSizes

CHUNKS, LEAST_CHUNK = 16, 1 << 20  # of the fp32 logits in tensor_parallel/loss.py: number, and bytes


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch at a stage or in one of its layers.

    Attributes:
        kept: from the forward to the backward, or to its first half.
        deferred: from the first half of a split backward to the second.
        forward, backward, backward_input, backward_weight: largest rise in a pass above the bytes before it.
    """

    kept: float
    deferred: float
    forward: float
    backward: float
    backward_input: float
    backward_weight: float


def stage_activations(sizes: TrainingSizes, num_stages: int) -> tuple[Activations, ...]:
    """Return the activations of every stage. Raises ScheduleError if the layers do not fit the stages."""
    layers = sizes.stage_layer_counts(num_stages)
    kinds = {kind: layer_activations(sizes, kind) for kind in {"none", sizes.recompute}}
    copied = sizes.tokens * _between(sizes) * sizes.token_bytes if _keeps_a_copy(sizes) else 0.0
    stages: dict[tuple[object, ...], Activations] = {}  # equal stages are computed once
    result, first, last = [], 0, len(layers) - 1
    for stage, count in enumerate(layers):
        key = stage == 0, stage == last, count, first % sizes.recompute_interval
        if key not in stages:
            parts = [kinds[sizes.recomputes(first + index)] for index in range(count)]
            if stage == 0:
                parts.insert(0, _embedding(sizes))
            elif parts and sizes.recomputes(first) != "full":
                parts[0] = replace(parts[0], kept=parts[0].kept + copied)
            if stage == last:
                parts.append(_head(sizes))
            stages[key] = _sum(parts)
        result.append(stages[key])
        first += count
    return tuple(result)


def _sum(parts: Sequence[Activations]) -> Activations:
    """Return the activations of a stage with these layers."""
    kept = forward = 0.0
    for part in parts:
        forward = max(forward, kept + part.kept + part.forward)
        kept += part.kept
    backward = backward_input = after = after_input = 0.0
    for part in reversed(parts):
        backward = max(backward, after + part.backward)
        backward_input = max(backward_input, after_input + part.backward_input)
        after -= part.kept
        after_input += part.deferred - part.kept
    weight = max((part.backward_weight for part in parts), default=0.0)
    return Activations(kept, after_input + kept, forward, backward, backward_input, weight)


def _keeps_a_copy(sizes: TrainingSizes) -> bool:
    """Return whether norms keep an fp32 copy instead of their input, which for the first one is that of the stage."""
    return sizes.normalization == "RMSNorm" and sizes.precision != "fp32"


def _between(sizes: TrainingSizes) -> float:
    """Return c, the elements of a token between tensor-parallel layers."""
    return sizes.hidden_size / sizes.tensor_parallel if sizes.sequence_parallel else sizes.hidden_size


def layer_activations(sizes: TrainingSizes, recompute: str) -> Activations:
    """Return the activations of a transformer layer with a kind of recomputation."""
    size, t, gated = sizes.token_bytes, sizes.tensor_parallel, sizes.swiglu
    h, c = sizes.hidden_size, _between(sizes)
    q, k, f = (width / t for width in (*sizes.attention_widths, sizes.ffn_size))
    dropout = sizes.hidden_dropout > 0
    inner = (4 if gated else 2) * f  # elements of the MLP
    # Bytes of a token.
    core = 4 * sizes.num_attention_heads / t  # log-sum-exp
    if sizes.attention_scores:
        core = sizes.score_bytes * sizes.num_attention_heads * sizes.seq_length / t
        core += sizes.score_copies * q
    everything = _norms(sizes, 2 * c) + size * (2 * c + q + inner) + 2 * c * dropout
    everything += size * _attention_inputs(sizes, q, k) + core
    everything += _norms(sizes, q + k) if sizes.qk_layernorm else 0
    kept = {"none": everything, "selective": everything - core, "full": size * c}[recompute]
    # The backward of the MLP comes first: the gradient of the output, and gradients of inner tensors.
    if recompute == "full":
        repeated = everything + size * 2 * (h - c) - kept
    else:
        repeated = max(everything - kept - size * inner, 0)
    scores = 0.0  # gradient of the scores; a whole backward has freed the MLP by then
    if sizes.attention_scores and recompute != "none":
        scores = sizes.score_bytes / 3 * sizes.num_attention_heads * sizes.seq_length / t
    freed = size * (h + inner) if recompute == "full" else 0
    # With tensor parallelism also that of the output over all tokens, or that of the input before its sum, and parts
    # from which sequence parallelism puts it together.
    gathered = (2 if sizes.sequence_parallel else 1) * h if t > 1 else 0
    above = size * (c + gathered) + (size - 1) * c * dropout + repeated
    weight = size * h * f
    deferred = size * (4 * h + 2 * q + 2 * k + (3 if gated else 2) * f)
    temporary = size * (3 * c + (0 if recompute != "full" else (3 if gated else 2) * f))
    tokens = sizes.tokens
    return Activations(
        tokens * kept,
        tokens * deferred,
        tokens * temporary,
        tokens * (above + max(scores - freed, 0) + size * inner / 2) + weight,
        tokens * (above + scores + size * (inner / 2 + f)),
        _deferred_gradient(sizes, weight),
    )


def _norms(sizes: TrainingSizes, width: float) -> float:
    """Return the bytes of a token that norms over ``width`` elements keep, without their outputs."""
    size = sizes.token_bytes
    if sizes.normalization == "LayerNorm":
        return size * width
    normalized = size  # before the weight is applied
    return (normalized + (4 if _keeps_a_copy(sizes) else size)) * width


def _attention_inputs(sizes: TrainingSizes, q: float, k: float) -> float:
    """Return the elements of a token in queries, keys and values."""
    if sizes.position_embedding_type != "rope" and not sizes.qk_layernorm:
        return q + 2 * k
    # Queries and keys are new tensors. The values are a part of the output of a linear layer, which is kept whole.
    return q + k + 2 * k + (q if sizes.query_groups == sizes.num_attention_heads else 0)


def _deferred_gradient(sizes: TrainingSizes, weight: float) -> float:
    """Return the bytes of a weight gradient in the second half of a split backward."""
    return 2 * weight if sizes.precision == "bf16" else weight


def _embedding(sizes: TrainingSizes) -> Activations:
    """Return the activations of the embeddings, and of the dropout after them."""
    tokens, size, c = sizes.tokens, sizes.token_bytes, _between(sizes)
    weight = size * sizes.embedding_parameters
    kept = tokens * c * (sizes.hidden_dropout > 0)
    return Activations(
        kept,
        tokens * size * c,
        0.0,
        tokens * size * c + weight,
        2 * tokens * size * c,
        _deferred_gradient(sizes, weight),
    )


def _head(sizes: TrainingSizes) -> Activations:
    """Return the activations of the last norm, the head and the loss."""
    tokens, size, c, h = sizes.tokens, sizes.token_bytes, _between(sizes), sizes.hidden_size
    vocabulary = sizes.padded_vocab_size(sizes.tensor_parallel) / sizes.tensor_parallel
    logits, weight = tokens * size * vocabulary, size * vocabulary * h
    fp32 = 4 * tokens * vocabulary
    chunk = max(fp32 / CHUNKS, min(LEAST_CHUNK, fp32))
    kept = tokens * (_norms(sizes, c) + size * c) + logits
    return Activations(
        kept,
        tokens * size * h + logits,
        chunk,
        max(logits + chunk, tokens * size * (c + h) + weight),
        logits + chunk,
        _deferred_gradient(sizes, weight),
    )
