"""Our weights and those of Hugging Face's transformers: which is which, and how each is laid out.

Ours are named "index of the layer in the whole model.name in the layer". A GPT is a GPT2LMHeadModel; a BERT is a
BertForPreTraining, or without the sentence head a BertForMaskedLM. The output layers of all three are the word
embeddings, which are listed once.

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
class Form:
    """How one weight of ours becomes theirs, which may be several, and back."""

    to_theirs: Callable[[Tensor, TransformerConfig], Sequence[Tensor]]
    to_ours: Callable[[Sequence[Tensor], TransformerConfig], Tensor]


@dataclass(frozen=True)
class Counterpart:
    """A weight of ours and what it is to transformers.

    Attributes:
        layer, key: index of our layer, and the weight's name in it.
        shape: of our whole weight, without padding.
        theirs: names of their weights.
        form: how the two are laid out.
    """

    layer: int
    key: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    form: Form

    @property
    def name(self) -> str:
        """Our name."""
        return f"{self.layer}.{self.key}"

    def their_shapes(self, config: TransformerConfig) -> dict[str, tuple[int, ...]]:
        """The shape of each of their weights."""
        tensors = self.form.to_theirs(torch.empty(self.shape, device="meta"), config)
        return {name: tuple(tensor.shape) for name, tensor in zip(self.theirs, tensors, strict=True)}


def counterparts(config: TransformerConfig) -> list[Counterpart]:
    """Every weight of a GPT, or of a BERT when ``config`` is a BertConfig; those of a layer one after the other."""
    return list(_bert(config) if isinstance(config, BertConfig) else _gpt2(config))


def num_pipeline_layers(config: TransformerConfig) -> int:
    """Layers of the pipeline: those of the transformer, and what is around them."""
    return config.num_layers + (5 if isinstance(config, BertConfig) else 4)


def their_name(name: str, config: TransformerConfig) -> str | None:
    """The current name of one of their weights; None for a copy or a constant that we have no use for.

    Older files call the parameters of a LayerNorm gamma and beta, and those of GPT-2's first authors leave
    the prefix out.
    """
    if isinstance(config, BertConfig):
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        spare = r"cls\.predictions\.decoder\.(weight|bias)|bert\.embeddings\.position_ids"
        if config.order_classes is None:
            spare += r"|bert\.pooler\.dense\.(weight|bias)"
    else:
        name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        spare = r"lm_head\.weight|transformer\.h\.\d+\.attn\.(bias|masked_bias)"
    return None if re.fullmatch(spare, name) else name


# --- the two models ---


def _gpt2(config: TransformerConfig) -> Iterator[Counterpart]:
    d, f = config.hidden_size, config.ffn_size
    yield _one(0, "word_embeddings.weight", (config.vocab_size, d), "transformer.wte.weight")
    yield _one(1, "weight", (config.positions, d), "transformer.wpe.weight")
    for i in range(config.num_layers):
        layer, theirs = i + 2, f"transformer.h.{i}."
        yield from _module(layer, "input_layernorm", (d,), f"{theirs}ln_1")
        yield from _module(layer, "self_attention.linear_qkv", (3 * d, d), f"{theirs}attn.c_attn", GPT2_QKV)
        yield from _module(layer, "self_attention.linear_proj", (d, d), f"{theirs}attn.c_proj", CONV1D)
        yield from _module(layer, "pre_mlp_layernorm", (d,), f"{theirs}ln_2")
        yield from _module(layer, "mlp.linear_fc1", (f, d), f"{theirs}mlp.c_fc", CONV1D)
        yield from _module(layer, "mlp.linear_fc2", (d, f), f"{theirs}mlp.c_proj", CONV1D)
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


def _bert_layer(layer: int, theirs: str, d: int, f: int) -> Iterator[Counterpart]:
    attention = f"{theirs}attention."
    for kind, shape in (("weight", (3 * d, d)), ("bias", (3 * d,))):
        names = tuple(f"{attention}self.{part}.{kind}" for part in ("query", "key", "value"))
        yield Counterpart(layer, f"self_attention.linear_qkv.{kind}", shape, names, BERT_QKV)
    yield from _module(layer, "self_attention.linear_proj", (d, d), f"{attention}output.dense")
    yield from _module(layer, "attention_layernorm", (d,), f"{attention}output.LayerNorm")
    yield from _module(layer, "mlp.linear_fc1", (f, d), f"{theirs}intermediate.dense")
    yield from _module(layer, "mlp.linear_fc2", (d, f), f"{theirs}output.dense")
    yield from _module(layer, "mlp_layernorm", (d,), f"{theirs}output.LayerNorm")


def _module(
    layer: int, ours: str, shape: tuple[int, ...], theirs: str, form: Form | None = None
) -> Iterator[Counterpart]:
    """Weight and bias of a linear layer or a normalization; ``shape`` is our weight's."""
    prefix = f"{ours}." if ours else ""
    yield _one(layer, f"{prefix}weight", shape, f"{theirs}.weight", form)
    yield _one(layer, f"{prefix}bias", shape[:1], f"{theirs}.bias", form)


def _one(layer: int, key: str, shape: tuple[int, ...], theirs: str, form: Form | None = None) -> Counterpart:
    return Counterpart(layer, key, shape, (theirs,), form or SAME)


# --- forms ---


def _split_heads(qkv: Tensor, config: TransformerConfig) -> tuple[Tensor, ...]:
    """Query, key and value (D rows each) of a fused weight or bias; ours have rows in the order (N, q | k | v, H)."""
    parts = qkv.unflatten(0, (config.num_attention_heads, 3, config.head_size)).unbind(1)
    return tuple(part.flatten(0, 1) for part in parts)


def _join_heads(parts: Sequence[Tensor], config: TransformerConfig) -> Tensor:
    """The fused weight or bias of :func:`_split_heads`."""
    by_head = [part.unflatten(0, (config.num_attention_heads, config.head_size)) for part in parts]
    return torch.stack(by_head, 1).flatten(0, 2)


def _turned(weight: Tensor) -> Tensor:
    """A weight as GPT-2's Conv1D has it, (in, out), or back; a bias stays."""
    return weight.t() if weight.dim() == 2 else weight


SAME = Form(lambda ours, _: (ours,), lambda theirs, _: theirs[0])
CONV1D = Form(lambda ours, _: (_turned(ours),), lambda theirs, _: _turned(theirs[0]))
GPT2_QKV = Form(
    lambda ours, config: (_turned(torch.cat(_split_heads(ours, config))),),
    lambda theirs, config: _join_heads(_turned(theirs[0]).chunk(3), config),
)
BERT_QKV = Form(_split_heads, _join_heads)
