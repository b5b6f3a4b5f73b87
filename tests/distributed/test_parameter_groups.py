"""Parameter groups that are empty on some ranks, and optimizers whose step needs a closure."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import ds_ext
from ds_ext.engine.rank_state import RankState
from ds_ext.errors import ConfigError
from ds_ext.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    create_tensor_parallel,
    is_sharded,
)
from tests.precisions import needs
from tests.ranks import Ranks

SIZE, STEPS, RATES = 4, 3, [0.01, 0.03, 0.02]
OWN = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}}


class Layer(nn.Module):
    """Layer in the dtype of its weight. Only those with ``bias`` have vectors."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype))


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.float() - labels.float()).square().mean()


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return vectors, which the first layers lack, nothing, and matrices."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    vectors, matrices = ([p for p in parameters if (p.dim() < 2) is small] for small in (True, False))
    lists = vectors, [], matrices
    return [{"params": params, "lr": lr} for params, lr in zip(lists, RATES, strict=True)]


def make_layers() -> list[Any]:
    return [LayerSpec(Layer, i >= 6) for i in range(8)]


def samples() -> TensorDataset:
    return TensorDataset(*torch.randn(2, 64, SIZE, generator=torch.Generator().manual_seed(0)))


def factors(step: int, base: float = 1.0) -> float:
    return base / (1 + step)


def make_scheduler(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, [functools.partial(factors, base=base) for base in (1.0, 2.0, 3.0)])


def config_of(schedule: str, zero: int, precision: str, pp: int = 2, **keys: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": pp, "print_plan": False},
        **keys,
    }


def build(how: str, config: dict[str, Any]) -> Any:
    keys = OWN if how == "JSON" else {}
    model = ds_ext.PipelineModule(
        make_layers(), {**config, **keys}, loss_fn=squared_error, partition_method="uniform"
    )
    arguments: dict[str, Any] = {"model_parameters": groups_of(model)}
    if how == "object":
        optimizer = torch.optim.AdamW(groups_of(model))
        arguments = {"optimizer": optimizer, "lr_scheduler": make_scheduler(optimizer)}
    elif how == "callable":
        arguments = {"optimizer": lambda parameters: torch.optim.AdamW(groups_of(model))}
    if "scheduler" not in config:
        arguments.setdefault("lr_scheduler", make_scheduler)
    return ds_ext.initialize(model=model, training_data=samples(), **arguments)[0]


Numbers = tuple[float, float, list[float], list[float]]


def train(rank: int, how: str, config: dict[str, Any]) -> list[Numbers]:
    """Return loss, norm, ``get_lr()`` and the rates of the groups, in every step."""
    engine, rows = build(how, config), []
    for _ in range(STEPS):
        loss, norm = float(engine.train_batch()), float(engine.get_global_grad_norm())
        groups = engine.optimizer.param_groups if engine.optimizer is not None else ()
        rows.append((loss, norm, engine.get_lr(), [group["lr"] for group in groups]))
    assert all(name.split(".")[0].isdigit() for name, _ in engine.module.named_parameters())
    assert sum(rank["parameters"] for rank in engine.run_facts["ranks"]) % engine.run_facts["parameters"] == 0
    engine.transport.close()
    return rows


def reference(with_scheduler: Callable[[Any], Any] = make_scheduler) -> list[Numbers]:
    layers, data, rows = [], samples(), []
    for index in range(8):
        torch.manual_seed(1234 + index)
        layers.append(Layer(index >= 6))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(groups_of(model))
    scheduler = with_scheduler(optimizer)
    for step in range(STEPS):
        x, y = data[8 * step : 8 * step + 8]
        loss = squared_error(model(x), y)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates = [group["lr"] for group in optimizer.param_groups]
        rows.append((loss.item(), norm, rates, rates))
    return rows


def require_equal(rows: list[Numbers], expected: list[Numbers], tolerance: float) -> None:
    for (loss, norm, rates, of_groups), one in zip(rows, expected, strict=True):
        assert (loss, norm) == pytest.approx(one[:2], rel=tolerance)
        assert rates == pytest.approx(one[2])
        assert of_groups in ([], rates)  # a forward rank has no optimizer


JOBS = [("1f1b", 2, 1), ("1f1b", 2, 2), ("bitpipe", 2, 1), ("zb_v", 2, 1)]


@pytest.mark.parametrize("how", ["JSON", "object", "callable"])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("schedule", "pp", "dp"), JOBS)
def test_groups_have_their_positions(
    ranks: Ranks, schedule: str, pp: int, dp: int, zero: int, how: str
) -> None:
    for rows in ranks(pp * dp).run(train, how, config_of(schedule, zero, "fp32", pp)):
        require_equal(rows, reference(), 1e-4)


