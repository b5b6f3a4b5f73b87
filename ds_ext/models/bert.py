"""BERT as a list of DeepSpeed layer specs, for any pipeline partition and tensor-parallel size.

    index       layer                  from                            to
    0           GPTEmbedding, tied     (tokens_BS, types_BS, seen_BS)  (hidden_BSD, types_BS, seen_BS)
    1           BertEmbedding          (hidden_BSD, types_BS, seen_BS) (hidden_BSD, seen_BS)
    2 .. L+1    BertLayer              (hidden_BSD, seen_BS)           (hidden_BSD, seen_BS)
    L+2         BertHeads              (hidden_BSD, seen_BS)           (words_BSD, order_B2)
    L+3         word_logits, tied      (words_BSD, order_B2)           (logits_BSV, order_B2)
    L+4         BertOutputBias         (logits_BSV, order_B2)          (logits_BSV, order_B2)

Shapes: B samples of a micro-batch, S tokens, D hidden size, V this rank's slice of the padded vocabulary.
``types_BS`` is 0 in the first sentence of a sample and 1 in the second; ``seen_BS`` is False in its padding, and
between stages the only companion of the activations: one byte a token. Without the sentence head there is no
``order_B2``.

The network is that of the original (Devlin et al. 2018): on the same weights the logits are those of transformers'
BertForPreTraining.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ds_ext.errors import ConfigError
from ds_ext.models.bert_layers import BertHeads, BertLayer
from ds_ext.models.config import TransformerConfig
from ds_ext.models.gpt import GPTEmbedding
from ds_ext.models.layers import LayerNorm, hidden_dropout
from ds_ext.tensor_parallel import (
    IGNORE_INDEX,
    DropoutClock,
    TensorParallel,
    embedding,
    enter_tensor_parallel,
    keyed_normal,
    linear,
    shared_parameters,
    vocab_parallel_cross_entropy,
)
from ds_ext.tensor_parallel.layers import sharded_parameter

_BEFORE_THE_FIRST_LAYER = -1
TOKEN_TYPES = 2


@dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """Sizes of a BERT; see TransformerConfig for the fields that all models have.

    Args:
        layernorm_epsilon: added to the variance; the original's value by default.
        order_classes: logits of the sentence head; None leaves the head out (Megatron's
            ``--bert-no-binary-head``).
    """

    layernorm_epsilon: float = 1e-12
    order_classes: int | None = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transformer_impl != "local":
            raise ConfigError("--transformer-impl must be local for BERT: its layers are post-LN.")


class BertEmbedding(nn.Module):
    """Add positions and token types to the word embeddings, normalize, drop out.

    (hidden_BSD, types_BS, seen_BS) to (hidden_BSD, seen_BS), with sequence parallelism of this rank's slice of the
    tokens.

    Raises:
        ConfigError: at run time, for more tokens than there are positions.
    """

    def __init__(self, config: TransformerConfig, tp: TensorParallel, clock: DropoutClock) -> None:
        super().__init__()
        # Of the tokens of a sample this rank holds one slice, or all.
        self.tp = tp if config.sequence_parallel else TensorParallel()
        self.position_embeddings = _table(config, config.positions, "position_embeddings.weight")
        self.token_type_embeddings = _table(config, TOKEN_TYPES, "tokentype_embeddings.weight")
        self.layernorm = LayerNorm(config, tp)
        self.dropout = hidden_dropout(config, _BEFORE_THE_FIRST_LAYER, "embedding_output", tp, clock)

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden_BSD, types_BS, seen_BS = inputs
        tokens, positions = types_BS.size(1), self.position_embeddings.size(0)
        if tokens > positions:
            raise ConfigError(
                f"a sample of {tokens} tokens does not fit {positions} position embeddings. "
                f"Raise max_position_embeddings to {tokens} or shorten the samples."
            )
        places_PD, types_TD = shared_parameters(self.tp, self.position_embeddings, self.token_type_embeddings)
        types_BSD = embedding(self.tp.shard(types_BS, 1), types_TD)
        hidden_BSD = hidden_BSD + types_BSD + self.tp.shard(places_PD[:tokens], 0)
        return self.dropout(self.layernorm(hidden_BSD)), seen_BS


class BertOutputBias(nn.Module):
    """Add a bias for every word: (logits_BSV, ...) to the same.

    A layer of its own, because the word embeddings in front of it are tied to those of the first stage, which has no
    use for a bias.
    """

    def __init__(self, config: TransformerConfig, tp: TensorParallel) -> None:
        super().__init__()
        rows = config.padded_vocab_size(tp.shards)
        self.bias = sharded_parameter((rows,), 0, tp, nn.init.zeros_, unpadded=config.vocab_size)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits_BSV, *order = inputs
        return logits_BSV + self.bias, *order


def embed_words(embedding: GPTEmbedding, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The first layer: (tokens_BS, types_BS, seen_BS) to (hidden_BSD, types_BS, seen_BS)."""
    tokens_BS, types_BS, seen_BS = inputs
    return embedding(tokens_BS), types_BS, seen_BS


