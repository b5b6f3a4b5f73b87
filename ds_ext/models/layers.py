"""A pre-LN transformer layer over tensor-parallel linear layers (GPT-2; Shoeybi et al. 2019, section 3).

Shapes: B samples of a micro-batch, S tokens, D hidden size, N heads of this rank, H head size, F this rank's
share of the MLP's inner width.
"""

from __future__ import annotations

import math

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
)


class SelfAttention(nn.Module):
    """Causal self attention over this rank's heads: hidden_BSD to hidden_BSD.

    The output features of ``linear_qkv`` are ordered (head, query | key | value, head size), so a
    tensor-parallel shard is a number of whole heads, and concatenated shards are the layer of one rank.
    """

    def __init__(
        self, config: TransformerConfig, layer: int, tp: TensorParallel, clock: DropoutClock
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_size = config.head_size
        self.linear_qkv = ColumnParallelLinear(
            size, 3 * size, tp, init=_weight_init(config, layer, "self_attention.linear_qkv.weight")
        )
        self.linear_proj = RowParallelLinear(
            size, size, tp, init=_output_init(config, layer, "self_attention.linear_proj.weight")
        )
        # Each rank holds other heads, so each needs masks of its own.
        self.dropout = KeyedDropout(config.attention_dropout, config.seed, layer, "attention", clock, tp.rank)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        batch, tokens = hidden_BSD.shape[:2]
        qkv_BSN3H = self.linear_qkv(hidden_BSD).view(batch, tokens, -1, 3, self.head_size)
        q_BNSH, k_BNSH, v_BNSH = (part.transpose(1, 2) for part in qkv_BSN3H.unbind(3))
        context_BNSH = self._attend(q_BNSH, k_BNSH, v_BNSH)
        return self.linear_proj(context_BNSH.transpose(1, 2).reshape(batch, tokens, -1))

    def _attend(self, q_BNSH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor) -> Tensor:
        if not self.training or self.dropout.p == 0.0:
            return F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH, is_causal=True)
        with keyed_rng(self.dropout.key(), q_BNSH.device):
            return F.scaled_dot_product_attention(
                q_BNSH, k_BNSH, v_BNSH, is_causal=True, dropout_p=self.dropout.p
            )


class MLP(nn.Module):
    """Two linear layers around a GELU (tanh form, as GPT-2 has it): hidden_BSD to hidden_BSD."""

    def __init__(self, config: TransformerConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size, config.ffn_size, tp, init=_weight_init(config, layer, "mlp.linear_fc1.weight")
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_size, config.hidden_size, tp, init=_output_init(config, layer, "mlp.linear_fc2.weight")
        )

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        inner_BSF = F.gelu(self.linear_fc1(hidden_BSD), approximate="tanh")
        return self.linear_fc2(inner_BSF)


class TransformerLayer(nn.Module):
    """One pre-LN layer, attention then MLP, each with its residual: hidden_BSD to hidden_BSD, on all ranks.

    Args:
        config: sizes; decides whether this layer recomputes its activations in the backward pass.
        layer: number of the layer in the whole model, from 0.
        tp: this rank's place in its tensor-parallel group.
        clock: the step and micro-batch that the dropout masks belong to.
    """

    def __init__(
        self, config: TransformerConfig, layer: int, tp: TensorParallel, clock: DropoutClock
    ) -> None:
        super().__init__()
        self.clock = clock
        self.recompute = config.recomputes(layer)
        p, seed = config.hidden_dropout, config.seed
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon)
        self.self_attention = SelfAttention(config, layer, tp, clock)
        self.attention_dropout = KeyedDropout(p, seed, layer, "attention_output", clock)
        self.pre_mlp_layernorm = nn.LayerNorm(config.hidden_size, config.layernorm_epsilon)
        self.mlp = MLP(config, layer, tp)
        self.mlp_dropout = KeyedDropout(p, seed, layer, "mlp_output", clock)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return self._layer(hidden_BSD)
        step, micro_batch = self.clock.step, self.clock.micro_batch

        def layer_at_its_time(hidden_BSD: Tensor) -> Tensor:
            # By the time of the backward pass the clock is at another micro-batch.
            with self.clock.at(step, micro_batch):
                return self._layer(hidden_BSD)

        return checkpoint(layer_at_its_time, hidden_BSD, use_reentrant=False, preserve_rng_state=False)

    def _layer(self, hidden_BSD: Tensor) -> Tensor:
        attended_BSD = self.self_attention(self.input_layernorm(hidden_BSD))
        hidden_BSD = hidden_BSD + self.attention_dropout(attended_BSD)
        return hidden_BSD + self.mlp_dropout(self.mlp(self.pre_mlp_layernorm(hidden_BSD)))


def _weight_init(config: TransformerConfig, layer: int, name: str) -> InitMethod:
    return keyed_normal(config.init_std, config.seed, layer, name)


def _output_init(config: TransformerConfig, layer: int, name: str) -> InitMethod:
    """Start values of what is added to the residual: smaller, since 2 * num_layers of them add up (GPT-2)."""
    return keyed_normal(config.init_std / math.sqrt(2 * config.num_layers), config.seed, layer, name)
