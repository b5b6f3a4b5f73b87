"""Mapping between the weights of ds_ext and those of Hugging Face's transformers: names and layouts.

A ds_ext weight is named "INDEX.NAME": the index of its layer in the whole model, and its name in the layer. A GPT
corresponds to a GPT2LMHeadModel. A BERT corresponds to a BertForPreTraining, or without the sentence-order head to a
BertForMaskedLM. All three use the word embeddings as the output layer, so this weight is listed once.

Shapes: D hidden size, F inner width of the MLP, V vocabulary without padding, P positions, N heads, H head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ext.models.bert import TOKEN_TYPES, BertConfig
from ds_ext.models.config import TransformerConfig


@dataclass(frozen=True)
class Conversion:
    """Conversion of one weight of ds_ext to one or more of transformers, and back."""

    to_hf: Callable[[Tensor, TransformerConfig], Sequence[Tensor]]
    from_hf: Callable[[Sequence[Tensor], TransformerConfig], Tensor]


@dataclass(frozen=True)
class Counterpart:
    """Weight of ds_ext and its counterparts in transformers.

    Attributes:
        layer: index of the layer in the whole model.
        key: name of the weight in the layer.
        shape: shape of the full weight, without padding.
        hf_names: names of the weights in transformers.
        conversion: conversion between the two layouts.
    """

    layer: int
    key: str
    shape: tuple[int, ...]
    hf_names: tuple[str, ...]
    conversion: Conversion

    @property
    def name(self) -> str:
        """Name of the weight in ds_ext."""
        return f"{self.layer}.{self.key}"

    def hf_shapes(self, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight in transformers, by its name there."""
        tensors = self.conversion.to_hf(torch.empty(self.shape, device="meta"), config)
        return {name: tuple(tensor.shape) for name, tensor in zip(self.hf_names, tensors, strict=True)}


def counterparts(config: TransformerConfig) -> list[Counterpart]:
    """Return every weight of a GPT, or of a BERT for a BertConfig, in the order of the layers."""
    return list(_bert(config) if isinstance(config, BertConfig) else _gpt2(config))


def num_pipeline_layers(config: TransformerConfig) -> int:
    """Return the number of pipeline layers: the transformer layers and the other layers at both ends."""
    return config.num_layers + (5 if isinstance(config, BertConfig) else 4)


def hf_name(name: str, config: TransformerConfig) -> str | None:
    """Return the current transformers name of a weight; None for an unused copy or constant.

    Older files name the parameters of a LayerNorm gamma and beta. The original GPT-2 files omit the prefix.
    """
    if isinstance(config, BertConfig):
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        unused = r"cls\.predictions\.decoder\.(weight|bias)|bert\.embeddings\.position_ids"
        if config.order_classes is None:
            unused += r"|bert\.pooler\.dense\.(weight|bias)"
    else:
        name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        unused = r"lm_head\.weight|transformer\.h\.\d+\.attn\.(bias|masked_bias)"
    return None if re.fullmatch(unused, name) else name


# --- models ---


def _gpt2(config: TransformerConfig) -> Iterator[Counterpart]:
    d, f = config.hidden_size, config.ffn_size
    yield _one(0, "word_embeddings.weight", (config.vocab_size, d), "transformer.wte.weight")
    yield _one(1, "weight", (config.positions, d), "transformer.wpe.weight")
    for i in range(config.num_layers):
        layer, hf_layer = i + 2, f"transformer.h.{i}."
        yield from _module(layer, "input_layernorm", (d,), f"{hf_layer}ln_1")
        yield from _module(layer, "self_attention.linear_qkv", (3 * d, d), f"{hf_layer}attn.c_attn", GPT2_QKV)
        yield from _module(layer, "self_attention.linear_proj", (d, d), f"{hf_layer}attn.c_proj", CONV1D)
        yield from _module(layer, "pre_mlp_layernorm", (d,), f"{hf_layer}ln_2")
        yield from _module(layer, "mlp.linear_fc1", (f, d), f"{hf_layer}mlp.c_fc", CONV1D)
        yield from _module(layer, "mlp.linear_fc2", (d, f), f"{hf_layer}mlp.c_proj", CONV1D)
    yield from _module(config.num_layers + 2, "", (d,), "transformer.ln_f")


