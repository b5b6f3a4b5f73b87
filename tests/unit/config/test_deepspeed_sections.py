"""The "optimizer" and "scheduler" sections: the tables are what is installed, and every mistake gets a sentence."""

from __future__ import annotations

import inspect
from typing import Any

import deepspeed.runtime.zero.utils as zero
import pytest
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler

from ds_ext.config import deepspeed_sections as tables
from ds_ext.config.deepspeed_sections import check_optimizer, check_scheduler
from ds_ext.errors import ConfigError

# Which class DeepSpeed makes of a type (runtime/engine.py, _configure_basic_optimizer).
CLASSES: dict[str, Any] = {
    "Adam": FusedAdam,
    "AdamW": FusedAdam,
    "Adagrad": torch.optim.Adagrad,
    "Lamb": FusedLamb,
    "Lion": FusedLion,
}
OFFLOADED: dict[str, Any] = {
    "Adam": DeepSpeedCPUAdam,
    "AdamW": DeepSpeedCPUAdam,
    "Adagrad": DeepSpeedCPUAdagrad,
    "Lion": DeepSpeedCPULion,
}
ZERO_1 = {"zero_optimization": {"stage": 1}}


def arguments(made: Any) -> tuple[list[str], list[str]]:
    """Required and other arguments of a class behind self and the one that it works on."""
    behind = list(inspect.signature(made.__init__).parameters.values())[2:]
    required = [p.name for p in behind if p.default is inspect.Parameter.empty]
    return required, [p.name for p in behind if p.name not in required]


def names(made: Any, *taken: str) -> set[str]:
    """All arguments but those that DeepSpeed does not take from the JSON."""
    required, others = arguments(made)
    return {*required, *others} - set(taken)


def torch_classes(module: Any, base: type) -> dict[str, Any]:
    found = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {
        name: c for name, c in found.items() if inspect.isclass(c) and issubclass(c, base) and c is not base
    }


def test_the_optimizers_are_those_of_deepspeed() -> None:
    not_for_scripts = {"muon", "muadam", "muadamw", "musgd"}
    known = {name.lower() for name in tables.DEEPSPEED_OPTIMIZERS}
    assert known | not_for_scripts == set(deepspeed_config.DEEPSPEED_OPTIMIZERS)
    for name, made in CLASSES.items():
        # DeepSpeed refuses max_grad_norm by name before it makes any optimizer.
        assert set(tables.DEEPSPEED_OPTIMIZERS[name].split()) == names(made, "max_grad_norm"), name
    assert CLASSES.keys() == tables.DEEPSPEED_OPTIMIZERS.keys()


def test_the_offloaded_optimizers_are_those_of_deepspeed() -> None:
    assert OFFLOADED.keys() == tables.OFFLOADED_OPTIMIZERS.keys()
    for name, made in OFFLOADED.items():
        taken = ("adamw_mode", "fp32_optimizer_states") if name.startswith("Adam") else ()
        assert set(tables.OFFLOADED_OPTIMIZERS[name].split()) == names(made, *taken), name


def test_the_optimizers_are_those_of_torch() -> None:
    for name, parameters in tables.TORCH_ADAMS.items():
        assert set(parameters.split()) == names(getattr(torch.optim, name)), name
    found = torch_classes(torch.optim, torch.optim.Optimizer)
    others = {n: c for n, c in found.items() if n.lower() not in deepspeed_config.DEEPSPEED_OPTIMIZERS}
    assert others.keys() - {"LBFGS", "SparseAdam"} == tables.TORCH_OPTIMIZERS.keys()
    for name, parameters in tables.TORCH_OPTIMIZERS.items():
        assert set(parameters.split()) == names(others[name]), name


def test_zero_has_been_tested_with_these() -> None:
    classes = CLASSES | {name: getattr(torch.optim, name) for name in tables.TORCH_OPTIMIZERS}
    tested = {name for name, made in classes.items() if made in zero.ZERO_SUPPORTED_OPTIMIZERS}
    assert tested == set(tables.ZERO_TESTED)


