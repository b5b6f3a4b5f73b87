"""Private names of other packages: a missing one stops the construction of the engine with its key."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from packaging.version import Version
from torch import nn

import ds_ext
from ds_ext.engine import PipelineEngine
from ds_ext.engine.deepspeed_api import names
from ds_ext.engine.deepspeed_api.names import NAMES, OVERRIDDEN, TESTED, PrivateName
from ds_ext.engine.grid import FoldedTopology, RoleGrid
from ds_ext.errors import ConfigError
from ds_ext.hf.weights import make_source
from ds_ext.tensor_parallel import weight_gradients
from tests.engine_runs import Job
from tests.precisions import is_supported, needs
from tests.ranks import Ranks

ROOT = Path(__file__).parents[2]
BATCH = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "ds_ext": {"print_plan": False}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "zero": {"zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}},
}
BUILT = [name for name in NAMES if name.kind in ("of objects", "of parameters")]
STATIC = [name for name in NAMES if name not in BUILT]


def module() -> ds_ext.PipelineModule:
    return ds_ext.PipelineModule(
        [LayerSpec(nn.Linear, 2, 2)], num_stages=1, loss_fn=nn.functional.mse_loss, config=BATCH
    )


def engine_of(**config: Any) -> PipelineEngine:
    model = module()
    config = {**BATCH, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, **config}
    return ds_ext.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def remove(patch: pytest.MonkeyPatch, name: PrivateName) -> None:
    """Remove the name from its owner, or rename it in the table if the owner is written in C or creates it anew."""
    owner = pkgutil.resolve_name(name.owner)
    if name.kind == "field":
        patch.delitem(owner.__annotations__, name.name)
        return
    removed = True
    try:
        for place in (owner,) if name.kind == "own" else getattr(owner, "__mro__", (owner, type(owner))):
            if name.name in vars(place):
                patch.delattr(place, name.name)
    except TypeError:
        removed = False
    if not removed or name.owner == "torch:ops.aten":
        renamed = replace(name, name=f"{name.name}_renamed")
        patch.setattr(names, "NAMES", [renamed if other == name else other for other in NAMES])


def build(package: str) -> None:
    if package == "transformers":
        make_source(nn.Module(), None)
    else:
        module()


def key_of_every_refusal(rank: int) -> dict[str, str]:
    """Return a dict of key -> error of the construction without the name."""
    errors = {}
    for name in STATIC:
        with pytest.MonkeyPatch.context() as patch:
            remove(patch, name)
            try:
                build(name.package)
            except ConfigError as error:
                errors[name.key] = str(error)
    return errors


@pytest.mark.quick
def test_the_engine_is_not_built_without_a_name_of_a_module_or_class(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    (errors,) = ranks(1).run(key_of_every_refusal)
    assert set(errors) == {name.key for name in STATIC}
    for name in STATIC:
        assert name.key in errors[name.key]
        assert f"=={TESTED[name.package]}" in errors[name.key]


def renamed_parameters_refused(rank: int) -> set[str]:
    """Return the keys of the callables that are refused if their parameters have other names."""
    refused: set[str] = set()
    for name in STATIC:
        if name.parameters is not None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pkgutil.resolve_name(name.owner), name.name, lambda renamed: None)
                with pytest.raises(ConfigError, match=re.escape(name.key)):
                    build(name.package)
                refused.add(name.key)
    return refused


@pytest.mark.quick
def test_a_callable_with_other_parameters_is_refused(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    (refused,) = ranks(1).run(renamed_parameters_refused)
    assert refused == {name.key for name in STATIC if name.parameters is not None} and len(refused) > 40


def refused_objects(rank: int) -> set[str]:
    """Return the keys that were refused after their removal from the objects of an engine."""
    refused: set[str] = set()
    for precision, section in PRECISIONS.items():
        if precision == "bf16" and not is_supported("bf16"):
            continue
        engine = engine_of(**section)
        assert isinstance(engine.optimizer, BF16_Optimizer if precision == "bf16" else DeepSpeedZeroOptimizer)
        scaler = DynamicLossScaler(2.0**16, 1000, 1.0, 1, False)
        owners = [engine, engine.module, engine.optimizer, scaler]
        names.require_built(*owners)
        weight = engine.module.stage_parameters(0)[0]
        for name in BUILT:
            for owner in (o for o in owners if isinstance(o, pkgutil.resolve_name(name.owner))):
                if owner is engine and name.owner != names.ENGINE:
                    continue  # DeepSpeed's engine has the attributes of its module
                target = weight if name.kind == "of parameters" else owner
                value = vars(target).pop(name.name)
                with pytest.raises(ConfigError) as caught:
                    names.require_built(*owners)
                assert name.key in str(caught.value), name.key
                vars(target)[name.name] = value
                refused.add(name.key)
    return refused


@pytest.mark.quick
def test_a_name_that_constructors_no_longer_set_is_refused(ranks: Ranks) -> None:
    (refused,) = ranks(1).run(refused_objects)
    expected = {name.key for name in BUILT if is_supported("bf16") or "bf16_optimizer" not in name.owner}
    assert refused == expected


def refused_while_building(rank: int, owner: str, name: str) -> str:
    entry = next(entry for entry in BUILT if entry.owner == owner and entry.name == name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "NAMES", [replace(entry, name="renamed") if e == entry else e for e in NAMES])
        with pytest.raises(ConfigError) as caught:
            engine_of(**PRECISIONS["bf16" if "bf16" in owner else "zero"])
    return str(caught.value)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (names.MODULE, "_layer_specs"),
        (names.ENGINE, "_step_applied"),
        (names.ZERO, "bit16_groups"),
        (names.ZERO, "_hp_mapping"),
        pytest.param(names.BF16, "fp32_groups_gradients", marks=needs("bf16")),
        (f"{names.SCALERS}:LossScalerBase", "cur_scale"),
    ],
)
def test_objects_are_checked_when_the_engine_is_built(ranks: Ranks, owner: str, name: str) -> None:
    (error,) = ranks(1).run(refused_while_building, owner, name)
    assert error.startswith(f"{owner.replace(':', '.')}.renamed")


def overridden(ours: list[type], parent: type) -> set[str]:
    """Return the attributes of DeepSpeed's class that our classes replace."""
    theirs = {name for c in parent.__mro__ if c.__module__.startswith("deepspeed.") for name in vars(c)}
    classes = {c for our in ours for c in our.__mro__ if c.__module__.startswith("ds_ext.")}
    return {name for c in classes for name in vars(c) if name in theirs and not name.startswith("__")}


