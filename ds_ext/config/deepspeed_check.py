"""Ask the installed DeepSpeed and torch whether they accept a JSON, before anything is launched.

Everything is derived from the installed packages:

- Sections and their keys: ``DeepSpeedConfig`` reads the JSON, and its error is reported with the key that causes it.
- Other keys: those that ``DeepSpeedConfig`` looks for, with values of the types of their defaults. Unknown keys are
  rejected in sections, and at the top level if they resemble a known key.
- Optimizers: ``DEEPSPEED_OPTIMIZERS``, ``torch.optim``, the signatures of the classes, and torch's checks of values.
- Schedulers: ``deepspeed.runtime.lr_schedules``, ``torch.optim.lr_scheduler``, the signatures of the classes, and one
  step with the given parameters.

Importing torch and DeepSpeed takes two seconds, so reading a JSON (:mod:`.job`) does not import this module.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib.util
import inspect
import json
import logging
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig, DtypeEnum, get_pipeline_config
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import logger
from deepspeed.utils.logging import get_log_level_from_string
from pydantic import ValidationError
from torch.optim import lr_scheduler

from ..errors import ConfigError, Problems
from .batch_sizes import NOT_REPLACED
from .deepspeed_json import RESEMBLES, fp32_sums_of_bf16, half_through_zero, precision, zero_stage
from .schedulers import MegatronLR, require_plain_step

Make = Callable[[Mapping[str, Any]], Any]

# Class of each DeepSpeed type, as DeepSpeedEngine chooses it: on the device, and with states offloaded to the host.
_CLASSES: dict[str, tuple[type, type]] = {
    "adam": (FusedAdam, DeepSpeedCPUAdam),
    "adamw": (FusedAdam, DeepSpeedCPUAdam),
    "adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
    "lamb": (FusedLamb, FusedLamb),
    "lion": (FusedLion, DeepSpeedCPULion),
}
# For Adam and AdamW, DeepSpeedEngine itself reads the first; the second are arguments that a JSON must not set.
_ADAM_SWITCHES = {"torch_adam": False, "adam_w_mode": True, "fp32_optimizer_states": True}
_NOT_OF_THE_JSON = ("adamw_mode", "max_grad_norm")
# These have the argument "amsgrad" and raise an error for it. Creating them to find out would compile their code.
_WITHOUT_AMSGRAD = (FusedAdam, DeepSpeedCPUAdam, FusedLamb)
# These need a closure or sparse gradients, which a pipeline does not have.
_NOT_IN_A_PIPELINE = ("SparseAdam",)
# DeepSpeed reads these parameters of Muon outside its class.
_MUON_RATES = ("muon_lr", "adam_lr")
_MUON_KEYS = (*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS, *_MUON_RATES)
# PipelineEngine reads the last one. It needs true or false, and not 1 or 0.
_PIPELINE = {**get_pipeline_config({}), "use_reentrant": True}
_DTYPES = ("grad_accum_dtype", "param_dtype", "buffer_dtype")
_NOT_ZERO = ("steps_per_print", "gradient_predivide_factor")  # DeepSpeed divides by them
_INSTEAD = {
    **{"learning_rate": "lr", "epsilon": "eps", "beta1": "betas", "beta2": "betas"},
    "max_grad_norm": "gradient_clipping at the top level",
}


def check_deepspeed(
    config: Mapping[str, Any],
    flags: Mapping[str, str] | None = None,
    *,
    optimizer: bool = True,
    scheduler: bool = True,
) -> None:
    """Raise ConfigError for settings that the installed DeepSpeed or torch would ignore, or reject after the launch.

    Args:
        config: the whole JSON, as accepted by ``load_config``.
        flags: keys that a flag set, as in ``JobConfig.flags``; errors then name the flag.
        optimizer: False if the caller passes an optimizer, which replaces the section.
        scheduler: False if the caller passes a scheduler, which replaces the section.
    """
    config = fp32_sums_of_bf16(half_through_zero(config))
    parsed, problems = _convert(_read, config), Problems()
    for key in unknown_keys(config):
        if near := difflib.get_close_matches(key.lower(), _top_level_keys(), n=1, cutoff=RESEMBLES):
            problems.add(f"{key}: unknown key (got {config[key]!r}). Did you mean {near[0]}?")
    with problems.collect():
        _check_values(config)
    with problems.collect():
        _check_dtypes(config)
        _check_half_precision(parsed, config)
    with problems.collect():
        if optimizer and parsed.optimizer_name is not None:
            _check_optimizer(parsed, config["optimizer"], flags or {})
        if scheduler and parsed.scheduler_name is not None:
            _check_scheduler(parsed, config["scheduler"])
    problems.raise_all()


def _check_values(config: Mapping[str, Any]) -> None:
    """Check for unknown keys of sections, and for values of another type than their default."""
    top = _Recorder(config)
    _attempt(DeepSpeedConfig, top)
    sections = {"": top, **{key: value for key, value in top.items() if isinstance(value, _Recorder)}}
    problems = Problems()
    if "pipeline" in sections:
        sections["pipeline"].defaults = _PIPELINE
    for section, values in sections.items():
        defaults = values.defaults
        if not defaults or (section and values.is_passed_on) or section in ("optimizer", "scheduler"):
            continue
        for key, value in values.items():
            name = f"{section}.{key}".strip(".")
            if section and key not in defaults:
                problems.add(f"{name}: unknown key (got {value!r}). {_suggestion(key, defaults)}")
            elif needed := _needed_type(key, defaults.get(key), value, strict=section == "pipeline"):
                problems.errors.append(
                    _wrong_type(name, needed, value, f"Default: {json.dumps(defaults[key])}.")
                )
    problems.raise_all()


def _needed_type(key: str, default: Any, value: Any, strict: bool = False) -> str | None:
    """Return the type of a key with this default; None if the value has it, or if the default has no type."""
    is_number = isinstance(value, int | float)
    if key in _NOT_ZERO and value is not None:
        return None if is_number and value else "a number other than 0"
    match default:
        case bool():
            needed, fits = "true or false", isinstance(value, bool) or (not strict and value in (0, 1, None))
        case int():
            needed, fits = "an integer", isinstance(value, int)
        case float():
            needed, fits = "a number", is_number
        case str() if default != "auto":
            needed, fits = "a string", isinstance(value, str)
        case dict():
            needed, fits = "an object", isinstance(value, Mapping)
        case _:
            return None
    return None if fits else needed


def _wrong_type(name: str, needed: str, value: Any, fix: str) -> ConfigError:
    fix = f"{NOT_REPLACED} {fix}" if value == "auto" else fix
    return ConfigError(f"{name}: must be {needed} (got {json.dumps(value, default=repr)}). {fix}")


def _check_dtypes(config: Mapping[str, Any]) -> None:
    for key, name in (config.get("data_types") or {}).items():
        if key not in _DTYPES or name is None:
            continue
        try:
            dtype = DtypeEnum(name).value
        except ValueError:
            raise ConfigError(f"data_types.{key}: unknown dtype (got {name!r}). Use fp32.") from None
        only_fp32 = key == "grad_accum_dtype" and precision(config) == "fp32" and not zero_stage(config)
        if only_fp32 and dtype != torch.float32:
            raise ConfigError(
                f"data_types.{key}: must be fp32 without half precision and ZeRO (got {name!r}). Remove it."
            )


def _check_half_precision(parsed: Any, config: Mapping[str, Any]) -> None:
    name = precision(config)
    if name == "fp32":
        return
    section = parsed.bfloat16_config if name == "bf16" else parsed.float16_config
    offload = parsed.zero_config.offload_optimizer
    keeps_states = getattr(section, "bf16_optimizer_states", False)
    is_offloaded = offload is not None and offload.device in ("cpu", "nvme")
    if getattr(section, f"{name}_master_weights_and_grads") and not (keeps_states or is_offloaded):
        states = ' Add "bf16_optimizer_states": true, or' if name == "bf16" else " Add"
        raise ConfigError(
            f"{name}.{name}_master_weights_and_grads: DeepSpeed keeps fp32 optimizer states of {name} weights only on "
            f'the CPU (got true).{states} "zero_optimization": {{"offload_optimizer": {{"device": "cpu"}}}}.'
        )
    has_check = not zero_stage(config) or DtypeEnum(parsed.grad_accum_dtype or name).value == torch.float32
    if name == "bf16" and not section.check_grad_overflow and has_check:
        raise ConfigError(
            "bf16.check_grad_overflow: fp32 sums of gradients always skip a step whose gradients are not finite (got "
            'false). Omit it, or add "zero_optimization": {"stage": 1} and "data_types": {"grad_accum_dtype": "bf16"}.'
        )


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the top-level keys without effect: neither ds_ext's nor those that the installed DeepSpeed looks for."""
    return [key for key in config if key not in _top_level_keys() | {"ds_ext"}]


