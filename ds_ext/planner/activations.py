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
keys; inputs and outputs of experts for each of their tokens, of which a rank has 1 / t; fp32 copies of norms, routers;
with attention that stores its s x s scores, 5 bytes per score (FlashAttention and torch's SDPA do not, but on CPUs SDPA
with dropout keeps three tensors of fp32 scores). "selective" drops what attention
adds; "full" keeps the input of the layer only. The table of the paper is the sum for q = k = h, f = 4h and two masks.
With sequence parallelism, the backward gathers the inputs of the column-parallel layers again, except in a layer that
was recomputed.

The first half of a split backward frees everything but the inputs and the output gradients of the linear layers, which
the second half reads. These are about as many bytes, also for a layer that was recomputed. The second half computes a
weight gradient, which autograd copies if the engine sums it elsewhere, in fp32 for bf16.

With a chunked loss, the last stage keeps the gradient of its hidden states instead of the logits. The second half of a
split backward reads the hidden states, and computes the logits in chunks again.

With a part of the head on every device, the last stage ends with the norm. A part keeps its inputs and the gradients
of its logits until its weight gradient, and computes both passes in chunks like a chunked loss. The loss gets two
tensors of hidden states from each part.

With slices of sequences, the backward of a micro-batch's last slice leaves gradients on the keys and values of all
others. The attention of every other backward computes gradients for the slices before it, and adds them. The MLP is
free by then. Layers that recompute everything store copies of the keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..pipe_schedules.placement import Placement
from ..pipe_schedules.stage_kinds import HEAD_PART
from .training_sizes import TrainingSizes

