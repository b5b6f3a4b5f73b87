"""Parameters that a script freezes or unfreezes between steps, against one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_ext
from ds_ext.engine.rank_state import RankState
from ds_ext.errors import ConfigError
from tests.ranks import Ranks
from tests.selection import covering

SIZE, LAYERS, SAMPLES, STEPS = 4, 8, 8, 5
LR, DECAY = 0.05, 0.5
# Step -> trained layers from then on. Those of step 0 are trained when the engine is built.
CHANGES: dict[str, dict[int, Iterable[int]]] = {
    "unfreeze": {0: range(4, 8), 2: range(8)},
    "freeze": {0: range(8), 2: range(4, 8)},
    "alternate": {step: range(step % 2, 8, 2) for step in range(STEPS)},
    "tied": {0: range(1, 7), 2: range(8)},
    "tied, frozen": {0: range(8), 2: range(1, 7)},
}


def make_layers(how: str) -> list[Any]:
    torch.manual_seed(0)
    layers: list[Any] = [nn.Linear(SIZE, SIZE) for _ in range(LAYERS)]
    if how.startswith("tied"):
        for end in (0, LAYERS - 1):
            layers[end] = TiedLayerSpec("end", nn.Linear, SIZE, SIZE, False)
    return layers


def set_trained(modules: dict[int, nn.Module], how: str, step: int) -> None:
    if step in CHANGES[how]:
        for index, layer in modules.items():
            layer.requires_grad_(index in CHANGES[how][step])


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(*torch.randn(2, SAMPLES * STEPS, SIZE, generator=generator))


def build(
    schedule: str,
    pp: int,
    options: dict[str, Any],
    zero: int,
    how: str,
    filtered: bool = False,
    first_step: int = 0,
) -> tuple[Any, dict[int, nn.Module]]:
    config = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": pp, "print_plan": False, **options},
    }
    layers = make_layers(how)
    set_trained({i: layer for i, layer in enumerate(layers) if isinstance(layer, nn.Module)}, how, first_step)
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    modules = {i: layer for stage in model.stages for i, layer in model.stage_modules(stage).items()}
    set_trained(modules, how, first_step)
    parameters = [p for p in model.parameters() if p.requires_grad or not filtered]
    engine, *_ = ds_ext.initialize(
        model=model, config=config, training_data=samples(), model_parameters=parameters
    )
    return engine, modules


def train_steps(
    engine: Any, modules: dict[int, nn.Module], how: str, steps: range
) -> list[tuple[float, float]]:
    losses = []
    for step in steps:
        if step:
            set_trained(modules, how, step)
        losses.append((float(engine.train_batch()), float(engine.get_global_grad_norm())))
    return losses


def train(
    rank: int, schedule: str, pp: int, options: dict[str, Any], how: str
) -> tuple[list[tuple[float, float]], dict[int, list[Tensor]]]:
    engine, modules = build(schedule, pp, options, 0, how)
    losses = train_steps(engine, modules, how, range(STEPS))
    engine.transport.close()
    return losses, {i: [p.detach() for p in layer.parameters()] for i, layer in modules.items()}


def reference(how: str) -> tuple[list[tuple[float, float]], dict[int, list[Tensor]]]:
    layers = make_layers(how)
    if how.startswith("tied"):
        torch.manual_seed(1234)  # the seed of layer 0
        layers[0] = layers[-1] = nn.Linear(SIZE, SIZE, False)
    modules, losses, data = dict(enumerate(layers)), [], samples()
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    for step in range(STEPS):
        set_trained(modules, how, step)
        x, y = data[step * SAMPLES : (step + 1) * SAMPLES]
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses.append((loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {i: [p.detach() for p in layer.parameters()] for i, layer in modules.items()}


JOBS = [
    ("1f1b", 2, {}, 1),
    ("1f1b", 2, {}, 2),
    ("bitpipe", 2, {}, 1),
    ("bitpipe", 2, {"eager_gradient_sync": False}, 1),
    ("zb_v", 2, {}, 2),
    ("1f1b", 1, {}, 2),
    ("zb_v", 2, {"overlap_across_steps": True}, 2),
    ("fbd", 2, {}, 2),
]


@pytest.mark.parametrize(
    ("schedule", "pp", "options", "dp", "how"),
    [(*job, how) for job, how in covering(product(JOBS, CHANGES), 1, lambda case: (str(case[0]), case[1]))],
)
def test_changed_parameters_train_as_in_one_process(
    ranks: Ranks, schedule: str, pp: int, options: dict[str, Any], dp: int, how: str
) -> None:
    expected, weights = reference(how)
    for losses, of_rank in ranks(pp * dp).run(train, schedule, pp, options, how):
        for found, one in zip(losses, expected, strict=True):
            assert found == pytest.approx(one, rel=1e-4)
        for index, found in of_rank.items():
            for tensor, one in zip(found, weights[index], strict=True):
                torch.testing.assert_close(tensor, one, rtol=1e-4, atol=1e-6)


# --- resume and recovery ---


def save(rank: int, folder: str) -> list[tuple[float, float]]:
    engine, modules = build("1f1b", 2, {}, 0, "unfreeze")
    train_steps(engine, modules, "unfreeze", range(3))
    engine.save_checkpoint(folder)
    return train_steps(engine, modules, "unfreeze", range(3, STEPS))


def resume(rank: int, folder: str, schedule: str, pp: int) -> list[tuple[float, float]]:
    engine, modules = build(schedule, pp, {}, 0, "unfreeze")
    engine.load_checkpoint(folder)
    set_trained(modules, "unfreeze", 2)
    return train_steps(engine, modules, "unfreeze", range(3, STEPS))


@pytest.mark.parametrize(("schedule", "pp"), [("bitpipe", 2), ("1f1b", 1)])
def test_a_resume_after_unfreezing(ranks: Ranks, tmp_path: Path, schedule: str, pp: int) -> None:
    expected = ranks(2).run(save, str(tmp_path))[0]
    for losses in ranks(2).run(resume, str(tmp_path), schedule, pp):
        for found, one in zip(losses, expected, strict=True):
            assert found == pytest.approx(one, rel=1e-5)


def save_before_a_change(rank: int, folder: str, schedule: str, pp: int, how: str) -> None:
    engine, modules = build(schedule, pp, {}, 1, how)
    train_steps(engine, modules, how, range(2))
    engine.save_checkpoint(folder)
    engine.transport.close()


def resume_with_a_change(
    rank: int, folder: str, schedule: str, pp: int, how: str
) -> list[tuple[float, float]]:
    engine, modules = build(schedule, pp, {}, 1, how, first_step=2)
    engine.load_checkpoint(folder)
    return train_steps(engine, modules, how, range(3, STEPS + 1))


@pytest.mark.parametrize("how", ["unfreeze", "freeze"])
@pytest.mark.parametrize(("schedule", "pp"), [("bitpipe", 2), ("1f1b", 1)])
def test_zero_resumes_with_other_trained_parameters(
    ranks: Ranks, tmp_path: Path, schedule: str, pp: int, how: str
) -> None:
    ranks(2).run(save_before_a_change, str(tmp_path), schedule, pp, how)
    for losses in ranks(2).run(resume_with_a_change, str(tmp_path), schedule, pp, how):
        for found, one in zip(losses, reference(how)[0][2:], strict=True):
            assert found == pytest.approx(one, rel=1e-4)


def recover(rank: int, how: str) -> tuple[list[Any], list[Any]]:
    """Return the losses after a snapshot, and those of new ranks that load it."""
    engine, modules = build("bitpipe", 2, {}, 0, how)
    train_steps(engine, modules, how, range(3))
    state = RankState(engine)
    snapshot = {name: t.clone() for name, t in state.tensors().items()}, copy.deepcopy(state.values())
    expected = train_steps(engine, modules, how, range(3, STEPS))
    engine.transport.close()
    engine, modules = build("bitpipe", 2, {}, 0, how)
    RankState(engine).load(*snapshot)
    set_trained(modules, how, 2)
    return expected, train_steps(engine, modules, how, range(3, STEPS))


@pytest.mark.parametrize("how", ["unfreeze", "freeze"])
def test_a_snapshot_has_all_parameters_that_were_trained(ranks: Ranks, how: str) -> None:
    for expected, losses in ranks(2).run(recover, how):
        assert losses == expected


# --- refusals ---


def error_of(rank: int, schedule: str, pp: int, zero: int, how: str, filtered: bool) -> str:
    """Return the error of a change, before which no warning is logged."""
    engine, modules = build(schedule, pp, {}, zero, how, filtered)
    warnings: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as caught:
        patch.setattr(
            logging.getLogger("ds_ext.engine.weights.gradients"), "warning", lambda *v: warnings.append(v)
        )
        train_steps(engine, modules, how, range(STEPS))
    assert engine.global_steps == 2 and not warnings
    return str(caught.value)


@pytest.mark.parametrize(("how", "flag"), [("unfreeze", True), ("freeze", False)])
@pytest.mark.parametrize(("schedule", "pp", "dp"), [("1f1b", 2, 1), ("bitpipe", 2, 1), ("1f1b", 1, 2)])
def test_zero_refuses_changes(ranks: Ranks, schedule: str, pp: int, dp: int, how: str, flag: bool) -> None:
    errors = ranks(pp * dp).run(error_of, schedule, pp, 1, how, False)
    assert all(error.startswith("0.weight, ") and f"(got {flag})" in error for error in errors)


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 2), ("bitpipe", 2), ("1f1b", 1)])
def test_a_parameter_that_the_optimizer_lacks_is_refused(ranks: Ranks, schedule: str, pp: int) -> None:
    errors = ranks(2).run(error_of, schedule, pp, 0, "unfreeze", True)
    assert all(error.startswith("0.weight, ") and "add_param_group" in error for error in errors)


def train_an_added_group(rank: int) -> list[tuple[float, float]]:
    engine, modules = build("bitpipe", 2, {}, 0, "unfreeze", filtered=True)
    losses = train_steps(engine, modules, "unfreeze", range(2))
    added = [p for p in engine.module.parameters() if not p.requires_grad]
    engine.optimizer.add_param_group({"params": added})
    return losses + train_steps(engine, modules, "unfreeze", range(2, STEPS))


def test_a_group_that_the_script_adds_is_trained(ranks: Ranks) -> None:
    for losses in ranks(2).run(train_an_added_group):
        for found, one in zip(losses, reference("unfreeze")[0], strict=True):
            assert found == pytest.approx(one, rel=1e-4)


def change_on_one_rank(rank: int, schedule: str, pp: int, index: int) -> str:
    engine, modules = build(schedule, pp, {}, 0, "unfreeze")
    engine.train_batch()
    if rank == 0:
        modules[index].requires_grad_(not next(modules[index].parameters()).requires_grad)
    with pytest.raises(ConfigError) as caught:
        engine.train_batch()
    return str(caught.value)


@pytest.mark.parametrize("index", [0, 7])
@pytest.mark.parametrize(("schedule", "pp"), [("bitpipe", 2), ("1f1b", 1)])
def test_replicas_that_differ_are_refused(ranks: Ranks, schedule: str, pp: int, index: int) -> None:
    for error in ranks(2).run(change_on_one_rank, schedule, pp, index):
        assert error.startswith(f"{index}.weight: ") and "on rank 0" in error and "on rank 1" in error


def unfreeze_an_untied_bias(rank: int) -> str:
    layers: list[Any] = [nn.Linear(SIZE, SIZE) for _ in range(LAYERS)]
    layers[0] = layers[-1] = TiedLayerSpec("end", FrozenBias)
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "ds_ext": {"print_plan": False}}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = ds_ext.PipelineModule(layers, config, num_stages=2, loss_fn=nn.functional.mse_loss)
    engine, *_ = ds_ext.initialize(model=model, training_data=samples())
    engine.train_batch()
    model.requires_grad_(True)
    with pytest.raises(ConfigError) as caught:
        engine.train_batch()
    return str(caught.value)


class FrozenBias(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.bias.requires_grad_(False)


def test_an_untied_parameter_of_a_tie_stays_frozen(ranks: Ranks) -> None:
    for error in ranks(2).run(unfreeze_an_untied_bias):
        assert error.startswith("tied_weight_attr: ") and "'end'" in error
