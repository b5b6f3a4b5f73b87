"""Sizes of a transformer and the checks on them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Self

from ..errors import ConfigError, Problems
from ..parallel.partition import LayerWork
from .field_flags import NO_FLAG, flag, flags_of


@dataclass(frozen=True)
class RopeScaling:
    """Change of the rotary frequencies for longer samples. The fields are those of transformers' ``rope_parameters``.

    Args:
        rope_type: "linear" divides all frequencies by ``factor``; "llama3" (Llama 3.1) and "yarn" (arXiv 2309.00071)
            divide only the low ones.
        factor: ratio of the longest sample to that of the original training.
        low_freq_factor, high_freq_factor: llama3: number of periods in ``original_max_position_embeddings`` up to which
            a frequency is divided, and from which it is unchanged.
        original_max_position_embeddings: tokens of the longest sample of the original training; llama3 and yarn.
        beta_fast, beta_slow: yarn: number of periods from which a frequency is unchanged, and up to which it is
            divided.
        attention_factor: yarn: factor of the rotated queries and keys; None: computed from the other fields.
        mscale, mscale_all_dim: yarn: terms of ``attention_factor``; None: not used.
        truncate: yarn: round the bounds of the ramp to whole dimensions.
    """

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        required_fields = {
            "linear": (),
            "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow"),
        }
        if self.rope_type not in required_fields:
            raise ConfigError(
                f'rope_scaling.rope_type: must be "linear", "llama3" or "yarn" (got {self.rope_type!r}). Use a model '
                f"with one of these types."
            )
        for name in ("factor", *required_fields[self.rope_type]):
            value = getattr(self, name)
            if value is None or value <= 0:
                raise ConfigError(
                    f"rope_scaling.{name}: must be positive for {self.rope_type} (got {value})."
                )
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.rope_type == "llama3" and low is not None and high is not None and high <= low:
            raise ConfigError(
                f"rope_scaling.high_freq_factor: must be above low_freq_factor {low:g} (got {high:g})."
            )


@dataclass(frozen=True)
class Experts:
    """Experts in place of the MLPs of a mixture's layers. Each layer has a router, a linear layer without a bias.

    Args:
        number: experts of a layer.
        per_token: those that compute a token.
        width: inner width of one of them.
        shared_width: inner width of those that compute every token; 0: none.
        dense_layers: layers with an MLP instead.
        fp32_router: the router reads an fp32 copy of its inputs.
    """

    number: int
    per_token: int
    width: int
    shared_width: int = 0
    dense_layers: int = 0
    fp32_router: bool = False

    def __post_init__(self) -> None:
        if (
            not 0 < self.per_token <= self.number
            or self.width < 1
            or min(self.shared_width, self.dense_layers) < 0
        ):
            raise ConfigError(
                f"experts: needs 1 to {self.number} experts per token of a positive width (got {self.per_token} of "
                f"width {self.width}, shared {self.shared_width}, {self.dense_layers} layers without)."
            )


@dataclass(frozen=True)
class LatentAttention:
    """Attention with queries, keys and values of low rank (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Args:
        query_rank: 0: the queries are not of low rank.
        kv_rank: of keys and values together.
        unrotated, rotated: features of a head's queries and keys; all heads share the rotated ones of the keys.
        value: features of a head's values.
    """

    query_rank: int
    kv_rank: int
    unrotated: int
    rotated: int
    value: int

    def __post_init__(self) -> None:
        if self.query_rank < 0 or min(self.kv_rank, self.unrotated, self.rotated, self.value) < 1:
            raise ConfigError(
                f"kv_lora_rank: latent attention needs a positive rank and heads with features (got rank "
                f"{self.kv_rank}, queries of rank {self.query_rank}, heads of {self.unrotated} + {self.rotated} and "
                f"{self.value} features)."
            )

    @property
    def head_size(self) -> int:
        """Features of a head's queries and keys."""
        return self.unrotated + self.rotated

    def weights(self, hidden: int, heads: int) -> int:
        """Return the number of weights of the linear layers."""
        rank = self.query_rank
        queries = rank * (hidden + heads * self.head_size) if rank else hidden * heads * self.head_size
        down = hidden * (self.kv_rank + self.rotated)
        return queries + down + heads * (self.kv_rank * (self.unrotated + self.value) + self.value * hidden)


def _llama3(use: bool, keys: Mapping[str, Any]) -> RopeScaling | None:
    """Return Llama 3.1's scaling, with Megatron's constants."""
    factor = keys.get("rope_scaling_factor", 8.0)
    return RopeScaling("llama3", factor, 1.0, 4.0, original_max_position_embeddings=8192) if use else None


def _llama3_keys(scaling: RopeScaling | None) -> Mapping[str, Any]:
    """Return the keys of a scaling; flags exist only for that of Llama 3.1."""
    if scaling is None or scaling.rope_type != "llama3":
        return {"use_rope_scaling": False}
    return {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}


def _window(text: str, _: object) -> int:
    """Return the number of tokens of Megatron's window ``"L,R"``, the token itself included."""
    match = re.fullmatch(r"\(?\s*(\d+)\s*,\s*0\s*\)?", text)
    if match is None:
        raise ConfigError(
            f"--window-size: must be the number of previous tokens and 0 for following tokens (got {text!r}). Use for "
            f"example 4095,0 for a window of 4096 tokens."
        )
    return int(match[1]) + 1


Recompute = Literal["none", "selective", "full"]
Positions = Literal["learned_absolute", "rope"]
Normalization = Literal["LayerNorm", "RMSNorm"]
# Flags whose values are not those of their fields.
_ROPE_SCALING = flag(
    "use_rope_scaling",
    default=False,
    kind=bool,
    read=_llama3,
    write=_llama3_keys,
    help="scale the rotary frequencies as in Llama 3.1",
)
_VOCABULARY = flag(
    planned=True,
    metavar="N",
    help="rows of the word embeddings without padding, if the model has more than its tokenizer",
)
_QUERY_GROUPS = flag(
    planned=True,
    write=lambda groups: {"group_query_attention": groups is not None, "num_query_groups": groups},
)
_BIASES = flag(
    "disable_bias_linear",
    default=False,
    read=lambda disabled, _: not disabled,
    write=lambda biases: {"disable_bias_linear": not biases},
    help="no biases in linear layers",
)
_WINDOW = flag(
    "window_size",
    kind=str,
    metavar="L,0",
    read=_window,
    write=lambda window: {"window_size": None if window is None else f"{window - 1},0"},
    help="attend to L previous tokens and the token itself (all previous tokens)",
)


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and initialization of a transformer language model, the same on all ranks.

    The defaults are those of GPT-2. The flags of the training scripts, the keys of "train" and the sizes that the
    planner needs are generated from the fields; see :mod:`.field_flags`.
    BERT does not support the fields from ``position_embedding_type`` on.

    Args:
        num_layers: number of transformer layers.
        hidden_size: width of the activations between layers.
        num_attention_heads: number of heads over all tensor-parallel ranks.
        seq_length: tokens per sample.
        vocab_size: size of the tokenizer's vocabulary, without padding.
        ffn_hidden_size: inner width of the MLP; None: 4 * hidden_size, with swiglu two thirds of it, rounded down to a
            multiple of 64.
        max_position_embeddings: largest number of tokens of a sample, rows of a learned position table; None:
            seq_length.
        hidden_dropout: probability of zeroing a hidden activation, in [0, 1).
        attention_dropout: probability of zeroing an attention weight, in [0, 1).
        init_std: standard deviation of the initial weights.
        layernorm_epsilon: constant added to the variance, or to the mean square of an RMSNorm.
        make_vocab_size_divisible_by: the padded vocabulary is a multiple of this number times the tensor-parallel size.
        recompute: activations to recompute in the backward: "full", all inner activations of a layer; "selective",
            those inside attention, which need a lot of memory but little compute (arXiv 2205.05198, section 4); "none".
        recompute_interval: recompute every n-th layer; 1: all layers.
        sequence_parallel: in the regions between tensor-parallel layers, each tensor-parallel rank holds only a slice
            of the tokens.
        transformer_impl: implementation of GPT's layers: "local"; NVIDIA's "transformer_engine" on CUDA; or
            "transformers", the default for LoRA and for models of --hf-model without local layers.
        seed: seed of the initial weights and the dropout masks.
        position_embedding_type: "learned_absolute", a table; or "rope", rotary embeddings (arXiv 2104.09864).
        rotary_base: base of the rotary frequencies.
        rotary_percent: share of each head that is rotated, from its first feature on, in (0, 1].
        rope_scaling: change of the rotary frequencies for longer samples; None: no change.
        normalization: kind of all norms.
        swiglu: gated MLP, fc2(silu(gate(x)) * fc1(x)) (arXiv 2002.05202), instead of one with a GELU.
        num_query_groups: key and value heads of grouped-query attention (arXiv 2305.13245); None: one for each head.
        kv_channels: width of one attention head; None: hidden_size / num_attention_heads.
        add_bias_linear: add biases to all linear layers.
        add_qkv_bias: add biases to queries, keys and values even without ``add_bias_linear``.
        qk_layernorm: normalize queries and keys of every head before the rotation.
        untie_embeddings_and_output_weights: the head has a separate weight.
        sliding_window: number of tokens that a token attends to, itself included; None: all previous tokens.
        sliding_window_layers: numbers of the transformer layers with the window; None: all layers.
        reset_position_ids: positions restart at every document of a sample.
        reset_attention_mask: tokens attend only to their own document of a sample.
        chunked_loss: compute head and loss in chunks of tokens, without storing the logits.
        lora_rank: rank of the adapters of all linear layers (arXiv 2106.09685), whose scale is 2; None: train all
            weights.
        experts: those of a mixture, in layers of transformers; ``ffn_hidden_size`` is that of its other layers.
        latent: sizes of latent attention, in layers of transformers.
        pad_token_id: token whose embedding the forward of a token does not train, as in transformers' Llama.
    """

    num_layers: int = field(metadata=flag(planned=True, default=8))
    hidden_size: int = field(metadata=flag(planned=True, default=128))
    num_attention_heads: int = field(metadata=flag(planned=True, default=4))
    seq_length: int = field(metadata=flag(planned=True, default=128))
    vocab_size: int = field(metadata=_VOCABULARY)
    ffn_hidden_size: int | None = field(default=None, metadata=flag(planned=True))
    max_position_embeddings: int | None = field(default=None, metadata=flag(planned=True))
    hidden_dropout: float = field(default=0.1, metadata=flag(planned=True))
    attention_dropout: float = field(default=0.1, metadata=flag(planned=True))
    init_std: float = field(default=0.02, metadata=flag("init_method_std"))
    layernorm_epsilon: float = field(default=1e-5, metadata=flag("norm_epsilon", default=None))
    make_vocab_size_divisible_by: int = 128
    recompute: Recompute = field(default="none", metadata=flag("recompute_granularity", default=None))
    recompute_interval: int = field(default=1, metadata=flag(metavar="K"))
    sequence_parallel: bool = field(default=False, metadata=NO_FLAG)  # a key of the JSON
    transformer_impl: Literal["local", "transformer_engine", "transformers"] = "local"
    seed: int = 1234
    position_embedding_type: Positions = field(default="learned_absolute", metadata=flag(planned=True))
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rope_scaling: RopeScaling | None = field(default=None, metadata=_ROPE_SCALING)
    normalization: Normalization = field(default="LayerNorm", metadata=flag(planned=True))
    swiglu: bool = field(default=False, metadata=flag(planned=True))
    num_query_groups: int | None = field(default=None, metadata=_QUERY_GROUPS)
    kv_channels: int | None = field(default=None, metadata=flag(planned=True))
    add_bias_linear: bool = field(default=True, metadata=_BIASES)
    add_qkv_bias: bool = False
    qk_layernorm: bool = field(default=False, metadata=flag(planned=True))
    untie_embeddings_and_output_weights: bool = field(default=False, metadata=flag(planned=True))
    sliding_window: int | None = field(default=None, metadata=_WINDOW)
    sliding_window_layers: tuple[int, ...] | None = field(default=None, metadata=NO_FLAG)
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    chunked_loss: bool = field(default=False, metadata=flag(planned=True))
    lora_rank: int | None = field(default=None, metadata=flag(planned=True, metavar="R"))
    experts: Experts | None = field(default=None, metadata=NO_FLAG)
    latent: LatentAttention | None = field(default=None, metadata=NO_FLAG)
    pad_token_id: int | None = field(default=None, metadata=NO_FLAG)

    _unchecked: ClassVar[tuple[str, ...]] = ("seed", "pad_token_id")  # fields with any number

    def __post_init__(self) -> None:
        self._check_ranges()
        problems = Problems()
        for check in (self._check_choices, self._check_attention):
            with problems.collect():
                check()
        heads = self.num_attention_heads
        if self.kv_channels is None and self.hidden_size % heads:
            lower = self.hidden_size - self.hidden_size % heads
            sizes = f"{lower} or {lower + heads}" if lower else str(heads)
            problems.add(
                f"hidden_size: must be a multiple of num_attention_heads {heads} (got {self.hidden_size}). Use {sizes}."
            )
        if self.seq_length > self.positions:
            problems.add(
                f"max_position_embeddings: must be at least seq_length {self.seq_length} (got {self.positions}). "
                f"Use {self.seq_length}, or shorter samples."
            )
        problems.raise_all()

    @property
    def attention_work(self) -> LayerWork:
        """Work of the attention of a layer, with its linear layers."""
        heads, hidden, latent = self.num_attention_heads, self.hidden_size, self.latent
        if latent is not None:
            features = latent.head_size + latent.value
            return LayerWork(latent.weights(hidden, heads), self.seq_length * heads * features)
        queries, keys = heads * self.head_size, self.query_groups * self.head_size
        return LayerWork(hidden * (2 * queries + 2 * keys), 2 * self.seq_length * queries)

    @property
    def layer_work(self) -> LayerWork:
        """Work of a transformer layer; with GPT-2's layers 12h² + 2sh (arXiv 2104.04473, appendix)."""
        attention, per_token = self.attention_work, 0 if self.experts is None else self.experts.per_token
        matrices = (3 if self.swiglu else 2) * self.inner_width(per_token)
        if self.experts is not None:
            matrices += self.sparse_share * self.experts.number
        return LayerWork(attention.matrices + self.hidden_size * matrices, attention.attention)

    @property
    def sparse_share(self) -> float:
        """Share of the layers that have experts."""
        return 0.0 if self.experts is None else 1 - self.experts.dense_layers / self.num_layers

    def inner_width(self, experts: int) -> float:
        """Return the inner width of an MLP, or of this many experts beside those of all tokens: a mean over layers."""
        if self.experts is None:
            return self.ffn_size
        sparse = self.experts.width * experts + self.experts.shared_width
        return self.sparse_share * sparse + (1 - self.sparse_share) * self.ffn_size

    def work_until(self, tokens: float) -> float:
        """Return the work of the first ``tokens`` of a sample. Each token attends to those before it."""
        windows = [self.window(layer) or math.inf for layer in range(self.num_layers)]
        keys = sum(
            tokens * tokens / 2 if tokens <= window else window * (tokens - window / 2) for window in windows
        )
        matrices = self.num_layers * self.layer_work.matrices + self.vocab_size * self.hidden_size
        return tokens * matrices + keys * self.layer_work.attention / self.seq_length

    @property
    def repeated_share(self) -> float:
        """Share of the layers' forwards that ``recompute`` repeats in the backward."""
        shares = {"none": 0.0, "selective": self.layer_work.attention / self.layer_work.total, "full": 1.0}
        return shares[self.recompute] / self.recompute_interval

    def head_work(self, repeated: float = 0.0) -> float:
        """Return the work of the head, in transformer layers. A backward takes twice as many operations as a forward.

        A chunked loss computes the logits twice: 4 products of the head's weight instead of 3. ``repeated`` is the
        share of a layer's forward that its backward recomputes; 1 for full recomputation.
        """
        products = 4 if self.chunked_loss else 3
        return self.vocab_size * self.hidden_size / self.layer_work.total * products / (3 + repeated)

    @property
    def forward_flops(self) -> int:
        """Model FLOPs of a forward for one sample (arXiv 2104.04473, section 5.1).

        A multiplication and an addition count as two. Attention counts in full, also with causal masks and windows.
        """
        per_token = self.num_layers * self.layer_work.total + self.hidden_size * self.vocab_size
        return round(2 * self.seq_length * per_token)

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of a forward and a backward, without recomputation.

        A backward counts as two forwards, or as one without the gradients of frozen weights.
        """
        return (3.0 if self.lora_rank is None else 2.0) * self.forward_flops

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP. The default with SwiGLU, as in Megatron, has about as many weights as without."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(64, 8 * self.hidden_size // 3 // 64 * 64) if self.swiglu else 4 * self.hidden_size

    @property
    def positions(self) -> int:
        return self.max_position_embeddings or self.seq_length

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key and value heads over all tensor-parallel ranks."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Features of a head that are rotated; 0 without rotary embeddings."""
        return int(self.head_size * self.rotary_percent) if self.position_embedding_type == "rope" else 0

    @property
    def packed(self) -> bool:
        """True if the model takes the start of every token's document as a second input."""
        return self.reset_position_ids or self.reset_attention_mask

    def resolved(self) -> Self:
        """Return the config with set values for all fields whose default follows from other fields."""
        return replace(
            self,
            ffn_hidden_size=self.ffn_size,
            max_position_embeddings=self.positions,
            num_query_groups=self.query_groups,
            kv_channels=self.head_size,
        )

    def shares_groups(self, tp_size: int) -> bool:
        """Return whether each tensor-parallel rank has whole query groups, or several ranks share one."""
        return self.query_groups % tp_size == 0 or tp_size % self.query_groups == 0

    def padded_vocab_size(self, tp_size: int = 1) -> int:
        """Round the vocabulary up as Megatron does."""
        multiple = self.make_vocab_size_divisible_by * tp_size
        return -(-self.vocab_size // multiple) * multiple

    def check_tensor_parallel(self, tp_size: int) -> None:
        self._check_shards(tp_size)
        if self.sequence_parallel and self.seq_length % tp_size:
            lower = self.seq_length - self.seq_length % tp_size
            raise ConfigError(
                f"seq_length: must be a multiple of tensor_parallel_size {tp_size} with sequence_parallel (got "
                f"{self.seq_length}). Use {lower or tp_size}, or disable sequence_parallel."
            )

    def _check_shards(self, tp_size: int) -> None:
        heads, ffn = self.num_attention_heads, self.ffn_size
        fitting_sizes = [
            n for n in range(1, heads + 1) if heads % n == 0 and ffn % n == 0 and self.shares_groups(n)
        ]
        for name, total in (("num_attention_heads", heads), ("ffn_hidden_size", ffn)):
            if tp_size < 1 or total % tp_size:
                raise ConfigError(
                    f"tensor_parallel_size: must divide {name} {total} (got {tp_size}). Use {_either(fitting_sizes)}."
                )
        if not self.shares_groups(tp_size):
            raise ConfigError(
                f"tensor_parallel_size: must divide num_query_groups {self.query_groups}, or be a multiple of it (got "
                f"{tp_size}). Use {_either(fitting_sizes)}."
            )

    def recomputes(self, layer: int) -> Literal["none", "selective", "full"]:
        return "none" if layer % self.recompute_interval else self.recompute

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a token attends to, itself included; None: all previous tokens."""
        layers = self.sliding_window_layers
        return self.sliding_window if layers is None or layer in layers else None

    def _check_ranges(self) -> None:
        for name, value in vars(self).items():
            if name in ("hidden_dropout", "attention_dropout"):
                if not 0.0 <= value < 1.0:
                    raise ConfigError(f"{name}: must be at least 0 and below 1 (got {value}).")
            elif type(value) in (int, float) and name not in self._unchecked and value <= 0:
                raise ConfigError(f"{name}: must be positive (got {value}).")

    def _check_choices(self) -> None:
        for name in ("recompute", "position_embedding_type", "normalization"):
            value = getattr(self, name)
            choices = flags_of(TransformerConfig)[name].choices
            if value not in choices:
                raise ConfigError(
                    f"{name}: must be {_either(list(map(json.dumps, choices)))} (got {value!r})."
                )

    def _check_attention(self) -> None:
        heads, groups = self.num_attention_heads, self.query_groups
        if heads % groups:
            divisors = [size for size in range(1, heads + 1) if heads % size == 0]
            raise ConfigError(
                f"num_query_groups: must divide num_attention_heads {heads} (got {groups}). Use {_either(divisors)}."
            )
        layers = self.sliding_window_layers
        if layers is not None and (
            self.sliding_window is None or not set(layers) <= {*range(self.num_layers)}
        ):
            raise ConfigError(
                f"sliding_window_layers: must be layers in 0..{self.num_layers - 1}, with a sliding_window (got "
                f"{layers} and sliding_window {self.sliding_window}). Set both."
            )
        self._check_rotary()

    def _check_rotary(self) -> None:
        if self.rotary_percent > 1:
            raise ConfigError(f"rotary_percent: must be at most 1 (got {self.rotary_percent:g}).")
        if self.position_embedding_type == "rope" and (self.rotary_size == 0 or self.rotary_size % 2):
            raise ConfigError(
                f"kv_channels x rotary_percent: rope needs an even number of features per head (got "
                f"{self.head_size} x {self.rotary_percent:g} = {self.rotary_size}). Use a multiple of 2."
            )
        if self.rope_scaling is not None and self.position_embedding_type != "rope":
            raise ConfigError(
                f'rope_scaling: needs position_embedding_type "rope" (got {self.position_embedding_type!r}).'
            )


def _either(choices: Sequence[int | str]) -> str:
    """Return ``1, 2 or 4``."""
    *head, last = map(str, choices)
    return f"{', '.join(head)} or {last}" if head else last


_NAMES = tuple(field.name for field in fields(TransformerConfig))
# Fields that BERT does not support.
GPT_FIELDS = _NAMES[_NAMES.index("position_embedding_type") :]
# Fields that decide neither the weights nor what they compute, and those that matter only in training.
RUN_FIELDS = (
    *("seq_length", "make_vocab_size_divisible_by", "recompute", "recompute_interval", "sequence_parallel"),
    *("transformer_impl", "seed", "reset_position_ids", "reset_attention_mask", "chunked_loss"),
    "lora_rank",
)
TRAINED_FIELDS = ("hidden_dropout", "attention_dropout", "init_std")
# Fields that decide the weights and what they compute.
WEIGHT_FIELDS = tuple(name for name in _NAMES if name not in (*RUN_FIELDS, *TRAINED_FIELDS))
# Fields that the planner needs, and those that have no default, except for the vocabulary.
PLANNED = tuple(name for name, flag in flags_of(TransformerConfig).items() if flag.planned)
SIZES = tuple(
    field.name
    for field in fields(TransformerConfig)
    if field.default is MISSING and field.name != "vocab_size"
)