CHUNKS, LEAST_CHUNK = 16, 1 << 20  # of the fp32 logits in tensor_parallel/loss.py: number, and bytes
_RMS_NORM_BACKWARD = (
    5 * 4
)  # bytes per element in the backward of torch's RMSNorm without a fused kernel: fp32


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch, or of one of its slices, at a stage or in one of its layers.

    Attributes:
        kept: from the forward to the backward, or to its first half.
        deferred: from the first half of a split backward to the second.
        forward, backward, backward_input, backward_weight: largest rise in a pass above the bytes before it.
        stored: part of ``kept`` that exists until the backward of the whole stage ends.
        gradients: change of the gradients of keys and values in the backward of a slice, or in its first half.
    """

    kept: float
    deferred: float
    forward: float
    backward: float
    backward_input: float
    backward_weight: float
    stored: float = 0.0
    gradients: float = 0.0


def stage_activations(
    sizes: TrainingSizes, placement: Placement, earlier: int = 0, later: int = 0
) -> tuple[Activations, ...]:
    """Return the activations of every stage, head parts and their loss included, as ops number them.

    Args:
        sizes: sizes of the model; ``seq_length`` is that of a slice.
        earlier, later: tokens of the other slices of a sample.
    """
    layers, head_parts = sizes.stage_layer_counts(placement.stages), len(placement.stages_of_kind(HEAD_PART))
    kinds = {kind: layer_activations(sizes, kind, earlier, later) for kind in {"none", sizes.recompute}}
    copied = sizes.tokens * _between(sizes) * sizes.token_bytes if _keeps_a_copy(sizes) else 0.0
    stages: dict[tuple[object, ...], Activations] = {}  # equal stages are computed once
    result, first, last = [], 0, len(layers) - 1
    for stage, count in enumerate(layers):
        key = stage == 0, stage == last, count, first % sizes.recompute_interval
        if key not in stages:
            parts = [kinds[sizes.recomputes(first + index)] for index in range(count)]
            if stage == 0:
                tied_parts = 0 if sizes.untie_embeddings_and_output_weights else head_parts
                parts.insert(0, _embedding(sizes, tied_parts))
            elif parts and sizes.recomputes(first) != "full":
                parts[0] = replace(parts[0], kept=parts[0].kept + copied)
            if stage == last:
                parts.append(_last_norm(sizes) if head_parts else _head(sizes))
            stages[key] = _sum(parts)
        result.append(stages[key])
        first += count
    return (*result, *_head_parts(sizes, head_parts)) if head_parts else tuple(result)


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
        change = part.stored + max(part.gradients, 0) - part.kept
        after += change
        after_input += part.deferred + change
    weight = max((part.backward_weight for part in parts), default=0.0)
    deferred, stored, gradients = (
        sum(getattr(part, name) for part in parts) for name in ("deferred", "stored", "gradients")
    )
    return Activations(kept, deferred, forward, backward, backward_input, weight, stored, gradients)


def _keeps_a_copy(sizes: TrainingSizes) -> bool:
    """Return whether norms keep an fp32 copy instead of their input, which for the first one is that of the stage."""
    return sizes.normalization == "RMSNorm" and sizes.precision != "fp32"


def _between(sizes: TrainingSizes) -> float:
    """Return c, the elements of a token between tensor-parallel layers."""
    return sizes.hidden_size / sizes.tensor_parallel if sizes.sequence_parallel else sizes.hidden_size


def layer_activations(sizes: TrainingSizes, recompute: str, earlier: int = 0, later: int = 0) -> Activations:
    """Return the activations of a transformer layer; arguments as for :func:`stage_activations`."""
    size, t, gated = sizes.token_bytes, sizes.tensor_parallel, sizes.swiglu
    h, c = sizes.hidden_size, _between(sizes)
    experts = sizes.experts
    per_token, number = (0, 0) if experts is None else (experts.per_token, experts.number)
    shards = sizes.attention_shards
    q, k = (width / shards for width in sizes.attention_widths)
    f = sizes.inner_width(per_token) / t
    dropout = sizes.hidden_dropout > 0
    fc1 = (2 if gated else 1) * f  # elements of the outputs of the MLP's first layers
    routed = 2 * sizes.sparse_share * per_token * h / t  # inputs and outputs of experts
    inner = 2 * fc1 + routed  # elements of the MLP
    scored = sizes.num_attention_heads * (earlier + sizes.seq_length) / shards
    # Bytes of a token.
    core = 4 * sizes.num_attention_heads / shards  # log-sum-exp
    if sizes.attention_scores:
        core = sizes.score_bytes * scored
        core += sizes.score_copies * q
    everything = _norms(sizes, 2 * c) + size * (2 * c + q + inner) + 2 * c * dropout
    everything += size * _attention_inputs(sizes, q, k) + core
    everything += _norms(sizes, q + k) if sizes.qk_layernorm else 0
    if experts is not None and experts.fp32_router and sizes.precision != "fp32":
        everything += 4 * sizes.sparse_share * h
    everything += 0 if sizes.latent is None else _norms(sizes, sizes.latent.query_rank + sizes.latent.kv_rank)
    kept = {"none": everything, "selective": everything - core, "full": size * c}[recompute]
    # The backward of the MLP comes first: the gradient of the output, and gradients of inner tensors.
    if recompute == "full":
        repeated = everything + size * 2 * (h - c) - kept
    else:
        repeated = max(everything - kept - size * inner, 0)
    scores = 0.0  # gradient of the scores; a whole backward has freed the MLP by then
    if sizes.attention_scores and recompute != "none":
        scores = sizes.score_bytes / 3 * scored
    freed = size * (h + inner) if recompute == "full" else 0
    # With tensor parallelism also that of the output over all tokens, or that of the input before its sum, and parts
    # from which sequence parallelism puts it together.
    gathered = (2 if sizes.sequence_parallel else 1) * h if t > 1 else 0
    above = size * (c + gathered) + (size - 1) * c * dropout + repeated
    # Gradient of the largest weight: the first one of all experts together.
    weight = size * h * f if experts is None else size * h * (2 if gated else 1) * number * experts.width / t
    deferred = size * (4 * h + 2 * q + 2 * k + f + fc1 + routed)
    temporary = size * (3 * c + (0 if recompute != "full" else f + fc1))
    backward = above + max(scores - freed, 0) + size * fc1
    backward_input = above + scores + size * (fc1 + f)
    stored = gradients = 0.0
    if earlier + later:
        keys, before = 2 * size * k, earlier / sizes.seq_length
        stored = keys if recompute == "full" else 0.0
        gradients = -keys if later else keys * before
        # At the last block: gradient of the context, its copy, gradients of the queries, those of the block's queries,
        # keys and values, with fewer heads of keys also copies of keys and values, and gradients of earlier keys.
        attention = size * (6 if k == q else 8) * q + before * keys
        attention += size * c + everything - kept - _norms(sizes, c) - size * (c + inner) - c * dropout
        backward = max(backward, attention)
        backward_input = max(backward_input, attention + size * (c + h + f + fc1))
    tokens = sizes.tokens
    return Activations(
        tokens * (kept + stored),
        tokens * deferred,
        tokens * temporary,
        tokens * backward + weight,
        tokens * backward_input,
        _deferred_gradient(sizes, weight),
        tokens * stored,
        tokens * gradients,
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
    if (latent := sizes.latent) is not None:
        # Also those of low rank. Queries and keys are new tensors, and the values a part of the output that is kept.
        features = 2 * latent.head_size + latent.unrotated + 2 * latent.value
        return sizes.num_attention_heads * features - q + latent.query_rank + latent.kv_rank
    if sizes.position_embedding_type != "rope" and not sizes.qk_layernorm:
        return q + 2 * k
    # Queries and keys are new tensors. The values are a part of the output of a linear layer, which is kept whole.
    return q + k + 2 * k + (q if sizes.query_groups == sizes.num_attention_heads else 0)


def _deferred_gradient(sizes: TrainingSizes, weight: float) -> float:
    return 2 * weight if sizes.precision == "bf16" else weight


def _embedding(sizes: TrainingSizes, parts: int = 0) -> Activations:
    """Return the activations of the embeddings, in parts with a tied head, and of the dropout after them."""
    tokens, size, c = sizes.tokens, sizes.token_bytes, _between(sizes)
    weight = size * sizes.embedding_parameters / max(parts, 1)
    kept = tokens * c * (sizes.hidden_dropout > 0)
    partial = (
        tokens * size * c if parts else 0.0
    )  # outputs, or their gradients, that are zero outside of a part
    return Activations(
        kept,
        tokens * size * c,
        2 * partial,
        tokens * size * c + partial + weight,
        2 * tokens * size * c,
        partial + _deferred_gradient(sizes, weight),
    )


def _head(sizes: TrainingSizes) -> Activations:
    """Return the activations of the last norm, the head and the loss."""
    tokens, size, c, h = sizes.tokens, sizes.token_bytes, _between(sizes), sizes.hidden_size
    vocabulary = sizes.padded_vocab_size(sizes.tensor_parallel) / sizes.tensor_parallel
    logits, weight = tokens * size * vocabulary, size * vocabulary * h
    chunk = _chunk(sizes, vocabulary)
    if sizes.chunked_loss:
        return _chunked_head(sizes, chunk, weight)
    kept = tokens * (_norms(sizes, c) + size * c) + logits
    # Its backward starts without the normalized input and the output of the norm, and without the logits.
    norm = tokens * (_RMS_NORM_BACKWARD - 2 * size) * c - logits if sizes.normalization == "RMSNorm" else 0.0
    return Activations(
        kept,
        tokens * size * h + logits,
        chunk,
        max(logits + chunk, tokens * size * (c + h) + weight, norm),
        logits + max(chunk, norm + tokens * size * h),
        _deferred_gradient(sizes, weight),
    )


def _chunk(sizes: TrainingSizes, vocabulary: float) -> float:
    """Return the bytes of the fp32 logits of a chunk of tokens."""
    fp32 = 4 * sizes.tokens * vocabulary
    return max(fp32 / CHUNKS, min(LEAST_CHUNK, fp32))


def _last_norm(sizes: TrainingSizes) -> Activations:
    """Return the activations of the last norm without the head. Its backward starts with the gradient of its output."""
    tokens, size, c = sizes.tokens, sizes.token_bytes, _between(sizes)
    rise = tokens * (size + (_RMS_NORM_BACKWARD if sizes.normalization == "RMSNorm" else size)) * c
    return Activations(tokens * _norms(sizes, c), 0.0, 0.0, rise, rise, 0.0)


def _head_parts(sizes: TrainingSizes, parts: int) -> list[Activations]:
    """Return the activations of every part of the head, then those of the loss that joins them."""
    hidden = sizes.tokens * sizes.token_bytes * sizes.hidden_size
    vocabulary = sizes.padded_vocab_size(sizes.tensor_parallel) / sizes.tensor_parallel / parts
    chunk = _chunk(sizes, vocabulary) * (1.5 if sizes.precision != "fp32" else 1.0)
    weight = sizes.token_bytes * vocabulary * sizes.hidden_size
    gradient = max(weight + chunk, _deferred_gradient(sizes, weight))
    statistics = 12 * sizes.tokens  # labels; three fp32 numbers for the weight gradient
    kept = hidden + sizes.tokens * sizes.token_bytes * vocabulary + statistics
    # A part frees at its weight gradient what it kept, as a split backward does.
    part = Activations(kept, kept, chunk + 2 * hidden, 0.0, 0.0, gradient)
    loss = Activations(0.0, 0.0, 2 * parts * hidden, 0.0, 0.0, 0.0)
    return [*[part] * parts, loss]


def _chunked_head(sizes: TrainingSizes, chunk: float, weight: float) -> Activations:
    """Return the activations of the last norm and a chunked loss: ``chunk`` bytes of fp32 logits exist at a time."""
    tokens, size, c, h = sizes.tokens, sizes.token_bytes, _between(sizes), sizes.hidden_size
    is_half = sizes.precision != "fp32"
    chunk *= 1.5 if is_half else 1.0  # with a copy in half precision
    gathered = size * h if c < h else 0.0
    statistics = size * h + 4  # gradient of the hidden states, and fp32 logarithm of the sum of exponentials
    scaled = (8 if is_half else size) * h  # the gradient times the factor of the loss, in fp32
    norm = (
        (_RMS_NORM_BACKWARD - 2 * size) * c - statistics - gathered if sizes.normalization == "RMSNorm" else 0
    )
    return Activations(
        tokens * (_norms(sizes, c) + size * c + gathered + statistics),
        tokens * (size * h + 4),
        chunk,
        max(
            tokens * scaled,
            tokens * size * h + weight + chunk,
            tokens * (size * (c + h) - gathered) + weight,
            tokens * norm,
        ),
        tokens * max(scaled, norm + size * h),
        max(weight + chunk, _deferred_gradient(sizes, weight)),
    )
