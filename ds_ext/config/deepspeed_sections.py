"""The "optimizer" and "scheduler" sections: what DeepSpeed makes of them, checked before anything is launched. Pure.

DeepSpeed itself finds a misspelt type or parameter only when every rank has started. The tables are those of
DeepSpeed 0.19 and torch 2.13; a test compares them with what is installed.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeGuard

from ..errors import ConfigError
from .deepspeed_json import zero_stage

# DeepSpeed's own types, which it takes in any case. Left out are Muon and mup's MuAdam, MuAdamW and MuSGD: they want
# tagged parameters, which the scripts' models do not have.
_ADAM = "lr bias_correction betas eps weight_decay amsgrad set_grad_none adam_w_mode"
_CPU_ADAM = "lr bias_correction betas eps weight_decay amsgrad"
_TORCH_ADAMW = "lr betas eps weight_decay amsgrad foreach maximize capturable differentiable fused"
DEEPSPEED_OPTIMIZERS: Mapping[str, str] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": "lr lr_decay weight_decay initial_accumulator_value eps foreach maximize differentiable fused",
    "Lamb": "lr bias_correction betas eps eps_inside_sqrt weight_decay max_coeff min_coeff amsgrad",
    "Lion": "lr betas weight_decay set_grad_none",
}
# With optimizer states offloaded to the host.
OFFLOADED_OPTIMIZERS: Mapping[str, str] = {
    "Adam": _CPU_ADAM,
    "AdamW": _CPU_ADAM,
    "Adagrad": "lr eps weight_decay amsgrad fp32_optimizer_states",
    "Lion": "lr betas weight_decay fp32_optimizer_states",
}
# With "torch_adam": true. Adam is AdamW's rule unless "adam_w_mode" is false.
TORCH_ADAMS: Mapping[str, str] = {"Adam": f"{_TORCH_ADAMW} decoupled_weight_decay", "AdamW": _TORCH_ADAMW}
# What DeepSpeed takes out of the parameters of Adam and AdamW, whoever implements them.
ADAM_SWITCHES = "torch_adam adam_w_mode fp32_optimizer_states"

# Any other name is torch.optim's, in its case. Left out are LBFGS, which wants a closure, and SparseAdam, which wants
# sparse gradients.
_COMMON = "lr weight_decay foreach maximize differentiable capturable"
TORCH_OPTIMIZERS: Mapping[str, str] = {
    "ASGD": f"{_COMMON} lambd alpha t0",
    "Adadelta": f"{_COMMON} rho eps",
    "Adafactor": "lr beta2_decay eps d weight_decay foreach maximize",
    "Adamax": f"{_COMMON} betas eps",
    "NAdam": f"{_COMMON} betas eps momentum_decay decoupled_weight_decay",
    "RAdam": f"{_COMMON} betas eps decoupled_weight_decay",
    "RMSprop": f"{_COMMON} alpha eps momentum centered",
    "Rprop": "lr etas step_sizes capturable foreach maximize differentiable",
    "SGD": "lr momentum dampening weight_decay nesterov maximize foreach differentiable fused",
}
# The types whose ZeRO stage 1 needs no "zero_allow_untested_optimizer".
ZERO_TESTED = ("Adam", "AdamW", "Adagrad", "Lion")

# Required parameters, then the others.
DEEPSPEED_SCHEDULERS: Mapping[str, tuple[str, str]] = {
    "WarmupLR": ("", "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"),
    "WarmupDecayLR": (
        "total_num_steps",
        "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration",
    ),
    "WarmupCosineLR": (
        "total_num_steps",
        "warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration",
    ),
    "OneCycle": (
        "cycle_min_lr cycle_max_lr",
        "decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count cycle_second_stair_count "
        "decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate last_batch_iteration",
    ),
    "LRRangeTest": (
        "",
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
        "last_batch_iteration",
    ),
}
# torch.optim.lr_scheduler's, without those whose parameters are functions or schedulers, which no JSON can hold.
TORCH_SCHEDULERS: Mapping[str, tuple[str, str]] = {
    "ConstantLR": ("", "factor total_iters last_epoch"),
    "CosineAnnealingLR": ("T_max", "eta_min last_epoch"),
    "CosineAnnealingWarmRestarts": ("T_0", "T_mult eta_min last_epoch"),
    "CyclicLR": (
        "base_lr max_lr",
        "step_size_up step_size_down mode gamma scale_fn scale_mode cycle_momentum base_momentum max_momentum "
        "last_epoch",
    ),
    "ExponentialLR": ("gamma", "last_epoch"),
    "LinearLR": ("", "start_factor end_factor total_iters last_epoch"),
    "MultiStepLR": ("milestones", "gamma last_epoch"),
    "OneCycleLR": (
        "max_lr",
        "total_steps epochs steps_per_epoch pct_start anneal_strategy cycle_momentum base_momentum max_momentum "
        "div_factor final_div_factor three_phase last_epoch",
    ),
    "PolynomialLR": ("", "total_iters power last_epoch"),
    "ReduceLROnPlateau": ("", "mode factor patience threshold threshold_mode cooldown min_lr eps"),
    "StepLR": ("step_size", "gamma last_epoch"),
}

# Section -> the package that DeepSpeed imports for it on rank 0, and what to give to pip.
MONITORS: Mapping[str, tuple[str, str]] = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "'comet_ml>=3.41.0'"),
}

# Numbers that no optimizer or scheduler can use below 0, and counts of steps that must be positive.
_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "momentum", "lr_decay")
_LEARNING_RATES = ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr")
_STEPS = ("warmup_num_steps", "lr_range_test_step_size", "T_0")
_LENGTHS = ("total_num_steps", "cycle_first_step_size", "T_max")
# At this difflib ratio a key of a section is a typo of one that is read; a parameter that nobody reads always is one.
_RESEMBLES = 0.7
_OTHER_NAMES = {"learning_rate": "lr", "epsilon": "eps", "beta1": "betas", "beta2": "betas"}


def check_optimizer(config: Mapping[str, Any], flags: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for an "optimizer" section that DeepSpeed would refuse on every rank, or half ignore.

    Args:
        config: the whole JSON; a section without a type is nobody's, and passes.
        flags: which keys a flag filled in, as ``JobConfig.flags``; errors then name the flag.
    """
    section = _section(config, "optimizer", ("type", "params", "legacy_fusion"))
    if section is None:
        return
    name = _type_of("optimizer", section, [*DEEPSPEED_OPTIMIZERS, *TORCH_OPTIMIZERS], DEEPSPEED_OPTIMIZERS)
    params = section.get("params") or {}
    known = _optimizer_parameters(name, params, config)
    _refuse_params_beside(section, "optimizer", name, known)
    if "max_grad_norm" in params:
        raise ConfigError(
            '"optimizer": clipping is no parameter of an optimizer: write "gradient_clipping": '
            f'{params["max_grad_norm"]} at the top level of the JSON instead of "max_grad_norm".'
        )
    _refuse_unknown(params, "optimizer", name, known, _torch_adam_hint(name, params))
    for key in _NOT_NEGATIVE:
        # Adafactor's eps is a pair.
        if key in params and not (key == "eps" and isinstance(params[key], list)):
            _require_number(params[key], f"optimizer.params.{key}", flags or {})
    if "betas" in params:
        _require_betas(params["betas"])
    untested = zero_stage(config) > 0 and name not in ZERO_TESTED
    if untested and not config.get("zero_allow_untested_optimizer"):
        raise ConfigError(
            f'DeepSpeed has not tested ZeRO with {name}: add "zero_allow_untested_optimizer": true to the JSON, set '
            f'"zero_optimization": {{"stage": 0}}, or use one of {", ".join(ZERO_TESTED)}.'
        )


