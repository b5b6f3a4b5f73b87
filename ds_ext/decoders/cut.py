"""Places at which a decoder can be cut into pipeline layers, found by running the model's own forward.

A backbone is the module that owns the list of decoder layers. Its forward embeds positions, builds masks and rotary
embeddings, calls the decoder layers and applies the final norm. :func:`find_cut` runs this forward twice, on a skeleton
whose weights take no memory and whose decoder layers only record their arguments: with a padding mask and without. The
records show which arguments every decoder layer gets. They also show what a cut would lose, such as a state that the
layers exchange; that model is refused.

B: batch, S: sequence, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import ConfigError
from .weights import Source

_BATCH, _LENGTH, _PADDING = (
    7,
    6,
    2,
)  # sizes of the trial inputs; a tensor has more rows than a layer returns values
_MAX_TUPLE = 3
_CONSTANTS = (bool, int, float, str, torch.dtype)


class Hidden(Enum):
    """Place of the hidden states among the arguments of a decoder layer."""

    HERE = 0


@dataclass(frozen=True)
class Slot:
    """Place of a shared tensor, such as a mask, among the arguments of a decoder layer."""

    number: int


@dataclass(frozen=True)
class Call:
    """Arguments of one decoder layer: constants, the hidden states, and tensors that layers share.

    Attributes:
        structure: structure of (positional arguments, keyword arguments).
        leaves: in the structure's order.
    """

    structure: TreeSpec
    leaves: tuple[Any, ...]

    def arguments(
        self, hidden_BSD: Tensor, shared: Sequence[Tensor | None]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the decoder layer."""

        def value(leaf: Any) -> Any:
            if leaf is Hidden.HERE:
                return hidden_BSD
            return shared[leaf.number] if isinstance(leaf, Slot) else leaf

        args, kwargs = tree_unflatten([value(leaf) for leaf in self.leaves], self.structure)
        return args, kwargs


@dataclass(frozen=True)
class Cut:
    """Parts of a causal language model. Paths are as in ``named_modules()``.

    Attributes:
        backbone: path of the module that owns the decoder layers.
        width: number of columns of the word embedding.
        layers: path of their list.
        embedding, head: paths of the word embedding and of the output projection.
        before, after: paths of the backbone's other modules that run before and after the decoder layers.
        tied: whether the head's weight is the embedding's.
        tuple_size: size of the tuple that a decoder layer returns, with the hidden states first; 0: only the tensor.
        calls: arguments of every decoder layer.
        differentiable: for every shared tensor, whether it depends on trained parameters.
    """

    backbone: str
    width: int
    layers: str
    embedding: str
    head: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    tied: bool
    tuple_size: int
    calls: tuple[Call, ...]
    differentiable: tuple[bool, ...]

    def returned(self, hidden_BSD: Tensor) -> Any:
        """Return the hidden states in the form in which a decoder layer returns them."""
        return (hidden_BSD, *[None] * (self.tuple_size - 1)) if self.tuple_size else hidden_BSD

    @staticmethod
    def hidden(record: tuple[Any, ...]) -> Tensor:
        """Return the hidden states among the recorded arguments of a decoder layer."""
        leaves, _ = _leaves(record)
        return leaves[_place_of_hidden(record)]

    def shared_tensors(self, records: Sequence[tuple[Any, ...]]) -> list[Tensor | None]:
        """Return the value of every slot from the recorded arguments of all decoder layers.

        Raises:
            ConfigError: layers got other arguments than in the trial, so the cut would be wrong.
        """
        shared: dict[int, Tensor | None] = {}
        for index, (record, call) in enumerate(zip(records, self.calls, strict=True)):
            for value, leaf in zip(_leaves(record)[0], call.leaves, strict=True):
                if isinstance(leaf, Slot):
                    if shared.setdefault(leaf.number, value) is not value:
                        raise ConfigError(
                            f"inputs: decoder layer {index} gets other masks or positions than in the trial of "
                            f"from_transformers. This model cannot be cut for these inputs."
                        )
                elif leaf is not Hidden.HERE and (isinstance(value, Tensor) or value != leaf):
                    raise ConfigError(
                        f"inputs: decoder layer {index} expects the argument {leaf!r} (got {value!r}). This model "
                        f"cannot be cut for these inputs."
                    )
        return [shared[number] for number in range(len(shared))]


