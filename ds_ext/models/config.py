"""Sizes of a transformer and the checks on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_ext.errors import ConfigError


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and initialization of a transformer language model, the same on all ranks.

    Args:
        num_layers: number of transformer layers.
        hidden_size: width of the activations between layers.
        num_attention_heads: number of heads over all tensor-parallel ranks.
        seq_length: tokens per sample.
        vocab_size: size of the tokenizer's vocabulary, without padding.
        ffn_hidden_size: inner width of the MLP; None: 4 * hidden_size.
        max_position_embeddings: rows of the position table; None: seq_length.
        hidden_dropout: probability of zeroing a hidden activation, in [0, 1).
        attention_dropout: probability of zeroing an attention weight, in [0, 1).
        init_std: standard deviation of the initial weights.
        layernorm_epsilon: constant added to the variance.
        make_vocab_size_divisible_by: the padded vocabulary is a multiple of this number times the tensor-parallel size.
        recompute: activations to recompute in the backward: "full", all inner activations of a layer; "selective",
            those inside attention, which need a lot of memory but little compute (arXiv 2205.05198, section 4); "none".
        recompute_interval: recompute every n-th layer; 1: all layers.
        sequence_parallel: in the regions between tensor-parallel layers, each tensor-parallel rank holds only a slice
            of the tokens.
        transformer_impl: implementation of GPT's layers: "local", or NVIDIA's "transformer_engine" on CUDA.
        seed: seed of the initial weights and the dropout masks.

    Raises:
        ConfigError: if a size is not positive, or if sizes contradict each other.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    vocab_size: int
    ffn_hidden_size: int | None = None
    max_position_embeddings: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    init_std: float = 0.02
    layernorm_epsilon: float = 1e-5
    make_vocab_size_divisible_by: int = 128
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_interval: int = 1
    sequence_parallel: bool = False
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    seed: int = 1234

    def __post_init__(self) -> None:
        self._check_ranges()
        heads = self.num_attention_heads
        if self.hidden_size % heads:
            lower = self.hidden_size - self.hidden_size % heads
            sizes = f"{lower} or {lower + heads}" if lower else str(heads)
            raise ConfigError(
                f"hidden_size: must be a multiple of num_attention_heads {heads} (got {self.hidden_size}). Use {sizes}."
            )
        if self.seq_length > self.positions:
            raise ConfigError(
                f"max_position_embeddings: must be at least seq_length {self.seq_length} (got {self.positions}). "
                f"Use {self.seq_length}, or shorter samples."
            )
        if self.recompute not in ("none", "selective", "full"):
            raise ConfigError(f'recompute: must be "none", "selective" or "full" (got {self.recompute!r}).')

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def positions(self) -> int:
        """Rows of the position table."""
        return self.max_position_embeddings or self.seq_length

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def padded_vocab_size(self, tp_size: int = 1) -> int:
        """Round the vocabulary up to a multiple of make_vocab_size_divisible_by * tp_size, as Megatron does."""
        multiple = self.make_vocab_size_divisible_by * tp_size
        return -(-self.vocab_size // multiple) * multiple

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Check that a tensor-parallel size divides the heads, the MLP and, with sequence parallelism, the tokens.

        Raises:
            ConfigError: if it does not.
        """
        heads, ffn = self.num_attention_heads, self.ffn_size
        for name, total in (("num_attention_heads", heads), ("ffn_hidden_size", ffn)):
            if tp_size < 1 or total % tp_size:
                common = [size for size in range(1, heads + 1) if heads % size == 0 and ffn % size == 0]
                raise ConfigError(
                    f"tensor_parallel_size: must divide {name} {total} (got {tp_size}). Use {_either(common)}."
                )
        if self.sequence_parallel and self.seq_length % tp_size:
            lower = self.seq_length - self.seq_length % tp_size
            raise ConfigError(
                f"seq_length: must be a multiple of tensor_parallel_size {tp_size} with sequence_parallel (got "
                f"{self.seq_length}). Use {lower or tp_size}, or disable sequence_parallel."
            )

    def recomputes(self, layer: int) -> Literal["none", "selective", "full"]:
        """Return the activations that transformer layer ``layer`` recomputes in the backward."""
        return "none" if layer % self.recompute_interval else self.recompute

    def _check_ranges(self) -> None:
        for name, value in vars(self).items():
            if name in ("hidden_dropout", "attention_dropout"):
                if not 0.0 <= value < 1.0:
                    raise ConfigError(f"{name}: must be at least 0 and below 1 (got {value}).")
            elif type(value) in (int, float) and name != "seed" and value <= 0:
                raise ConfigError(f"{name}: must be positive (got {value}).")


def _either(choices: list[int]) -> str:
    *rest, last = map(str, choices)
    return f"{', '.join(rest)} or {last}" if rest else last
