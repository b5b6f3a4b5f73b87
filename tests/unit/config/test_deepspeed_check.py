"""The checks accept and refuse what the installed DeepSpeed does, and their errors name the key and a fix."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cpu.no_impl import NotImplementedBuilder
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import (
    _REMOVED_TOP_LEVEL_CONFIG_KEYS,
    _REMOVED_ZERO_CONFIG_KEYS,
    DEEPSPEED_OPTIMIZERS,
    DeepSpeedConfig,
    get_pipeline_config,
)
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.utils import logger
from pydantic import ValidationError
from torch.optim import lr_scheduler

from ds_ext.config.deepspeed_check import _PIPELINE, _top_level_keys
from ds_ext.config.deepspeed_json import UNAPPLIED
from ds_ext.config.job import load_config
from ds_ext.engine import check_deepspeed
from ds_ext.errors import ConfigError

ONE = {"train_micro_batch_size_per_gpu": 1}
ZERO_1 = {"zero_optimization": {"stage": 1}}
OFFLOADED = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
BATCH_SIZES = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
ROOT = Path(__file__).parents[3]
CONFIGS = sorted([*(ROOT / "configs").glob("*.json"), *(ROOT / "examples").rglob("*.json")])
KEYS = sorted(_top_level_keys() - BATCH_SIZES)
NOT_IN_A_PIPELINE = {"LBFGS", "SparseAdam"}
# They depend on tags of the model's parameters.
TAGGED = {"muon", "muadam", "muadamw", "musgd", "Muon"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def refusal(config: Mapping[str, Any]) -> str | None:
    """Return our error, None if we accept the JSON."""
    try:
        check_deepspeed(load_config(copy.deepcopy({**ONE, **config})).deepspeed)
    except ConfigError as error:
        return str(error)
    return None


def reading(config: Mapping[str, Any]) -> Any:
    """Return DeepSpeed's reading of the JSON, or its error."""
    try:
        return DeepSpeedConfig(copy.deepcopy({**ONE, **config}))
    except Exception as error:
        return error


def agree(config: Mapping[str, Any], deepspeed_accepts: bool) -> None:
    found = refusal(config)
    if not without_effect(found):
        assert (found is None) == deepspeed_accepts, (config, found)


def without_effect(refusal: str | None) -> bool:
    """Return whether we refused a key that DeepSpeed accepts and a pipeline cannot use."""
    return refusal is not None and refusal.partition(":")[0] in UNAPPLIED


# --- sections and keys -----------------------------------------------------------------------------------------------


def test_many_keys_are_found() -> None:
    assert len(KEYS) > 50
    assert {*_REMOVED_TOP_LEVEL_CONFIG_KEYS, "zero_optimization", "optimizer", "scheduler", "wandb"} <= {
        *KEYS
    }


VALUES = ({}, {"enabled": False}, {"enabled": True}, None, True, False, 3, "fp32", "auto", "0.5", "false", [])
# Attributes of DeepSpeed's reading have the defaults of the keys with their names.
DEFAULTS = {key: value for key, value in vars(DeepSpeedConfig(ONE)).items() if key in KEYS}


@pytest.mark.parametrize("key", KEYS)
def test_top_level_keys(key: str) -> None:
    """An error names the key, and refuses what DeepSpeed refuses, or values of another type than the default."""
    default = DEFAULTS.get(key)
    for value in VALUES:
        found = refusal({key: value})
        if found is None:
            assert not isinstance(reading({key: value}), Exception), value
            assert (
                not isinstance(default, int | float | str)
                or isinstance(value, type(default) | int)
                or (value is None and isinstance(default, bool))
            )
        else:
            assert found.startswith(f"{key}: ") or found.startswith(f"{key}."), found
    if isinstance(default, int | float | str):
        assert refusal({key: default}) is None


def test_many_keys_have_a_default() -> None:
    types = [type(value) for value in DEFAULTS.values()]
    assert types.count(bool) > 8 and {float, str} <= {*types}


