"""GPT as a list of DeepSpeed layer specs for any partition and tensor-parallel size.

    index            layer                      from          to
    0                GPTEmbedding, tied         tokens_BS     hidden_BSD
    1                GPTPositionEmbedding       hidden_BSD    hidden_BSD
    2 .. L+1         TransformerLayer           hidden_BSD    hidden_BSD
    L+2              LayerNorm or RMSNorm       hidden_BSD    hidden_BSD
    L+3              output_logits, tied        hidden_BSD    logits_BSV

Shapes: B samples of a micro-batch, S tokens, D hidden size, V this rank's slice of the padded vocabulary.
The first and the last layer share a module that contains only the word embeddings. A stage with only the last layer
then has no parameter without a gradient. Without the tie, the last layer is a GPTHead. With a chunked loss, the last
layer returns the hidden states of all tokens, and the loss function computes the logits.

If documents are separated (``config.packed``), inputs and outputs of the layers 0..L are pairs with ``starts_BS``: the
index of the first token of every token's document in its sample, 0 for a document that started before the sample.
An end-of-document token belongs to the document that it ends.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ds_ext.errors import ConfigError
from ds_ext.model.config import TransformerConfig
from ds_ext.recipes.models.layers import (
    BEFORE_THE_FIRST_LAYER,
    Packed,
    TransformerLayer,
    embedding_table,
    hidden_dropout,
    norm_class,
    unpack_starts,
)
from ds_ext.recipes.models.te import TransformerEngineLayer, check_transformer_engine
from ds_ext.tensor_parallel import (
    IGNORE_INDEX,
    ChunkedHead,
    DividedEmbedding,
    DropoutClock,
    HeadPart,
    InitMethod,
    TensorParallel,
    VocabParallelEmbedding,
    embedding,
    keyed_normal,
    project_logits,
    shared_parameters,
    slice_start,
    vocab_parallel_cross_entropy,
)
from ds_ext.tensor_parallel.layers import sharded_parameter


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """Sizes of a GPT. See TransformerConfig for the fields."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transformer_impl == "transformer_engine":
            check_transformer_engine(self)
        elif self.transformer_impl == "transformers":
            _check_transformers(self)
        elif self.lora_rank is not None:
            raise ConfigError(f"--lora-rank: needs a model of --hf-model (got {self.lora_rank}). Add it.")

    def _check_shards(self, tp_size: int) -> None:
        if self.transformer_impl != "transformers" or self.experts is None:  # see also ds_ext.hf.shards
            super()._check_shards(tp_size)


def _check_transformers(config: TransformerConfig) -> None:
    refused = {
        "recompute": ("selective", "Use --recompute-granularity full."),
        "reset_position_ids": (True, "Remove --reset-position-ids."),
        "reset_attention_mask": (True, "Remove --reset-attention-mask."),
    }
    for name, (value, fix) in refused.items():
        if getattr(config, name) == value:
            raise ConfigError(f"{name}: layers of transformers do not support it (got {value}). {fix}")
    if config.recompute != "none" and config.recompute_interval > 1:
        raise ConfigError(
            f"recompute_interval: layers of transformers support only 1 (got {config.recompute_interval}). Use 1."
        )


class GPTEmbedding(nn.Module):
    """Word embeddings.

    Padding rows are zero and stay zero. The initial values of the other rows do not depend on the padding. ``parts`` is
    the number of parts of the tied head; 0: it is whole.
    """

    def __init__(self, config: TransformerConfig, tp: TensorParallel, parts: int = 0) -> None:
        super().__init__()
        self.tp, self.packed, self.pad_token_id = tp, config.packed, config.pad_token_id
        width, rows = config.hidden_size, config.padded_vocab_size(tp.shards * max(parts, 1))
        tokens, sequence = config.vocab_size, config.sequence_parallel
        init = _embedding_init(config)
        self.word_embeddings: VocabParallelEmbedding | DividedEmbedding
        if parts:
            whole = sharded_parameter((rows, width), 0, TensorParallel(), init).detach()
            weights = [nn.Parameter(tp.shard(part, 0).clone()) for part in whole.chunk(parts)]
            self.word_embeddings = DividedEmbedding(weights, tp, tokens, sequence)
        else:
            self.word_embeddings = VocabParallelEmbedding(
                rows, width, tp, init=init, padding=rows - tokens, sequence_parallel=sequence
            )

    def forward(self, inputs: Packed) -> Packed:
        """Map tokens_BS to hidden_BSD, or (tokens_BS, starts_BS) to (hidden_BSD, starts_BS).

        hidden_BSD is the same on all tensor-parallel ranks, or this rank's slice with sequence parallelism.
        """
        tokens_BS, starts_BS = unpack_starts(inputs)
        if self.packed and starts_BS is None:
            raise _inputs_error("a pair (tokens, starts) with packed=True (got tokens)")
        if not self.packed and starts_BS is not None:
            raise _inputs_error("tokens with packed=False (got a pair)")
        hidden_BSD = self.word_embeddings(tokens_BS)
        if self.pad_token_id is not None:
            shards = tokens_BS.size(1) // hidden_BSD.size(1)  # with sequence parallelism
            is_pad_BS = (tokens_BS == self.pad_token_id).chunk(shards, 1)[self.tp.rank if shards > 1 else 0]
            hidden_BSD = torch.where(is_pad_BS.unsqueeze(-1), hidden_BSD.detach(), hidden_BSD)
        return hidden_BSD if starts_BS is None else (hidden_BSD, starts_BS)