def _convert(
    make: Make, values: Mapping[str, Any], section: str = "", flags: Mapping[str, str] | None = None
) -> Any:
    """Return ``make(values)``. An error becomes a ConfigError with the key that causes it by itself."""
    result, error = _attempt(make, values)
    if error is None:
        return result
    without_keys = str(_attempt(make, {})[1]) == str(error)
    causes = (key for key in values if str(_attempt(make, {key: values[key]})[1]) == str(error))
    key = "" if without_keys else next(causes, "")
    path, problem, fix = [section, key], str(error).strip(" ."), "Correct or remove it."
    value = values.get(key, values)
    if not section and isinstance(error, AttributeError | TypeError):
        problem = "wrong type"
    if value == "auto" and isinstance(error, AttributeError | TypeError | ValueError):
        fix = NOT_REPLACED
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        problem = first["msg"].removeprefix("Value error, ")
        value = first["input"]
        places = [str(place) for place in first["loc"]]
        section_has_key = isinstance(values.get(key), Mapping) and key in values[key]
        path = (
            places if places and (not key or (places[0] == key and not section_has_key)) else [key, *places]
        )
        if first["type"] == "extra_forbidden":
            problem = "unknown key"
            fix = _suggestion(places[-1], _known_fields(error.title if len(places) == 1 else None))
    name = ".".join(filter(None, path)) or "DeepSpeed's keys"
    name = (flags or {}).get(name, "").partition(" ")[0] or name
    raise ConfigError(f"{name}: {problem} (got {reprlib.repr(value)}). {fix}")