def require_monitors(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for an enabled monitor whose package is not installed here; rank 0 alone uses it."""
    for section, (package, requirement) in MONITORS.items():
        settings = config.get(section)
        if not isinstance(settings, Mapping) or not settings.get("enabled"):
            continue
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:  # a folder of that name, as wandb makes, is a package too
            raise ConfigError(
                f'{section}: the package {package!r} is not installed on the host of rank 0 (got "enabled": true). '
                f"Install it with `pip install {requirement}`, or remove the section."
            )


def check_scheduler(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a "scheduler" section that DeepSpeed would refuse on every rank, or half ignore."""
    section = _section(config, "scheduler", ("type", "params"))
    if section is None:
        return
    tables = {**DEEPSPEED_SCHEDULERS, **TORCH_SCHEDULERS}
    name = _type_of("scheduler", section, [*tables], ())
    if name in TORCH_SCHEDULERS and (zero_stage(config) > 0 or precision(config) != "fp32"):
        raise ConfigError(
            f'"scheduler": {name} is torch\'s, which cannot drive the optimizer that DeepSpeed makes for ZeRO, bf16 or '
            f"fp16. Use one of DeepSpeed's: {', '.join(DEEPSPEED_SCHEDULERS)}."
        )
    required, others = (words.split() for words in tables[name])
    _refuse_params_beside(section, "scheduler", name, [*required, *others])
    params = section.get("params")
    _refuse_unknown(params or {}, "scheduler", name, [*required, *others])
    missing = [key for key in required if key not in (params or {})]
    if missing or params is None:
        wanted = ", ".join(f'"{key}": ...' for key in missing)
        raise ConfigError(f'"scheduler": {name} needs "params": {{{wanted}}}.')
    for key, value in params.items():
        path = f"scheduler.params.{key}"
        if (key, value) == ("warmup_max_lr", None):
            continue  # its default, which means the optimizer's lr
        if key in _LEARNING_RATES:
            for number in value if isinstance(value, list) else [value]:
                _require_number(number, path, {})
        elif key in _STEPS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f'"{path}" must be a whole number of steps, at least 1; got {value!r}.')
        elif key in _LENGTHS and (not _is_number(value) or value <= 0):
            raise ConfigError(f'"{path}" must be a positive number of steps; got {value!r}.')