def _inputs_error(problem: str) -> ConfigError:
    fix = "Change the data, or reset_position_ids and reset_attention_mask."
    return ConfigError(f"inputs: must be {problem}. {fix}")


def _embedding_init(config: TransformerConfig) -> InitMethod:
    return _vocabulary_init(config, BEFORE_THE_FIRST_LAYER, "word_embeddings.weight")


def _vocabulary_init(config: TransformerConfig, layer: int, name: str) -> InitMethod:
    """Return the initialization of a weight with a row for every token and zero rows of padding."""
    normal = keyed_normal(config.init_std, config.seed, layer, name)

    def fill(full_VD: Tensor) -> None:
        normal(full_VD[: config.vocab_size])
        full_VD[config.vocab_size :].zero_()

    return fill


class GPTPositionEmbedding(nn.Module):
    """Learned position embeddings and a dropout. With rotary embeddings only the dropout."""

    def __init__(self, config: TransformerConfig, tp: TensorParallel, clock: DropoutClock) -> None:
        super().__init__()
        self.sequence_tp = tp if config.sequence_parallel else TensorParallel()
        self.reset = config.reset_position_ids
        self.positions = config.positions
        learned = config.position_embedding_type == "learned_absolute"
        self.weight = (
            embedding_table(config, config.positions, "position_embeddings.weight") if learned else None
        )
        self.dropout = hidden_dropout(config, BEFORE_THE_FIRST_LAYER, "embedding_output", tp, clock)

    def forward(self, inputs: Packed) -> Packed:
        """Map hidden_BSD, or (hidden_BSD, starts_BS), to the same shapes.

        With sequence parallelism, hidden_BSD holds this rank's slice of the tokens.
        """
        hidden_BSD, starts_BS = unpack_starts(inputs)
        tokens, first = hidden_BSD.size(1) * self.sequence_tp.size, slice_start()
        check_positions(first + tokens, self.positions)
        if self.weight is not None:
            (table_PD,) = shared_parameters(self.sequence_tp, self.weight)
            if self.reset and starts_BS is not None:
                positions_BS = torch.arange(first, first + tokens, device=starts_BS.device) - starts_BS
                hidden_BSD = hidden_BSD + embedding(self.sequence_tp.shard(positions_BS, 1), table_PD)
            else:
                hidden_BSD = hidden_BSD + self.sequence_tp.shard(table_PD[first : first + tokens], 0)
        hidden_BSD = self.dropout(hidden_BSD)
        return hidden_BSD if starts_BS is None else (hidden_BSD, starts_BS)


