"""Shards of a decoder's modules over a tensor-parallel group, by the plan of its class in transformers.

A plan names the style of a module by its path, with ``*`` for the number of a layer:

    style                            this rank's weights    input               output
    colwise                          rows                   whole               its features
    colwise_gather_output            rows                   whole               whole
    rowwise                          columns                its features        whole
    rowwise_split_input              columns                whole               whole
    replicated_with_grad_allreduce   whole                  its heads           its heads; gradients are summed
    embedding_rowwise                rows of the table      token ids           whole
    moe_tp_experts                   whole experts          whole               whole
    of_heads                         its heads' elements of a parameter

A shard computes with the model's own code around it: attention finds its heads by ``view(..., -1, head_dim)``.
Adapters of LoRA follow the module that they adapt. Other styles are refused by the name of the module. Styles of the
parameters of experts have no effect: each rank has the whole weights of its experts.

With sequence parallelism, modules with shards (attention, MLP) gather their tokens and return this rank's, and all
other modules of a layer compute this rank's tokens.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..experts import divided_experts_forward, has_interface
from ..tensor_parallel import (
    ChunkedHead,
    TensorParallel,
    copy_to_tensor_model_parallel_region,
    enter_tensor_parallel,
    gather_features,
    leave_tensor_parallel,
    linear,
    reduce_from_tensor_model_parallel_region,
    shared_parameters,
    split_features,
    vocab_parallel_cross_entropy,
)
from ..tensor_parallel.layers import check_ids, linear_rows, mark_rows
from ..tensor_parallel.mappings import keep_slice
from ..tensor_parallel.weight_gradients import embedding_rows
from .lora import Adapters
from .split import Split
from .weights import Source

_COLUMN, _ROW = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
_SUMMED = "replicated_with_grad_allreduce"
_EXPERTS = "moe_tp_experts"
_OF_HEADS = "of_heads"
# Class of a config -> plan of its decoder layers, if transformers has none.
_PLANS = {
    "GptOssConfig": {
        **dict.fromkeys((f"self_attn.{name}_proj" for name in "qkv"), "colwise"),
        **{"self_attn.o_proj": "rowwise", "self_attn.sinks": _OF_HEADS, "mlp.experts": _EXPERTS},
    }
}
_HEADS = ("num_heads", "num_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")


def plan_of(model: Any, name: str) -> Mapping[str, str]:
    """Return the plan of a model, by the class of its config."""
    own = {
        f"{model.base_model_prefix}.layers.*.{path}": style for path, style in _PLANS.get(name, {}).items()
    }
    return own | (getattr(model, "tp_plan", None) or {})


class _Place(NamedTuple):
    """Module or parameter that a plan divides, and the module that computes with it, such as attention."""

    name: str
    module: Any
    style: str
    owner_name: str
    owner: Any


class Shards:
    """Divides modules of one decoder.

    Args:
        plan: path of a module or a parameter -> style, as ``PreTrainedModel.tp_plan``.
        name: class of the config, for errors.
        entry: input that the shards of a layer share.
    """

    def __init__(self, plan: Mapping[str, str], name: str, entry: Entry) -> None:
        self.tp, self._entry, self._plan, self._name = entry.tp, entry, plan, name
        self._widest: dict[nn.Module, int] = {}  # attention -> features of its queries

    def divide(self, path: str, layer: nn.Module) -> None:
        """Keep this rank's parts of the weights of a layer, in place."""
        places = list(self._places(path, layer))
        if not places:
            raise self._refusal(path, "no plan of transformers")
        for place in places:
            if isinstance(place.module, nn.Linear) and place.style == "colwise":
                self._widest[place.owner] = max(self._widest.get(place.owner, 0), place.module.out_features)
        for place in places:
            self._divide_module(f"{path}.{place.name}", place)
        for name, place in {p.owner_name: p for p in places if p.style == "colwise"}.items():
            self._divide_heads(f"{path}.{name}", place.owner)
        if self._entry.tokens.size > 1:
            owners = {p.owner_name for p in places if p.style in _COLUMN}
            self._divide_tokens(path, layer, "", owners)

    def _divide_tokens(self, path: str, module: nn.Module, name: str, owners: set[str]) -> None:
        """Let the modules with shards compute all tokens, and the others those of this rank."""
        if name in owners:
            if not name:
                raise self._refusal(path, "sequence_parallel, and weights of the layer itself")
            module.forward = functools.partial(_on_all_tokens, self._entry, module.forward)
        elif not any(owner.startswith(f"{name}." if name else "") for owner in owners):
            if any(True for _ in module.parameters()):
                tokens = self._entry.tokens
                module.forward = functools.partial(_with_summed_gradients, tokens, module, module.forward)
        elif any(parameter is not None for parameter in module._parameters.values()):
            raise self._refusal(f"{path}.{name}", "sequence_parallel, and parameters beside its modules")
        else:
            for key, child in module.named_children():
                self._divide_tokens(path, child, f"{name}.{key}" if name else key, owners)

    def _places(self, path: str, layer: nn.Module) -> Iterator[_Place]:
        """Yield all that the plan divides in a layer, and the adapters beside it."""
        found: Any = (*layer.named_modules(), *layer.named_parameters())
        for name, module in found:
            style = self._style(f"{path}.{name}")
            owner_name = name.rpartition(".")[0]
            if style is None or self._style(f"{path}.{owner_name}") == _EXPERTS:
                continue
            parts: list[Any] = [module]
            if hasattr(module, "base_layer"):  # adapted by peft
                self._require_plain_adapters(f"{path}.{name}", module)
                adapters: Any = module.lora_B if style in _COLUMN else module.lora_A
                parts = [module.base_layer, *adapters.values()]
            for part in parts:
                yield _Place(name, part, style, owner_name, layer.get_submodule(owner_name))

    def _require_plain_adapters(self, path: str, adapted: Any) -> None:
        """Raise ConfigError for adapters whose forward is not that of their linear layers."""
        kind = type(adapted)
        if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
            raise self._refusal(path, f"adapters of class {kind.__name__}")
        variants = [type(variant).__name__ for variant in getattr(adapted, "lora_variant", {}).values()]
        if any(name != "KasaLinearVariant" for name in variants):
            raise self._refusal(path, f"adapters with a {', '.join(variants)}")
        if any(type(dropout) is not nn.Identity for dropout in adapted.lora_dropout.values()):
            raise self._refusal(path, "a lora_dropout, which would drop the same places on every rank")

    def _style(self, path: str) -> str | None:
        return self._plan.get(path) or self._plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))

    def _divide_module(self, path: str, place: _Place) -> None:
        module, style = place.module, place.style
        if style == _EXPERTS and has_interface(module):
            self._divide_experts(path, module)
            return
        if style == _OF_HEADS:
            self._require_multiple(path, len(module), "heads")
            shard(module, 0, self.tp)
            return
        if "forward" in vars(module) and style in (*_COLUMN, *_ROW):
            raise self._refusal(path, "another forward, of an earlier PipelineModule or of a hook")
        if style in _COLUMN and type(module) is nn.Linear:
            self._divide_columns(path, module, style, place.owner)
        elif style in _ROW and type(module) is nn.Linear:
            self._divide_rows(path, module, style)
        elif style == _SUMMED and isinstance(module, nn.Module):
            module.forward = functools.partial(_with_summed_gradients, self.tp, module, module.forward)
        else:
            kind = "a parameter" if isinstance(module, nn.Parameter) else f"a {type(module).__name__}"
            raise self._refusal(path, f"the style {style} for {kind}")

    def _divide_columns(self, path: str, projection: Any, style: str, owner: Any) -> None:
        """Divide the output features: in attention by whole heads, of which several ranks may need the same one."""
        tp, size = self.tp, projection.out_features
        head_size = vars(owner).get("head_dim") if style == "colwise" else None
        if not isinstance(head_size, int) or size % head_size:
            head_size = 1  # of other layers than attention
        heads = size // head_size
        is_common = heads < tp.size and tp.size % heads == 0
        if is_common and size < self._widest.get(
            owner, 0
        ):  # keys and values: ranks with their queries share a head
            first = tp.rank * heads // tp.size * head_size
            rows = slice(first, first + head_size)
            projection.forward = functools.partial(_forward_head, projection, self._entry, rows)
            owner.heads_in_common = heads
            return
        self._require_multiple(path, heads, "heads" if head_size > 1 else "output features")
        shard(projection.weight, 0, tp)
        if projection.bias is not None:
            shard(projection.bias, 0, tp)
        projection.out_features = size // tp.size
        gathers = style == "colwise_gather_output"
        projection.forward = functools.partial(_forward_columns, projection, self._entry, gathers)

    def _divide_rows(self, path: str, projection: Any, style: str) -> None:
        self._require_multiple(path, projection.in_features, "input features")
        shard(projection.weight, 1, self.tp)
        projection.in_features //= self.tp.size
        splits = style == "rowwise_split_input"
        projection.forward = functools.partial(_forward_rows, projection, self._entry, splits)

    def _divide_experts(self, path: str, experts: Any) -> None:
        if self._entry.tokens.size > 1:
            raise self._refusal(path, "sequence_parallel, and experts")
        self._require_multiple(path, experts.num_experts, "experts")
        for name, parameter in experts.named_parameters():
            if len(parameter) != experts.num_experts:
                raise self._refusal(f"{path}.{name}", "a weight that experts share")
            shard(parameter, 0, self.tp)
        enter, leave = self._entry.enter, self._entry.leave
        experts.forward = functools.partial(divided_experts_forward, experts, self.tp, enter, leave)

    def _require_multiple(self, path: str, size: int, what: str) -> None:
        if size % self.tp.size:
            raise self._refusal(path, f"{size} {what}")

    def _divide_heads(self, path: str, attention: Any) -> None:
        """Set the numbers of heads that attention of some models reads, in place of ``view(..., -1, head_dim)``."""
        numbers, in_common = vars(attention), vars(attention).pop("heads_in_common", None)
        for key in _HEADS if in_common else (*_HEADS, *_KEY_HEADS):
            if isinstance(numbers.get(key), int):
                self._require_multiple(path, numbers[key], "heads")
                numbers[key] //= self.tp.size
        if in_common:
            numbers.update({key: 1 for key in _KEY_HEADS if key in numbers})
            numbers["num_key_value_groups"] = numbers["num_key_value_groups"] * in_common // self.tp.size

    def _refusal(self, path: str, got: str) -> ConfigError:
        return ConfigError(
            f"tensor_parallel_size: {self._name} cannot be divided into {self.tp.size} shards at {path} (got {got}). "
            f"Use a tensor_parallel_size that fits, or 1 and more pipeline stages."
        )


