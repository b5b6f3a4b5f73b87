"""Sources of a decoder's modules: a model in memory, a folder that is read piece by piece, or new weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..engine.deepspeed_api.names import require_names
from ..errors import ConfigError
from ..tensor_parallel import TensorParallel, is_sharded, keyed_rng, mix_key, shard_dim
from .folder import CONFIG, ModelFolder, read_config

_NEEDS = "Install them with: pip install 'transformers>=5' safetensors"


class Source(Protocol):
    """Provider of skeletons and of modules with weights."""

    @property
    def config(self) -> Any: ...

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

    def divided(self, path: str, divide: Callable[[nn.Module], None], tp: TensorParallel) -> nn.Module | None:
        """Return a module after ``divide`` without reading other weights than this rank's; None if that cannot be.

        Args:
            divide: keeps this rank's shards of the weights, in place.
        """
        ...

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return rows of a weight, such as ``lm_head.weight``, as a view if the weight is in memory."""
        ...


def make_source(model_or_folder: Any, dtype: torch.dtype | None, seed: int = 0) -> Source:
    """Return the source for a model, a folder, or a config, whose weights are new and drawn from ``seed``."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"from_transformers: needs transformers (got none). {_NEEDS}") from None
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ConfigError(
            f"from_transformers: needs transformers 5 or newer (got {transformers.__version__}). {_NEEDS}"
        )
    require_names("transformers")
    if isinstance(model_or_folder, transformers.PreTrainedConfig):
        return NewWeights(model_or_folder, dtype, seed)
    if not isinstance(model_or_folder, nn.Module):
        return FolderSource(Path(model_or_folder), dtype)
    model: Any = model_or_folder
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()  # peft's wrapper; the adapters are in the layers
    if not isinstance(model, transformers.PreTrainedModel):
        raise ConfigError(
            f"model_or_folder: must be a transformers model, a folder or a config (got {type(model).__name__}). Pass "
            f"AutoModelForCausalLM.from_pretrained(...) or the path of its folder."
        )
    if dtype is not None:
        raise ConfigError(
            "dtype: applies to a folder only (got a model). Convert the model with model.to(dtype)."
        )
    return ModelSource(model)


class ModelSource:
    """Modules of a model in memory. They are used as they are, never copied."""

    def __init__(self, model: Any) -> None:
        if any(is_sharded(parameter) for parameter in model.parameters()):
            raise ConfigError(
                "model_or_folder: its weights are tensor-parallel shards (got a model that a PipelineModule has "
                "divided). Load it again, or pass its folder."
            )
        self.model = model
        self.config = model.config
        self.loss_function = model.loss_function

    def skeleton(self) -> Any:
        return empty_model(type(self.model), self.model.config, self.model.dtype)

    def reference(self) -> Any:
        return self.model

    def submodule(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)

    def divided(self, path: str, divide: Callable[[nn.Module], None], tp: TensorParallel) -> nn.Module | None:
        return None  # the weights are in memory

    def rows(self, name: str, rows: slice) -> Tensor:
        return self.model.get_parameter(name).detach()[rows]


class _Built:
    """Modules built from a config."""

    _dtype: torch.dtype

    def __init__(self, config: Any, name: object) -> None:
        self.config = config
        self._class = _model_class(config, name)

    @property
    def loss_function(self) -> Any:
        return self.skeleton().loss_function

    def skeleton(self) -> Any:
        return empty_model(self._class, self.config, self._dtype)

    def reference(self) -> Any:
        """Return a skeleton, whose tied parameters are tied."""
        return self.skeleton()


class NewWeights(_Built):
    """Modules with new weights, as the class of the model draws them.

    The weights of a module depend on ``seed`` and its path alone, so that they are the same in every layout.
    """

    def __init__(self, config: Any, dtype: torch.dtype | None, seed: int) -> None:
        super().__init__(config, type(config).__name__)
        self._seed = seed
        self._dtype = dtype or _dtype_of(config) or torch.get_default_dtype()

    def submodule(self, path: str) -> nn.Module:
        model = self.skeleton()
        names, module = _weight_names(model, path), model.get_submodule(path)
        inside = [name for name in names if name.startswith(f"{path}.")]
        owners = {name.rpartition(".")[0] for name in names.difference(inside)}  # of tied weights
        for part in [*sorted(owners), path]:
            self._draw(model, part)
        model.tie_weights(recompute_mapping=False)
        return module

    def _draw(self, model: Any, path: str) -> None:
        module = model.get_submodule(path)
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.is_meta:
                    values = torch.full_like(parameter, math.nan, device="cpu")
                    part._parameters[name] = nn.Parameter(values, parameter.requires_grad)
            part.__dict__.pop("_is_hf_initialized", None)
        with keyed_rng(mix_key("weights", self._seed, path), torch.device("cpu")):
            model.initialize_weights()
        for name, parameter in module.named_parameters():
            if parameter.isnan().any():
                raise ConfigError(
                    f"model_or_folder: {self._class.__name__} has no rule for new values of {path}.{name} (got a "
                    f"config). Write a folder with save_pretrained() of a new model, and pass it."
                )

    def divided(self, path: str, divide: Callable[[nn.Module], None], tp: TensorParallel) -> nn.Module | None:
        return None  # the whole module is drawn

    def rows(self, name: str, rows: slice) -> Tensor:
        path, _, key = name.rpartition(".")
        return self.submodule(path).get_parameter(key).detach()[rows]


class FolderSource(_Built):
    """Modules built from ``config.json``, with weights from the folder's safetensors files.

    transformers renames and converts the weights as ``from_pretrained`` does. Only the files' parts with the weights
    of the module are read. Without ``dtype``, it is that of the folder.
    """

    def __init__(self, folder: Path, dtype: torch.dtype | None) -> None:
        super().__init__(config_of(folder), folder)
        self.folder = folder
        self._weights = ModelFolder(folder)
        self._dtype = dtype or _dtype_of(self.config) or self._dtype_of_files()
        if getattr(self.config, "tie_word_embeddings", False) and not self._is_head_embedding():
            self.config.tie_word_embeddings = False  # as from_pretrained does

    def submodule(self, path: str) -> nn.Module:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        model = self.skeleton()
        mapping = _conversions(model)
        names = _weight_names(model, path)
        keys = [key for key, targets in self._targets(model, mapping).items() if names & targets]
        tensors = {key: self._weights.read(key) for key in keys}
        settings = LoadStateDictConfig(dtype=self._dtype, weight_mapping=mapping, device_map={"": "cpu"})
        with _quiet():
            info, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
        if info.mismatched_keys or info.conversion_errors:
            misfits = sorted([str(key[0]) for key in info.mismatched_keys] + list(info.conversion_errors))[:4]
            raise ConfigError(
                f"{self.folder}: config.json and the weights do not fit (got other shapes of {', '.join(misfits)}). "
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

    def divided(self, path: str, divide: Callable[[nn.Module], None], tp: TensorParallel) -> nn.Module | None:
        model = self.skeleton()
        module, shapes = model.get_submodule(path), {}
        keys = {
            next(iter(names)): key for key, names in self._targets(model, _conversions(model), False).items()
        }
        for name, tensor in module.state_dict().items():
            key = keys.get(f"{path}.{name}")
            if key is None or not tensor.is_meta or self._weights.shape(key) != tensor.shape:
                return None  # it is converted, shared or no parameter
            shapes[name] = tensor.shape
        divide(module)
        for name in shapes:
            owner_path, _, last = name.rpartition(".")
            owner, key = module.get_submodule(owner_path), keys[f"{path}.{name}"]
            part = owner._parameters[last]
            assert part is not None
            loaded = nn.Parameter(self._read_part(key, shard_dim(part), tp), part.requires_grad)
            for mark, value in vars(part).items():  # those of shards
                setattr(loaded, mark, value)
            owner._parameters[last] = loaded
        return module

    def _read_part(self, key: str, dim: int | None, tp: TensorParallel) -> Tensor:
        """Return this rank's shard of a weight in the files. Columns are read with those of all ranks."""
        if dim == 0:
            rows = tp.shard_size(self._weights.shape(key)[0], "rows")
            return self._weights.read_rows(key, tp.rank * rows, (tp.rank + 1) * rows).to(self._dtype)
        whole = self._weights.read(key)
        return (whole if dim is None else tp.shard(whole, dim).clone()).to(self._dtype)

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return rows of a weight, and read only these if the files contain it unconverted."""
        model = self.skeleton()
        shape = model.get_parameter(name).shape
        targets = self._targets(model, _conversions(model))
        keys = [key for key, names in targets.items() if names == {name}]
        if len(keys) == 1 and self._weights.shape(keys[0]) == shape:
            start, stop, _ = rows.indices(shape[0])
            return self._weights.read_rows(keys[0], start, stop).to(self._dtype)
        path, _, key = name.rpartition(".")
        return self.submodule(path).get_parameter(key).detach()[rows]

    def _dtype_of_files(self) -> torch.dtype:
        return self._weights.read_rows(self._weights.names[0], 0, 0).dtype

    def _is_head_embedding(self) -> bool:
        """Return whether the files have no head, or one that equals the word embedding."""
        model = self.skeleton()
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        names = {f"{path}.weight" for path, m in model.named_modules() if any(m is end for end in ends)}
        keys = [key for key, targets in self._targets(model, _conversions(model)).items() if names & targets]
        return len(keys) != 2 or self._weights.are_equal(*keys)

    def _targets(self, model: Any, mapping: list[Any], converted: bool = True) -> dict[str, set[str]]:
        """Return key in the files -> names in the model that the key's tensor contributes to.

        Args:
            mapping: that of :func:`_conversions`.
            converted: include tensors that are not only renamed.
        """
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        names = model.state_dict(keep_vars=True)
        targets: dict[str, set[str]] = {}
        for key in self._weights.names:
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
            if name not in names and key in names:
                targets[key] = {key}
            elif pattern is None:
                targets[key] = {name}
            elif converted:
                # One tensor may become several, such as q, k and v. The name is that of the first.
                parts = by_pattern[pattern].target_patterns
                targets[key] = {name.replace(parts[0], part) for part in parts}
        return targets


def config_of(folder: Path) -> Any:
    """Return transformers' config for the ``config.json`` of a folder."""
    import transformers

    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"model_or_folder: needs a folder with {CONFIG} (got {folder}). Download it first: huggingface-cli "
            f"download NAME --local-dir {folder}"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library raises several types
        values = read_config(folder)
        fix = "Use a newer transformers, or a model that it knows."
        if "auto_map" in values:
            fix = (
                "Python code of the folder (auto_map) is not run: load the model with trust_remote_code=True and pass "
                "it to from_transformers."
            )
        raise ConfigError(
            f"{folder / CONFIG}: transformers {transformers.__version__} cannot read it (got model_type "
            f"{values.get('model_type')!r}: {str(error).partition(chr(10))[0]}). {fix}"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{folder}: quantized weights cannot be trained in a pipeline (got quantization_config). Use a folder "
            f"with bf16 or fp32 weights."
        )
    return config


def _dtype_of(config: Any) -> torch.dtype | None:
    return getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype


def _model_class(config: Any, name: object) -> Any:
    import transformers

    mapping = transformers.AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ConfigError(
            f"{name}: {type(config).__name__} has no causal language model in transformers. Use a "
            f"decoder-only model."
        )
    return mapping[type(config)]


def _weight_names(model: nn.Module, path: str) -> set[str]:
    """Return the names of the weights of a module, and for tied parameters also the names elsewhere in the model."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    module = model.get_submodule(path)
    names = {name_of[id(parameter)] for parameter in module.parameters()}
    return names | {f"{path}.{name}" for name in module.state_dict()}


def _conversions(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


def empty_model(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Return a model whose parameters are on the meta device. Buffers are real, because no file contains them all."""
    with _parameters_on_meta(), torch.random.fork_rng(devices=[]), _quiet():
        return model_class._from_config(config, dtype=dtype)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move new parameters to the meta device before they are initialized."""
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
    """Suppress transformers' progress bars and messages, which would appear once per layer."""
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