def plain_sections() -> Iterator[tuple[str, list[str]]]:
    """Yield the sections that DeepSpeed reads without a model, and the keys that it looks for."""
    for section in sorted({*KEYS} - {"optimizer", "scheduler", "zero_optimization", "datastates_ckpt"}):
        keys: set[str] = set()

        class Recorder(dict[str, Any]):
            def get(self, key: str, default: Any = None, keys: set[str] = keys) -> Any:
                keys.add(key)
                return super().get(key, default)

            def __contains__(self, key: Any, keys: set[str] = keys) -> bool:
                keys.add(key)
                return super().__contains__(key)

        with contextlib.suppress(Exception):
            DeepSpeedConfig({**ONE, section: Recorder(no_such_key=1)})
            if keys or section == "pipeline":
                yield section, sorted(keys or {*get_pipeline_config({}), "use_reentrant"})


@pytest.mark.parametrize(("section", "keys"), [*plain_sections()], ids=lambda value: str(value)[:20])
def test_keys_of_sections_without_a_model(section: str, keys: list[str]) -> None:
    for key in keys:
        typo = f"{key}x"
        found = str(refusal({section: {typo: 1}}))
        assert found.startswith(f"{section}.{typo}: unknown key (got 1)") and f"mean {key}?" in found
        found = refusal({section: {key: "auto"}})
        assert found is None or found.startswith((f"{section}.{key}: ", f"{section}: "))
    assert str(refusal({section: {"no_such_key": 1}})).startswith(f"{section}.no_such_key: ")


def test_many_sections_have_no_model() -> None:
    names = {section for section, _ in plain_sections()}
    assert {
        "pipeline",
        "data_types",
        "checkpoint",
        "expert_parallel",
        "flops_profiler",
        "aio",
        "timers",
    } <= names


def test_the_keys_of_the_pipeline_are_those_that_the_engine_reads() -> None:
    source = inspect.getsource(PipelineEngine)
    read = set(re.findall(r"_config\.pipeline(?:\.get\(|\[)'(\w+)'", source))
    assert {"use_reentrant", "activation_checkpoint_interval"} <= read <= {*_PIPELINE}


@pytest.mark.parametrize(
    ("config", "value"),
    [
        ({"steps_per_print": 0}, "0"),
        ({"steps_per_print": False}, "false"),
        ({"steps_per_print": "inf"}, '"inf"'),
        ({"gradient_predivide_factor": 0}, "0"),
        ({"gradient_clipping": "0.5"}, '"0.5"'),
        ({"pipeline": {"use_reentrant": 1}}, "1"),
        ({"pipeline": {"activation_checkpoint_interval": "1"}}, '"1"'),
        ({"checkpoint": {"load_universal": "false"}}, '"false"'),
        ({"data_types": {"param_dtype": "fp12"}}, "'fp12'"),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": "false"}}}, '"false"'),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1, "nesterov": "false"}}}, '"false"'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "'auto'"),
        ({"optimizer": {"type": "Muon", "params": {"momentum": "0.9"}}}, "'0.9'"),
        ({"optimizer": {"type": "Muon", "params": {"muon_lr": -1}}}, "-1"),
        ({"optimizer": {"type": "Muon", "params": {"ns_steps": 9}}}, "9"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "'auto'"),
    ],
    ids=str,
)
def test_values_that_would_fail_or_mean_something_else(config: dict[str, Any], value: str) -> None:
    name = ""
    section: Any = config
    while isinstance(section, dict) and section:
        key = next(reversed(section))
        name, section = f"{name}.{key}".strip("."), section[key]
    found = str(refusal(config))
    assert found.startswith(f"{name}: ") and f"(got {value})" in found
    assert ('"auto"' in found) == (value == "'auto'")