class Entry:
    """Input of the sharded projections of a layer: one collective sums its gradients, for all that read it.

    Args:
        tokens: position in the group that divides the tokens between the projections; None: every rank has all.
    """

    def __init__(self, tp: TensorParallel, tokens: TensorParallel | None = None) -> None:
        self.tp, self.tokens = tp, tokens or TensorParallel()
        self._last: tuple[Tensor, Tensor] | None = None  # an input, and as the projections read it

    def enter(self, x: Tensor) -> Tensor:
        """Return an input of attention or of an MLP as their projections read it: all tokens."""
        if self._last is None or self._last[0] is not x:
            self._last = x, enter_tensor_parallel(x, self.tp, self.tokens.size > 1)
        return self._last[1]

    def enter_projection(self, x: Tensor) -> Tensor:
        return x if self.tokens.size > 1 else self.enter(x)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the partial results of all ranks, of all tokens or of this rank's."""
        return leave_tensor_parallel(x, self.tp, self.tokens.size > 1)

    def clear(self) -> None:
        self._last = None


def check_shards(
    source: Source,
    split: Split,
    adapters: Adapters | None,
    vocabulary: Vocabulary,
    size: int,
    loss_fn: object,
    sequence_parallel: bool = False,
) -> None:
    """Raise ConfigError if a decoder has no exact shards, by its plan and the shapes of its weights.

    See also :mod:`.shard_trial`. Another loss function than that of ``vocabulary`` gets whole logits.
    """
    if adapters is not None and sequence_parallel:
        raise ConfigError(
            f"sequence_parallel: adapters read the tokens of all ranks (got true with lora and {size} shards). Remove "
            f"sequence_parallel."
        )
    if getattr(loss_fn, "vocabulary", None) is not vocabulary:
        vocabulary.is_whole = True
    if adapters is not None and adapters.config.lora_dropout:
        raise ConfigError(
            f"lora: lora_dropout would drop the same features on every tensor-parallel rank (got "
            f"{adapters.config.lora_dropout}, {size} shards). Set it to 0."
        )
    if adapters is not None and adapters.config.use_dora:
        raise ConfigError(
            f"lora: use_dora needs the norms of whole weights (got true with {size} shards). Set it to False."
        )
    for key, value in source.config.get_text_config().to_dict().items():
        if re.search("classif|summary", key):
            continue  # of heads that a causal model lacks
        if "drop" in key and value and ("attn" in key or "attention" in key or sequence_parallel):
            name = "sequence_parallel" if sequence_parallel else "tensor_parallel_size"
            raise ConfigError(
                f"{name}: every rank would drop the same places of its scores or tokens (got {key} {value}, {size} "
                f"shards). Set it to 0 in config.json, in a copy of the model's folder."
            )
    model = source.skeleton()
    if adapters is not None:
        adapters.insert_without_weights(model)
    group: Any = object()  # nothing is sent
    tp = TensorParallel(0, size, group)
    entry = Entry(tp, tp if sequence_parallel else None)
    for index in range(split.num_layers):
        path = f"{split.layers}.{index}"
        Shards(split.plan, split.name, entry).divide(path, model.get_submodule(path))