def _leaves(record: tuple[Any, ...]) -> tuple[list[Any], TreeSpec]:
    # Layers may exchange a state in a list or dictionary, so these are values and not structure.
    nested = record[1].values()
    return tree_flatten(
        record, is_leaf=lambda node: any(node is v for v in nested) and isinstance(node, dict | list)
    )


def find_cut(source: Source) -> Cut:
    """Return how the model of ``source`` is cut.

    Raises:
        ConfigError: the model cannot be cut; the message says why.
    """
    config = source.config
    name = type(config).__name__
    _check_config(config, name)
    model = source.skeleton()
    owner, attribute = _owner_of_layers(model, config, name)
    backbone = model.get_submodule(owner)
    embedding = _name_of(model, model.get_input_embeddings())
    head = _name_of(model, model.get_output_embeddings())
    if embedding is None or head is None:
        raise ConfigError(
            f"{name}: cannot be cut, because it has no separate word embedding and output projection."
        )
    reference = source.reference()
    projection = reference.get_submodule(head)
    tied = projection.weight is reference.get_submodule(embedding).weight
    if tied and (type(projection) is not nn.Linear or projection.bias is not None):
        raise ConfigError(
            f"{name}: cannot be cut, because its tied output projection has more than the tied weight."
        )
    layers = f"{owner}.{attribute}" if owner else attribute
    trial = _Trial(model, backbone, getattr(backbone, attribute), name)
    padded, plain = trial.run(padded=True), trial.run(padded=False)
    before, after = trial.modules_around(owner, layers, embedding)
    _check_sharing(reference, layers, (embedding, head), name)
    covered = (embedding, head, *before, *after, layers)
    others = [
        n for n, _ in model.named_parameters() if not n.startswith(tuple(f"{path}." for path in covered))
    ]
    if others:
        raise ConfigError(
            f"{name}: cannot be cut, because it uses {others[0]} outside its embedding, layers and head."
        )
    trial.check_tail(before)
    calls, differentiable = _merge(padded, plain, name)
    return Cut(
        backbone=owner,
        width=model.get_submodule(embedding).weight.shape[1],
        layers=layers,
        embedding=embedding,
        head=head,
        before=before,
        after=after,
        tied=tied,
        tuple_size=trial.tuple_size,
        calls=tuple(calls),
        differentiable=tuple(differentiable),
    )


