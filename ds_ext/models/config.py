"""The sizes of a transformer, and the checks that need nothing but them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ds_ext.errors import ConfigError


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and start values of a transformer language model. Every rank has the same one.

    Args:
        num_layers: transformer layers.
        hidden_size: width of the activations between layers.
        num_attention_heads: heads of all tensor-parallel ranks together.
        seq_length: tokens of one sample.
        vocab_size: entries of the tokenizer, without padding.
        ffn_hidden_size: width inside the MLP; 4 * hidden_size when None.
        max_position_embeddings: rows of the position table; seq_length when None.
        hidden_dropout, attention_dropout: probabilities of zeroing, in [0, 1).
        init_std: standard deviation of the start weights.
        layernorm_epsilon: added to the variance.
        make_vocab_size_divisible_by: the padded vocabulary is a multiple of this times the tensor-parallel
            size.
        recompute: "full" drops the inner activations of a layer after its forward pass and computes them
            again in the backward pass; "selective" those inside the attention, which are the many for the least
            work (arXiv 2205.05198, section 4); "none" keeps them.
        recompute_interval: every how many layers one is recomputed; 1 is all of them.
        transformer_impl: of GPT's layers: ours, or NVIDIA's for CUDA.
        sequence_parallel: between the tensor-parallel layers each rank of the group holds a slice of the tokens.
        seed: of the start weights and of the dropout masks.

    Raises:
        ConfigError: for a size that is not positive, or sizes that do not fit each other.
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
                f"hidden_size must be a multiple of {heads} (num_attention_heads); got {self.hidden_size}. "
                f"Use hidden_size {sizes}."
            )
        if self.seq_length > self.positions:
            raise ConfigError(
                f"seq_length {self.seq_length} needs as many position embeddings; "
                f"max_position_embeddings is {self.positions}. Raise it to {self.seq_length} "
                "or shorten the samples."
            )
        if self.recompute not in ("none", "selective", "full"):
            raise ConfigError(f'recompute must be "none", "selective" or "full"; got {self.recompute!r}.')

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP."""
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
        """The vocabulary rounded up to a multiple of make_vocab_size_divisible_by * tp_size (as Megatron)."""
        multiple = self.make_vocab_size_divisible_by * tp_size
        return -(-self.vocab_size // multiple) * multiple

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Refuse a tensor-parallel size that would cut a head or share the MLP out unevenly.

        Raises:
            ConfigError: with the sizes that would work.
        """
        heads, ffn = self.num_attention_heads, self.ffn_size
        for name, total in (("num_attention_heads", heads), ("ffn_hidden_size", ffn)):
            if tp_size < 1 or total % tp_size:
                common = [size for size in range(1, heads + 1) if heads % size == 0 and ffn % size == 0]
                raise ConfigError(
                    f"tensor_parallel_size must divide {name}; got {tp_size} for {name} {total}. "
                    f"Use tensor_parallel_size {_either(common)}."
                )
        if self.sequence_parallel and self.seq_length % tp_size:
            lower = self.seq_length - self.seq_length % tp_size
            raise ConfigError(
                f"with sequence_parallel, seq_length must be a multiple of {tp_size} (tensor_parallel_size); got "
                f"{self.seq_length}. Use seq_length {lower or tp_size}, or leave sequence_parallel out."
            )

    def recomputes(self, layer: int) -> Literal["none", "selective", "full"]:
        """What transformer layer number ``layer`` computes again in the backward pass."""
        return "none" if layer % self.recompute_interval else self.recompute

    def _check_ranges(self) -> None:
        for name, value in vars(self).items():
            if name in ("hidden_dropout", "attention_dropout"):
                if not 0.0 <= value < 1.0:
                    raise ConfigError(f"{name} must be at least 0 and below 1; got {value}.")
            elif type(value) in (int, float) and name != "seed" and value <= 0:
                raise ConfigError(f"{name} must be positive; got {value}.")


def _either(choices: list[int]) -> str:
    *rest, last = map(str, choices)
    return f"{', '.join(rest)} or {last}" if rest else last
