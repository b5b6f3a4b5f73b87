"""LoRA adapters of peft in the decoder layers: insertion while a layer is built, and export as an adapter folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..engine.together import by_rank_0, together
from ..errors import ConfigError
from .cut import Cut
from .weights import Source

if TYPE_CHECKING:
    from ..engine import PipelineEngine

_PREFIX, _ADAPTER = "base_model.model.", "default"  # of the names in peft's files and modules


class Adapters:
    """Adapters for the decoder layers of a model.

    Args:
        lora: a ``peft.LoraConfig``.
        source, cut: model.

    Raises:
        ConfigError: peft is missing, or the configuration trains something outside the decoder layers.
    """

    def __init__(self, lora: Any, source: Source, cut: Cut) -> None:
        try:
            import peft
        except ImportError:
            raise ConfigError("lora: needs peft (got none). Install it with: pip install peft") from None
        if not isinstance(lora, peft.LoraConfig):
            raise ConfigError(f"lora: must be a peft.LoraConfig (got {type(lora).__name__}).")
        self.config = lora
        self._layers = self._adapted_layers(source, cut)

    def _adapted_layers(self, source: Source, cut: Cut) -> set[int]:
        """Return the indices of the decoder layers with adapters, from a model without weights."""
        import peft

        model = source.skeleton()
        try:
            peft.inject_adapter_in_model(copy.deepcopy(self.config), model, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ConfigError(f"lora: {error}") from None
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        outside = [name for name in trained if not name.startswith(f"{cut.layers}.")]
        if outside:
            raise ConfigError(
                f"lora: adapters must be in the decoder layers (got {outside[0]}). Change target_modules, and leave "
                f"modules_to_save empty."
            )
        return {int(name.removeprefix(f"{cut.layers}.").split(".")[0]) for name in trained}

    def insert(self, source: Source, cut: Cut, index: int, layer: nn.Module) -> None:
        """Freeze a decoder layer with weights, and insert its adapters. torch's generator gives the initial values."""
        import peft

        layer.requires_grad_(False)
        if index not in self._layers:
            return
        # peft selects modules by their names in the whole model.
        model = source.skeleton()
        layers: Any = model.get_submodule(cut.layers)
        for other in range(len(layers)):
            layers[other] = layer if other == index else nn.Identity()
        peft.inject_adapter_in_model(copy.deepcopy(self.config), model)


def save_adapter(engine: PipelineEngine, lora: Any, folder: str | Path) -> None:
    """Write the trained adapters as a folder for ``peft.PeftModel.from_pretrained``. All ranks must call this together.

    Args:
        engine: engine of a module from ``from_transformers`` with adapters.
        lora: ``peft.LoraConfig`` of the adapters.
        folder: path of the new folder: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ConfigError: the layers have no adapters.
    """
    from .layers import DecoderLayer

    def weights() -> dict[str, Any]:
        modules = [m for stage in engine.module.stages for m in engine.module.stage_modules(stage).values()]
        return {
            f"{_PREFIX}{layer.path}.{name.replace(f'.{_ADAPTER}.', '.')}": parameter.detach().cpu().clone()
            for layer in modules
            if isinstance(layer, DecoderLayer)
            for name, parameter in layer.module.named_parameters()
            if "lora_" in name
        }

    tensors = {name: tensor for part in together(weights) for name, tensor in part.items()}

    def write() -> None:
        from safetensors.torch import save_file

        if not tensors:
            raise ConfigError(
                "save_adapter: the layers have no adapters (got 0). Pass lora=... to from_transformers."
            )
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        saved = copy.deepcopy(lora)
        saved.inference_mode = True
        saved.save_pretrained(str(target))
        save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})

    by_rank_0(write)
