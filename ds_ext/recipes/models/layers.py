"""Pre-LN transformer layer over tensor-parallel linear layers (GPT-2; Shoeybi et al. 2019, section 3), and its options
for the Llama family: rotary positions, RMSNorm, gated MLP, grouped-query attention.

Shapes: B samples of a micro-batch, S tokens (with sequence parallelism those of this rank), D hidden size, N heads of
this rank, G key and value heads of this rank, H head size, F this rank's slice of the inner width of the MLP.
``starts_BS`` holds all tokens on every rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_ext.model.config import TransformerConfig
from ds_ext.recipes.models.rotary import rotary_tables, rotate
from ds_ext.tensor_parallel import (
    ColumnParallelLinear,
    DropoutClock,
    InitMethod,
    KeyedDropout,
    RowParallelLinear,
    Slice,
    TensorParallel,
    attend_slice,
    current_slice,
    earlier_slices,
    enter_tensor_parallel,
    keyed_normal,
    keyed_rng,
    shared_parameters,
)

BEFORE_THE_FIRST_LAYER = -1  # number of the embeddings in the keys of random numbers
Packed = Tensor | tuple[Tensor, Tensor]
"""Input of a layer: hidden_BSD, or (hidden_BSD, starts_BS) with ``TransformerConfig.packed``."""


class SelfAttention(nn.Module):
    """Causal self-attention over this rank's heads.

    The output features of ``linear_qkv`` are ordered (head, query | key | value, head size). With fewer query groups
    than heads, ``linear_q`` has the features (head, head size), and ``linear_kv`` (group, key | value, head size). A
    tensor-parallel shard therefore consists of whole heads, and concatenating the shards gives the full layer.
    """

    causal: ClassVar[bool] = True

    def __init__(
        self, config: TransformerConfig, layer: int, tp: TensorParallel, clock: DropoutClock
    ) -> None:
        super().__init__()
        heads, groups, head_size = config.num_attention_heads, config.query_groups, config.head_size
        self.config = config
        self.window = config.window(layer)
        self.head_size = head_size
        self.clock = clock
        self.tp = tp
        self.recompute = config.recomputes(layer) == "selective"
        self.copies = config.recomputes(layer) == "full"  # of the keys and values that later slices need
        self.grouped = groups != heads

        def column(name: str, features: int, groups: int | None = None) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                config.hidden_size,
                features,
                tp,
                config.add_bias_linear or config.add_qkv_bias,
                sequence_parallel=config.sequence_parallel,
                init=_weight_init(config, layer, f"self_attention.{name}.weight"),
                groups=groups,
            )

        if self.grouped:
            self.linear_q = column("linear_q", heads * head_size)
            self.linear_kv = column("linear_kv", 2 * groups * head_size, groups)
        else:
            self.linear_qkv = column("linear_qkv", 3 * heads * head_size)
        if config.qk_layernorm:
            self.q_layernorm = norm_class(config)(config, tp, head_size)
            self.k_layernorm = norm_class(config)(config, tp, head_size)
        self.linear_proj = RowParallelLinear(
            heads * head_size,
            config.hidden_size,
            tp,
            config.add_bias_linear,
            sequence_parallel=config.sequence_parallel,
            init=_output_init(config, layer, "self_attention.linear_proj.weight"),
        )
        # Ranks hold different heads and need different masks.
        self.dropout = KeyedDropout(config.attention_dropout, config.seed, layer, "attention", clock, tp.rank)

    def forward(
        self, hidden_BSD: Tensor, mask_B11S: Tensor | None = None, starts_BS: Tensor | None = None
    ) -> Tensor:
        """Map hidden_BSD to hidden_BSD.

        Args:
            mask_B11S: False for tokens to which no token attends; only for bidirectional attention.
            starts_BS: index of the first token of every token's document; None: a sample is one document.
        """
        q_BNSH, k_BGSH, v_BGSH = self._project(hidden_BSD)
        batch, _, tokens, _ = q_BNSH.shape
        if self.config.rotary_size:
            positions = starts_BS if self.config.reset_position_ids else None
            cos, sin = rotary_tables(self.config, tokens, q_BNSH.dtype, q_BNSH.device, positions)
            q_BNSH, k_BGSH = rotate(q_BNSH, cos, sin), rotate(k_BGSH, cos, sin)
        earlier = earlier_slices(self, k_BGSH, v_BGSH, copy=self.copies) if self.causal else []
        inputs = q_BNSH, k_BGSH, v_BGSH, mask_B11S, starts_BS, earlier
        context_BNSH = (
            recomputed(self.clock, self._attend, *inputs) if self.recompute else self._attend(*inputs)
        )
        return self.linear_proj(context_BNSH.transpose(1, 2).reshape(batch, tokens, -1))

    def _project(self, hidden_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map hidden_BSD to q_BNSH, k_BGSH and v_BGSH of all tokens."""
        size = self.head_size
        if self.grouped:
            hidden_BSD = enter_tensor_parallel(hidden_BSD, self.tp, self.config.sequence_parallel)
            q_BSNH = self.linear_q.project(hidden_BSD).unflatten(-1, (-1, size))
            k_BSGH, v_BSGH = self.linear_kv.project(hidden_BSD).unflatten(-1, (-1, 2, size)).unbind(3)
        else:
            q_BSNH, k_BSGH, v_BSGH = self.linear_qkv(hidden_BSD).unflatten(-1, (-1, 3, size)).unbind(3)
        if self.config.qk_layernorm:
            q_BSNH, k_BSGH = self.q_layernorm(q_BSNH), self.k_layernorm(k_BSGH)
        return q_BSNH.transpose(1, 2), k_BSGH.transpose(1, 2), v_BSGH.transpose(1, 2)

    def _attend(
        self,
        q_BNSH: Tensor,
        k_BGSH: Tensor,
        v_BGSH: Tensor,
        mask: Tensor | None,
        starts_BS: Tensor | None,
        earlier: list[tuple[Tensor, ...]],
    ) -> Tensor:
        part = current_slice()
        if self.causal:
            # Computed here, because recomputation would otherwise keep it.
            documents = starts_BS if self.config.reset_attention_mask else None
            if part is not None:
                return self._attend_slice(part, q_BNSH, k_BGSH, v_BGSH, documents, earlier)
            mask = causal_mask(q_BNSH.size(2), self.window, documents, q_BNSH.device)
        num_shards = self.tp.merged
        if num_shards == 1:
            return self._attend_shard(self.dropout.shard, q_BNSH, k_BGSH, v_BGSH, mask)
        # This rank computes the heads of several ranks, with the mask of each. Ranks may share a group.
        copies = max(1, num_shards // k_BGSH.size(1))
        k_BGSH, v_BGSH = (x_BGSH.repeat_interleave(copies, 1) for x_BGSH in (k_BGSH, v_BGSH))
        shards = zip(*(x.chunk(num_shards, 1) for x in (q_BNSH, k_BGSH, v_BGSH)), strict=True)
        contexts = [self._attend_shard(i, q, k, v, mask) for i, (q, k, v) in enumerate(shards)]
        return torch.cat(contexts, 1)

    def _attend_slice(
        self,
        part: Slice,
        q_BNSH: Tensor,
        k_BGSH: Tensor,
        v_BGSH: Tensor,
        starts_BS: Tensor | None,
        earlier: list[tuple[Tensor, ...]],
    ) -> Tensor:
        """Return context_BNSH of a slice, whose tokens also attend to the earlier slices."""
        window = self.window if self.window is not None and self.window < part.stop else None
        if window is None and starts_BS is None and not (self.dropout.p and self.training):
            return attend_slice(q_BNSH, k_BGSH, v_BGSH, earlier)
        first = part.start
        keys, values = [k_BGSH], [v_BGSH]
        for k, v in reversed(earlier):
            if window is not None and first <= part.start - window + 1:
                break
            keys.insert(0, k)
            values.insert(0, v)
            first -= k.size(2)
        mask = slice_mask(part, first, window, starts_BS, q_BNSH.device)
        return self._attend_shard(self.dropout.shard, q_BNSH, torch.cat(keys, 2), torch.cat(values, 2), mask)

    def _attend_shard(
        self, shard: int, q_BNSH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Return context_BNSH of the heads of one tensor-parallel rank, with the dropout mask of its ``shard``."""
        p = self.dropout.p if self.training else 0.0
        rng = keyed_rng(self.dropout.key(shard), q_BNSH.device) if p else nullcontext()
        with rng:
            return F.scaled_dot_product_attention(
                q_BNSH,
                k_BGSH,
                v_BGSH,
                mask,
                dropout_p=p,
                is_causal=self.causal and mask is None,
                enable_gqa=self.grouped,
            )


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)  # autograd must be able to save the cached mask
def _window_mask(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Return the causal mask (S, S) with a window: True for the keys (columns) of every query (row)."""
    i_S = torch.arange(tokens, device=device)
    distance_SS = i_S[:, None] - i_S
    return (distance_SS >= 0) & (distance_SS < (window or tokens))


def causal_mask(
    tokens: int, window: int | None, starts_BS: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return the mask of a causal attention, (1, 1, S, S) or (B, 1, S, S); None: all previous tokens.

    Args:
        window: number of tokens that a token attends to, itself included; None: all previous tokens.
        starts_BS: tokens attend only to tokens with the same start; None: to tokens of all documents.
    """
    if starts_BS is None and (window is None or window >= tokens):
        return None
    mask_11SS = _window_mask(tokens, window, device)[None, None]
    if starts_BS is None:
        return mask_11SS
    return mask_11SS & (starts_BS[:, None, :, None] == starts_BS[:, None, None, :])


def slice_mask(
    part: Slice, first: int, window: int | None, starts_BS: Tensor | None, device: torch.device
) -> Tensor:
    """Return the mask of the queries of a slice and the keys from token ``first`` on; see :func:`causal_mask`."""
    i_S1 = torch.arange(part.start, part.stop, device=device)[:, None]
    j_T = torch.arange(first, part.stop, device=device)
    mask_ST = (j_T <= i_S1) & (i_S1 - j_T < (window or part.total))
    return mask_ST[None, None] if starts_BS is None else mask_ST & (j_T >= starts_BS[:, None, :, None])


class MLP(nn.Module):
    """Two linear layers with GPT-2's tanh form of the GELU, or a gated MLP with three layers (SwiGLU)."""

    gelu: ClassVar[str] = "tanh"

    def __init__(self, config: TransformerConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        size, inner, sequence = config.hidden_size, config.ffn_size, config.sequence_parallel
        self.tp, self.sequence_parallel, self.gated = tp, sequence, config.swiglu
        bias = config.add_bias_linear

        def column(name: str) -> ColumnParallelLinear:
            init = _weight_init(config, layer, f"mlp.{name}.weight")
            return ColumnParallelLinear(size, inner, tp, bias, sequence_parallel=sequence, init=init)

        if self.gated:
            self.linear_gate = column("linear_gate")
        self.linear_fc1 = column("linear_fc1")
        fc2_init = _output_init(config, layer, "mlp.linear_fc2.weight")
        self.linear_fc2 = RowParallelLinear(inner, size, tp, bias, sequence_parallel=sequence, init=fc2_init)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        if self.gated:
            hidden_BSD = enter_tensor_parallel(hidden_BSD, self.tp, self.sequence_parallel)
            gate_BSF = F.silu(self.linear_gate.project(hidden_BSD))
            return self.linear_fc2(gate_BSF * self.linear_fc1.project(hidden_BSD))
        inner_BSF = F.gelu(self.linear_fc1(hidden_BSD), approximate=self.gelu)
        return self.linear_fc2(inner_BSF)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm over the hidden size, or over ``head_size``.

    With sequence parallelism, ranks hold different tokens, and norms of a head always see different heads. In both
    cases the gradients are summed over the ranks.
    """

    def __init__(self, config: TransformerConfig, tp: TensorParallel, head_size: int | None = None) -> None:
        super().__init__(head_size or config.hidden_size, config.layernorm_epsilon)
        self.tp = tp if config.sequence_parallel or head_size else TensorParallel()

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = shared_parameters(self.tp, self.weight, self.bias)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32 (arXiv 1910.07467). The arguments and the gradients are those of LayerNorm."""

    def __init__(self, config: TransformerConfig, tp: TensorParallel, head_size: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_size or config.hidden_size))
        self.eps = config.layernorm_epsilon
        self.tp = tp if config.sequence_parallel or head_size else TensorParallel()

    def forward(self, input: Tensor) -> Tensor:
        """Normalize over the last dimension. The weight is applied in the input's dtype."""
        (weight,) = shared_parameters(self.tp, self.weight)
        return weight * F.rms_norm(input.float(), weight.shape, eps=self.eps).to(input.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


def norm_class(config: TransformerConfig) -> type[LayerNorm] | type[RMSNorm]:
    return RMSNorm if config.normalization == "RMSNorm" else LayerNorm


class TransformerLayer(nn.Module):
    """Pre-LN transformer layer. ``layer`` is its number in the whole model, from 0."""

    def __init__(
        self, config: TransformerConfig, layer: int, tp: TensorParallel, clock: DropoutClock
    ) -> None:
        super().__init__()
        self.clock = clock
        self.recompute = config.recomputes(layer) == "full"
        self.last = layer == config.num_layers - 1
        self.input_layernorm = norm_class(config)(config, tp)
        self.self_attention = SelfAttention(config, layer, tp, clock)
        self.attention_dropout = hidden_dropout(config, layer, "attention_output", tp, clock)
        self.pre_mlp_layernorm = norm_class(config)(config, tp)
        self.mlp = MLP(config, layer, tp)
        self.mlp_dropout = hidden_dropout(config, layer, "mlp_output", tp, clock)

    def forward(self, inputs: Packed) -> Packed:
        """Map hidden_BSD, or (hidden_BSD, starts_BS), to the same shapes on all ranks.

        The last layer drops starts_BS.
        """
        hidden_BSD, starts_BS = unpack_starts(inputs)
        if self.recompute:
            hidden_BSD = recomputed(self.clock, self._layer, hidden_BSD, starts_BS)
        else:
            hidden_BSD = self._layer(hidden_BSD, starts_BS)
        return hidden_BSD if starts_BS is None or self.last else (hidden_BSD, starts_BS)

    def _layer(self, hidden_BSD: Tensor, starts_BS: Tensor | None) -> Tensor:
        attended_BSD = self.self_attention(self.input_layernorm(hidden_BSD), starts_BS=starts_BS)
        hidden_BSD = hidden_BSD + self.attention_dropout(attended_BSD)
        return hidden_BSD + self.mlp_dropout(self.mlp(self.pre_mlp_layernorm(hidden_BSD)))


def unpack_starts(inputs: Packed) -> tuple[Tensor, Tensor | None]:
    return inputs if isinstance(inputs, tuple) else (inputs, None)


def recomputed(clock: DropoutClock, function: Callable[..., Any], *inputs: Any) -> Any:
    """Return ``function(*inputs)`` without keeping its inner activations, which the backward recomputes."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    step, micro_batch = clock.step, clock.micro_batch

    def at_saved_clock(*inputs: Any) -> Any:
        # During the backward the clock is at a different micro-batch.
        with clock.at(step, micro_batch):
            return function(*inputs)

    return checkpoint(at_saved_clock, *inputs, use_reentrant=False, preserve_rng_state=False)


def hidden_dropout(
    config: TransformerConfig, layer: int, site: str, tp: TensorParallel, clock: DropoutClock
) -> KeyedDropout:
    """Return a dropout between tensor-parallel layers: one mask for all ranks, or one per rank if tokens are sliced."""
    shard = tp.rank if config.sequence_parallel else 0
    return KeyedDropout(config.hidden_dropout, config.seed, layer, site, clock, shard)


def embedding_table(config: TransformerConfig, rows: int, name: str) -> nn.Parameter:
    """Return an embedding table. Its initial values depend only on its name and the seed."""
    table_RD = torch.empty(rows, config.hidden_size, dtype=torch.float32, device="cpu")
    keyed_normal(config.init_std, config.seed, BEFORE_THE_FIRST_LAYER, name)(table_RD)
    return nn.Parameter(table_RD.to(torch.get_default_dtype()))


def _weight_init(config: TransformerConfig, layer: int, name: str) -> InitMethod:
    return keyed_normal(config.init_std, config.seed, layer, name)


def _output_init(config: TransformerConfig, layer: int, name: str) -> InitMethod:
    """Return the scaled-down initialization for the 2 * num_layers layers that feed a residual addition."""
    return keyed_normal(config.init_std / math.sqrt(2 * config.num_layers), config.seed, layer, name)