def _known_fields(title: str | None) -> set[str]:
    """Return the fields of DeepSpeed's section with the class name ``title``; of all sections if no class has it."""
    models = _models(DeepSpeedConfigModel)
    matches = [model for model in models if model.__name__ == title]
    return {field for model in matches or models for field in model.model_fields}


def _attempt(make: Make, values: Mapping[str, Any]) -> tuple[Any, Exception | None]:
    """Return the result or the error of ``make(values)``, without warnings, because the engine repeats them."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            return make(values), None
    except Exception as error:
        return None, error
    finally:
        logger.setLevel(level)


def _read(config: Mapping[str, Any]) -> Any:
    """Return DeepSpeed's reading of the JSON for a batch of one sample; batch sizes are checked elsewhere."""
    sizes = {
        "train_batch_size": None,
        "gradient_accumulation_steps": None,
        "train_micro_batch_size_per_gpu": 1,
    }
    parsed = DeepSpeedConfig(copy.deepcopy({**config, **sizes}))
    if parsed.log_level is not None:
        get_log_level_from_string(parsed.log_level)  # as in the engine's constructor
    return parsed


def _models(base: type[Any]) -> list[type[Any]]:
    """Return all direct and indirect subclasses."""
    return [model for model_class in base.__subclasses__() for model in (model_class, *_models(model_class))]


def _suggestion(key: str, known: Iterable[str]) -> str:
    names = {name.lower(): name for name in known if name != key}
    near = [_INSTEAD[key]] if key in _INSTEAD else difflib.get_close_matches(key.lower(), names, n=1)
    if near:
        return f"Did you mean {names.get(near[0], near[0])}?"
    return f"Known: {', '.join(sorted(names.values()))}." if len(names) < 60 else "Remove it."


@functools.cache
def _top_level_keys() -> set[str]:
    top = _Recorder({"train_micro_batch_size_per_gpu": 1})
    _attempt(DeepSpeedConfig, top)
    return set(top.defaults)