@needs("bf16")
@pytest.mark.parametrize("how", ["JSON", "object", "callable"])
def test_groups_of_half_precision(ranks: Ranks, how: str) -> None:
    for rows in ranks(2).run(train, how, config_of("1f1b", 1, "bf16")):
        require_equal(rows, reference(), 0.05)


def test_forward_ranks_have_the_rates_of_all_groups(ranks: Ranks) -> None:
    results = ranks(4).run(train, "JSON", config_of("fbd", 0, "fp32"))
    for rows in results:
        require_equal(rows, reference(), 1e-4)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_momentum": False}},
        {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": [0.01, 0.03, 0.02]}},
        {"type": "WarmupLR", "params": {"warmup_max_lr": [0.01, 0.03, 0.02], "warmup_num_steps": 5}},
    ],
)
def test_schedulers_of_the_json_have_all_groups(ranks: Ranks, scheduler: dict[str, Any]) -> None:
    results = ranks(2).run(train, "JSON", config_of("1f1b", 1, "fp32", scheduler=scheduler))
    assert results[0] == results[1]
    assert all(len(rates) == len(RATES) for _, _, rates, _ in results[0])


def save_and_resume(rank: int, folder: str, zero: int, load: bool, schedule: str, pp: int) -> list[Any]:
    """Train, with rates that the script sets before it saves. Returns losses and rates."""
    engine = build(
        "JSON", config_of(schedule, zero, "fp32", pp, scheduler={"type": "WarmupLR", "params": {}})
    )
    engine.lr_scheduler = None
    if load:
        engine.load_checkpoint(folder)
    else:
        for step, group in enumerate(engine.optimizer.param_groups):
            group["lr"] = 0.05 * (step + 1)
        engine.train_batch()
        engine.save_checkpoint(folder)
    return [engine.get_lr(), float(engine.train_batch()), float(engine.train_batch())]


@pytest.mark.parametrize("zero", [0, 1])
def test_a_resume_with_other_sizes_keeps_the_rates(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    expected = ranks(2).run(save_and_resume, str(tmp_path), zero, False, "1f1b", 1)
    rates, *losses = expected[0]
    for schedule in ("1f1b", "bitpipe"):
        for found, *after in ranks(2).run(save_and_resume, str(tmp_path), zero, True, schedule, 2):
            assert found[::2] == rates[::2] == [0.05, pytest.approx(0.15)]
            assert after == pytest.approx(losses, rel=1e-4)


MUON = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.1, "torch_adam": True}}


def build_with_muon(config: dict[str, Any], layers: list[Any], frozen: str = "none") -> Any:
    config = {**config, "optimizer": MUON}
    model = ds_ext.PipelineModule(layers, config, loss_fn=squared_error, partition_method="uniform")
    for name, parameter in model.named_parameters():
        parameter.use_muon = parameter.dim() > 1 and not is_sharded(parameter)  # pyright: ignore[reportAttributeAccessIssue]
        parameter.requires_grad_(name.split(".")[0] != frozen)
    return ds_ext.initialize(model=model, training_data=samples())[0]


def train_eagerly(engine: Any, steps: int = STEPS) -> list[float]:
    torch.compiler.set_stance("force_eager")
    losses = [float(engine.train_batch()) for _ in range(steps)]
    torch.compiler.set_stance("default")
    return losses


def train_with_muon(rank: int, zero: int, pp: int) -> tuple[list[float], list[tuple[str, float]]]:
    """Return losses and norm, and names and rates of the groups. The first stages have matrices only."""
    engine = build_with_muon(config_of("1f1b", zero, "fp32", pp), make_layers())
    losses = train_eagerly(engine)
    engine.transport.close()
    groups = [(group["name"], group["lr"]) for group in engine.optimizer.param_groups]
    return [*losses, float(engine.get_global_grad_norm())], groups


@pytest.mark.parametrize("zero", [0, 1])
def test_all_ranks_have_both_halves_of_muons_groups(ranks: Ranks, zero: int) -> None:
    ((expected, halves),) = ranks(1).run(train_with_muon, zero, 1, timeout_s=120)
    assert halves == [("muon-params", 0.02), ("adam-params", 0.1)]
    for losses, groups in ranks(2).run(train_with_muon, zero, 2, timeout_s=120):
        assert groups == halves and losses == pytest.approx(expected, rel=1e-3)


class Words(nn.Module):
    """Layer in the place of an embedding or a head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Positions(nn.Module):
    """Layer that adds the row of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table.weight