def shard(parameter: Any, dim: int, tp: TensorParallel) -> None:
    """Keep this rank's shard of a parameter, which stays the object that optimizers and hooks of a script have."""
    parameter.data = tp.shard(parameter.detach(), dim).clone()
    parameter.model_parallel = parameter.tensor_model_parallel = True
    parameter.partition_dim = dim


def _forward_columns(projection: nn.Linear, entry: Entry, gathers: bool, x: Tensor) -> Tensor:
    x = entry.enter_projection(x)
    with keep_slice(x):
        y = linear(x, projection.weight, projection.bias)
    return gather_features(y, entry.tp) if gathers else y


def _forward_head(projection: nn.Linear, entry: Entry, rows: slice, x: Tensor) -> Tensor:
    """Compute the features of a head that several ranks need. Every rank has the whole weight."""
    return linear_rows(entry.enter_projection(x), projection.weight, projection.bias, rows, entry.tp)


def _forward_rows(projection: nn.Linear, entry: Entry, splits: bool, x: Tensor) -> Tensor:
    y = entry.leave(linear(split_features(x, entry.tp) if splits else x, projection.weight))
    if projection.bias is None:
        return y
    (bias,) = shared_parameters(entry.tokens, projection.bias)
    return y + bias


def _on_all_tokens(entry: Entry, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module whose first argument has this rank's tokens on those of all ranks."""
    if args:
        return forward(entry.enter(args[0]), *args[1:], **kwargs)
    key = next(iter(kwargs))
    return forward(**{**kwargs, key: entry.enter(kwargs[key])})


def _with_summed_gradients(
    tp: TensorParallel, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a module whose parameters meet other values on every rank."""
    owners = [
        (owner, key) for owner in module.modules() for key, p in owner._parameters.items() if p is not None
    ]
    shared = shared_parameters(tp, *(owner._parameters[key] for owner, key in owners))  # pyright: ignore[reportArgumentType]
    for (owner, key), value in zip(owners, shared, strict=True):
        owner.__dict__[key] = value  # hides the parameter
    try:
        return forward(*args, **kwargs)
    finally:
        for owner, key in owners:
            del owner.__dict__[key]


# --- vocabulary ---


class Vocabulary:
    """Head of a decoder, as its layer and its loss function know it.

    Attributes:
        tp: position in the group over which the rows of the head are divided.
        chunked: head that the loss function applies; None: the layer does.
        is_whole: the loss function needs whole logits.
    """

    def __init__(self, chunked: ChunkedHead | None = None, is_whole: bool = True) -> None:
        self.tp, self.chunked, self.is_whole = TensorParallel(), chunked, is_whole
        self._size = 0

    def divide(self, tp: TensorParallel, size: int) -> None:
        """Let this rank have its rows of the head, of ``size`` in all."""
        self.tp, self._size = tp, size
        if self.chunked is not None:
            self.chunked.tp = tp

    def project(self, hidden_BSD: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
        """Return the logits of this rank's rows, or all if the loss needs them."""
        logits_BSV = linear(copy_to_tensor_model_parallel_region(hidden_BSD, self.tp), weight_VD, bias_V)
        return self.gather(logits_BSV) if self.is_whole else logits_BSV

    def gather(self, logits_BSV: Tensor) -> Tensor:
        """Return the logits of all rows, without padding."""
        return logits_BSV if self.tp.size == 1 else gather_features(logits_BSV, self.tp)[..., : self._size]

    def loss(self, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the sum of the cross entropies over the logits of this rank's rows."""
        return vocab_parallel_cross_entropy(logits_BSV, labels_BS, self.tp, self._size).sum()


def vocabulary_rows(size: int, tp: TensorParallel, part: int = 0, parts: int = 1) -> slice:
    """Return this rank's rows of a table with ``size`` rows, or of one of its parts. The last ones may be missing."""
    rows = -(-size // (tp.size * parts))
    first = (part * tp.size + tp.rank) * rows
    return slice(first, first + rows)


def padded_rows(rows_VD: Tensor, rows: slice) -> Tensor:
    """Return rows of a table, or elements of a bias, with zeros for those that are missing."""
    padded_VD = rows_VD.new_zeros(rows.stop - rows.start, *rows_VD.shape[1:])
    padded_VD[: len(rows_VD)] = rows_VD
    return padded_VD


def divide_rows(table: Any, tp: TensorParallel) -> None:
    """Keep this rank's rows of a parameter with one row per word."""
    size, rows = len(table), vocabulary_rows(len(table), tp)
    table.data = padded_rows(table.detach()[rows], rows)
    mark_rows(table, tp, size)


class _DividedTable(nn.Embedding):
    """Embedding with this rank's rows of its table: the class before nn.Embedding for :func:`divide_embedding`."""

    _tp: TensorParallel

    def forward(self, input: Tensor) -> Tensor:
        check_ids(input, self.num_embeddings)
        partial = embedding_rows(input, self.weight, self._tp.rank * len(self.weight))
        if self.padding_idx is not None:
            is_padding = (input == self.padding_idx).unsqueeze(-1)
            partial = torch.where(is_padding, partial.detach(), partial)
        return reduce_from_tensor_model_parallel_region(partial, self._tp)


def can_divide_embedding(table: nn.Module) -> bool:
    """Return whether a table is looked up by ``nn.Embedding.forward`` only, without its rarer options."""
    plain = isinstance(table, nn.Embedding) and "forward" not in vars(table)
    return plain and not (table.max_norm or table.scale_grad_by_freq or table.sparse)


def divide_embedding(table: Any, tp: TensorParallel) -> None:
    """Keep this rank's rows, and look them up. A class between it and nn.Embedding, which scales, stays in effect."""
    kind = type(table)
    bases = (_DividedTable,) if kind is nn.Embedding else (kind, _DividedTable)
    table.__class__ = type(f"Divided{kind.__name__}", bases, {})
    table._tp = tp
    divide_rows(table.weight, tp)
