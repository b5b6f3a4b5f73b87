"""BERT as a list of DeepSpeed layer specs for any partition and tensor-parallel size.

    index       layer                  from                            to
    0           GPTEmbedding, tied     (tokens_BS, types_BS, mask_BS)  (hidden_BSD, types_BS, mask_BS)
    1           BertEmbedding          (hidden_BSD, types_BS, mask_BS) (hidden_BSD, mask_BS)
    2 .. L+1    BertLayer              (hidden_BSD, mask_BS)           (hidden_BSD, mask_BS)
    L+2         BertHeads              (hidden_BSD, mask_BS)           (transformed_BSD, order_B2)
    L+3         word_logits, tied      (transformed_BSD, order_B2)     (logits_BSV, order_B2)
    L+4         BertOutputBias         (logits_BSV, order_B2)          (logits_BSV, order_B2)

Shapes: B samples of a micro-batch, S tokens, D hidden size, V this rank's slice of the padded vocabulary.
``types_BS`` is 0 in the first segment of a sample and 1 in the second. ``mask_BS`` is False for padding; stages send it
with the activations, one byte per token. Without the sentence-order head there is no ``order_B2``.

The network is the original one (Devlin et al. 2018). With the same weights, its logits match those of transformers'
BertForPreTraining.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ds_ext.errors import ConfigError
from ds_ext.model.config import GPT_FIELDS, TransformerConfig
from ds_ext.recipes.models.bert_layers import BertHeads, BertLayer
from ds_ext.recipes.models.gpt import GPTEmbedding, check_positions, output_logits
from ds_ext.recipes.models.layers import BEFORE_THE_FIRST_LAYER, LayerNorm, embedding_table, hidden_dropout
from ds_ext.tensor_parallel import (
    IGNORE_INDEX,
    DropoutClock,
    TensorParallel,
    embedding,
    shared_parameters,
    vocab_parallel_cross_entropy,
)
from ds_ext.tensor_parallel.layers import sharded_parameter

TOKEN_TYPES = 2
# Names of the terms of the loss; the perplexity is of the first one.
MASKED_WORDS, SENTENCE_ORDER = "masked_words", "sentence_order"


@dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """Sizes of a BERT. See TransformerConfig for the other fields.

    Args:
        layernorm_epsilon: constant added to the variance; the default is that of the original BERT.
        order_classes: number of logits of the sentence-order head; None: no such head (Megatron's
            ``--bert-no-binary-head``).
    """

    layernorm_epsilon: float = 1e-12
    order_classes: int | None = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transformer_impl != "local":
            raise ConfigError(f"--transformer-impl: must be local for BERT (got {self.transformer_impl}).")
        for name in GPT_FIELDS:
            value, default = getattr(self, name), getattr(TransformerConfig, name)
            if value != default:
                raise ConfigError(f"{name}: BERT supports only the default {default} (got {value}).")


class BertEmbedding(nn.Module):
    def __init__(self, config: TransformerConfig, tp: TensorParallel, clock: DropoutClock) -> None:
        super().__init__()
        self.sequence_tp = tp if config.sequence_parallel else TensorParallel()
        self.position_embeddings = embedding_table(config, config.positions, "position_embeddings.weight")
        self.token_type_embeddings = embedding_table(config, TOKEN_TYPES, "tokentype_embeddings.weight")
        self.layernorm = LayerNorm(config, tp)
        self.dropout = hidden_dropout(config, BEFORE_THE_FIRST_LAYER, "embedding_output", tp, clock)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Map (hidden_BSD, types_BS, mask_BS) to (hidden_BSD, mask_BS).

        With sequence parallelism, hidden_BSD holds this rank's slice of the tokens.
        """
        hidden_BSD, types_BS, mask_BS = inputs
        tokens = types_BS.size(1)
        check_positions(tokens, self.position_embeddings.size(0))
        positions_PD, types_TD = shared_parameters(
            self.sequence_tp, self.position_embeddings, self.token_type_embeddings
        )
        types_BSD = embedding(self.sequence_tp.shard(types_BS, 1), types_TD)
        hidden_BSD = hidden_BSD + types_BSD + self.sequence_tp.shard(positions_PD[:tokens], 0)
        return self.dropout(self.layernorm(hidden_BSD)), mask_BS


