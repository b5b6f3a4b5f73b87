"""GPT as a list of DeepSpeed layer specs for any partition and tensor-parallel size.

    index            layer                   from          to
    0                GPTEmbedding, tied      tokens_BS     hidden_BSD
    1                GPTPositionEmbedding    hidden_BSD    hidden_BSD
    2 .. L+1         TransformerLayer        hidden_BSD    hidden_BSD
    L+2              LayerNorm               hidden_BSD    hidden_BSD
    L+3              output_logits, tied     hidden_BSD    logits_BSV

Shapes: B samples of a micro-batch, S tokens, D hidden size, V this rank's slice of the padded vocabulary.
The first and the last layer share a module that contains only the word embeddings. A stage with only the last layer
then has no parameter without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from ds_ext.errors import ConfigError
from ds_ext.models.config import TransformerConfig
from ds_ext.models.layers import (
    BEFORE_THE_FIRST_LAYER,
    LayerNorm,
    TransformerLayer,
    embedding_table,
    hidden_dropout,
)
from ds_ext.models.te import TransformerEngineLayer, check_transformer_engine
from ds_ext.tensor_parallel import (
    IGNORE_INDEX,
    DropoutClock,
    TensorParallel,
    VocabParallelEmbedding,
    enter_tensor_parallel,
    keyed_normal,
    linear,
    shared_parameters,
    vocab_parallel_cross_entropy,
)


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """Sizes of a GPT. See TransformerConfig for the fields."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transformer_impl == "transformer_engine":
            check_transformer_engine(self)


class GPTEmbedding(nn.Module):
    """Word embeddings.

    Padding rows are zero and stay zero. The initial values of the other rows do not depend on the padding.
    """

    def __init__(self, config: TransformerConfig, tp: TensorParallel) -> None:
        super().__init__()
        normal = keyed_normal(config.init_std, config.seed, BEFORE_THE_FIRST_LAYER, "word_embeddings.weight")

        def fill(full_VD: Tensor) -> None:
            normal(full_VD[: config.vocab_size])
            full_VD[config.vocab_size :].zero_()

        rows = config.padded_vocab_size(tp.shards)
        self.word_embeddings = VocabParallelEmbedding(
            rows,
            config.hidden_size,
            tp,
            init=fill,
            padding=rows - config.vocab_size,
            sequence_parallel=config.sequence_parallel,
        )

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Map tokens_BS to hidden_BSD, which is the same on all tensor-parallel ranks."""
        return self.word_embeddings(tokens_BS)


class GPTPositionEmbedding(nn.Module):
    """Learned position embeddings and a dropout."""

    def __init__(self, config: TransformerConfig, tp: TensorParallel, clock: DropoutClock) -> None:
        super().__init__()
        # With sequence parallelism this rank holds one slice of the tokens.
        self.tp = tp if config.sequence_parallel else TensorParallel()
        self.weight = embedding_table(config, config.positions, "position_embeddings.weight")
        self.dropout = hidden_dropout(config, BEFORE_THE_FIRST_LAYER, "embedding_output", tp, clock)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """Map hidden_BSD to hidden_BSD; with sequence parallelism, both contain this rank's slice of the tokens.

        Raises:
            ConfigError: if there are more tokens than positions.
        """
        tokens = hidden_BSD.size(1) * self.tp.size
        check_positions(tokens, self.weight.size(0))
        (table_PD,) = shared_parameters(self.tp, self.weight)
        return self.dropout(hidden_BSD + self.tp.shard(table_PD[:tokens], 0))


def check_positions(tokens: int, positions: int) -> None:
    """Raise ConfigError for a sample with more tokens than position embeddings."""
    if tokens > positions:
        raise ConfigError(
            f"max_position_embeddings: must be at least the {tokens} tokens of a sample (got {positions}). "
            f"Use {tokens}, or shorter samples."
        )


def output_logits(embedding: GPTEmbedding, hidden_BSD: Tensor) -> Tensor:
    """Apply the language model head, which uses the tied word embeddings: hidden_BSD to this rank's logits_BSV."""
    table = embedding.word_embeddings
    return linear(enter_tensor_parallel(hidden_BSD, table.tp, table.sequence_parallel), table.weight)


def gpt_layer_specs(config: TransformerConfig, tp: TensorParallel, clock: DropoutClock) -> list[LayerSpec]:
    """Return the whole model as num_layers + 4 specs, of which a rank may build any subset.

    Building a spec neither communicates nor uses a global generator. Initial weights depend only on ``config``.

    Args:
        config: sizes.
        tp: position of this rank in its tensor-parallel group.
        clock: current step and micro-batch, for the dropout masks.

    Raises:
        ConfigError: if the tensor-parallel size does not divide the heads or the MLP.
    """
    config.check_tensor_parallel(tp.size)
    weight = "word_embeddings.weight"
    layer_class = TransformerLayer if config.transformer_impl == "local" else TransformerEngineLayer
    return [
        TiedLayerSpec("embed", GPTEmbedding, config, tp, tied_weight_attr=weight),
        LayerSpec(GPTPositionEmbedding, config, tp, clock),
        *(LayerSpec(layer_class, config, layer, tp, clock) for layer in range(config.num_layers)),
        LayerSpec(LayerNorm, config, tp),
        TiedLayerSpec("embed", GPTEmbedding, config, tp, forward_fn=output_logits, tied_weight_attr=weight),
    ]


def gpt_loss(config: TransformerConfig, tp: TensorParallel) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss function of the last stage: (logits_BSV, labels_BS) to a scalar, in nats per token.

    The loss is the mean over the labels other than ``IGNORE_INDEX``, as in torch's cross_entropy. It is fp32 and the
    same on all tensor-parallel ranks.
    """

    def mean_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        loss_BS = vocab_parallel_cross_entropy(logits_BSV, labels_BS, tp, config.vocab_size)
        return loss_BS.sum() / (labels_BS != IGNORE_INDEX).sum().clamp(min=1)

    return mean_loss
