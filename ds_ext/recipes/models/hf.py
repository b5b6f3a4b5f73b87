"""Mapping between the weights of ds_ext and those of Hugging Face's transformers: names and layouts.

A ds_ext weight is named "INDEX.NAME": the index of its layer in the whole model, and its name in the layer. A GPT with
GPT-2's layers corresponds to a GPT2LMHeadModel, any other to a model of the Llama family. A BERT corresponds to a
BertForPreTraining, or without the sentence-order head to a BertForMaskedLM. Word embeddings that are also the output
layer are listed once.

Shapes: D hidden size, F inner width of the MLP, V vocabulary without padding, P positions, N heads, G query groups, H
head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_ext.model.config import TransformerConfig
from ds_ext.recipes.models.bert import TOKEN_TYPES, BertConfig
from ds_ext.recipes.models.hf_config import is_gpt2


@dataclass(frozen=True)
class Conversion:
    """Conversion of one weight of ds_ext to one or more of transformers, and back.

    With ``by_rows``, equal parts of the rows of all transformers' weights convert to the same part of our rows, if the
    parts consist of whole heads.
    """

    to_hf: Callable[[Tensor, TransformerConfig], Sequence[Tensor]]
    from_hf: Callable[[Sequence[Tensor], TransformerConfig], Tensor]
    by_rows: bool = True


@dataclass(frozen=True)
class Counterpart:
    """Weight of ds_ext and its counterparts in transformers. ``shape`` is that of the full weight, without padding."""

    layer: int
    key: str
    shape: tuple[int, ...]
    hf_names: tuple[str, ...]
    conversion: Conversion

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.key}"

    def hf_shapes(self, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
        tensors = self.conversion.to_hf(torch.empty(self.shape, device="meta"), config)
        return {name: tuple(tensor.shape) for name, tensor in zip(self.hf_names, tensors, strict=True)}


def counterparts(config: TransformerConfig) -> list[Counterpart]:
    """Return every weight of a GPT, or of a BERT for a BertConfig, in the order of the layers."""
    if isinstance(config, BertConfig):
        return list(_bert(config))
    return list(_gpt2(config) if is_gpt2(config) else _llama(config))


def num_pipeline_layers(config: TransformerConfig) -> int:
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
    elif is_gpt2(config):
        name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        unused = r"lm_head\.weight|transformer\.h\.\d+\.attn\.(bias|masked_bias)"
    else:
        unused = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
        if not config.untie_embeddings_and_output_weights:
            unused += r"|lm_head\.weight"
    return None if re.fullmatch(unused, name) else name


def tied_copies(config: TransformerConfig) -> dict[str, str]:
    """Return the names of the weights of tied output layers -> the weights of which they must be copies.

    Files may contain both. transformers ties them only if they are equal.
    """
    if isinstance(config, BertConfig):
        predictions = "cls.predictions."
        return {
            f"{predictions}decoder.weight": "bert.embeddings.word_embeddings.weight",
            f"{predictions}decoder.bias": f"{predictions}bias",
        }
    if config.untie_embeddings_and_output_weights:
        return {}
    return {"lm_head.weight": "transformer.wte.weight" if is_gpt2(config) else "model.embed_tokens.weight"}


# --- models ---


def _gpt2(config: TransformerConfig) -> Iterator[Counterpart]:
    d, f = config.hidden_size, config.ffn_size
    yield _weight(0, "word_embeddings.weight", (config.vocab_size, d), "transformer.wte.weight")
    yield _weight(1, "weight", (config.positions, d), "transformer.wpe.weight")
    for i in range(config.num_layers):
        layer, hf_layer = i + 2, f"transformer.h.{i}."
        yield from _module(layer, "input_layernorm", (d,), f"{hf_layer}ln_1")
        yield from _module(layer, "self_attention.linear_qkv", (3 * d, d), f"{hf_layer}attn.c_attn", GPT2_QKV)
        yield from _module(layer, "self_attention.linear_proj", (d, d), f"{hf_layer}attn.c_proj", CONV1D)
        yield from _module(layer, "pre_mlp_layernorm", (d,), f"{hf_layer}ln_2")
        yield from _module(layer, "mlp.linear_fc1", (f, d), f"{hf_layer}mlp.c_fc", CONV1D)
        yield from _module(layer, "mlp.linear_fc2", (d, f), f"{hf_layer}mlp.c_proj", CONV1D)
    yield from _module(config.num_layers + 2, "", (d,), "transformer.ln_f")


def _llama(config: TransformerConfig) -> Iterator[Counterpart]:
    d = config.hidden_size
    yield _weight(0, "word_embeddings.weight", (config.vocab_size, d), "model.embed_tokens.weight")
    if config.position_embedding_type == "learned_absolute":
        yield _weight(1, "weight", (config.positions, d), "model.embed_positions.weight")
    for i in range(config.num_layers):
        yield from _llama_layer(config, i + 2, f"model.layers.{i}.")
    norm_bias = config.normalization == "LayerNorm"
    yield from _module(config.num_layers + 2, "", (d,), "model.norm", bias=norm_bias)
    if config.untie_embeddings_and_output_weights:
        yield _weight(config.num_layers + 3, "weight", (config.vocab_size, d), "lm_head.weight")


def _llama_layer(config: TransformerConfig, layer: int, hf_layer: str) -> Iterator[Counterpart]:
    d, f = config.hidden_size, config.ffn_size
    bias, norm_bias = config.add_bias_linear, config.normalization == "LayerNorm"
    yield from _module(layer, "input_layernorm", (d,), f"{hf_layer}input_layernorm", bias=norm_bias)
    yield from _llama_attention(config, layer, f"{hf_layer}self_attn.")
    yield from _module(
        layer, "pre_mlp_layernorm", (d,), f"{hf_layer}post_attention_layernorm", bias=norm_bias
    )
    if config.swiglu:
        yield from _module(layer, "mlp.linear_gate", (f, d), f"{hf_layer}mlp.gate_proj", bias=bias)
    yield from _module(layer, "mlp.linear_fc1", (f, d), f"{hf_layer}mlp.up_proj", bias=bias)
    yield from _module(layer, "mlp.linear_fc2", (d, f), f"{hf_layer}mlp.down_proj", bias=bias)


def _llama_attention(config: TransformerConfig, layer: int, hf_attention: str) -> Iterator[Counterpart]:
    d, attention = config.hidden_size, "self_attention."
    q, kv = config.num_attention_heads * config.head_size, config.query_groups * config.head_size
    q_name, k_name, v_name = (f"{hf_attention}{part}_proj" for part in "qkv")
    qkv_bias = config.add_bias_linear or config.add_qkv_bias
    if config.query_groups == config.num_attention_heads:
        names = (q_name, k_name, v_name)
        yield from _fused(layer, f"{attention}linear_qkv", (3 * q, d), names, QKV, bias=qkv_bias)
    else:
        yield from _module(layer, f"{attention}linear_q", (q, d), q_name, bias=qkv_bias)
        yield from _fused(layer, f"{attention}linear_kv", (2 * kv, d), (k_name, v_name), KV, bias=qkv_bias)
    if config.qk_layernorm:
        norm_bias = config.normalization == "LayerNorm"
        for part in "qk":
            name = f"{attention}{part}_layernorm"
            yield from _module(layer, name, (config.head_size,), f"{hf_attention}{part}_norm", bias=norm_bias)
    name = f"{attention}linear_proj"
    yield from _module(layer, name, (d, q), f"{hf_attention}o_proj", bias=config.add_bias_linear)


def _bert(config: BertConfig) -> Iterator[Counterpart]:
    d, f, head_layer = config.hidden_size, config.ffn_size, config.num_layers + 2
    embeddings, predictions = "bert.embeddings.", "cls.predictions."
    yield _weight(0, "word_embeddings.weight", (config.vocab_size, d), f"{embeddings}word_embeddings.weight")
    yield _weight(1, "position_embeddings", (config.positions, d), f"{embeddings}position_embeddings.weight")
    yield _weight(1, "token_type_embeddings", (TOKEN_TYPES, d), f"{embeddings}token_type_embeddings.weight")
    yield from _module(1, "layernorm", (d,), f"{embeddings}LayerNorm")
    for i in range(config.num_layers):
        yield from _bert_layer(i + 2, f"bert.encoder.layer.{i}.", d, f)
    yield from _module(head_layer, "transform", (d, d), f"{predictions}transform.dense")
    yield from _module(head_layer, "transform_layernorm", (d,), f"{predictions}transform.LayerNorm")
    if config.order_classes is not None:
        yield from _module(head_layer, "pooler", (d, d), "bert.pooler.dense")
        yield from _module(head_layer, "classifier", (config.order_classes, d), "cls.seq_relationship")
    # The layer between computes the logits with the word embeddings.
    yield _weight(head_layer + 2, "bias", (config.vocab_size,), f"{predictions}bias")


def _bert_layer(layer: int, hf_layer: str, d: int, f: int) -> Iterator[Counterpart]:
    attention = f"{hf_layer}attention."
    names = tuple(f"{attention}self.{part}" for part in ("query", "key", "value"))
    yield from _fused(layer, "self_attention.linear_qkv", (3 * d, d), names, QKV)
    yield from _module(layer, "self_attention.linear_proj", (d, d), f"{attention}output.dense")
    yield from _module(layer, "attention_layernorm", (d,), f"{attention}output.LayerNorm")
    yield from _module(layer, "mlp.linear_fc1", (f, d), f"{hf_layer}intermediate.dense")
    yield from _module(layer, "mlp.linear_fc2", (d, f), f"{hf_layer}output.dense")
    yield from _module(layer, "mlp_layernorm", (d,), f"{hf_layer}output.LayerNorm")


def _module(
    layer: int,
    name: str,
    shape: tuple[int, ...],
    hf_name: str,
    conversion: Conversion | None = None,
    *,
    bias: bool = True,
) -> Iterator[Counterpart]:
    yield from _fused(layer, name, shape, (hf_name,), conversion or IDENTITY, bias=bias)


def _fused(
    layer: int,
    name: str,
    shape: tuple[int, ...],
    hf_names: Sequence[str],
    conversion: Conversion,
    *,
    bias: bool = True,
) -> Iterator[Counterpart]:
    """Yield the weight and the bias of a layer that corresponds to one or several layers of transformers."""
    prefix = f"{name}." if name else ""
    names = tuple(f"{hf_name}.weight" for hf_name in hf_names)
    yield Counterpart(layer, f"{prefix}weight", shape, names, conversion)
    if bias:
        names = tuple(f"{hf_name}.bias" for hf_name in hf_names)
        yield Counterpart(layer, f"{prefix}bias", shape[:1], names, conversion)


def _weight(layer: int, key: str, shape: tuple[int, ...], hf_name: str) -> Counterpart:
    return Counterpart(layer, key, shape, (hf_name,), IDENTITY)


# --- conversions ---


def _split_heads(fused: Tensor, config: TransformerConfig, parts: int) -> tuple[Tensor, ...]:
    """Split a fused weight or bias, with rows ordered (head or group, part, H), into query, key and value."""
    return tuple(part.flatten(0, 1) for part in fused.unflatten(0, (-1, parts, config.head_size)).unbind(1))


def _join_heads(parts: Sequence[Tensor], config: TransformerConfig) -> Tensor:
    """Invert :func:`_split_heads`."""
    return torch.stack([part.unflatten(0, (-1, config.head_size)) for part in parts], 1).flatten(0, 2)


def _transpose(weight: Tensor) -> Tensor:
    """Transpose a weight to or from the layout (in, out) of GPT-2's Conv1D. A bias is not changed."""
    return weight.t() if weight.dim() == 2 else weight


IDENTITY = Conversion(lambda weight, _: (weight,), lambda hf_weights, _: hf_weights[0])
CONV1D = Conversion(
    lambda weight, _: (_transpose(weight),),
    lambda hf_weights, _: _transpose(hf_weights[0]),
    by_rows=False,
)
GPT2_QKV = Conversion(
    lambda weight, config: (_transpose(torch.cat(_split_heads(weight, config, 3))),),
    lambda hf_weights, config: _join_heads(_transpose(hf_weights[0]).chunk(3), config),
    by_rows=False,
)
QKV = Conversion(lambda weight, config: _split_heads(weight, config, 3), _join_heads)
KV = Conversion(lambda weight, config: _split_heads(weight, config, 2), _join_heads)