class BertOutputBias(nn.Module):
    """Bias of the word logits.

    It is a separate layer because the module of the word embeddings is tied to the first stage, which has no bias.
    """

    def __init__(self, config: TransformerConfig, tp: TensorParallel) -> None:
        super().__init__()
        rows = config.padded_vocab_size(tp.shards)
        self.bias = sharded_parameter((rows,), 0, tp, nn.init.zeros_, unpadded=config.vocab_size)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits_BSV, *order = inputs
        return logits_BSV + self.bias, *order


def embed_words(embedding: GPTEmbedding, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Map (tokens_BS, types_BS, mask_BS) to (hidden_BSD, types_BS, mask_BS)."""
    tokens_BS, types_BS, mask_BS = inputs
    return embedding(tokens_BS), types_BS, mask_BS


def word_logits(embedding: GPTEmbedding, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Map (transformed_BSD, order_B2) to (logits_BSV, order_B2), this rank's logits."""
    transformed_BSD, *order = inputs
    return output_logits(embedding, transformed_BSD), *order


def bert_layer_specs(config: BertConfig, tp: TensorParallel, clock: DropoutClock) -> list[LayerSpec]:
    """Return the whole model as num_layers + 5 specs, of which a rank may build any subset.

    Building a spec neither communicates nor uses a global generator. Initial weights depend only on ``config``.
    """
    config.check_tensor_parallel(tp.size)

    def tied(forward_fn: Callable[..., object]) -> TiedLayerSpec:
        weight = "word_embeddings.weight"
        return TiedLayerSpec(
            "embed", GPTEmbedding, config, tp, forward_fn=forward_fn, tied_weight_attr=weight
        )

    return [
        tied(embed_words),
        LayerSpec(BertEmbedding, config, tp, clock),
        *(LayerSpec(BertLayer, config, layer, tp, clock) for layer in range(config.num_layers)),
        LayerSpec(BertHeads, config, tp, config.order_classes),
        tied(word_logits),
        LayerSpec(BertOutputBias, config, tp),
    ]


class BertLoss:
    """Loss function of the last stage: ((logits_BSV, order_B2), (labels_BS, swapped_B)) to name -> (sum, count).

    The masked words (labels other than ``IGNORE_INDEX``) and the samples of the sentence-order loss have separate
    divisors. The sums are fp32, in nats, and the same on all tensor-parallel ranks. Without a sentence-order head, the
    result is a pair.
    """

    def __init__(self, config: BertConfig, tp: TensorParallel) -> None:
        self._vocab_size, self._tp = config.vocab_size, tp
        self._has_order = config.order_classes is not None

    def __call__(self, outputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> Any:
        logits_BSV, *order = outputs
        labels_BS, *swapped = labels
        counts = self.counts(labels)
        words = vocab_parallel_cross_entropy(logits_BSV, labels_BS, self._tp, self._vocab_size).sum()
        if not self._has_order:
            return words, counts
        sums = {
            MASKED_WORDS: words,
            SENTENCE_ORDER: F.cross_entropy(order[0].float(), swapped[0], reduction="sum"),
        }
        return {name: (sums[name], counts[name]) for name in sums}

    def counts(self, labels: tuple[Tensor, ...]) -> Any:
        """Return the number of masked words, or name -> number for both terms."""
        labels_BS, *swapped = labels
        words = (labels_BS != IGNORE_INDEX).sum()
        return {MASKED_WORDS: words, SENTENCE_ORDER: swapped[0].numel()} if self._has_order else words