def layers_for_muon(kind: str) -> list[Any]:
    """Return nine layers with hidden layers 3 to 6. The first and the last are functions."""
    first, last = LayerSpec(Words), LayerSpec(Words)
    second: list[Any] = [LayerSpec(Positions), *(LayerSpec(Layer, True) for _ in range(4))]
    if kind == "tied":
        first = second[-1] = TiedLayerSpec("words", Words)
    if kind == "functions":  # on the first device
        return [*[torch.tanh] * 4, first, *second[-2:], last, torch.tanh]
    return [torch.tanh, first, *second, last, torch.tanh]


def train_with_tags(rank: int, kind: str, schedule: str, pp: int) -> tuple[dict[str, bool], list[float]]:
    """Return name -> whether Muon trains it, of this rank, and losses."""
    config = {**config_of(schedule, 0, "fp32", pp), "optimizer": MUON}
    model = ds_ext.PipelineModule(
        layers_for_muon(kind), config, loss_fn=squared_error, partition_method="uniform"
    )
    if kind == "by the script":
        for parameter in (p for name, p in model.named_parameters() if name == "1.weight"):
            parameter.use_muon = True  # pyright: ignore[reportAttributeAccessIssue]
    engine = ds_ext.initialize(model=model, training_data=samples())[0]
    losses = train_eagerly(engine)
    engine.transport.close()
    halves = {id(p): group["use_muon"] for group in engine.optimizer.param_groups for p in group["params"]}
    return {name: halves[id(p)] for name, p in engine.module.named_parameters()}, losses


MUON_TRAINS: dict[str, set[str]] = {
    "untied": {"3.linear.weight", "4.linear.weight", "5.linear.weight", "6.linear.weight"},
    "tied": {"3.linear.weight", "4.linear.weight", "5.linear.weight"},
    "functions": {"5.linear.weight", "6.linear.weight"},
    "by the script": {"1.weight"},
}


@pytest.mark.parametrize(
    ("kind", "schedule"), [*((kind, "1f1b") for kind in MUON_TRAINS), ("untied", "bitpipe")]
)
def test_muon_trains_the_matrices_of_hidden_layers(ranks: Ranks, kind: str, schedule: str) -> None:
    ((tags, expected),) = ranks(1).run(train_with_tags, kind, "1f1b", 1, timeout_s=120)
    assert {name for name, tag in tags.items() if tag} == MUON_TRAINS[kind]
    for of_rank, losses in ranks(2).run(train_with_tags, kind, schedule, 2, timeout_s=120):
        assert of_rank.items() <= tags.items() | {("placeholder_0", False)}
        assert losses == pytest.approx(expected, rel=1e-3)


def unclipped(schedule: str, zero: int, pp: int) -> dict[str, Any]:
    """Return a job. With ZeRO, DeepSpeed's Muon clips what it has orthogonalized, and without, the gradients."""
    return config_of(schedule, zero, "fp32", pp, gradient_clipping=0.0)


def train_unclipped(rank: int, zero: int) -> list[float]:
    return train_eagerly(build_with_muon(unclipped("1f1b", zero, 1), make_layers()))


def test_muon_trains_vectors_with_adam_as_zero_does(ranks: Ranks) -> None:
    plain, with_zero = (ranks(1).run(train_unclipped, zero, timeout_s=120)[0] for zero in (0, 1))
    assert plain == pytest.approx(with_zero, rel=1e-4)


def save_with_muon(rank: int, folder: str, schedule: str, pp: int) -> list[float]:
    """Save in the middle of a run. With 7 matrices, two data-parallel ranks have a part of one."""
    engine = build_with_muon(unclipped(schedule, 1, pp), make_layers(), frozen="2")
    train_eagerly(engine)
    engine.save_checkpoint(folder)
    return train_eagerly(engine)


def resume_with_muon(rank: int, folder: str, schedule: str, zero: int, pp: int) -> tuple[list[float], ...]:
    """Return the losses after a load, and those of an engine with a snapshot of it."""
    config, results = unclipped(schedule, zero, pp), []
    engine = build_with_muon(config, make_layers(), frozen="2")
    engine.load_checkpoint(folder)
    state = RankState(engine)
    tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
    values = copy.deepcopy(state.values())
    results.append(train_eagerly(engine))
    engine.transport.close()
    engine = build_with_muon(config, make_layers(), frozen="2")
    RankState(engine).load(tensors, values)
    results.append(train_eagerly(engine))
    return tuple(results)


@pytest.mark.parametrize("saved", [("1f1b", 1), ("bitpipe", 2)])
def test_zero_resumes_the_momentum_of_muon(ranks: Ranks, tmp_path: Path, saved: tuple[str, int]) -> None:
    expected = ranks(2).run(save_with_muon, str(tmp_path), *saved, timeout_s=120)[0]
    for schedule, zero, pp in (("1f1b", 1, 1), ("bitpipe", 1, 2), ("1f1b", 0, 2)):
        job = str(tmp_path), schedule, zero, pp
        for loaded, from_snapshot in ranks(2).run(resume_with_muon, *job, timeout_s=120):
            assert loaded == pytest.approx(expected, rel=1e-3) and from_snapshot == loaded


