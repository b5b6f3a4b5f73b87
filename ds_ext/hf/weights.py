"""Sources of a decoder's modules: a model in memory, or a Hugging Face folder that is read piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..engine.deepspeed_api.names import require_names
from ..errors import ConfigError
from .folder import CONFIG, ModelFolder

_NEEDS = "Install them with: pip install 'transformers>=5,<5.24' safetensors"
_ROWS = 4096  # that are read at once to compare two tables


class Source(Protocol):
    """Provider of skeletons and of modules with weights."""

    @property
    def config(self) -> Any:
        """Configuration of the transformers model."""
        ...

    @property
    def loss_function(self) -> Any:
        """Loss function of the model, with the arguments ``logits``, ``labels`` and ``vocab_size``."""
        ...

    def skeleton(self) -> Any:
        """Return a new model without weights: its parameters are on the meta device, its buffers are not."""
        ...

    def reference(self) -> Any:
        """Return a model that shares parameters between its modules as the source does; it may have no weights."""
        ...

    def submodule(self, path: str) -> nn.Module:
        """Return the module with its weights, such as ``model.layers.3``."""
        ...


def source_of(model_or_folder: Any, dtype: torch.dtype | None) -> Source:
    """Return the source for a transformers model (plain or peft's) or a folder.

    Raises:
        ConfigError: transformers or one of its private names is missing, or the folder cannot be read.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"from_transformers: needs transformers (got none). {_NEEDS}") from None
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(
            f"from_transformers: needs transformers 5 or newer (got {transformers.__version__}). {_NEEDS}"
        )
    require_names("transformers")
    if isinstance(model_or_folder, nn.Module):
        model: Any = model_or_folder
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()  # peft's wrapper; the adapters are in the layers
        if not isinstance(model, transformers.PreTrainedModel):
            raise ConfigError(
                f"model_or_folder: must be a transformers model or a folder (got {type(model).__name__}). Pass "
                f"AutoModelForCausalLM.from_pretrained(...) or the path of its folder."
            )
        if dtype is not None:
            raise ConfigError(
                "dtype: applies to a folder only (got a model). Convert the model with model.to(dtype)."
            )
        return ModelSource(model)
    return FolderSource(Path(model_or_folder), dtype)