def _check_config(config: Any, name: str) -> None:
    """Raise ConfigError for models that are not plain decoders, and for options that a cut would change."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{name}: cannot be cut, because it is an encoder-decoder. Use a decoder-only model."
        )
    parts = [key for key in ("vision_config", "audio_config") if getattr(config, key, None) is not None]
    if parts:
        raise ConfigError(
            f"{name}: cannot be cut, because it is not a text model (got {parts[0]}). Pass its decoder."
        )
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            "output_router_logits: a pipeline does not add the router's loss (got true). Set it to false in the config."
        )
    if getattr(config, "layerdrop", 0.0):
        raise ConfigError(
            f"layerdrop: a pipeline runs every layer (got {config.layerdrop}). Set it to 0 in the config."
        )


def _owner_of_layers(model: nn.Module, config: Any, name: str) -> tuple[str, str]:
    """Return (path of the backbone, name of its list of decoder layers)."""
    count = config.get_text_config().num_hidden_layers
    lists = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and count > 0
    ]
    depth = min((path.count(".") for path in lists), default=0)
    lists = [path for path in lists if path.count(".") == depth]
    if len(lists) != 1:
        raise ConfigError(
            f"{name}: cannot be cut, because it needs one list of {count} decoder layers (got "
            f"{', '.join(lists) or 'none'})."
        )
    owner, _, attribute = lists[0].rpartition(".")
    return owner, attribute


def _check_sharing(model: nn.Module, layers: str, table: tuple[str, str], name: str) -> None:
    """Raise ConfigError if parts of the model share a parameter, apart from a head that is tied to the embedding."""
    parts: dict[int, set[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        depth = layers.count(".") + 2 if path.startswith(f"{layers}.") else layers.count(".") + 1
        part = (
            "table"
            if path.startswith(tuple(f"{end}." for end in table))
            else ".".join(path.split(".")[:depth])
        )
        parts.setdefault(id(parameter), set()).add(part)
        if len(parts[id(parameter)]) > 1:
            raise ConfigError(
                f"{name}: cannot be cut, because {' and '.join(sorted(parts[id(parameter)]))} share weights."
            )


def _name_of(model: nn.Module, module: Any) -> str | None:
    return next((path for path, other in model.named_modules() if other is module), None)


class _Uncuttable(Exception):
    """Reason why a model cannot be cut."""


class _State:
    """Stand-in for a value that a decoder layer returns beside the hidden states."""


class Recorder:
    """Stand-in for the decoder layers of a skeleton. It records their arguments.

    Args:
        layers: decoder layers, whose forward it replaces.
        outputs: called with the index and the arguments of a layer; returns what the layer shall return.
    """

    def __init__(self, layers: nn.ModuleList, outputs: Callable[[int, tuple[Any, ...]], Any]) -> None:
        self.records: list[tuple[Any, ...]] = []
        self._outputs = outputs
        for index, layer in enumerate(layers):
            layer.forward = functools.partial(self._forward, index)

    def _forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        self.records.append((args, kwargs))
        return self._outputs(index, (args, kwargs))


class _Trial:
    """Runs of a skeleton's backbone with decoder layers that return chosen hidden states."""

    def __init__(self, model: Any, backbone: Any, layers: nn.ModuleList, name: str) -> None:
        self.model, self.backbone, self.layers, self.name = model, backbone, layers, name
        model.eval()  # draw no random numbers
        self.tuple_size, self._checks_arguments = 0, True
        self._hidden: list[Tensor] = []
        self._called: dict[str, set[str]] = {"before": set(), "after": set()}
        self._recorder = Recorder(layers, self._output)
        _give_free_weights(backbone, layers)
        in_layers = {id(module) for layer in layers for module in layer.modules()}
        for path, module in backbone.named_modules():
            if id(module) not in in_layers and module not in (backbone, layers):
                module.register_forward_pre_hook(functools.partial(self._note, path))

    def run(self, padded: bool) -> list[tuple[Any, ...]]:
        """Return the arguments of every decoder layer, with or without a padding mask."""
        embeds_BSD = self._embeds(1.0)
        mask_BS = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
        mask_BS[0, -_PADDING:] = 0
        errors: list[tuple[int, str]] = []
        for self.tuple_size in range(_MAX_TUPLE + 1):
            self._hidden, self._recorder.records = [], []
            try:
                outputs = self.backbone(
                    inputs_embeds=embeds_BSD, attention_mask=mask_BS if padded else None, use_cache=False
                )
                self._check_result(getattr(outputs, "last_hidden_state", None))
            except _Uncuttable as error:
                errors.append((len(self._recorder.records), str(error)))
            except Exception as error:  # any forward, with layers that return the wrong form
                cause = f"{type(error).__name__}: {error}".splitlines()[0]
                reason = f"its layers pass on more than hidden states ({cause})"
                errors.append((len(self._recorder.records), reason))
            else:
                return self._recorder.records
        # The run with the form that the model expects gets further.
        raise ConfigError(
            f"{self.name}: cannot be cut, because {max(errors, key=lambda error: error[0])[1]}."
        )

    def check_tail(self, before: Sequence[str]) -> None:
        """Raise ConfigError if the final hidden states depend on anything before the decoder layers.

        This run has NaN in the word embeddings and in all weights of the modules ``before``.
        """
        self._hidden, self._recorder.records, self._checks_arguments = [], [], False
        for path in before:
            for parameter in self.model.get_submodule(path).parameters():
                parameter.data = torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)
        try:
            outputs = self.backbone(inputs_embeds=self._embeds(float("nan")), use_cache=False)
            self._check_result(outputs.last_hidden_state)
        except _Uncuttable as error:
            raise ConfigError(f"{self.name}: cannot be cut, because {error}.") from None

    def _embeds(self, value: float) -> Tensor:
        weight = self.model.get_input_embeddings().weight
        shape = (_BATCH, _LENGTH, weight.shape[1])
        return torch.full(shape, value, dtype=weight.dtype, requires_grad=True)

    def _check_result(self, final_BSD: Tensor | None) -> None:
        calls, layers = len(self._recorder.records), len(self.layers)
        if calls != layers:
            raise _Uncuttable(f"its forward calls {layers} decoder layers {calls} times")
        if final_BSD is None or final_BSD.shape[:2] != (_BATCH, _LENGTH) or not final_BSD.isfinite().all():
            raise _Uncuttable("its final hidden states depend on more than those of the last layer")

    def _output(self, index: int, record: tuple[Any, ...]) -> Any:
        """Return the hidden states of a layer, and check that the model passes on exactly those of the last layer."""
        leaves, _ = _leaves(record)
        hidden = leaves[_place_of_hidden(record)]
        if index and hidden is not self._hidden[-1]:
            raise _Uncuttable("it changes the hidden states between decoder layers")
        if any(isinstance(leaf, _State) for leaf in leaves):
            raise _Uncuttable("its decoder layers pass a state to each other")
        for leaf in leaves if self._checks_arguments else ():
            if (
                isinstance(leaf, Tensor)
                and leaf is not hidden
                and leaf.is_floating_point()
                and leaf.isnan().any()
            ):
                raise _Uncuttable(f"decoder layer {index} gets the results of several earlier layers")
        # NaN shows whatever depends on the hidden states and not only on the inputs.
        value = 1.0 if index == len(self.layers) - 1 else float("nan")
        self._hidden.append(torch.full_like(hidden, value, requires_grad=False))
        # The other values of a tuple must not reach the next layer. _State shows them.
        others = [_State()] * (self.tuple_size - 1)
        return (self._hidden[-1], *others) if self.tuple_size else self._hidden[-1]

    def _note(self, path: str, module: nn.Module, args: Any) -> None:
        done = len(self._recorder.records)
        if 0 < done < len(self.layers):
            raise _Uncuttable(f"it runs {path} between decoder layers")
        self._called["after" if done else "before"].add(path.split(".")[0])

    def modules_around(
        self, owner: str, layers: str, embedding: str
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the paths of the backbone's modules that run before and after the decoder layers."""
        both = self._called["before"] & self._called["after"]
        if both:
            raise ConfigError(
                f"{self.name}: cannot be cut, because it runs {min(both)} before and after the layers."
            )
        prefix = f"{owner}." if owner else ""
        before, after = (
            tuple(sorted(f"{prefix}{child}" for child in self._called[when])) for when in ("before", "after")
        )
        if embedding in before + after:
            raise ConfigError(f"{self.name}: cannot be cut, because it embeds words again in {embedding}.")
        return before, after


def _give_free_weights(backbone: nn.Module, layers: nn.ModuleList) -> None:
    """Replace the meta parameters outside the decoder layers by ones of stride 0, which take no memory."""
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    for module in backbone.modules():
        if id(module) not in in_layers:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    ones = torch.ones((), dtype=parameter.dtype).expand(parameter.shape)
                    module._parameters[key] = nn.Parameter(ones, requires_grad=True)


def _merge(
    padded: list[tuple[Any, ...]], plain: list[tuple[Any, ...]], name: str
) -> tuple[list[Call], list[bool]]:
    """Return the calls of all layers, from the arguments with and without a padding mask.

    A tensor that several layers get becomes one slot. A slot may be empty: without padding there may be no mask.
    """
    slots: dict[tuple[int, int], Slot] = {}
    differentiable: list[bool] = []
    calls = []
    for index in range(len(padded)):
        (values, structure), (others, other_structure) = _leaves(padded[index]), _leaves(plain[index])
        if structure != other_structure:
            raise ConfigError(
                f"{name}: cannot be cut, because a padding mask changes the arguments of its layers."
            )
        leaves = []
        hidden, other_hidden = values[_place_of_hidden(padded[index])], others[_place_of_hidden(plain[index])]
        for value, other in zip(values, others, strict=True):
            if value is hidden and other is other_hidden:
                leaves.append(Hidden.HERE)
            elif isinstance(value, Tensor) or isinstance(other, Tensor):
                key = (_identity(value), _identity(other))
                if key not in slots:
                    slots[key] = Slot(len(slots))
                    tensors = [tensor for tensor in (value, other) if isinstance(tensor, Tensor)]
                    differentiable.append(any(tensor.requires_grad for tensor in tensors))
                leaves.append(slots[key])
            elif (value is None or isinstance(value, _CONSTANTS)) and value == other:
                leaves.append(value)
            else:
                raise ConfigError(
                    f"{name}: cannot be cut, because its decoder layers exchange a {type(value).__name__}."
                )
        calls.append(Call(structure, tuple(leaves)))
    return calls, differentiable


def _identity(value: Any) -> int:
    return id(value) if isinstance(value, Tensor) else 0


def _place_of_hidden(record: tuple[Any, ...]) -> int:
    """Return the position of the hidden states among the leaves of a call: that of the first tensor."""
    return next(place for place, leaf in enumerate(_leaves(record)[0]) if isinstance(leaf, Tensor))