@pytest.mark.parametrize(
    "config",
    [
        *({"steps_per_print": value} for value in (None, 1, 10**9, 1e9, float("inf"), 0.5, -2)),
        *({"gradient_clipping": value} for value in (0, 1, 0.5, False, float("inf"))),
        *({"prescale_gradients": value} for value in (0, 1, None, True)),
        {"pipeline": {"stages": "auto", "use_reentrant": False, "activation_checkpoint_interval": 2}},
        {"data_types": {"keep_in_fp32_modules": ["norm"], "param_dtype": None}},
        {
            "data_efficiency": {
                "enabled": False,
                "data_sampling": {"curriculum_learning": {"enabled": False, "x": 1}},
            }
        },
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto", "overlap_comm": "auto"}},
        {"expert_parallel": {"enabled": False, "score_func": "auto", "top_k": 2}},
        {
            "optimizer": {
                "type": "Muon",
                "params": {"lr": 1e-3, "momentum": 0.9, "ns_method": "gram", "adam_lr": 1e-4},
            }
        },
    ],
    ids=str,
)
def test_values_that_have_an_effect(config: dict[str, Any]) -> None:
    assert refusal(config) is None


def models() -> Iterator[tuple[str, type[DeepSpeedConfigModel]]]:
    """Yield the sections that DeepSpeed reads with a pydantic model, and their models."""
    direct = DeepSpeedConfigModel.__subclasses__()
    known = {model.__name__: model for one in direct for model in (one, *one.__subclasses__())}
    for key in KEYS:
        error = reading({key: {"no_such_key": 1}})
        if isinstance(error, ValidationError):
            model = known[error.title]
            joined = error.errors()[0]["loc"][0] == key  # the monitors' sections are fields of one model
            yield key, model.model_fields[key].annotation if joined else model


@pytest.mark.parametrize(
    ("section", "model"), [*models()], ids=lambda value: getattr(value, "__name__", value)
)
def test_keys_of_sections(section: str, model: type[DeepSpeedConfigModel]) -> None:
    assert len(model.model_fields) > 1
    for name, field in model.model_fields.items():
        value = field.get_default(call_default_factory=True)
        for config in ({section: {name: value}}, {section: {name: "nothing"}}):
            ours = refusal(config)
            if name != "stage" and not without_effect(ours):
                fine = not isinstance(reading(config), Exception)
                assert (ours is None) == fine or (name == "enabled" and value is False), (config, ours)
    key = next(iter(model.model_fields))
    for typo in ("no_such_key", f"{key}x"):
        agree({section: {typo: 1}}, False)
        assert f"{section}.{typo}: " in str(refusal({section: {typo: 1}}))
    if section not in model.model_fields:  # as gpt-neox writes "fp16": {"fp16": true}
        assert f"{section}.{section}: " in str(refusal({section: {section: True}}))
    assert f"Did you mean {key}?" in str(refusal({section: {f"{key}x": 1}}))


def test_many_sections_have_a_model() -> None:
    assert {"bf16", "fp16", "zero_optimization", "tensorboard", "comms_logger", "compile"} <= dict(
        models()
    ).keys()


@pytest.mark.parametrize("key", _REMOVED_ZERO_CONFIG_KEYS)
def test_keys_that_zero_has_lost(key: str) -> None:
    agree({"zero_optimization": {key: 1}}, False)
    assert f"'zero_optimization.{key}'" in str(refusal({"zero_optimization": {key: 1}}))


@pytest.mark.parametrize("key", _REMOVED_TOP_LEVEL_CONFIG_KEYS)
def test_keys_that_deepspeed_has_lost(key: str) -> None:
    agree({key: {"enabled": False}}, False)
    assert str(refusal({key: {"enabled": False}})).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"gradient_clip": 1}, ("gradient_clip: ", "got 1", "gradient_clipping")),
        ({"optimiser": {}}, ("optimiser: ", "optimizer")),
        ({"Steps_Per_Print": 1}, ("Steps_Per_Print: ", "steps_per_print")),
        (
            {"zero_optimization": {"reduce_buckt_size": 1}},
            ("zero_optimization.reduce_buckt_size: ", "reduce_bucket_size"),
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
            ("zero_optimization.offload_optimizer.devise: ", "device"),
        ),
        ({"wandb": {"x": 1}, "comet": {"y": 1}}, ("y: ", "got 1")),
        ({"fp16": {"loss_scale": -1}}, ("fp16.loss_scale: ", "got -1")),
        ({"communication_data_type": "fp8"}, ("communication_data_type: ", "got 'fp8'")),
        ({"wall_clock_breakdown": None}, ("wall_clock_breakdown: ", "got None")),
        ({"elasticity": {"enabled": True}, "amp": {}}, ("amp: ", "got {}")),
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
            ("bf16_optimizer_states", "bf16_master_weights_and_grads"),
        ),
    ],
)
def test_errors_name_the_key(config: dict[str, Any], words: tuple[str, ...]) -> None:
    found = str(refusal(config))
    assert all(word in found for word in words), found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_examples_pass(path: Path) -> None:
    check_deepspeed(load_config(path).deepspeed)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp12"])
