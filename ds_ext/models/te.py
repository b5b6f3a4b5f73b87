"""The transformer layer of NVIDIA's Transformer Engine in place of ours (``--transformer-impl transformer_engine``).

CUDA only, and imported when it is asked for. Its start weights are those of our layer, so that a run begins at the same
loss; its weight gradients come with the input gradients (a split backward is a whole one in its first half), and its
parameters have names of their own, so that its checkpoints are read by it alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from ds_ext.errors import ConfigError
from ds_ext.models.config import TransformerConfig
from ds_ext.models.layers import TransformerLayer, recomputed
from ds_ext.tensor_parallel import DropoutClock, TensorParallel

# Transformer Engine's name -> ours. Its fused weight has the order of ours: (head, query | key | value, head size).
_NAMES = {
    "self_attention.layernorm_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.layernorm_qkv.layer_norm_bias": "input_layernorm.bias",
    "self_attention.layernorm_qkv.weight": "self_attention.linear_qkv.weight",
    "self_attention.layernorm_qkv.bias": "self_attention.linear_qkv.bias",
    "self_attention.proj.weight": "self_attention.linear_proj.weight",
    "self_attention.proj.bias": "self_attention.linear_proj.bias",
    "layernorm_mlp.layer_norm_weight": "pre_mlp_layernorm.weight",
    "layernorm_mlp.layer_norm_bias": "pre_mlp_layernorm.bias",
    "layernorm_mlp.fc1_weight": "mlp.linear_fc1.weight",
    "layernorm_mlp.fc1_bias": "mlp.linear_fc1.bias",
    "layernorm_mlp.fc2_weight": "mlp.linear_fc2.weight",
    "layernorm_mlp.fc2_bias": "mlp.linear_fc2.bias",
}


def import_transformer_engine() -> Any:
    """``transformer_engine.pytorch``. Raises ConfigError that says what is missing."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "--transformer-impl transformer_engine needs CUDA, and torch finds no GPU here. Use local, or a CUDA host."
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "--transformer-impl transformer_engine: Transformer Engine is not installed. Install it with "
            "`pip install --no-build-isolation 'ds_ext[te]'`, or use local."
        )
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # its loader raises ImportError, RuntimeError or OSError, by what it misses
        raise ConfigError(
            f"--transformer-impl transformer_engine: it is installed and does not load ({type(error).__name__}: "
            f"{error}). Its build must fit torch {torch.__version__}; or use local."
        ) from None


def check_transformer_engine(config: TransformerConfig) -> None:
    """Raise ConfigError for what Transformer Engine's layer cannot do here."""
    if config.hidden_dropout or config.attention_dropout:
        raise ConfigError(
            f"with --transformer-impl transformer_engine dropout must be 0, because its masks would depend on the "
            f"schedule; got hidden {config.hidden_dropout:g}, attention {config.attention_dropout:g}."
        )
    if config.sequence_parallel:
        raise ConfigError(
            "with --transformer-impl transformer_engine sequence_parallel must be off: it leaves the gradients of its "
            "norms unsummed over the tensor-parallel ranks."
        )
    if config.recompute == "selective":
        raise ConfigError(
            "with --transformer-impl transformer_engine --recompute-granularity is none or full: its fused attention "
            "keeps no scores to recompute."
        )
    import_transformer_engine()


class TransformerEngineLayer(nn.Module):
    """One pre-LN layer: hidden_BSD to hidden_BSD, as :class:`ds_ext.models.layers.TransformerLayer`."""

    def __init__(
        self, config: TransformerConfig, layer: int, tp: TensorParallel, clock: DropoutClock
    ) -> None:
        super().__init__()
        te = import_transformer_engine()
        self.clock = clock
        self.recompute = config.recomputes(layer) == "full"
        self.layer = te.TransformerLayer(
            config.hidden_size,
            config.ffn_size,
            config.num_attention_heads,
            layernorm_epsilon=config.layernorm_epsilon,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            layer_number=layer + 1,
            self_attn_mask_type="causal",
            tp_group=tp.group,
            tp_size=tp.size,
            set_parallel_mode=True,
            params_dtype=torch.get_default_dtype(),
            fuse_qkv_params=True,
            qkv_weight_interleaved=True,
            activation="gelu",
            attn_input_format="bshd",
        )
        start_as(self.layer, TransformerLayer(config, layer, tp, clock))

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        return recomputed(self.clock, self.layer, hidden_BSD) if self.recompute else self.layer(hidden_BSD)


def start_as(layer: nn.Module, ours: TransformerLayer) -> None:
    """Copy our layer's weights, and what they say of their sharding, into Transformer Engine's.

    Raises:
        ConfigError: its parameters are not those that are known.
    """
    theirs, found = dict(layer.named_parameters()), dict(ours.named_parameters())
    if theirs.keys() != _NAMES.keys():
        unknown = sorted(theirs.keys() ^ _NAMES.keys())
        raise ConfigError(
            f"--transformer-impl transformer_engine: its layer has other parameters than this version knows "
            f"({', '.join(unknown[:4])}). Use version 2, or local."
        )
    with torch.no_grad():
        for name, parameter in theirs.items():
            mine = found[_NAMES[name]]
            parameter.copy_(mine)
            for mark in ("model_parallel", "tensor_model_parallel", "partition_dim"):
                if hasattr(mine, mark):
                    setattr(parameter, mark, getattr(mine, mark))
                elif hasattr(parameter, mark):
                    delattr(parameter, mark)
