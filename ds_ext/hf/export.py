"""Export of trained adapters as a folder that peft loads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.together import by_rank_0, together
from ..errors import ConfigError
from .layers import DecoderLayer

if TYPE_CHECKING:
    from ..engine import PipelineEngine

_PREFIX, _ADAPTER = "base_model.model.", "default"  # of the names in peft's files and modules


def save_adapter(engine: PipelineEngine, lora: Any, folder: str | Path) -> None:
    """Write the trained adapters as a folder for ``peft.PeftModel.from_pretrained``. All ranks must call this together.

    Args:
        engine: engine of a module from ``from_transformers`` with adapters.
        lora: ``peft.LoraConfig`` of the adapters.
        folder: path of the new folder: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ConfigError: the layers have no adapters.
    """

    def weights() -> dict[str, Any]:
        modules = [m for stage in engine.module.stages for m in engine.module.stage_modules(stage).values()]
        return {
            f"{_PREFIX}{layer.path}.{_saved_name(name)}": parameter.detach().cpu().clone()
            for layer in modules
            if isinstance(layer, DecoderLayer)
            for name, parameter in layer.module.named_parameters()
            if "lora_" in name or parameter.requires_grad  # such as the biases of bias="lora_only"
        }

    tensors = {name: tensor for part in together(weights) for name, tensor in part.items()}

    def write() -> None:
        from safetensors.torch import save_file

        if not any("lora_" in name for name in tensors):
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


def _saved_name(name: str) -> str:
    """Return the name in peft's file. The magnitudes of DoRA have none of the suffixes that their module has."""
    return name.replace(f".{_ADAPTER}.", ".").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