class ModelSource:
    """Modules of a model in memory. They are used as they are, never copied."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def config(self) -> Any:
        """Configuration of the model."""
        return self.model.config

    @property
    def loss_function(self) -> Any:
        """Loss function of the model."""
        return self.model.loss_function

    def skeleton(self) -> Any:
        """Return a new model without weights."""
        return empty_model(type(self.model), self.model.config, self.model.dtype)

    def reference(self) -> Any:
        """Return the model."""
        return self.model

    def submodule(self, path: str) -> nn.Module:
        """Return the module with its weights."""
        return self.model.get_submodule(path)


class FolderSource:
    """Modules built from ``config.json``, with weights from the folder's safetensors files.

    transformers renames and converts the weights as ``from_pretrained`` does. Only the files' parts with the weights
    of the module are read.

    Args:
        folder: path of the folder.
        dtype: dtype of the weights; None: as in the folder.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None) -> None:
        import transformers

        self.folder = folder
        if not (folder / CONFIG).is_file():
            raise ConfigError(
                f"model_or_folder: needs a folder with {CONFIG} (got {folder}). Download it first: huggingface-cli "
                f"download NAME --local-dir {folder}"
            )
        self._config = transformers.AutoConfig.from_pretrained(folder)
        if getattr(self._config, "quantization_config", None) is not None:
            raise ConfigError(
                f"{folder}: quantized weights cannot be trained in a pipeline (got quantization_config). Use a folder "
                f"with bf16 or fp32 weights."
            )
        mapping = transformers.AutoModelForCausalLM._model_mapping
        if type(self._config) not in mapping:
            raise ConfigError(
                f"{folder}: {type(self._config).__name__} has no causal language model in transformers. Use a "
                f"decoder-only model."
            )
        self._class = mapping[type(self._config)]
        self._weights = ModelFolder(folder)
        saved = self._config.dtype
        saved = getattr(torch, saved) if isinstance(saved, str) else saved
        self._dtype: torch.dtype = (
            dtype or saved or self._weights.read_rows(self._weights.names[0], 0, 0).dtype
        )
        if getattr(self._config, "tie_word_embeddings", False) and not self._heads_agree():
            self._config.tie_word_embeddings = False  # as from_pretrained does

    @property
    def config(self) -> Any:
        """Configuration of the model."""
        return self._config

    @property
    def loss_function(self) -> Any:
        """Loss function of the model."""
        return self.skeleton().loss_function

    def skeleton(self) -> Any:
        """Return a new model without weights."""
        return empty_model(self._class, self._config, self._dtype)

    def reference(self) -> Any:
        """Return a skeleton, whose tied parameters are tied."""
        return self.skeleton()

    def submodule(self, path: str) -> nn.Module:
        """Return the module with its weights. Raises ConfigError if the folder does not have them all."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        model = self.skeleton()
        mapping = _conversions(model)
        tied = {id(p): name for name, p in model.named_parameters()}
        module = model.get_submodule(path)
        wanted = {tied[id(p)] for p in module.parameters()}
        wanted |= {f"{path}.{name}" for name in module.state_dict()}
        keys = [key for key, targets in self._targets(model, mapping).items() if wanted & targets]
        tensors = {key: self._weights.read(key) for key in keys}
        settings = LoadStateDictConfig(dtype=self._dtype, weight_mapping=mapping, device_map={"": "cpu"})
        with _quiet():
            info, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
        if info.mismatched_keys or info.conversion_errors:
            names = sorted([str(key[0]) for key in info.mismatched_keys] + list(info.conversion_errors))
            raise ConfigError(
                f"{self.folder}: config.json and the weights do not fit (got other shapes of {', '.join(names[:4])}). "
                f"Download the folder again."
            )
        model.tie_weights(recompute_mapping=False)
        module = model.get_submodule(path)
        missing = [name for name, tensor in module.state_dict().items() if tensor.is_meta]
        if missing:
            raise ConfigError(
                f"{self.folder}: the weights of {path} are incomplete (missing: {', '.join(missing[:4])}). Download "
                f"the folder again."
            )
        return module

    def _heads_agree(self) -> bool:
        """Return False if the files have a head that differs from the word embedding. Rows are compared in blocks."""
        model = self.skeleton()
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        names = {f"{path}.weight" for path, m in model.named_modules() if any(m is end for end in ends)}
        keys = [key for key, targets in self._targets(model, _conversions(model)).items() if names & targets]
        if len(keys) != 2:
            return True
        (rows, *_), other_shape = self._weights.shape(keys[0]), self._weights.shape(keys[1])
        blocks = [(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS)]
        return self._weights.shape(keys[0]) == other_shape and all(
            torch.equal(*(self._weights.read_rows(key, *block) for key in keys)) for block in blocks
        )

    def _targets(self, model: Any, mapping: list[Any]) -> dict[str, set[str]]:
        """Return a dict of key in the files -> names in the model that the key's tensor contributes to."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        names = model.state_dict(keep_vars=True)
        targets: dict[str, set[str]] = {}
        for key in self._weights.names:
            renamed, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
            if renamed not in names and key in names:
                renamed, pattern = key, None
            targets[key] = {renamed}
            if pattern is not None:  # one tensor may become several, such as q, k and v
                first, *others = by_pattern[pattern].target_patterns
                targets[key] |= {renamed.replace(first, other) for other in others}
        return targets


def _conversions(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


def empty_model(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Return a model whose parameters are on the meta device. Buffers are real, because no file contains them all."""
    with _parameters_on_meta(), torch.random.fork_rng(devices=[]), _quiet():
        return model_class._from_config(config, dtype=dtype)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Context in which new parameters move to the meta device before they are initialized."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context without transformers' progress bars and messages, which would appear once per layer."""
    from transformers.utils import logging

    enabled, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if enabled:
            logging.enable_progress_bar()