def test_accumulation_in_a_dtype_that_deepspeed_refuses(dtype: str) -> None:
    with pytest.raises(ConfigError, match=dtype) as caught:
        check_deepspeed(ONE | {"data_types": {"grad_accum_dtype": dtype}})
    assert str(caught.value).startswith("data_types.grad_accum_dtype")
    check_deepspeed(ONE | {"data_types": {"grad_accum_dtype": "fp32"}})
    check_deepspeed(ONE | {"data_types": {"grad_accum_dtype": "bf16"}, "bf16": {"enabled": True}})


IN_BF16 = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
BF16_SUMS = {"data_types": {"grad_accum_dtype": "bf16"}}


@pytest.mark.parametrize(
    ("key", "section", "others"),
    [
        ("", IN_BF16, {}),
        ("", IN_BF16, ZERO_1),
        ("", IN_BF16 | {"check_grad_overflow": False}, {}),
        ("bf16.bf16_master_weights_and_grads", {"bf16_master_weights_and_grads": True}, ZERO_1),
        ("", {"bf16_master_weights_and_grads": True}, OFFLOADED),
        ("bf16.check_grad_overflow", {"check_grad_overflow": False}, ZERO_1),
        ("bf16.check_grad_overflow", {"check_grad_overflow": False}, BF16_SUMS),
        ("", {"check_grad_overflow": False}, BF16_SUMS | ZERO_1),
        ("", {"check_grad_overflow": False}, OFFLOADED),
        ("", {"check_grad_overflow": False, "enabled": False}, ZERO_1),
    ],
)
def test_keys_of_bf16_are_applied_or_refused(
    key: str, section: dict[str, Any], others: dict[str, Any]
) -> None:
    """tests/distributed/test_precision.py has their effects."""
    error = refusal({"bf16": {"enabled": True, **section}, **others}) or ""
    assert error.partition(": ")[0] == key


def test_sections_of_the_users_own_pass() -> None:
    for key in ("comment", "_comment", "my_lab", "model", "train", "data", "run_name", "notes"):
        assert refusal({key: 1}) is None


def test_the_json_is_checked_as_deepspeed_gets_it() -> None:
    """ZeRO stage 1 is added for half precision, and batch sizes are those of the whole job."""
    assert refusal({"bf16": {"enabled": True, **IN_BF16}}) is None
    assert refusal({"train_batch_size": 64, "gradient_accumulation_steps": 4}) is None


def test_nothing_is_logged_or_changed(caplog: pytest.LogCaptureFixture) -> None:
    logger.setLevel(logging.INFO)
    config = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "zero_optimization": True}
    before = copy.deepcopy(config)
    logger.propagate = True
    assert refusal(config) is None and config == before
    logger.propagate = False
    assert not caplog.records and logger.level == logging.INFO


# --- optimizers ------------------------------------------------------------------------------------------------------


def signatures(classes: Iterable[Any]) -> dict[str, Any]:
    """Return all arguments of some classes after the first, with a value for each."""
    found: dict[str, Any] = {}
    for made in classes:
        for one in [*inspect.signature(made.__init__).parameters.values()][2:]:
            value = list(one.default) if isinstance(one.default, tuple) else one.default
            if found.get(one.name) is None and value is not inspect.Parameter.empty:
                found[one.name] = value
    return found


