"""Transformer layer of NVIDIA's Transformer Engine (``--transformer-impl transformer_engine``).

It needs CUDA and is imported on first use. Its initial weights equal those of the local layer, so a run starts with the
same loss. Its parameters have different names, so the two implementations cannot load each other's checkpoints.

It computes weight gradients together with input gradients, so a split backward defers none, and the job plan prints a
line about it. Versions 2.3 and later have ``delay_wgrad_compute`` in their linear modules, but not in
``TransformerLayer``. ``backward_dw`` assigns ``.grad`` without adding to it, runs no hooks of autograd, and handles
biases differently from version to version. docs/models.md has the reasons for not using it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from typing import Any

import torch
from torch import Tensor, nn

from ds_ext.errors import ConfigError
from ds_ext.model.config import TransformerConfig
from ds_ext.recipes.models.layers import TransformerLayer, recomputed
from ds_ext.tensor_parallel import DropoutClock, TensorParallel

# Option that has no counterpart here -> reason.
_UNSUPPORTED = {
    "position_embedding_type": "it gets no rotary tables",
    "swiglu": "it keeps both matrices in one weight, which checkpoints cannot split",
    "num_query_groups": "its fused weight is ordered by groups",
    "kv_channels": "its head size follows from the hidden size",
    "add_qkv_bias": "it has biases in all linear layers or in none",
    "qk_layernorm": "it does not sum the gradients of these norms over tensor-parallel ranks",
    "sliding_window": "its windows are not tested",
    "reset_position_ids": "it gets no starts of documents",
    "reset_attention_mask": "it gets no starts of documents",
}
# Transformer Engine's name -> local name. Both fused weights are ordered (head, query | key | value, head size).
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


_MAJOR_VERSIONS = ("2",)  # with the names above and the arguments of TransformerEngineLayer


def check_version(version: str) -> None:
    if re.match(r"\d+", version) is None or version.split(".")[0] not in _MAJOR_VERSIONS:
        raise ConfigError(
            f"--transformer-impl: needs Transformer Engine 2 (got {version}). Install it with `pip install "
            "--no-build-isolation 'transformer-engine[pytorch]>=2,<3'`, or use local."
        )


def import_transformer_engine() -> Any:
    if not torch.cuda.is_available():
        raise ConfigError(
            "--transformer-impl: transformer_engine needs CUDA (no GPU found). Use local, or a host with CUDA."
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "--transformer-impl: Transformer Engine is not installed. Install it with `pip install "
            "--no-build-isolation 'ds_ext[te]'`, or use local."
        )
    check_version(_installed_version())
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # its loader may raise ImportError, RuntimeError or OSError
        raise ConfigError(
            f"--transformer-impl: Transformer Engine does not load (got {type(error).__name__}: {error}). "
            f"Install a build for torch {torch.__version__}, or use local."
        ) from None


def _installed_version() -> str:
    for name in ("transformer_engine", "transformer_engine_torch"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def check_transformer_engine(config: TransformerConfig) -> None:
    if config.hidden_dropout or config.attention_dropout:
        raise ConfigError(
            "--transformer-impl: transformer_engine needs hidden_dropout 0 and attention_dropout 0 (got "
            f"{config.hidden_dropout:g} and {config.attention_dropout:g}), because its dropout masks depend on the "
            "schedule. Set both to 0, or use local."
        )
    if config.sequence_parallel:
        raise ConfigError(
            "--transformer-impl: transformer_engine does not support sequence_parallel, because it does not sum the "
            "gradients of its norms over tensor-parallel ranks. Disable sequence_parallel, or use local."
        )
    if config.recompute == "selective":
        raise ConfigError(
            "--transformer-impl: transformer_engine does not support --recompute-granularity selective, because its "
            "fused attention stores no scores. Use none or full."
        )
    for name, reason in _UNSUPPORTED.items():
        value = getattr(config, name)
        if value != getattr(TransformerConfig, name):
            raise ConfigError(
                f"--transformer-impl: transformer_engine does not support {name} here, because {reason} (got {value}). "
                f"Use local."
            )
    import_transformer_engine()


class TransformerEngineLayer(nn.Module):
    """Equivalent of :class:`ds_ext.recipes.models.layers.TransformerLayer` with Transformer Engine's kernels."""

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
            normalization=config.normalization,
            bias=config.add_bias_linear,
            attn_input_format="bshd",
        )
        copy_weights(self.layer, TransformerLayer(config, layer, tp, clock))

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        return recomputed(self.clock, self.layer, hidden_BSD) if self.recompute else self.layer(hidden_BSD)


def copy_weights(te_layer: nn.Module, layer: TransformerLayer) -> None:
    """Copy the weights of a local layer and their sharding attributes into Transformer Engine's layer."""
    te_parameters, parameters = dict(te_layer.named_parameters()), dict(layer.named_parameters())
    expected = {name for name, local in _NAMES.items() if local in parameters}
    if te_parameters.keys() != expected:
        different = sorted(te_parameters.keys() ^ expected)
        raise ConfigError(
            "--transformer-impl: the installed Transformer Engine has unknown or missing parameters (got "
            f"{', '.join(different[:4])}). Use version 2, or local."
        )
    with torch.no_grad():
        for name, te_parameter in te_parameters.items():
            parameter = parameters[_NAMES[name]]
            te_parameter.copy_(parameter)
            for attribute in ("model_parallel", "tensor_model_parallel", "partition_dim"):
                if hasattr(parameter, attribute):
                    setattr(te_parameter, attribute, getattr(parameter, attribute))
                elif hasattr(te_parameter, attribute):
                    delattr(te_parameter, attribute)