def test_the_schedulers_are_those_of_deepspeed_and_torch() -> None:
    assert set(tables.DEEPSPEED_SCHEDULERS) == set(lr_schedules.VALID_LR_SCHEDULES)
    for name, (required, others) in tables.DEEPSPEED_SCHEDULERS.items():
        found = arguments(getattr(lr_schedules, name))
        assert (set(required.split()), set(others.split())) == tuple(map(set, found)), name
    # Their parameters are functions or schedulers.
    no_json = {"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"}
    classes = torch_classes(lr_scheduler, lr_scheduler.LRScheduler)
    assert classes.keys() - no_json == tables.TORCH_SCHEDULERS.keys()
    for name, (required, others) in tables.TORCH_SCHEDULERS.items():
        found = arguments(classes[name])
        assert (set(required.split()), set(others.split())) == tuple(map(set, found)), name


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        ({"type": "ADAMW", "params": {"lr": 1e-3, "torch_adam": True, "foreach": False}}, ZERO_1),
        (
            {
                "type": "adam",
                "params": {"adam_w_mode": False, "torch_adam": True, "decoupled_weight_decay": False},
            },
            {},
        ),
        (
            {"type": "Adam", "params": {"lr": 0, "bias_correction": False, "fp32_optimizer_states": True}},
            ZERO_1,
        ),
        ({"type": "AdamW", "params": None, "legacy_fusion": False}, {}),
        ({"type": "AdamW", "params": {"lr": 1}, "comment": "mine"}, {}),
        ({"type": "SGD", "params": {"momentum": 0.9, "nesterov": True}}, {}),
        ({"type": "SGD"}, {**ZERO_1, "zero_allow_untested_optimizer": True}),
        ({"type": "Adafactor", "params": {"eps": [None, 1e-3]}}, {}),
        ({"type": None, "params": {"anything": 1}}, {}),
        ({}, {}),
    ],
)
def test_optimizers_that_run_pass(optimizer: dict[str, Any], more: dict[str, Any]) -> None:
    check_optimizer({"optimizer": optimizer, **more})