@pytest.mark.quick
def test_every_overridden_method_is_listed() -> None:
    listed = {
        owner: {name.name for name in OVERRIDDEN if name.owner == owner}
        for owner in (names.ENGINE, names.MODULE)
    }
    assert listed[names.ENGINE] == overridden([ds_ext.engine.PipelineEngine], DeepSpeedPipelineEngine)
    assert listed[names.MODULE] == overridden([ds_ext.PipelineModule], DeepSpeedPipelineModule)


def fields_of_grids(rank: int) -> tuple[set[str], set[str]]:
    layout = Job("fbd", 2, 1, 1, 2, model=None).layout  # pyright: ignore[reportArgumentType]
    theirs = PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=2))
    return set(vars(RoleGrid(FoldedTopology(layout, layout.role(rank))))), set(vars(theirs))


@pytest.mark.quick
def test_the_grid_of_a_role_has_all_fields_of_deepspeeds(ranks4: Any) -> None:
    for ours, theirs in ranks4.run(fields_of_grids):
        # DeepSpeed's constructor is the only one to read these lists.
        assert theirs - ours == {"dp_groups", "pipe_groups"}


def defaults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every hasattr(x, "name") and getattr(x, "name", default)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            decides = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            if decides and isinstance(node.args[1], ast.Constant):
                yield node.lineno, str(node.args[1].value)


@pytest.mark.quick
def test_no_default_hides_a_missing_name() -> None:
    listed = {name.name for name in NAMES} | {"_hp_grad"}
    hidden = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / "ds_ext").rglob("*.py"))
        for line, name in defaults(ast.parse(path.read_text()))
        if name in listed
    ]
    assert hidden == []
    assert list(defaults(ast.parse('getattr(p, "_hp_grad", None), getattr(p, "x")'))) == [(1, "_hp_grad")]


@pytest.mark.quick
def test_the_constraints_are_tested_versions() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert all(Version(pinned[package]) <= Version(TESTED[package]) for package in TESTED.keys() - {"python"})


@pytest.mark.quick
@pytest.mark.parametrize(
    ("version", "lines"),
    [("99.0.1", 1), (f"{TESTED['torch']}+cu130", 0), ("2.6.0+cpu", 0), (TESTED["torch"], 0)],
)
def test_a_newer_version_is_named(version: str, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "package_version", {"torch": version}.get)
    found = names.untested_versions()
    assert len(found) == lines and all(version in line and TESTED["torch"] in line for line in found)


@pytest.mark.quick
def test_a_backward_without_torchs_private_function(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(3, requires_grad=True)
    for expected in (2.0, 4.0):
        weight_gradients.backward([weight * 2], [torch.ones(3)])
        assert weight.grad is not None and weight.grad.tolist() == [expected] * 3
        monkeypatch.setattr(weight_gradients, "_engine_run_backward", None)
