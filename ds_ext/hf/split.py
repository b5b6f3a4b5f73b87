"""Description of a cut: parts of a decoder, and arguments of its decoder layers.

B: batch, S: sequence, D: hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import ConfigError
from ..tensor_parallel import current_slice
from .routers import Routers


class NotSplittable(Exception):
    """Reason why a model cannot be cut, or cannot train in slices."""


class Hidden(Enum):
    """Place of the hidden states among the arguments of a decoder layer."""

    HERE = 0


class Keys(Enum):
    """Place of the cache of keys and values among the arguments of a decoder layer."""

    HERE = 0


@dataclass(frozen=True)
class SharedArgument:
    """Place of a shared tensor, such as a mask, among the arguments of a decoder layer."""

    number: int


@dataclass(frozen=True)
class Call:
    """Arguments of one decoder layer: constants, the hidden states, and tensors that layers share.

    ``structure`` is that of (positional arguments, keyword arguments). ``leaves`` are in its order.
    """

    structure: TreeSpec
    leaves: tuple[Any, ...]

    def arguments(
        self, hidden_BSD: Tensor, shared: Sequence[Tensor | None], cache: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def value(leaf: Any) -> Any:
            if leaf is Hidden.HERE:
                return hidden_BSD
            if leaf is Keys.HERE:
                return cache
            return shared[leaf.number] if isinstance(leaf, SharedArgument) else leaf

        args, kwargs = tree_unflatten([value(leaf) for leaf in self.leaves], self.structure)
        return args, kwargs


@dataclass(frozen=True)
class Shared:
    """Tensor that decoder layers share.

    Attributes:
        differentiable: it depends on trained parameters.
        queries: its dimensions with the tokens of a slice.
        keys: its dimensions with these and all earlier tokens.
    """

    differentiable: bool
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Calls:
    """Arguments of all decoder layers. ``shared`` has every shared argument."""

    layers: tuple[Call, ...]
    shared: tuple[Shared, ...]

    def shared_tensors(self, records: Sequence[tuple[Any, ...]]) -> list[Tensor | None]:
        """Return the value of every shared argument from the recorded arguments of all decoder layers."""
        shared: dict[int, Tensor | None] = {}
        for index, (record, call) in enumerate(zip(records, self.layers, strict=True)):
            for value, leaf in zip(leaves_of(record)[0], call.leaves, strict=True):
                if isinstance(leaf, SharedArgument):
                    if shared.setdefault(leaf.number, value) is not value:
                        raise ConfigError(
                            f"inputs: decoder layer {index} gets other masks or positions than in the trial of "
                            f"from_transformers. This model cannot be cut for these inputs."
                        )
                elif not isinstance(leaf, Hidden | Keys) and (isinstance(value, Tensor) or value != leaf):
                    raise ConfigError(
                        f"inputs: decoder layer {index} expects the argument {leaf!r} (got {value!r}). This model "
                        f"cannot be cut for these inputs."
                    )
        return [shared[number] for number in range(len(shared))]


@dataclass(frozen=True)
class Split:
    """Parts of a causal language model. Paths are as in ``named_modules()``.

    Attributes:
        name: class of the config, for errors.
        backbone: path of the module that owns the decoder layers.
        layers: path of their list.
        width: number of columns of the word embedding.
        before, after: paths of the backbone's other modules that run before and after the decoder layers.
        tied: the head's weight is the embedding's.
        tuple_size: size of the tuple that a decoder layer returns, with the hidden states first; 0: only the tensor.
        whole: arguments of the decoder layers for sequences.
        sliced: arguments for slices of sequences; or the reason why the model cannot train in slices.
        plan: tensor-parallel plan of the model: path of a module or parameter -> style, see :mod:`.shards`.
        routers: those whose loss is added; None: no such loss.
    """

    name: str
    backbone: str
    width: int
    layers: str
    embedding: str
    head: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    tied: bool
    tuple_size: int
    whole: Calls
    sliced: Calls | str
    plan: Mapping[str, str] = field(default_factory=dict)
    routers: Routers | None = None

    @property
    def num_layers(self) -> int:
        return len(self.whole.layers)

    def name_of(self, index: int, key: str) -> str:
        """Return the name in the model of a parameter, from its pipeline layer and its name in this layer."""
        if index == 0:
            return key.replace("module", self.embedding, 1)
        if 2 <= index < 2 + self.num_layers:
            return key.replace("module", f"{self.layers}.{index - 2}", 1)
        return key.removeprefix("skeleton.")

    def calls(self) -> Calls:
        """Return the arguments of the decoder layers in the current pass."""
        return self.whole if current_slice() is None else self.sliced_calls()

    def sliced_calls(self) -> Calls:
        if isinstance(self.sliced, str):
            raise self.no_slices(self.sliced)
        return self.sliced

    def no_slices(self, reason: object) -> ConfigError:
        return ConfigError(
            f"sequence_slices: {self.name} cannot train in slices, because {reason}. Remove sequence_slices."
        )

    def layer_output(self, hidden_BSD: Tensor) -> Any:
        return (hidden_BSD, *[None] * (self.tuple_size - 1)) if self.tuple_size else hidden_BSD

    @staticmethod
    def hidden_states(record: tuple[Any, ...]) -> Tensor:
        leaves, _ = leaves_of(record)
        return leaves[place_of_hidden(record)]


def leaves_of(record: tuple[Any, ...]) -> tuple[list[Any], TreeSpec]:
    """Return the leaves and the structure of recorded (positional arguments, keyword arguments).

    Lists and dictionaries among the arguments are leaves, because layers may exchange a state in them.
    """
    return tree_flatten(record, is_leaf=lambda node: isinstance(node, dict | list) and node is not record[1])


def place_of_hidden(record: tuple[Any, ...]) -> int:
    """Return the position of the hidden states among the leaves of a call: that of the first tensor."""
    return next(place for place, leaf in enumerate(leaves_of(record)[0]) if isinstance(leaf, Tensor))


class Recorder:
    """Stand-in for the decoder layers of a skeleton. It replaces their forwards and records their arguments.

    ``outputs`` gets the index and the arguments of a layer, and returns the output of the layer.
    """

    def __init__(self, layers: nn.ModuleList, outputs: Callable[[int, tuple[Any, ...]], Any]) -> None:
        self.records: list[tuple[Any, ...]] = []
        self._outputs = outputs
        for index, layer in enumerate(layers):
            layer.forward = functools.partial(self._forward, index)

    def take(self) -> list[tuple[Any, ...]]:
        records = self.records
        self.records = []
        return records

    def _forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        self.records.append((args, kwargs))
        return self._outputs(index, (args, kwargs))