def word_logits(embedding: GPTEmbedding, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The language model head over the tied word embeddings: (words_BSD, ...) to this rank's (logits_BSV, ...)."""
    words_BSD, *order = inputs
    words = embedding.word_embeddings
    words_BSD = enter_tensor_parallel(words_BSD, words.tp, words.sequence_parallel)
    return linear(words_BSD, words.weight), *order


def bert_layer_specs(config: BertConfig, tp: TensorParallel, clock: DropoutClock) -> list[LayerSpec]:
    """The whole model as num_layers + 5 specs that any rank may build any part of.

    Building communicates nothing and draws from no global generator: the start weights depend on ``config``
    only.

    Args:
        config: sizes.
        tp: this rank's place in its tensor-parallel group.
        clock: the object that will tell the dropout layers which step and micro-batch they compute.

    Raises:
        ConfigError: if the tensor-parallel size does not divide the heads or the MLP.
    """
    config.check_tensor_parallel(tp.size)

    def words(forward_fn: Callable[..., object]) -> TiedLayerSpec:
        weight = "word_embeddings.weight"
        return TiedLayerSpec(
            "embed", GPTEmbedding, config, tp, forward_fn=forward_fn, tied_weight_attr=weight
        )

    return [
        words(embed_words),
        LayerSpec(BertEmbedding, config, tp, clock),
        *(LayerSpec(BertLayer, config, layer, tp, clock) for layer in range(config.num_layers)),
        LayerSpec(BertHeads, config, tp, config.order_classes),
        words(word_logits),
        LayerSpec(BertOutputBias, config, tp),
    ]


class BertLoss:
    """Loss function of the last stage: ((logits_BSV, order_B2), (labels_BS, swapped_B)) to a scalar, in nats.

    The mean over the masked words, those whose label is not ``IGNORE_INDEX``, plus the mean over the samples of the
    sentence head's cross entropy; fp32, equal on all tensor-parallel ranks. Both parts are also summed up over the
    micro-batches since :meth:`reset`.

    Attributes:
        has_order: whether the model has the sentence head.
    """

    def __init__(self, config: BertConfig, tp: TensorParallel) -> None:
        self._vocab_size, self._tp = config.vocab_size, tp
        self.has_order = config.order_classes is not None
        self.reset()

    def __call__(self, outputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> Tensor:
        logits_BSV, *order = outputs
        labels_BS, *swapped = labels
        loss_BS = vocab_parallel_cross_entropy(logits_BSV, labels_BS, self._tp, self._vocab_size)
        words = loss_BS.sum() / (labels_BS != IGNORE_INDEX).sum().clamp(min=1)
        loss, parts = words, [torch.ones_like(words), words.detach(), torch.zeros_like(words)]
        for order_B2, swapped_B in zip(order, swapped, strict=True):
            order_loss = F.cross_entropy(order_B2.float(), swapped_B)
            loss, parts[2] = loss + order_loss, order_loss.detach()
        added = torch.stack(parts).double()
        self._sums = added if self._sums is None else self._sums + added
        return loss

    def reset(self) -> None:
        """Forget the micro-batches so far."""
        self._sums: Tensor | None = None  # micro-batches, masked-word losses, order losses

    def mean_parts(self, device: torch.device) -> tuple[float, float]:
        """Mean (masked-word loss, order loss) over the micro-batches of all ranks; a collective call of the world."""
        sums = torch.zeros(3, dtype=torch.float64, device=device) if self._sums is None else self._sums
        if dist.is_initialized():
            sums = sums.clone()
            dist.all_reduce(sums)
        count, words, order = sums.tolist()
        return words / max(count, 1), order / max(count, 1)


def bert_loss(config: BertConfig, tp: TensorParallel) -> BertLoss:
    """Return the loss function of the last stage."""
    return BertLoss(config, tp)


def _table(config: TransformerConfig, rows: int, name: str) -> nn.Parameter:
    """An embedding table with start values that depend on its name alone."""
    table_RD = torch.empty(rows, config.hidden_size, dtype=torch.float32, device="cpu")
    keyed_normal(config.init_std, config.seed, _BEFORE_THE_FIRST_LAYER, name)(table_RD)
    return nn.Parameter(table_RD.to(torch.get_default_dtype()))
