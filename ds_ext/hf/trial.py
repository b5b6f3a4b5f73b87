"""Trial runs of a decoder's backbone, without weights, that show what its decoder layers get.

B: batch, S: sequence, D: hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .split import (
    Call,
    Calls,
    Hidden,
    Keys,
    NotSplittable,
    Recorder,
    Shared,
    SharedArgument,
    leaves_of,
    place_of_hidden,
)

_BATCH, _PADDING = 7, 2  # of the trial inputs; a batch has more rows than a layer returns values
_LENGTH, _EARLIER = 11, 2  # tokens, and in slices those before them; no other sizes of shared tensors
_MAX_TUPLE = 3
_CONSTANTS = (bool, int, float, str, torch.dtype)


class _State:
    """Stand-in for a value that a decoder layer returns beside the hidden states."""


class Trial:
    """Runs of a skeleton's backbone with decoder layers that return chosen hidden states.

    The constructor changes the skeleton: its decoder layers only record their arguments, its other weights are ones.
    ``tuple_size`` is the size of the tuple that the decoder layers return, with the hidden states first; 0: only the
    tensor.
    """

    def __init__(self, model: Any, backbone: Any, layers: nn.ModuleList, name: str) -> None:
        self.model = model
        self.backbone = backbone
        self.layers = layers
        self.name = name
        self.tuple_size = 0
        self._checks_arguments = True
        self._hidden: list[Tensor] = []  # hidden states that the layers have returned in this run
        self._modules_before: set[str] = set()  # children of the backbone called before the first layer
        self._modules_after: set[str] = set()  # and after the last one
        self._recorder = Recorder(layers, self._layer_output)
        model.eval()  # draw no random numbers
        modules = _modules_outside(backbone, layers)
        _give_free_weights(modules.values())
        for path, module in modules.items():
            if module is not backbone and module is not layers:
                module.register_forward_pre_hook(functools.partial(self._note_call, path))

    def run(self, padded: bool, in_slices: bool = False) -> list[tuple[Any, ...]]:
        """Return the arguments of every decoder layer, with or without a padding mask, for sequences or a slice.

        The model may expect a tensor or a tuple from a decoder layer. ``tuple_size`` is set to the first form that it
        accepts.
        """
        from .slices import SliceCache, cache_arguments  # needs transformers

        earlier = _EARLIER if in_slices else 0
        arguments = cache_arguments(self.backbone, SliceCache(earlier) if in_slices else None)
        if padded:
            mask_BS = torch.ones(_BATCH, earlier + _LENGTH, dtype=torch.int64)
            mask_BS[0, -_PADDING:] = 0
            arguments["attention_mask"] = mask_BS
        failures: list[tuple[int, str]] = []  # (number of layers called, reason) for every form
        for tuple_size in range(_MAX_TUPLE + 1):
            self.tuple_size = tuple_size
            reason = self._try_run(arguments)
            if reason is None:
                return self._recorder.records
            failures.append((len(self._recorder.records), reason))
        # The run with the form that the model expects gets further.
        _, reason = max(failures, key=lambda failure: failure[0])
        raise NotSplittable(reason)

    def _try_run(self, arguments: dict[str, Any]) -> str | None:
        """Run the backbone and return why the model cannot be cut; None if the run shows no reason."""
        self._forget_run()
        try:
            outputs = self.backbone(inputs_embeds=self._embeds(1.0), **arguments)
            self._check_result(getattr(outputs, "last_hidden_state", None))
        except NotSplittable as error:
            return str(error)
        except Exception as error:  # any forward, with layers that return the wrong form
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
            return f"its layers pass on more than hidden states ({cause})"
        return None

    def _forget_run(self) -> None:
        self._hidden = []
        self._recorder.records = []

    def check_tail(self, before: Sequence[str]) -> None:
        """Raise NotSplittable if the final hidden states depend on anything before the decoder layers.

        This run has NaN in the word embeddings and in all weights of the modules ``before``. Call it last: the weights
        stay NaN.
        """
        self._forget_run()
        self._checks_arguments = False  # masks and positions may be NaN too; run() has checked the arguments
        for path in before:
            for parameter in self.model.get_submodule(path).parameters():
                parameter.data = torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)
        outputs = self.backbone(inputs_embeds=self._embeds(float("nan")), use_cache=False)
        self._check_result(outputs.last_hidden_state)

    def _embeds(self, value: float) -> Tensor:
        weight = self.model.get_input_embeddings().weight
        shape = (_BATCH, _LENGTH, weight.shape[1])
        return torch.full(shape, value, dtype=weight.dtype, requires_grad=True)

    def _check_result(self, final_BSD: Tensor | None) -> None:
        calls = len(self._recorder.records)
        layers = len(self.layers)
        if calls != layers:
            raise NotSplittable(f"its forward calls {layers} decoder layers {calls} times")
        if final_BSD is None or final_BSD.shape[:2] != (_BATCH, _LENGTH) or not final_BSD.isfinite().all():
            raise NotSplittable("its final hidden states depend on more than those of the last layer")

    def _layer_output(self, index: int, record: tuple[Any, ...]) -> Any:
        """Return the hidden states of layer ``index``: ones for the final layer, else NaN."""
        leaves, _ = leaves_of(record)
        hidden = leaves[place_of_hidden(record)]
        self._check_arguments(index, hidden, leaves)
        # NaN shows whatever depends on the hidden states and not only on the inputs.
        value = 1.0 if index == len(self.layers) - 1 else float("nan")
        output = torch.full_like(hidden, value, requires_grad=False)
        self._hidden.append(output)
        # The other values of a tuple must not reach the next layer. _State shows them.
        return (output, *[_State()] * (self.tuple_size - 1)) if self.tuple_size else output

    def _check_arguments(self, index: int, hidden: Tensor, leaves: Sequence[Any]) -> None:
        """Raise NotSplittable if a layer gets more from earlier layers than the hidden states of the preceding one."""
        if index and hidden is not self._hidden[-1]:
            raise NotSplittable("it changes the hidden states between decoder layers")
        if any(isinstance(leaf, _State) for leaf in leaves):
            raise NotSplittable("its decoder layers pass a state to each other")
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf is not hidden]
        depends = any(tensor.is_floating_point() and tensor.isnan().any() for tensor in tensors)
        if self._checks_arguments and depends:
            raise NotSplittable(f"decoder layer {index} gets the results of several earlier layers")

    def _note_call(self, path: str, module: nn.Module, args: Any) -> None:
        """Record on which side of the decoder layers a module runs. Raises NotSplittable if it is between them."""
        layer_calls = len(self._recorder.records)
        if 0 < layer_calls < len(self.layers):
            raise NotSplittable(f"it runs {path} between decoder layers")
        calls = self._modules_after if layer_calls else self._modules_before
        calls.add(path.split(".")[0])

    def modules_around(
        self, owner: str, layers: str, embedding: str
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        repeated_calls = self._modules_before & self._modules_after
        if repeated_calls:
            raise ConfigError(
                f"{self.name}: cannot be cut, because it runs {min(repeated_calls)} before and after the layers."
            )
        prefix = f"{owner}." if owner else ""
        before = tuple(sorted(f"{prefix}{child}" for child in self._modules_before))
        after = tuple(sorted(f"{prefix}{child}" for child in self._modules_after))
        if embedding in before + after:
            raise ConfigError(f"{self.name}: cannot be cut, because it embeds words again in {embedding}.")
        return before, after


def _modules_outside(backbone: nn.Module, layers: nn.ModuleList) -> dict[str, nn.Module]:
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    return {path: module for path, module in backbone.named_modules() if id(module) not in in_layers}


def _give_free_weights(modules: Iterable[nn.Module]) -> None:
    """Replace the modules' own parameters, on the meta device, by ones of stride 0, which take no memory."""
    for module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                ones = torch.ones((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[key] = nn.Parameter(ones, requires_grad=True)


def merge_records(padded: Sequence[tuple[Any, ...]], plain: Sequence[tuple[Any, ...]]) -> Calls:
    """Return the calls of all layers from their arguments with and without a padding mask."""
    arguments = _SharedArguments()
    calls = [_merge_record(*pair, arguments) for pair in zip(padded, plain, strict=True)]
    return Calls(tuple(calls), tuple(arguments.shared))


def _merge_record(padded: tuple[Any, ...], plain: tuple[Any, ...], arguments: _SharedArguments) -> Call:
    from .slices import SliceCache

    values, structure = leaves_of(padded)
    plain_values, plain_structure = leaves_of(plain)
    if structure != plain_structure:
        raise NotSplittable("a padding mask changes the arguments of its layers")
    hidden = values[place_of_hidden(padded)]
    plain_hidden = plain_values[place_of_hidden(plain)]
    leaves: list[Any] = []
    for value, plain_value in zip(values, plain_values, strict=True):
        if value is hidden and plain_value is plain_hidden:
            leaves.append(Hidden.HERE)
        elif isinstance(value, Tensor) or isinstance(plain_value, Tensor):
            leaves.append(arguments.argument(value, plain_value))
        elif isinstance(value, SliceCache):
            leaves.append(Keys.HERE)
        elif (value is None or isinstance(value, _CONSTANTS)) and value == plain_value:
            leaves.append(value)
        else:
            raise NotSplittable(f"its decoder layers exchange a {type(value).__name__}")
    return Call(structure, tuple(leaves))


class _SharedArguments:
    """Slots of the tensors that decoder layers get beside the hidden states."""

    def __init__(self) -> None:
        self.shared: list[Shared] = []
        self._arguments: dict[
            tuple[int, int], SharedArgument
        ] = {}  # by the identities of the tensor in both runs

    def argument(self, value: Any, plain_value: Any) -> SharedArgument:
        """Return the shared argument, the same for all layers that get the same tensor.

        One of the values may be None: without padding there may be no mask.
        """
        pair = (value, plain_value)
        key = (_identity(value), _identity(plain_value))
        if key not in self._arguments:
            self._arguments[key] = SharedArgument(len(self._arguments))
            tensors = [t for t in pair if isinstance(t, Tensor)]
            sizes = [*enumerate(tensors[0].shape)]
            queries, keys = (
                tuple(dim for dim, size in sizes if size == n) for n in (_LENGTH, _EARLIER + _LENGTH)
            )
            self.shared.append(Shared(any(t.requires_grad for t in tensors), queries, keys))
        return self._arguments[key]


def _identity(value: Any) -> int:
    return id(value) if isinstance(value, Tensor) else 0