class _Recorder(dict[str, Any]):
    """Object of a JSON that records how DeepSpeed reads it.

    Attributes:
        defaults: key that DeepSpeed looks for -> its default; None: no default.
        is_passed_on: another class got all keys, and checks them.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(
            (key, _Recorder(value) if isinstance(value, Mapping) else copy.deepcopy(value))
            for key, value in values.items()
        )
        self.defaults: dict[str, Any] = {}
        self.is_passed_on = False

    def get(self, key: str, default: Any = None) -> Any:
        self.defaults[key] = default
        return super().get(key, default)

    def __contains__(self, key: Any) -> bool:
        self.defaults.setdefault(key, None)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.is_passed_on = True
        return super().__iter__()

    def keys(self) -> Any:
        return self


def _classes(module: ModuleType, base: type) -> dict[str, type[Any]]:
    classes = {name: item for name, item in vars(module).items() if isinstance(item, type) and name[0] != "_"}
    return {name: item for name, item in classes.items() if issubclass(item, base) and item is not base}


def _arguments(class_: type[Any]) -> dict[str, Any]:
    """Return the arguments that a JSON may set, except the first, with their defaults."""
    later = [*inspect.signature(class_.__init__).parameters.values()][2:]
    return {entry.name: entry.default for entry in later if entry.name not in _NOT_OF_THE_JSON}


def _check_optimizer(parsed: Any, section: Mapping[str, Any], flags: Mapping[str, str]) -> None:
    name = parsed.optimizer_name
    params = parsed.optimizer_params or {}
    is_adam = name in ("adam", "adamw")
    optimizer_class = _optimizer_class(parsed)
    if optimizer_class is None:
        if name == "muon":
            _check_params(
                "optimizer", section, {**dict.fromkeys(_MUON_KEYS), **_ADAM_SWITCHES}, _try_muon, flags
            )
        return
    step_of_none = functools.partial(optimizer_class.step, None)
    require_plain_step("optimizer.type", repr(section["type"]), step_of_none, "Use AdamW.")
    is_tested = optimizer_class in ZERO_SUPPORTED_OPTIMIZERS or parsed.zero_allow_untested_optimizer
    if parsed.zero_enabled and not is_tested:
        raise ConfigError(
            f"optimizer.type: not tested with ZeRO by DeepSpeed (got {section['type']!r}). Add "
            f'"zero_allow_untested_optimizer": true, or use AdamW.'
        )
    if params.get("amsgrad") and optimizer_class in _WITHOUT_AMSGRAD:
        fix = 'Remove it, or add "torch_adam": true.' if is_adam else "Remove it."
        raise ConfigError(
            f"optimizer.params.amsgrad: not supported by {optimizer_class.__name__} (got {params['amsgrad']!r}). {fix}"
        )
    # DeepSpeed's classes do not check values, so AdamW's rules apply.
    is_torch_class = optimizer_class in _classes(torch.optim, torch.optim.Optimizer).values()
    rules = optimizer_class if is_torch_class else torch.optim.AdamW
    known = {**_arguments(optimizer_class), **(_ADAM_SWITCHES if is_adam else {})}
    _check_params("optimizer", section, known, functools.partial(_try_rules, rules), flags)


def _try_rules(rules: type[Any], params: Mapping[str, Any]) -> None:
    """Raise what a class of torch raises for the values of its arguments; other parameters are ignored."""
    defaults = _arguments(rules)
    values = {key: value for key, value in params.items() if key in defaults}
    for key, value in values.items():
        if isinstance(defaults[key], tuple) and len(value) != len(defaults[key]):
            raise ValueError(f"needs {len(defaults[key])} numbers")
    try:
        rules([], **values)
    except ValueError as error:
        if "empty parameter list" not in str(error):  # torch checks the values first
            raise


def _try_muon(params: Mapping[str, Any]) -> None:
    for key, value in params.items():
        rules = torch.optim.SGD if key == "momentum" else torch.optim.AdamW
        _try_rules(rules, {"lr" if key in _MUON_RATES else key: value})


def _optimizer_class(parsed: Any) -> type[Any] | None:
    """Return the class that DeepSpeed chooses; None if its parameters depend on tags in the model."""
    name, params = parsed.optimizer_name, parsed.optimizer_params or {}
    offload = parsed.zero_config.offload_optimizer
    torch_classes = _classes(torch.optim, torch.optim.Optimizer)
    if name in ("adam", "adamw") and params.get("torch_adam"):
        decoupled = name == "adamw" or params.get("adam_w_mode", True)
        return torch.optim.AdamW if decoupled else torch.optim.Adam
    if name in _CLASSES:
        return _CLASSES[name][offload is not None and offload.device in ("cpu", "nvme")]
    if name in torch_classes and name not in _NOT_IN_A_PIPELINE:
        return torch_classes[name]
    if name == "muon" or (name in DEEPSPEED_OPTIMIZERS and importlib.util.find_spec("mup")):
        return None
    known = [entry for entry in [*_CLASSES, "muon", *torch_classes] if entry not in _NOT_IN_A_PIPELINE]
    fix = "Install the package mup." if name in DEEPSPEED_OPTIMIZERS else _suggestion(name, known)
    raise ConfigError(f"optimizer.type: cannot be used (got {name!r}). {fix}")


def _check_scheduler(parsed: Any, section: Mapping[str, Any]) -> None:
    name = str(parsed.scheduler_name)
    deepspeed_classes = {valid: getattr(lr_schedules, valid) for valid in lr_schedules.VALID_LR_SCHEDULES}
    deepspeed_classes["MegatronLR"] = MegatronLR
    classes = _classes(lr_scheduler, lr_scheduler.LRScheduler) | deepspeed_classes
    if name not in classes:
        raise ConfigError(f"scheduler.type: unknown (got {name!r}). {_suggestion(name, classes)}")
    is_wrapped = parsed.zero_enabled or parsed.float16_config.enabled or parsed.bfloat16_config.enabled
    if is_wrapped and name not in deepspeed_classes:
        raise ConfigError(
            f"scheduler.type: torch's schedulers cannot drive the optimizers that DeepSpeed makes for ZeRO, bf16 and "
            f"fp16 (got {name!r}). Use one of {', '.join(deepspeed_classes)}."
        )
    step_of_none = functools.partial(classes[name].step, None)
    require_plain_step(
        "scheduler.type", repr(name), step_of_none, f"Use one of {', '.join(deepspeed_classes)}."
    )
    if section.get("params") is None:
        raise ConfigError('scheduler.params: missing (got null). Add "params": {...}.')

    rate = (parsed.optimizer_params or {}).get("lr")
    try_step = functools.partial(_try_step, classes[name], rate if isinstance(rate, int | float) else 1e-3)
    _check_params("scheduler", section, _arguments(classes[name]), try_step, {})


def _try_step(scheduler_class: type[Any], rate: float, params: Mapping[str, Any]) -> None:
    """Do one step with a scheduler. Raises what it raises, or ValueError for a negative learning rate."""
    # Skip the optimizer's __init__, which takes a second to import torch's compiler.
    optimizer = torch.optim.AdamW.__new__(torch.optim.AdamW)
    optimizer.defaults = {"lr": rate, "betas": (0.9, 0.999)}
    num_groups = max([1, *(len(value) for value in params.values() if isinstance(value, list))])
    optimizer.param_groups = [optimizer.defaults | {"params": []} for _ in range(num_groups)]
    scheduler_class(optimizer, **params).step(1)
    if not all(group["lr"] >= 0 for group in optimizer.param_groups):
        raise ValueError("the learning rate becomes negative")


def _check_params(
    what: str, section: Mapping[str, Any], known: Mapping[str, Any], make: Make, flags: Mapping[str, str]
) -> None:
    """Reject unknown parameters, parameters outside "params", and values with which ``make`` fails.

    ``known`` has the default of every parameter; the value of a switch must be true or false.
    """
    params = section.get("params") or {}
    for key in [key for key in params if key not in known]:
        problem = f"unknown to {section['type']} (got {params[key]!r})"
        raise ConfigError(f"{what}.params.{key}: {problem}. {_suggestion(key, known)}")
    for key in [key for key in section if key not in ("type", "params", "legacy_fusion")]:
        if key in known or difflib.get_close_matches(key, ["params"], cutoff=0.7):
            problem = f'has no effect outside "params" (got {section[key]!r})'
            raise ConfigError(f"{what}.{key}: {problem}. Move it into {what}.params.")
    for key, value in params.items():
        if isinstance(known[key], bool) and (needed := _needed_type(key, known[key], value)):
            raise _wrong_type(f"{what}.params.{key}", needed, value, f"Default: {json.dumps(known[key])}.")
    _convert(make, params, f"{what}.params", flags)