def classes(module: Any, base: type) -> dict[str, Any]:
    found = {n: c for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, base)}
    return {n: c for n, c in found.items() if c is not base and not n.startswith("_")}


OPTIMIZERS = classes(torch.optim, torch.optim.Optimizer)
OPTIMIZER_PARAMS = signatures([torch.optim.AdamW, *torch.optim.Optimizer.__subclasses__()])


def optimizer_of(config: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the optimizer that DeepSpeed makes of the JSON, without compiling it, or its error."""
    for builder in (OpBuilder, NotImplementedBuilder):
        monkeypatch.setattr(builder, "load", lambda *_, **__: MagicMock())
    monkeypatch.setattr("cpuinfo.get_cpu_info", dict)  # takes a tenth of a second
    engine = object.__new__(DeepSpeedEngine)
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.zeros(2, 2)
    engine.__dict__.update(
        _config=reading(config), client_optimizer=None, has_moe_layers=False, zenflow=False
    )
    try:
        made: Any = engine._configure_basic_optimizer([parameter])
        if type(made).__module__.startswith("torch."):
            made.step()
        return made
    except Exception as error:
        return error


TYPES = sorted({*DEEPSPEED_OPTIMIZERS, *OPTIMIZERS} - TAGGED - {"Adam", "AdamW", "Adagrad"})


@pytest.mark.parametrize("more", [{}, OFFLOADED], ids=["device", "host"])
@pytest.mark.parametrize("name", [*TYPES, "Optimizer", "lr_scheduler", "sgd", "None"])
def test_optimizers(name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    more = more | {"zero_allow_untested_optimizer": True}
    switches = [{}, {"torch_adam": True}, {"torch_adam": True, "adam_w_mode": False}]
    for params in [
        None,
        {"no_such_parameter": 1},
        {"fp32_optimizer_states": True},
        *(switch | {"amsgrad": True} for switch in switches[: 1 + 2 * ("adam" in name)]),
        *(
            switch | {key: value}
            for key, value in OPTIMIZER_PARAMS.items()
            for switch in switches[: 1 + 2 * ("adam" in name)]
        ),
    ]:
        config = {"optimizer": {"type": name, "params": params}, **more}
        agree(config, not isinstance(optimizer_of(config, monkeypatch), Exception))


@pytest.mark.parametrize("name", sorted({*TYPES} - NOT_IN_A_PIPELINE))
def test_optimizers_that_zero_supports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_utils.dist, "get_rank", lambda: 1)
    for more in (ZERO_1, OFFLOADED):
        config = {"optimizer": {"type": name}, **more}
        made = optimizer_of(config, monkeypatch)
        agree(config, zero_utils.is_zero_supported_optimizer(made))


def test_optimizers_that_depend_on_the_model_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal({"optimizer": {"type": "Muon", "params": {"muon_lr": 1}}}) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "mup" in str(refusal({"optimizer": {"type": "MuAdam"}}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert refusal({"optimizer": {"type": "MuAdam"}}) is None


@pytest.mark.parametrize("name", sorted(NOT_IN_A_PIPELINE))
def test_optimizers_that_need_more_than_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(optimizer_of({"optimizer": {"type": name}}, monkeypatch), Exception)
    error = str(refusal({"optimizer": {"type": name}}))
    assert error.startswith("optimizer.type: ") and f"(got '{name}'" in error


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"type": "Adamm"}, ("optimizer.type: ", "'Adamm'", "mean Adam?")),
        ({"type": "sgd"}, ("optimizer.type: ", "'sgd'", "mean SGD?")),
        ({"type": 3}, ("optimizer: ", "3")),
        ("AdamW", ("optimizer: ", "'AdamW'")),
        ({"type": "AdamW", "params": [1]}, ("optimizer.params: ", "[1]")),
        ({"type": "AdamW", "param": {}}, ("optimizer.param: ", "optimizer.params")),
        ({"type": "AdamW", "lr": 1}, ("optimizer.lr: ", "got 1", "optimizer.params")),
        ({"type": "AdamW", "params": {"learning_rate": 1}}, ("optimizer.params.learning_rate: ", "mean lr?")),
        ({"type": "AdamW", "params": {"fused": True}}, ("optimizer.params.fused: ", "torch_adam")),
        ({"type": "AdamW", "params": {"torch_adam": True, "bias_correction": True}}, ("bias_correction: ",)),
        ({"type": "SGD", "params": {"betas": [0.9, 0.9]}}, ("optimizer.params.betas: ", "SGD", "momentum")),
        ({"type": "Adam", "params": {"max_grad_norm": 2}}, ("max_grad_norm: ", "got 2", "gradient_clipping")),
        ({"type": "AdamW", "params": {"lr": -1}}, ("optimizer.params.lr: ", "got -1")),
        ({"type": "Lamb", "params": {"lr": "1e-3"}}, ("optimizer.params.lr: ", "got '1e-3'")),
        ({"type": "AdamW", "params": {"lr": float("nan")}}, ("optimizer.params.lr: ", "got nan")),
        ({"type": "SGD", "params": {"momentum": -1, "lr": 1}}, ("optimizer.params.momentum: ", "got -1")),
        (
            {"type": "AdamW", "params": {"weight_decay": None}},
            ("optimizer.params.weight_decay: ", "got None"),
        ),
        ({"type": "AdamW", "params": {"betas": [0.9, 1.0]}}, ("optimizer.params.betas: ", "got [0.9, 1.0]")),
        ({"type": "AdamW", "params": {"betas": 0.9}}, ("optimizer.params.betas: ", "got 0.9")),
        (
            {"type": "AdamW", "params": {"betas": [0.9, 0.9, 0.9]}},
            ("optimizer.params.betas: ", "2", "got [0.9"),
        ),
        ({"type": "SGD", "params": {"nesterov": True}}, ("optimizer.params.nesterov: ", "momentum")),
        (
            {"type": "AdamW", "params": {"amsgrad": True}},
            ("optimizer.params.amsgrad: ", "True", "torch_adam"),
        ),
        ({"type": "Lamb", "params": {"amsgrad": True}}, ("optimizer.params.amsgrad: ", "FusedLamb")),
    ],
)
def test_errors_in_optimizers(optimizer: Any, words: tuple[str, ...]) -> None:
    found = str(refusal({"optimizer": optimizer}))
    assert all(word in found for word in words), found


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "ADAMW", "params": {"lr": 1e-3, "torch_adam": True, "foreach": False}},
        {"type": "AdamW", "params": {"amsgrad": True, "torch_adam": True}},
        {"type": "AdamW", "params": {"amsgrad": False}},
        {"type": "AdamW", "params": None, "legacy_fusion": False},
        {"type": "AdamW", "params": {"lr": 1}, "comment": "mine"},
        {"type": "SGD", "params": {"momentum": 0.9, "nesterov": True}},
        {"type": "Adafactor", "params": {"eps": [None, 1e-3]}},
        {"type": None, "params": {"anything": 1}},
        {},
    ],
)
def test_optimizers_that_run(optimizer: dict[str, Any]) -> None:
    assert refusal({"optimizer": optimizer}) is None


def test_errors_name_the_flag() -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": -1.0, "eps": 1e-8}}}
    with pytest.raises(ConfigError, match=r"^--lr: .*got -1\.0"):
        check_deepspeed(config, {"optimizer.params.lr": "--lr -1.0"})


def test_sections_that_the_caller_replaces() -> None:
    config = {"optimizer": {"type": "Adamm"}, "scheduler": {"type": "Warmup"}}
    check_deepspeed(config, optimizer=False, scheduler=False)
    with pytest.raises(ConfigError, match=r"^scheduler\.type: "):
        check_deepspeed(config, optimizer=False)


# --- schedulers ------------------------------------------------------------------------------------------------------

OWN = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
SCHEDULERS = classes(lr_scheduler, lr_scheduler.LRScheduler) | OWN
SCHEDULER_PARAMS = signatures(SCHEDULERS.values())
NEEDED: dict[str, dict[str, Any]] = {
    "WarmupDecayLR": {"total_num_steps": 5000},
    "WarmupCosineLR": {"total_num_steps": 5000},
    "OneCycle": {"cycle_min_lr": 0, "cycle_max_lr": 1},
    "CosineAnnealingLR": {"T_max": 10},
    "CosineAnnealingWarmRestarts": {"T_0": 10},
    "CyclicLR": {"base_lr": 0, "max_lr": 1},
    "ExponentialLR": {"gamma": 0.9},
    "MultiStepLR": {"milestones": [1, 2, 3]},
    "OneCycleLR": {"max_lr": 1, "total_steps": 10},
    "StepLR": {"step_size": 1},
}


def runs(config: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed makes the scheduler of the JSON and steps it, without a loss."""
    engine = object.__new__(DeepSpeedEngine)
    engine.__dict__.update(_config=reading(config))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    try:
        scheduler = engine._scheduler_from_config(optimizer)
        scheduler.step(1)
        scheduler.step()
    except Exception:
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*SCHEDULERS, "LRScheduler", "WarmupCosine", "warmuplr", "Optimizer"])
def test_schedulers(name: str) -> None:
    needed = NEEDED.get(name, {})
    for params in [
        None,
        {},
        needed,
        {**needed, "no_such_parameter": 1},
        *({**needed, key: value} for key, value in SCHEDULER_PARAMS.items()),
        *({**needed, key: "text"} for key in (*needed, "gamma", "warmup_max_lr")),
        *({**needed, key: 0} for key in (*needed, "warmup_num_steps", "lr_range_test_step_size")),
    ]:
        config = {"scheduler": {"type": name, "params": params}}
        agree(config, runs(config))


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        ({"type": "WarmupCosine"}, ("scheduler.type: ", "'WarmupCosine'", "mean WarmupCosineLR?")),
        ({"type": "warmuplr"}, ("scheduler.type: ", "mean WarmupLR?")),
        (None, ("scheduler: ", "got None")),
        (
            {"type": "ReduceLROnPlateau", "params": {}},
            ("scheduler.type: ", "'ReduceLROnPlateau'", "WarmupLR"),
        ),
        ({"type": []}, ("scheduler.type: ",)),
        ({"type": "WarmupLR"}, ("scheduler.params: ", "got null")),
        (
            {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1}},
            ("scheduler.params: ", "total_num_steps"),
        ),
        ({"type": "OneCycle", "params": {}}, ("scheduler.params: ", "cycle_min_lr", "cycle_max_lr")),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, ("warmup_steps: ", "mean warmup_num_steps?")),
        ({"type": "WarmupLR", "params": {}, "warmup_min_lr": 1}, ("scheduler.warmup_min_lr: ", "got 1")),
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": -1}},
            ("scheduler.params.warmup_max_lr: ", "got -1"),
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
            ("scheduler.params.warmup_num_steps: ", "got 0"),
        ),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": "9"}},
            ("scheduler.params.total_num_steps: ", "got '9'"),
        ),
    ],
)
def test_errors_in_schedulers(scheduler: Any, words: tuple[str, ...]) -> None:
    found = str(refusal({"scheduler": scheduler}))
    assert all(word in found for word in words), found


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
def test_schedulers_that_run(scheduler: dict[str, Any], more: dict[str, Any]) -> None:
    assert refusal({"scheduler": scheduler, **more}) is None


@pytest.mark.parametrize("wrapped", [ZERO_1, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}])
def test_schedulers_of_torch_need_an_optimizer_of_torch(wrapped: dict[str, Any]) -> None:
    found = str(refusal({"scheduler": {"type": "StepLR", "params": {"step_size": 1}}, **wrapped}))
    assert found.startswith("scheduler.type: ") and "'StepLR'" in found and "WarmupCosineLR" in found