def sharded_layers(size: int) -> list[Any]:
    groups: Any = create_tensor_parallel([[0, 1]]) if size > 1 else TensorParallel()
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(SIZE, SIZE, generator=generator) for _ in range(2)]
    up, down = (functools.partial(Tensor.copy_, other=weight) for weight in weights)
    columns = LayerSpec(ColumnParallelLinear, SIZE, SIZE, groups, init=up)
    rows = LayerSpec(RowParallelLinear, SIZE, SIZE, groups, init=down)
    return [LayerSpec(Layer, True), columns, rows, LayerSpec(Layer, True)]


def train_shards(rank: int, zero: int, size: int) -> list[float]:
    sizes = {
        "schedule": "1f1b",
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": size,
        "print_plan": False,
    }
    config = config_of("1f1b", zero, "fp32", ds_ext=sizes)
    return train_eagerly(build_with_muon(config, sharded_layers(size)))


@pytest.mark.parametrize("zero", [0, 1])
def test_adam_trains_shards_beside_muon(ranks: Ranks, zero: int) -> None:
    (expected,) = ranks(1).run(train_shards, zero, 1, timeout_s=120)
    for losses in ranks(2).run(train_shards, zero, 2, timeout_s=120):
        assert losses == pytest.approx(expected, rel=1e-3)


def error_of_shards(rank: int, how: str, zero: int) -> str:
    sizes = {"schedule": "1f1b", "pipeline_parallel_size": 1, "tensor_parallel_size": 2, "print_plan": False}
    config = {
        **config_of("1f1b", zero, "fp32", ds_ext=sizes),
        **({} if how == "object" else {"optimizer": MUON}),
    }
    model = ds_ext.PipelineModule(sharded_layers(2), config, loss_fn=squared_error)
    for parameter in model.parameters() if how != "untagged" else ():
        parameter.use_muon = parameter.dim() > 1  # pyright: ignore[reportAttributeAccessIssue]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    optimizer: Any = torch.optim.Muon(matrices) if how == "object" else None
    with pytest.raises(ConfigError) as caught:
        ds_ext.initialize(model=model, optimizer=optimizer, training_data=samples())
    return str(caught.value)


@pytest.mark.parametrize(("how", "zero"), [("JSON", 0), ("JSON", 1), ("object", 0)])
def test_muon_refuses_shards(ranks: Ranks, how: str, zero: int) -> None:
    for error in ranks(2).run(error_of_shards, how, zero):
        assert error.startswith("optimizer.type: ") and "tensor_parallel_size 2" in error
        assert " 1.weight" in error and "use_muon" in error


@pytest.mark.parametrize("zero", [0, 1])
def test_muon_without_a_whole_matrix_is_refused(ranks: Ranks, zero: int) -> None:
    """Adam would train all of the model, because the layers at both ends are Adam's."""
    for error in ranks(2).run(error_of_shards, "untagged", zero):
        assert error.startswith("optimizer.type: ") and "2 matrices" in error


# --- optimizers whose step needs a closure ---


class Lookahead(torch.optim.Optimizer):
    """Optimizer that passes its step on."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.inner.step(closure)


def error_of_lbfgs(rank: int, how: str, schedule: str) -> str:
    config = config_of(schedule, 0, "fp32")
    if how == "JSON":
        config["optimizer"] = {"type": "LBFGS", "params": {"lr": 0.1}}
    model = ds_ext.PipelineModule(make_layers(), config, loss_fn=squared_error)
    optimizer: Any = None
    if how in ("object", "wrapped"):
        optimizer = torch.optim.LBFGS(model.parameters())
    if how == "wrapped":
        optimizer = Lookahead(optimizer)
    if how == "callable":
        optimizer = torch.optim.LBFGS
    with pytest.raises(ConfigError) as caught:
        ds_ext.initialize(model=model, optimizer=optimizer, training_data=samples())
    return str(caught.value)


@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe"])
@pytest.mark.parametrize("how", ["JSON", "object", "callable", "wrapped"])
def test_an_optimizer_that_needs_a_closure_is_refused(ranks: Ranks, how: str, schedule: str) -> None:
    for error in ranks(2).run(error_of_lbfgs, how, schedule):
        assert error.startswith("optimizer") and "LBFGS" in error and "closure" in error


def test_forward_ranks_report_the_refusal_of_backward_ranks(ranks: Ranks) -> None:
    for error in ranks(4).run(error_of_lbfgs, "callable", "fbd"):
        assert "LBFGS" in error