def _bert(config: BertConfig) -> Iterator[Counterpart]:
    d, f, heads = config.hidden_size, config.ffn_size, config.num_layers + 2
    embeddings, predictions = "bert.embeddings.", "cls.predictions."
    yield _one(0, "word_embeddings.weight", (config.vocab_size, d), f"{embeddings}word_embeddings.weight")
    yield _one(1, "position_embeddings", (config.positions, d), f"{embeddings}position_embeddings.weight")
    yield _one(1, "token_type_embeddings", (TOKEN_TYPES, d), f"{embeddings}token_type_embeddings.weight")
    yield from _module(1, "layernorm", (d,), f"{embeddings}LayerNorm")
    for i in range(config.num_layers):
        yield from _bert_layer(i + 2, f"bert.encoder.layer.{i}.", d, f)
    yield from _module(heads, "transform", (d, d), f"{predictions}transform.dense")
    yield from _module(heads, "transform_layernorm", (d,), f"{predictions}transform.LayerNorm")
    if config.order_classes is not None:
        yield from _module(heads, "pooler", (d, d), "bert.pooler.dense")
        yield from _module(heads, "classifier", (config.order_classes, d), "cls.seq_relationship")
    yield _one(heads + 2, "bias", (config.vocab_size,), f"{predictions}bias")


def _bert_layer(layer: int, hf_layer: str, d: int, f: int) -> Iterator[Counterpart]:
    attention = f"{hf_layer}attention."
    for kind, shape in (("weight", (3 * d, d)), ("bias", (3 * d,))):
        names = tuple(f"{attention}self.{part}.{kind}" for part in ("query", "key", "value"))
        yield Counterpart(layer, f"self_attention.linear_qkv.{kind}", shape, names, BERT_QKV)
    yield from _module(layer, "self_attention.linear_proj", (d, d), f"{attention}output.dense")
    yield from _module(layer, "attention_layernorm", (d,), f"{attention}output.LayerNorm")
    yield from _module(layer, "mlp.linear_fc1", (f, d), f"{hf_layer}intermediate.dense")
    yield from _module(layer, "mlp.linear_fc2", (d, f), f"{hf_layer}output.dense")
    yield from _module(layer, "mlp_layernorm", (d,), f"{hf_layer}output.LayerNorm")


def _module(
    layer: int, name: str, shape: tuple[int, ...], hf_name: str, conversion: Conversion | None = None
) -> Iterator[Counterpart]:
    """Yield the weight, of shape ``shape``, and the bias of a linear layer or a LayerNorm."""
    prefix = f"{name}." if name else ""
    yield _one(layer, f"{prefix}weight", shape, f"{hf_name}.weight", conversion)
    yield _one(layer, f"{prefix}bias", shape[:1], f"{hf_name}.bias", conversion)


def _one(
    layer: int, key: str, shape: tuple[int, ...], hf_name: str, conversion: Conversion | None = None
) -> Counterpart:
    return Counterpart(layer, key, shape, (hf_name,), conversion or IDENTITY)


# --- conversions ---


def _split_heads(qkv: Tensor, config: TransformerConfig) -> tuple[Tensor, ...]:
    """Split a fused weight or bias, with rows ordered (N, q | k | v, H), into query, key and value of D rows each."""
    parts = qkv.unflatten(0, (config.num_attention_heads, 3, config.head_size)).unbind(1)
    return tuple(part.flatten(0, 1) for part in parts)


def _join_heads(parts: Sequence[Tensor], config: TransformerConfig) -> Tensor:
    """Fuse query, key and value. This is the inverse of :func:`_split_heads`."""
    by_head = [part.unflatten(0, (config.num_attention_heads, config.head_size)) for part in parts]
    return torch.stack(by_head, 1).flatten(0, 2)


def _transposed(weight: Tensor) -> Tensor:
    """Transpose a weight to or from the layout (in, out) of GPT-2's Conv1D. A bias stays as it is."""
    return weight.t() if weight.dim() == 2 else weight


IDENTITY = Conversion(lambda weight, _: (weight,), lambda hf_weights, _: hf_weights[0])
CONV1D = Conversion(
    lambda weight, _: (_transposed(weight),), lambda hf_weights, _: _transposed(hf_weights[0])
)
GPT2_QKV = Conversion(
    lambda weight, config: (_transposed(torch.cat(_split_heads(weight, config))),),
    lambda hf_weights, config: _join_heads(_transposed(hf_weights[0]).chunk(3), config),
)
BERT_QKV = Conversion(_split_heads, _join_heads)
