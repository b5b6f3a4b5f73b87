"""LoRA adapters of peft, inserted in a decoder layer while it is built."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import nn

from ..errors import ConfigError
from .split import Split
from .weights import Source

# Fields of LoraConfig that have the effect that they have in peft, or are refused with the reason. Others may need more
# than adapters in layers, such as a loss, a router or copies of layers, so they must have their defaults.
_NAMES = (
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision runtime_config r target_modules "
    "exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save init_lora_weights "
    "layers_to_transform layers_pattern rank_pattern alpha_pattern loftq_config eva_config corda_config lora_ga_config "
    "use_dora lora_bias target_parameters trainable_token_indices ensure_weight_tying kasa_config velora_config "
    "use_qalora qalora_group_size"
)
FIELDS = frozenset(_NAMES.split())
# Values of init_lora_weights that leave the frozen weights as they are.
_INITIAL_VALUES = (True, False, "gaussian", "orthogonal")


def lora_config(rank: int) -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError("lora: needs peft (got none). Install it with: pip install peft") from None
    return peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")


class Adapters:
    """Adapters of the decoder layers.

    Attributes:
        elements: trained elements of all layers.
    """

    def __init__(self, lora: Any, source: Source, split: Split) -> None:
        try:
            import peft
        except ImportError:
            raise ConfigError("lora: needs peft (got none). Install it with: pip install peft") from None
        if not isinstance(lora, peft.LoraConfig):
            raise ConfigError(f"lora: must be a peft.LoraConfig (got {type(lora).__name__}).")
        if lora.init_lora_weights not in _INITIAL_VALUES:
            raise ConfigError(
                f"lora: init_lora_weights must not change the frozen weights (got {lora.init_lora_weights!r}). Use "
                f"{', '.join(map(repr, _INITIAL_VALUES[:-1]))} or {_INITIAL_VALUES[-1]!r}."
            )
        for field in dataclasses.fields(lora):
            value, factory = getattr(lora, field.name), field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            if field.name not in FIELDS and value != default:
                raise ConfigError(
                    f"lora: {field.name} must have peft's default, {default!r} (got {value!r}). Remove it, or pass a "
                    f"model with its adapters, from peft.get_peft_model()."
                )
        self.config = lora
        self._layers, self.elements = self._adapted_layers(source, split)

    def _adapted_layers(self, source: Source, split: Split) -> tuple[set[int], int]:
        """Return the indices of the decoder layers with adapters, and their trained elements.

        They are those of a model without weights.
        """
        model = source.skeleton()
        self.insert_without_weights(model)
        trained = {name: each.numel() for name, each in model.named_parameters() if each.requires_grad}
        outside = [name for name in trained if not name.startswith(f"{split.layers}.")]
        if outside:
            raise ConfigError(
                f"lora: adapters must be in the decoder layers (got {outside[0]}). Change target_modules, and leave "
                f"modules_to_save empty."
            )
        layers = {int(name.removeprefix(f"{split.layers}.").split(".")[0]) for name in trained}
        return layers, sum(trained.values())

    def insert_without_weights(self, model: Any) -> None:
        """Insert the adapters in a model without weights."""
        import peft

        try:
            peft.inject_adapter_in_model(copy.deepcopy(self.config), model, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ConfigError(f"lora: {error}") from None

    def insert(self, source: Source, split: Split, index: int, layer: nn.Module) -> None:
        """Freeze a decoder layer with weights, and insert its adapters in place.

        peft changes modules that it selects by their paths in the whole model. So the layer takes its place in a
        skeleton while peft runs. The skeleton is dropped, and the adapters remain in ``layer``. torch's generator
        draws their initial values.
        """
        import peft

        layer.requires_grad_(False)
        if index not in self._layers:
            return
        skeleton = source.skeleton()
        skeleton_layers: Any = skeleton.get_submodule(split.layers)
        for position in range(len(skeleton_layers)):
            skeleton_layers[position] = nn.Identity()
        skeleton_layers[index] = layer
        peft.inject_adapter_in_model(copy.deepcopy(self.config), skeleton)
