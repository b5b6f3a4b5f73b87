"""Pre-LN transformer layer over tensor-parallel linear layers (GPT-2; Shoeybi et al. 2019, section 3).

Shapes: B samples of a micro-batch, S tokens (with sequence parallelism those of this rank), D hidden size, N heads of
this rank, H head size, F this rank's slice of the inner width of the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_ext.models.config import TransformerConfig
from ds_ext.tensor_parallel import (
    ColumnParallelLinear,
    DropoutClock,
    InitMethod,
    KeyedDropout,
    RowParallelLinear,
    TensorParallel,
    keyed_normal,
    keyed_rng,
    shared_parameters,
)

BEFORE_THE_FIRST_LAYER = -1  # number of the embeddings in the keys of random numbers


class SelfAttention(nn.Module):
    """Causal self-attention over this rank's heads.

    The output features of ``linear_qkv`` are ordered (head, query | key | value, head size). A tensor-parallel shard
    therefore consists of whole heads, and concatenating the shards gives the full layer.
    """

    causal: ClassVar[bool] = True

    def __init__(
        self, config: TransformerConfig, layer: int, tp: TensorParallel, clock: DropoutClock
    ) -> None:
        super().__init__()
        size, sequence = config.hidden_size, config.sequence_parallel
        self.head_size, self.clock, self.merged = config.head_size, clock, tp.merged
        self.recompute = config.recomputes(layer) == "selective"
        qkv_init = _weight_init(config, layer, "self_attention.linear_qkv.weight")
        self.linear_qkv = ColumnParallelLinear(size, 3 * size, tp, sequence_parallel=sequence, init=qkv_init)
        proj_init = _output_init(config, layer, "self_attention.linear_proj.weight")
        self.linear_proj = RowParallelLinear(size, size, tp, sequence_parallel=sequence, init=proj_init)
        # Ranks hold different heads and need different masks.
        self.dropout = KeyedDropout(config.attention_dropout, config.seed, layer, "attention", clock, tp.rank)

    def forward(self, hidden_BSD: Tensor, mask_B11S: Tensor | None = None) -> Tensor:
        """Map hidden_BSD to hidden_BSD. A token does not attend to tokens where ``mask_B11S`` is False."""
        qkv_BSF = self.linear_qkv(hidden_BSD)
        batch, tokens = qkv_BSF.shape[:2]
        qkv_BSN3H = qkv_BSF.view(batch, tokens, -1, 3, self.head_size)
        q_BNSH, k_BNSH, v_BNSH = (part.transpose(1, 2) for part in qkv_BSN3H.unbind(3))
        if self.recompute:
            context_BNSH = recomputed(self.clock, self._attend, q_BNSH, k_BNSH, v_BNSH, mask_B11S)
        else:
            context_BNSH = self._attend(q_BNSH, k_BNSH, v_BNSH, mask_B11S)
        return self.linear_proj(context_BNSH.transpose(1, 2).reshape(batch, tokens, -1))

    def _attend(self, q_BNSH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, mask_B11S: Tensor | None) -> Tensor:
        if self.merged > 1:
            # This rank computes the heads of several ranks, with the mask of each.
            shards = zip(*(x_BNSH.chunk(self.merged, 1) for x_BNSH in (q_BNSH, k_BNSH, v_BNSH)), strict=True)
            parts = (self._attend_shard(i, q, k, v, mask_B11S) for i, (q, k, v) in enumerate(shards))
            return torch.cat([*parts], 1)
        return self._attend_shard(self.dropout.shard, q_BNSH, k_BNSH, v_BNSH, mask_B11S)

    def _attend_shard(
        self, shard: int, q_BNSH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, mask_B11S: Tensor | None
    ) -> Tensor:
        p = self.dropout.p if self.training else 0.0
        with keyed_rng(self.dropout.key(shard), q_BNSH.device) if p else nullcontext():
            return F.scaled_dot_product_attention(
                q_BNSH, k_BNSH, v_BNSH, mask_B11S, dropout_p=p, is_causal=self.causal
            )


class MLP(nn.Module):
    """Two linear layers with a GELU in between, in GPT-2's tanh form."""

    gelu: ClassVar[str] = "tanh"

    def __init__(self, config: TransformerConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        size, inner, sequence = config.hidden_size, config.ffn_size, config.sequence_parallel
        fc1_init = _weight_init(config, layer, "mlp.linear_fc1.weight")
        self.linear_fc1 = ColumnParallelLinear(size, inner, tp, sequence_parallel=sequence, init=fc1_init)
        fc2_init = _output_init(config, layer, "mlp.linear_fc2.weight")
        self.linear_fc2 = RowParallelLinear(inner, size, tp, sequence_parallel=sequence, init=fc2_init)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """Map hidden_BSD to hidden_BSD."""
        inner_BSF = F.gelu(self.linear_fc1(hidden_BSD), approximate=self.gelu)
        return self.linear_fc2(inner_BSF)


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm over all tokens, or over this rank's slice with sequence parallelism."""

    def __init__(self, config: TransformerConfig, tp: TensorParallel) -> None:
        super().__init__(config.hidden_size, config.layernorm_epsilon)
        self.tp = tp if config.sequence_parallel else TensorParallel()

    def forward(self, input: Tensor) -> Tensor:
        """Normalize hidden_BSD over its last dimension."""
        weight, bias = shared_parameters(self.tp, self.weight, self.bias)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class TransformerLayer(nn.Module):
    """Pre-LN transformer layer: attention and MLP, each with a residual connection.

    Args:
        config: sizes, and whether this layer recomputes its activations.
        layer: number of the layer in the whole model, from 0.
        tp: position of this rank in its tensor-parallel group.
        clock: current step and micro-batch, for the dropout masks.
    """

    def __init__(
        self, config: TransformerConfig, layer: int, tp: TensorParallel, clock: DropoutClock
    ) -> None:
        super().__init__()
        self.clock = clock
        self.recompute = config.recomputes(layer) == "full"
        self.input_layernorm = LayerNorm(config, tp)
        self.self_attention = SelfAttention(config, layer, tp, clock)
        self.attention_dropout = hidden_dropout(config, layer, "attention_output", tp, clock)
        self.pre_mlp_layernorm = LayerNorm(config, tp)
        self.mlp = MLP(config, layer, tp)
        self.mlp_dropout = hidden_dropout(config, layer, "mlp_output", tp, clock)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """Map hidden_BSD to hidden_BSD on all ranks."""
        return recomputed(self.clock, self._layer, hidden_BSD) if self.recompute else self._layer(hidden_BSD)

    def _layer(self, hidden_BSD: Tensor) -> Tensor:
        attended_BSD = self.self_attention(self.input_layernorm(hidden_BSD))
        hidden_BSD = hidden_BSD + self.attention_dropout(attended_BSD)
        return hidden_BSD + self.mlp_dropout(self.mlp(self.pre_mlp_layernorm(hidden_BSD)))


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
    """Return an embedding table of ``rows`` rows. Its initial values depend only on its name and the seed."""
    table_RD = torch.empty(rows, config.hidden_size, dtype=torch.float32, device="cpu")
    keyed_normal(config.init_std, config.seed, BEFORE_THE_FIRST_LAYER, name)(table_RD)
    return nn.Parameter(table_RD.to(torch.get_default_dtype()))


def _weight_init(config: TransformerConfig, layer: int, name: str) -> InitMethod:
    return keyed_normal(config.init_std, config.seed, layer, name)


def _output_init(config: TransformerConfig, layer: int, name: str) -> InitMethod:
    """Return the scaled-down initialization for the 2 * num_layers layers that feed a residual addition."""
    return keyed_normal(config.init_std / math.sqrt(2 * config.num_layers), config.seed, layer, name)