def test_offloaded_parameters_are_those_of_the_host() -> None:
    section = {"type": "Adagrad", "params": {"amsgrad": False}}
    offload = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    check_optimizer({"optimizer": section, **offload})
    with pytest.raises(ConfigError, match=r"Adagrad has no parameter 'amsgrad'"):
        check_optimizer({"optimizer": section})


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (
            {"type": "Adamm"},
            r"cannot have the type 'Adamm' \(did you mean 'Adam'\?\); the types: Adam, AdamW, ",
        ),
        ({"type": "sgd"}, r"cannot have the type 'sgd' \(did you mean 'SGD'\?\)"),
        ({"type": "LBFGS"}, r"cannot have the type 'LBFGS'; the types: "),
        ({"type": 3}, r"cannot have the type 3; "),
        ("AdamW", r"\"optimizer\" must be an object with \"type\" and \"params\"; got 'AdamW'"),
        ({"type": "AdamW", "params": [1]}, r"\"optimizer.params\" must be an object; got \[1\]"),
        ({"type": "AdamW", "param": {}}, r"a key 'param', which nothing reads: did you mean 'params'\?"),
        (
            {"type": "AdamW", "lr": 1},
            r"'lr' is a parameter of AdamW and belongs into \"params\": {\"lr\": 1}",
        ),
        (
            {"type": "AdamW", "params": {"learning_rate": 1}},
            r"AdamW has no parameter 'learning_rate' \(did you mean 'lr'\?\); its parameters: lr, bias_correction",
        ),
        (
            {"type": "AdamW", "params": {"fused": True}},
            r"no parameter 'fused' \(torch's implementation has it: add \"torch_adam\": true\)",
        ),
        (
            {"type": "AdamW", "params": {"bias_correction": True, "torch_adam": True}},
            r"no parameter 'bias_correction'",
        ),
        ({"type": "SGD", "params": {"betas": [0.9, 0.9]}}, r"SGD has no parameter 'betas'"),
        (
            {"type": "Adam", "params": {"max_grad_norm": 2}},
            r"write \"gradient_clipping\": 2 at the top level",
        ),
        (
            {"type": "AdamW", "params": {"lr": -1}},
            r"^\"optimizer.params.lr\" must be a number of at least 0; got -1",
        ),
        ({"type": "AdamW", "params": {"lr": "1e-3"}}, r"must be a number of at least 0; got '1e-3'"),
        ({"type": "AdamW", "params": {"lr": float("nan")}}, r"got nan"),
        ({"type": "AdamW", "params": {"eps": -1e-8}}, r"optimizer.params.eps\" must be .* got -1e-08"),
        (
            {"type": "AdamW", "params": {"weight_decay": None}},
            r"optimizer.params.weight_decay\" must be .* got None",
        ),
        (
            {"type": "AdamW", "params": {"betas": [0.9, 1.0]}},
            r"below 1, such as \[0.9, 0.95\]; got \[0.9, 1.0\]",
        ),
        ({"type": "AdamW", "params": {"betas": 0.9}}, r"must be two numbers, .* got 0.9"),
    ],
)
def test_optimizers_that_do_not_run(optimizer: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_optimizer({"optimizer": optimizer})


def test_a_number_that_came_from_a_flag_is_named_as_such() -> None:
    section = {"optimizer": {"type": "AdamW", "params": {"lr": -1.0}}}
    with pytest.raises(ConfigError, match=r"^--lr must be a number of at least 0; got -1\.0\.$"):
        check_optimizer(section, {"optimizer.params.lr": "--lr -1.0"})


def test_zero_wants_a_tested_optimizer() -> None:
    with pytest.raises(
        ConfigError, match=r'tested ZeRO with SGD: add "zero_allow_untested_optimizer": true .* Lion\.'
    ):
        check_optimizer({"optimizer": {"type": "SGD"}, **ZERO_1})


@pytest.mark.parametrize(
    ("scheduler", "more"),
    [
        ({"type": "WarmupLR", "params": {"warmup_max_lr": None, "warmup_min_lr": [0, 1e-4]}}, ZERO_1),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": 1e4, "warmup_num_steps": 1}}, ZERO_1),
        ({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}, {"bf16": {"enabled": True}}),
        ({"type": "CosineAnnealingLR", "params": {"T_max": 10}}, {"bf16": {"enabled": False}}),
        ({"type": None}, {}),
        ({}, {}),
    ],
)
def test_schedulers_that_run_pass(scheduler: dict[str, Any], more: dict[str, Any]) -> None:
    check_scheduler({"scheduler": scheduler, **more})


@pytest.mark.parametrize(
    ("scheduler", "sentence"),
    [
        (
            {"type": "WarmupCosine"},
            r"'WarmupCosine' \(did you mean 'WarmupCosineLR'\?\); the types: WarmupLR, ",
        ),
        ({"type": "warmuplr"}, r"'warmuplr' \(did you mean 'WarmupLR'\?\)"),
        ({"type": "LambdaLR", "params": {}}, r"cannot have the type 'LambdaLR'"),
        (None, r"\"scheduler\" must be an object with \"type\" and \"params\"; got None"),
        ({"type": "WarmupLR"}, r"WarmupLR needs \"params\": {}\."),
        (
            {"type": "WarmupDecayLR", "params": {}},
            r"WarmupDecayLR needs \"params\": {\"total_num_steps\": \.\.\.}",
        ),
        ({"type": "OneCycle"}, r"needs \"params\": {\"cycle_min_lr\": \.\.\., \"cycle_max_lr\": \.\.\.}"),
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 3}},
            r"no parameter 'warmup_steps' \(did you mean 'warmup_num_steps'\?\); its parameters: warmup_min_lr, ",
        ),
        (
            {"type": "WarmupLR", "warmup_min_lr": 1},
            r"'warmup_min_lr' is a parameter of WarmupLR and belongs into",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": -1}},
            r"warmup_max_lr\" must be .* at least 0; got -1",
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
            r"whole number of steps, at least 1; got 0",
        ),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 1e3}}, r"whole number of steps.* got 1000.0"),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": "9"}}, r"positive number of steps; got '9'"),
    ],
)
def test_schedulers_that_do_not_run(scheduler: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_scheduler({"scheduler": scheduler})


@pytest.mark.parametrize("wrapped", [ZERO_1, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}])
def test_schedulers_of_torch_want_an_optimizer_of_torch(wrapped: dict[str, Any]) -> None:
    section = {"type": "StepLR", "params": {"step_size": 1}}
    with pytest.raises(
        ConfigError, match=r"StepLR is torch's, .* Use one of DeepSpeed's: WarmupLR, .*LRRangeTest\."
    ):
        check_scheduler({"scheduler": section, **wrapped})
