"""Kinds made of torch's modules: attention, convolutions, recurrent layers, norms, parametrizations."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ds_ext.tensor_parallel import ColumnParallelLinear, RowParallelLinear, keyed_normal

from .kinds import HEADS, LENGTH, WIDTH, Kind, Made, Place, layer


def linear() -> nn.Linear:
    """Return a square linear layer."""
    return nn.Linear(WIDTH, WIDTH)


class Mlp(nn.Sequential):
    """Residual MLP."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


class ReluInPlace(nn.Sequential):
    """MLP with an in-place ReLU."""

    def __init__(self) -> None:
        super().__init__(linear(), nn.ReLU(inplace=True), linear())


class SelfAttention(nn.Module):
    """Attention of torch, whose key bias has no gradient but rounding errors."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class CausalAttention(nn.Module):
    """Attention with one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class EncoderLayer(nn.TransformerEncoderLayer):
    """Transformer layer of torch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(WIDTH, HEADS, 2 * WIDTH, dropout, batch_first=True)


class OverChannels(nn.Module):
    """Module that takes (B, WIDTH, S), such as a convolution."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Conv1d(OverChannels):
    """Convolution over the tokens."""

    def __init__(self) -> None:
        super().__init__(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))


class DepthwiseConv(OverChannels):
    """Convolution with one channel per group."""

    def __init__(self) -> None:
        super().__init__(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False))


class ConvTranspose(OverChannels):
    """Transposed convolution."""

    def __init__(self) -> None:
        super().__init__(nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1))


class BatchNorm(OverChannels):
    """Batch norm with running statistics."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(WIDTH))


class CumulativeBatchNorm(OverChannels):
    """Batch norm whose statistics weigh all batches equally."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(WIDTH, momentum=None))


class InstanceNorm(OverChannels):
    """Instance norm with running statistics."""

    def __init__(self) -> None:
        super().__init__(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True))


class FrozenBatchNorm(BatchNorm):
    """Batch norm that stays in evaluation mode."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class GroupNorm(OverChannels):
    """Group norm."""

    def __init__(self) -> None:
        super().__init__(nn.GroupNorm(2, WIDTH))


class Conv2d(nn.Module):
    """Two convolutions over tokens and features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.unsqueeze(1)))).squeeze(1)


class Recurrent(nn.Module):
    """Recurrent layer; only its output is used, not its state."""

    def __init__(self, module: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent = module(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]


class CellLoop(nn.Module):
    """Recurrent cell in a loop, which uses its weights once per token."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = self.cell(token, state)
            outputs.append(state)
        return torch.stack(outputs, 1)


class Bilinear(nn.Module):
    """Bilinear layer and PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.slope = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.PReLU(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.slope(self.bilinear(x, x).transpose(1, 2)).transpose(1, 2)


def weight_norm() -> nn.Module:
    """Return a linear layer with a parametrized weight."""
    return parametrizations.weight_norm(linear())


def old_weight_norm() -> nn.Module:
    """Return a linear layer whose weight is set by a forward hook."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(linear())


def orthogonal() -> nn.Module:
    """Return a linear layer with an orthogonal weight."""
    return parametrizations.orthogonal(linear())


def spectral_norm() -> nn.Module:
    """Return a linear layer whose parametrization updates buffers in training."""
    return parametrizations.spectral_norm(linear())


class Symmetric(nn.Module):
    """Parametrization of symmetric matrices."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def symmetric() -> nn.Module:
    """Return a linear layer with a symmetric weight."""
    module = linear()
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


class LowRank(nn.Module):
    """Frozen weight with a trained low-rank update."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear()
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def frozen() -> nn.Module:
    """Return a linear layer without trained parameters."""
    return linear().requires_grad_(False)


class PartlyFrozen(nn.Module):
    """Linear layers with a frozen weight, and with a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.first.weight.requires_grad_(False)
        self.second.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Positions(nn.Module):
    """Learned positions, of the first S tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.linear = nn.Parameter(0.1 * torch.randn(4 * LENGTH, WIDTH)), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.positions[: x.shape[1]]


class DroppedMlp(nn.Sequential):
    """MLP with dropout."""

    def __init__(self) -> None:
        super().__init__(linear(), nn.Dropout(0.3), nn.Tanh(), linear(), nn.Dropout1d(0.2))


def _tensor_parallel(place: Place) -> list[Any]:
    return [LayerSpec(ShardedMlp, place.tp)]


class ShardedMlp(nn.Module):
    """Linear layer sharded by columns, then one sharded by rows."""

    def __init__(self, tp: Any) -> None:
        super().__init__()
        self.first = ColumnParallelLinear(WIDTH, 2 * WIDTH, tp, init=keyed_normal(0.3, 1))
        self.second = RowParallelLinear(2 * WIDTH, WIDTH, tp, init=keyed_normal(0.3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


STANDARD: dict[str, Kind] = {
    "linear": layer(nn.Linear, WIDTH, WIDTH),
    "linear_without_bias": layer(nn.Linear, WIDTH, WIDTH, False),
    "mlp": layer(Mlp),
    "relu_in_place": layer(ReluInPlace),
    "self_attention": layer(SelfAttention),
    "causal_attention": layer(CausalAttention),
    "encoder_layer": layer(EncoderLayer),
    "conv1d": layer(Conv1d),
    "depthwise_conv": layer(DepthwiseConv),
    "conv_transpose": layer(ConvTranspose),
    "conv2d": layer(Conv2d),
    "layer_norm": layer(nn.LayerNorm, WIDTH),
    "rms_norm": layer(nn.RMSNorm, WIDTH),
    "group_norm": layer(GroupNorm),
    "batch_norm": layer(BatchNorm, fp32=True, weight=3),
    "cumulative_batch_norm": layer(CumulativeBatchNorm, fp32=True, weight=3),
    "instance_norm": layer(InstanceNorm, fp32=True, weight=3),
    "frozen_batch_norm": layer(FrozenBatchNorm, fp32=True),
    "lstm": layer(Recurrent, nn.LSTM),
    "gru": layer(Recurrent, nn.GRU),
    "rnn": layer(Recurrent, nn.RNN),
    "cell_loop": layer(CellLoop),
    "bilinear": layer(Bilinear),
    "weight_norm": layer(Made, weight_norm),
    "old_weight_norm": layer(Made, old_weight_norm),
    "orthogonal": layer(Made, orthogonal, fp32=True),
    "spectral_norm": layer(Made, spectral_norm, statistics=True, fp32=True),
    "symmetric": layer(Made, symmetric),
    "low_rank": layer(LowRank),
    "frozen": layer(Made, frozen),
    "partly_frozen": layer(PartlyFrozen),
    "positions": layer(Positions),
    "sharded_mlp": Kind(_tensor_parallel),
    "dropout": layer(DroppedMlp, random=True, weight=3),
    "attention_dropout": layer(SelfAttention, 0.3, random=True, weight=3),
    "encoder_dropout": layer(EncoderLayer, 0.2, random=True, weight=3),
}
