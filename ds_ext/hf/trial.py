"""Trial runs of a decoder's backbone, without weights, that show what its decoder layers get.

B: batch, S: sequence, D: hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .cut import Call, Hidden, Recorder, Slot, leaves_of, place_of_hidden

_BATCH, _LENGTH, _PADDING = 7, 6, 2  # of the trial inputs; a batch has more rows than a layer returns values
_MAX_TUPLE = 3
_CONSTANTS = (bool, int, float, str, torch.dtype)


class Uncuttable(Exception):
    """Reason why a model cannot be cut."""


class _State:
    """Stand-in for a value that a decoder layer returns beside the hidden states."""


class Trial:
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
        """Return the arguments of every decoder layer, with or without a padding mask.

        Raises:
            ConfigError: the model cannot be cut.
        """
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
            except Uncuttable as error:
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
        except Uncuttable as error:
            raise ConfigError(f"{self.name}: cannot be cut, because {error}.") from None

    def _embeds(self, value: float) -> Tensor:
        weight = self.model.get_input_embeddings().weight
        shape = (_BATCH, _LENGTH, weight.shape[1])
        return torch.full(shape, value, dtype=weight.dtype, requires_grad=True)

    def _check_result(self, final_BSD: Tensor | None) -> None:
        calls, layers = len(self._recorder.records), len(self.layers)
        if calls != layers:
            raise Uncuttable(f"its forward calls {layers} decoder layers {calls} times")
        if final_BSD is None or final_BSD.shape[:2] != (_BATCH, _LENGTH) or not final_BSD.isfinite().all():
            raise Uncuttable("its final hidden states depend on more than those of the last layer")

    def _output(self, index: int, record: tuple[Any, ...]) -> Any:
        """Return the hidden states of a layer, and check that the model passes on exactly those of the last layer."""
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
        """Raise Uncuttable if a layer gets more from earlier layers than the hidden states of the last one."""
        if index and hidden is not self._hidden[-1]:
            raise Uncuttable("it changes the hidden states between decoder layers")
        if any(isinstance(leaf, _State) for leaf in leaves):
            raise Uncuttable("its decoder layers pass a state to each other")
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf is not hidden]
        depends = any(tensor.is_floating_point() and tensor.isnan().any() for tensor in tensors)
        if self._checks_arguments and depends:
            raise Uncuttable(f"decoder layer {index} gets the results of several earlier layers")

    def _note(self, path: str, module: nn.Module, args: Any) -> None:
        done = len(self._recorder.records)
        if 0 < done < len(self.layers):
            raise Uncuttable(f"it runs {path} between decoder layers")
        self._called["after" if done else "before"].add(path.split(".")[0])

    def modules_around(
        self, owner: str, layers: str, embedding: str
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the paths of the backbone's modules that run before and after the decoder layers.

        Raises:
            ConfigError: the model cannot be cut.
        """
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


def merge_records(
    padded: list[tuple[Any, ...]], plain: list[tuple[Any, ...]], name: str
) -> tuple[list[Call], list[bool]]:
    """Return the calls of all layers, from the arguments with and without a padding mask.

    A tensor that several layers get becomes one slot. A slot may be empty: without padding there may be no mask.
    Raises ConfigError for other objects that the layers exchange.
    """
    slots: dict[tuple[int, int], Slot] = {}
    differentiable: list[bool] = []
    calls = []
    for index in range(len(padded)):
        (values, structure), (others, other_structure) = leaves_of(padded[index]), leaves_of(plain[index])
        if structure != other_structure:
            raise ConfigError(
                f"{name}: cannot be cut, because a padding mask changes the arguments of its layers."
            )
        leaves = []
        hidden, other_hidden = values[place_of_hidden(padded[index])], others[place_of_hidden(plain[index])]
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