class GPTHead(nn.Module):
    """Language model head that is not tied to the word embeddings. Padding rows are zero and stay zero."""

    def __init__(
        self, config: TransformerConfig, tp: TensorParallel, chunked: ChunkedHead | None = None
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel, self.chunked = tp, config.sequence_parallel, chunked
        self.weight = _head_weight(config, tp)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """Map hidden_BSD to this rank's logits_BSV, or with a chunked loss to the hidden states of all tokens."""
        if self.chunked is not None:
            return self.chunked.enter(hidden_BSD, self.weight, self.sequence_parallel)
        return project_logits(hidden_BSD, self.weight, self.tp, self.sequence_parallel)


def _head_weight(
    config: TransformerConfig, tp: TensorParallel, part: int = 0, parts: int = 1
) -> nn.Parameter:
    shape = config.padded_vocab_size(tp.shards * parts), config.hidden_size
    is_untied = config.untie_embeddings_and_output_weights
    head_init = _vocabulary_init(config, config.num_layers, "output_layer.weight")
    init = head_init if is_untied else _embedding_init(config)
    return sharded_parameter(shape, 0, tp, init, unpadded=config.vocab_size, part=part, parts=parts)


class GPTHeadPart(HeadPart):
    """Part of the rows of a GPTHead, or of the tied embedding. All parts together have its initial values."""

    def __init__(self, config: TransformerConfig, tp: TensorParallel, part: int, parts: int) -> None:
        weight = _head_weight(config, tp, part, parts)
        super().__init__(weight, part, tp, config.vocab_size, config.sequence_parallel)


def check_positions(tokens: int, positions: int) -> None:
    if tokens > positions:
        raise ConfigError(
            f"max_position_embeddings: must be at least the {tokens} tokens of a sample (got {positions}). "
            f"Use {tokens}, or shorter samples."
        )


def output_logits(embedding: GPTEmbedding, hidden_BSD: Tensor) -> Tensor:
    """Apply the tied language model head: hidden_BSD to this rank's logits_BSV."""
    table = _whole_table(embedding)
    return project_logits(hidden_BSD, table.weight, table.tp, table.sequence_parallel)


def _whole_table(embedding: GPTEmbedding) -> VocabParallelEmbedding:
    assert isinstance(embedding.word_embeddings, VocabParallelEmbedding), "a head in parts has no logits"
    return embedding.word_embeddings


def enter_head(chunked: ChunkedHead, embedding: GPTEmbedding, hidden_BSD: Tensor) -> Tensor:
    """Apply the tied language model head with a chunked loss: hidden_BSD to the hidden states of all tokens."""
    table = _whole_table(embedding)
    return chunked.enter(hidden_BSD, table.weight, table.sequence_parallel)


def gpt_layer_specs(
    config: TransformerConfig, tp: TensorParallel, clock: DropoutClock, chunked: ChunkedHead | None = None
) -> list[LayerSpec]:
    """Return the whole model as num_layers + 4 specs, of which a rank may build any subset.

    Building a spec neither communicates nor uses a global generator. Initial weights depend only on ``config``.
    ``chunked`` is an attribute of the loss function, required with ``config.chunked_loss``.
    """
    if config.chunked_loss and chunked is None:
        raise ConfigError(
            "chunked_loss: gpt_layer_specs() needs the head of the loss function (got none). Pass "
            "chunked=gpt_loss(config, tp).chunked of the same loss function."
        )
    config.check_tensor_parallel(tp.size)
    layer_class = TransformerLayer if config.transformer_impl == "local" else TransformerEngineLayer
    if config.untie_embeddings_and_output_weights:
        embedding_spec = LayerSpec(GPTEmbedding, config, tp)
        head_spec = LayerSpec(GPTHead, config, tp, chunked)
    else:
        weight = "word_embeddings.weight"
        embedding_spec, head_spec = (
            TiedLayerSpec("embed", GPTEmbedding, config, tp, forward_fn=forward, tied_weight_attr=weight)
            for forward in (None, functools.partial(enter_head, chunked) if chunked else output_logits)
        )
        embedding_spec.in_parts = lambda parts: TiedLayerSpec(
            "embed", GPTEmbedding, config, tp, parts, tied_weight_attr=weight
        )
    head_spec.in_parts = lambda parts: [
        LayerSpec(GPTHeadPart, config, tp, part, parts) for part in range(parts)
    ]
    return [
        embedding_spec,
        LayerSpec(GPTPositionEmbedding, config, tp, clock),
        *(LayerSpec(layer_class, config, layer, tp, clock) for layer in range(config.num_layers)),
        LayerSpec(norm_class(config), config, tp),
        head_spec,
    ]


class GPTLoss:
    """Loss function of the last stage: (logits_BSV, labels_BS) to (sum, count), in nats.

    The labels other than ``IGNORE_INDEX`` count. The sum is fp32 and the same on all tensor-parallel ranks.

    Attributes:
        chunked: head of the model with a chunked loss, which takes hidden_BSD instead of logits_BSV; None: without.
        takes_token_losses: with the parts of a head it gets the losses of the tokens, (B, S), instead of logits_BSV.
    """

    takes_token_losses = True

    def __init__(self, config: TransformerConfig, tp: TensorParallel) -> None:
        self._vocab_size, self._tp = config.vocab_size, tp
        self.chunked = ChunkedHead(tp) if config.chunked_loss else None

    def __call__(self, outputs: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        if outputs.shape == labels_BS.shape:  # losses of the tokens, from the parts of a head
            return outputs.sum(), self.counts(labels_BS)
        if self.chunked is not None:
            return self.chunked.loss(outputs, labels_BS, self._vocab_size), self.counts(labels_BS)
        loss_BS = vocab_parallel_cross_entropy(outputs, labels_BS, self._tp, self._vocab_size)
        return loss_BS.sum(), self.counts(labels_BS)

    def return_logits(self, outputs: Tensor) -> Tensor:
        return outputs if self.chunked is None else self.chunked.logits(outputs)

    def counts(self, labels_BS: Tensor) -> Tensor:
        return (labels_BS != IGNORE_INDEX).sum()


def gpt_loss(config: TransformerConfig, tp: TensorParallel) -> GPTLoss:
    return GPTLoss(config, tp)
