"""Export of trained adapters as a folder that peft loads."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.all_ranks import from_rank_0, on_all_ranks
from ..engine.wrappers import plain_name
from ..errors import ConfigError
from ..tensor_parallel import shard_dim
from .layers import DecoderLayer

if TYPE_CHECKING:
    from ..engine import PipelineEngine

Shard = tuple[
    Tensor, int | None
]  # and the dimension along which those of all ranks are joined; None: it is whole

_PREFIX, _ADAPTER = "base_model.model.", "default"  # of the names in peft's files and modules


def save_adapter(engine: PipelineEngine, lora: Any, folder: str | Path) -> None:
    """Write the trained adapters as a folder for ``peft.PeftModel.from_pretrained``. All ranks must call this together.

    Args:
        engine: engine of a module from ``from_transformers`` with adapters.
        lora: ``peft.LoraConfig`` of the adapters.
        folder: path of the new folder: ``adapter_config.json`` and ``adapter_model.safetensors``. The former has the
            absolute path of the model's folder and the task, unless ``lora`` has others.

    Raises:
        ConfigError: the layers have no adapters.
    """
    tensor_rank = engine.module.layout.coordinates(engine.global_rank)[2]
    weights_by_rank = on_all_ranks(lambda: (tensor_rank, _adapter_weights(engine)))
    shards: dict[str, dict[int, Shard]] = {}
    for tensor_rank, weights in weights_by_rank:
        for name, shard in weights.items():
            shards.setdefault(name, {})[tensor_rank] = shard
    tensors = {
        name: _join([shard for _, shard in sorted(of_ranks.items())]) for name, of_ranks in shards.items()
    }
    names = on_all_ranks(lambda: [layer.base_model for layer in _decoder_layers(engine)])
    base_model = next((name for of_rank in names for name in of_rank if name), None)
    from_rank_0(lambda: _write(tensors, lora, base_model, Path(folder)))


def _decoder_layers(engine: PipelineEngine) -> list[DecoderLayer]:
    stages = (engine.module.stage_modules(stage) for stage in engine.module.stages)
    return [layer for modules in stages for layer in modules.values() if isinstance(layer, DecoderLayer)]


def _join(shards: list[Shard]) -> Tensor:
    """Return the whole weight from those of all tensor-parallel ranks."""
    _, dim = shards[0]
    return shards[0][0] if dim is None else torch.cat([tensor for tensor, _ in shards], dim)


def _adapter_weights(engine: PipelineEngine) -> dict[str, Shard]:
    """Return copies of the trained weights in this rank's decoder layers, on the CPU, by their names in peft's file."""
    weights: dict[str, Shard] = {}
    for layer in _decoder_layers(engine):
        for name, parameter in layer.module.named_parameters():
            # Other parameters are trained with bias="lora_only", for example.
            if "lora_" in name or parameter.requires_grad:
                key = f"{_PREFIX}{layer.path}.{_peft_name(plain_name(name))}"
                weights[key] = parameter.detach().cpu().clone(), shard_dim(parameter)
    return weights


def _write(tensors: dict[str, Tensor], lora: Any, base_model: str | None, folder: Path) -> None:
    from safetensors.torch import save_file

    if not any("lora_" in name for name in tensors):
        raise ConfigError(
            "save_adapter: the layers have no adapters (got 0). Pass lora=... to from_transformers."
        )
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(lora)
    config.inference_mode = True
    base_model = config.base_model_name_or_path or base_model
    if base_model and os.path.isdir(base_model):
        base_model = os.path.abspath(base_model)
    config.base_model_name_or_path = base_model
    config.task_type = config.task_type or "CAUSAL_LM"
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _peft_name(name: str) -> str:
    """Return the name in peft's file. The magnitudes of DoRA have none of the suffixes that their module has."""
    name = name.replace(f".modules_to_save.{_ADAPTER}.", ".")
    return name.replace(f".{_ADAPTER}.", ".").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