def _section(config: Mapping[str, Any], name: str, keys: Collection[str]) -> Mapping[str, Any] | None:
    """The section, None when it is not there or has no type; its form and the spelling of its keys are checked."""
    if name not in config:
        return None
    section = config[name]
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{name}" must be an object with "type" and "params"; got {section!r}.')
    for key in section:
        near = difflib.get_close_matches(key, keys, n=1, cutoff=_RESEMBLES)
        if key not in keys and near:
            raise ConfigError(f'"{name}" has a key {key!r}, which nothing reads: did you mean {near[0]!r}?')
    params = section.get("params")
    if params is not None and not isinstance(params, Mapping):
        raise ConfigError(f'"{name}.params" must be an object; got {params!r}.')
    return section if section.get("type") is not None else None


def _type_of(what: str, section: Mapping[str, Any], known: list[str], any_case: Iterable[str]) -> str:
    """The type as the tables spell it."""
    given = section["type"]
    if given in known:
        return given
    lower = {name.lower(): name for name in known}
    same = lower.get(given.lower()) if isinstance(given, str) else None
    if same is not None and same in any_case:
        return same
    near = difflib.get_close_matches(str(given).lower(), [*lower], n=1)
    hint = f" (did you mean {lower[near[0]]!r}?)" if near else ""
    raise ConfigError(f'"{what}" cannot have the type {given!r}{hint}; the types: {", ".join(known)}.')


def _optimizer_parameters(name: str, params: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What the implementation that DeepSpeed would choose takes."""
    own = {**DEEPSPEED_OPTIMIZERS, **TORCH_OPTIMIZERS}[name]
    if name in TORCH_ADAMS:
        if params.get("torch_adam"):
            plain = name == "Adam" and not params.get("adam_w_mode", True)
            own = TORCH_ADAMS["Adam" if plain else "AdamW"]
        elif _offloads(config):
            own = OFFLOADED_OPTIMIZERS[name]
        own = f"{own} {ADAM_SWITCHES}"
    elif _offloads(config):
        own = OFFLOADED_OPTIMIZERS.get(name, own)
    return list(dict.fromkeys(own.split()))


def _torch_adam_hint(name: str, params: Mapping[str, Any]) -> Mapping[str, str]:
    """What to do about parameters that only torch's implementation has."""
    if name not in TORCH_ADAMS or params.get("torch_adam"):
        return {}
    return {
        key: 'torch\'s implementation has it: add "torch_adam": true' for key in TORCH_ADAMS[name].split()
    }


def _refuse_params_beside(section: Mapping[str, Any], what: str, name: str, known: Collection[str]) -> None:
    for key in section:
        if key in known and key not in ("type", "params"):
            raise ConfigError(
                f'"{what}": {key!r} is a parameter of {name} and belongs into "params": {{"{key}": '
                f"{section[key]!r}}}; beside it nothing reads it."
            )


def _refuse_unknown(
    params: Mapping[str, Any], what: str, name: str, known: list[str], hints: Mapping[str, str] | None = None
) -> None:
    for key in params:
        if key in known:
            continue
        near = (
            [_OTHER_NAMES[key]]
            if _OTHER_NAMES.get(key) in known
            else difflib.get_close_matches(key, known, n=1)
        )
        hint = (hints or {}).get(key) or (f"did you mean {near[0]!r}?" if near else "")
        raise ConfigError(
            f'"{what}": {name} has no parameter {key!r}{f" ({hint})" if hint else ""}; its parameters: '
            f"{', '.join(known)}."
        )


def _require_number(value: Any, path: str, flags: Mapping[str, str]) -> None:
    if not _is_number(value) or value < 0:
        name = flags.get(path, "").partition(" ")[0] or f'"{path}"'
        raise ConfigError(f"{name} must be a number of at least 0; got {value!r}.")


def _require_betas(betas: Any) -> None:
    numbers = isinstance(betas, list) and all(_is_number(beta) and 0 <= beta < 1 for beta in betas)
    if not numbers or len(betas) != 2:
        raise ConfigError(
            '"optimizer.params.betas" must be two numbers, each at least 0 and below 1, such as [0.9, 0.95]; got '
            f"{betas!r}."
        )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _offloads(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer runs on the host for a model on a device."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return False
    offload = zero.get("offload_optimizer")
    return bool(zero.get("cpu_offload")) or (
        isinstance(offload, Mapping) and offload.get("device") in ("cpu", "nvme")
    )


def precision(config: Mapping[str, Any]) -> str:
    """bf16, fp16 or fp32, as the JSON's sections of these names say."""
    name = precision_section(config) or "fp32"
    return "bf16" if name == "bfloat16" else name


def precision_section(config: Mapping[str, Any]) -> str | None:
    """Name of the section that enables half precision; None for fp32."""
    for name in ("bf16", "bfloat16", "fp16"):
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled"):
            return name
    return None
