"""Layers of a user: the lines of docs/own_scripts.md, plain modules with random start weights, all kinds of data."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.errors import ConfigError
from ds_ext.recipes.convert.export import export
from tests.engine_runs import digest
from tests.losses import learned
from tests.plans import batch_of
from tests.ranks import RankPool, Ranks

OWN_SCRIPTS = Path(__file__).parents[2] / "docs" / "own_scripts.md"


def job(schedule: str, gas: int) -> dict[str, Any]:
    return {
        **batch_of(schedule, gas),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2},
    }


class Squares(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sample i and its target, both functions of i."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(torch.arange(4.0) * (i + 1))
        return x, x.square()


def build(schedule: str, gas: int, training_data: Any = None, **kwargs: Any) -> Any:
    config = job(schedule, gas)
    layers = [spec for _ in range(4) for spec in (LayerSpec(nn.Linear, 4, 4), torch.tanh)]
    model = ds_ext.PipelineModule(
        layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform", **kwargs
    )
    engine, *_ = ds_ext.initialize(
        model=model, config=config, model_parameters=model.parameters(), training_data=training_data
    )
    return engine


def train_from_a_dataset(
    rank: int, schedule: str, gas: int, seed_layers: bool = True
) -> tuple[list[str], list[float]]:
    torch.manual_seed(rank)  # without layer seeds every rank draws other start weights
    engine = build(schedule, gas, Squares(), seed_layers=seed_layers)
    digests, losses = [digest(engine)], []
    for _ in range(3):
        losses.append(float(engine.train_batch()))
        digests.append(digest(engine))
    return digests, losses


def train_from_an_iterator(rank: int, schedule: str, gas: int) -> list[float]:
    engine = build(schedule, gas)
    data, mine, ranks = Squares(), engine.mpu.get_data_parallel_rank(), engine.dp_world_size

    def loader() -> Any:
        """What a DeepSpeed user has: the micro-batches of this data-parallel rank."""
        for step in range(3):
            for j in range(mine * gas, (mine + 1) * gas):
                first = (step * ranks * gas + j) * 2
                yield tuple(map(torch.stack, zip(data[first], data[first + 1], strict=True)))

    iterator = loader()
    losses = [float(engine.train_batch(iterator)) for _ in range(3)]
    with pytest.raises(ConfigError, match=r"^data_iter: .*got 0 on rank 0"):
        engine.train_batch(iterator)
    return losses


@pytest.mark.parametrize("world", [2, 4])
def test_random_start_weights_become_equal_on_replicas(ranks: Ranks, world: int) -> None:
    results = ranks(world).run(train_from_a_dataset, "bitpipe", 2, False)
    for moment in range(4):
        assert len({digests[moment] for digests, _ in results}) == 1
    assert len(set(results[0][0])) == 4
    assert results[0][1][-1] < results[0][1][0]


@pytest.mark.parametrize(("schedule", "gas", "world"), [("1f1b", 4, 2), ("1f1b", 2, 4), ("bitpipe", 2, 4)])
def test_a_dataset_and_an_iterator_over_it_are_the_same(
    ranks: Ranks, schedule: str, gas: int, world: int
) -> None:
    pool = ranks(world)
    from_dataset = pool.run(train_from_a_dataset, schedule, gas)
    from_iterator = pool.run(train_from_an_iterator, schedule, gas)
    pool.close()  # the iterator ended in the middle of a step
    assert [losses for _, losses in from_dataset] == from_iterator


def run_the_docs(rank: int, code: str, config: str) -> float:
    scope: dict[str, Any] = {"dataset": Squares(), "config": config}
    exec(code, scope)
    return float(scope["loss"])


def test_the_lines_of_the_docs(ranks2: RankPool, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", OWN_SCRIPTS.read_text(), re.DOTALL)
    code = next(block for block in blocks if "ds_ext.PipelineModule" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= 14
    losses = []
    for schedule, gas in (("bitpipe", 2), ("1f1b", 4), ("interleaved", 4)):
        config = tmp_path / f"{schedule}.json"
        config.write_text(json.dumps(job(schedule, gas)))
        losses += ranks2.run(run_the_docs, code, str(config))
    # The same start weights and samples, whatever the schedule.
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-6)
    assert losses[0] < 1


def rows() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*torch.rand(2, 150, 4, generator=generator))


def train_from(rank: int, code: str, config: dict[str, Any], folder: str) -> float:
    """Run the lines of the docs, which save their initial weights. Returns the last loss."""
    scope: dict[str, Any] = {"dataset": rows(), "config": config}
    exec(code.replace("metrics =", f"engine.save_checkpoint({folder!r})\nmetrics =", 1), scope)
    return float(scope["loss"])


def test_the_plain_process_of_the_docs(
    ranks2: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop in one process has the losses of the script, over more than an epoch."""
    pytest.importorskip("safetensors")
    page = OWN_SCRIPTS.read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script, plain = (next(b for b in blocks if word in b) for word in ("ds_ext.PipelineModule", "load_file"))
    config = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    config["ds_ext"]["pipeline_parallel_size"] = 2
    losses = ranks2.run(train_from, script, config, str(tmp_path / "start"))
    export(tmp_path / "start", tmp_path / "start_weights")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"dataset": rows()}
    exec(plain, scope)
    assert losses == pytest.approx([float(scope["loss"])] * 2, rel=1e-4)


def rates(rank: int, scheduler: dict[str, Any]) -> list[float]:
    config = job("1f1b", 2) | scheduler
    model = ds_ext.PipelineModule([nn.Linear(4, 4) for _ in range(2)], config, loss_fn=nn.functional.mse_loss)
    engine, *_ = ds_ext.initialize(model=model, config=config, training_data=Squares())
    found = []
    for _ in range(4):
        engine.train_batch()
        found.append(engine.step_lr)
    return found


def test_the_warmup_of_the_docs(ranks2: RankPool) -> None:
    block = re.search(r"```json\n(\s*\"scheduler\".*?)```", OWN_SCRIPTS.read_text(), re.DOTALL)
    assert block is not None
    for found in ranks2.run(rates, json.loads(f"{{{block[1]}}}")):
        assert found == pytest.approx([0.0, 0.0, 0.001, 0.002])  # of a rate of 0.1
    scheduler = json.loads(f"{{{block[1]}}}")
    scheduler["scheduler"]["params"]["warmup_min_ratio"] = 0.5
    assert ranks2.run(rates, scheduler)[0] == pytest.approx([0.0, 0.05, 0.0505, 0.051])


def build_wrongly(rank: int, what: str) -> str:
    config = job("bitpipe", 2)
    layers = [nn.Linear(4, 4) for _ in range(3 if what == "few layers" else 4)]
    if what == "no parameters":
        layers = [nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Tanh(), nn.Tanh()]
        config = job("1f1b", 2)
    method: Any = [0, 1, 2, 4] if what == "boundaries" else [0, 1, 1, 2, 4] if what == "empty" else "uniform"
    with pytest.raises(ConfigError) as caught:
        model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method=method)
        if what == "no data":
            engine, *_ = ds_ext.initialize(model=model, config=config, model_parameters=model.parameters())
            engine.train_batch()
        if what == "no parameters":
            ds_ext.initialize(model=model, config=config)
        if what == "another section":
            ds_ext.initialize(model=model, config=job("interleaved", 2))
        ds_ext.initialize(model=nn.Linear(4, 4) if what == "plain module" else model)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("few layers", "4 stages on 2 devices (got 3 layers)"),
        ("boundaries", "4 stages need 5 boundaries"),
        ("empty", "partition_method: stage 1 of 4"),
        ("no data", "data_iter: "),
        ("plain module", "model: must be a ds_ext.PipelineModule (got Linear)"),
        ("no parameters", "layers: the model has no trainable parameter"),
        ("another section", "ds_ext.schedule"),
    ],
)
def test_errors_tell_the_numbers(ranks2: RankPool, what: str, says: str) -> None:
    assert all(says in message for message in ranks2.run(build_wrongly, what))


def resize(rank: int, schedule: str, from_iterator: bool) -> tuple[list[float], float]:
    """Train with 2, 4, 4 and 2 micro-batches a data-parallel rank; a refused size in between changes nothing."""
    engine = build(schedule, 2, None if from_iterator else Squares())
    data, sizes, position = Squares(), [2, 4, 4, 2], 0
    mine, ranks = engine.mpu.get_data_parallel_rank(), engine.dp_world_size

    def loader() -> Any:
        start = 0
        for gas in sizes:
            for j in range(mine * gas, (mine + 1) * gas):
                first = start + j * 2
                yield tuple(map(torch.stack, zip(data[first], data[first + 1], strict=True)))
            start += gas * ranks * 2

    iterator = loader() if from_iterator else None
    losses = []
    for gas in sizes:
        engine.set_train_batch_size(gas * 2 * ranks)
        if schedule == "bitpipe":
            before = engine.gradient_accumulation_steps()
            with pytest.raises(ValueError):
                engine.set_train_batch_size(engine.train_batch_size() + 1)
            assert engine.gradient_accumulation_steps() == before
        losses.append(float(engine.train_batch(iterator)))
        position += gas * ranks * 2
    return losses, position


def plain_losses() -> list[float]:
    layers: list[nn.Module] = []
    for index in range(4):
        torch.manual_seed(1234 + 2 * index)  # PipelineModule seeds by the layer's index
        layers += [nn.Linear(4, 4), nn.Tanh()]
    model = nn.Sequential(*layers)
    sgd, data, position, losses = torch.optim.SGD(model.parameters(), lr=0.1), Squares(), 0, []
    for micro_batches in [4, 8, 8, 4]:
        samples = [data[position + i] for i in range(2 * micro_batches)]
        position += 2 * micro_batches
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sgd.step()
        sgd.zero_grad()
        losses.append(loss.item())
    return learned(losses)


@pytest.mark.parametrize("from_iterator", [False, True])
def test_the_batch_size_may_change_between_steps(ranks2: RankPool, from_iterator: bool) -> None:
    results = ranks2.run(resize, "bitpipe", from_iterator)
    for losses, _ in results:
        assert losses == pytest.approx(plain_losses(), rel=1e-5)


def refuse_a_size(rank: int) -> tuple[float, float]:
    """Gradient norms of a step after a refused size, and of the same step without it (D = 2, N must be even)."""
    norms = []
    for refused in (True, False):
        config = job("interleaved", 4)
        config["gradient_clipping"] = 0.0
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(4)]
        model = ds_ext.PipelineModule(
            layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
        engine, *_ = ds_ext.initialize(
            model=model, config=config, model_parameters=model.parameters(), training_data=Squares()
        )
        if refused:
            with pytest.raises(ConfigError, match="multiple of 2"):
                engine.set_train_batch_size(6)
        engine.train_batch()
        norms.append(float(engine.get_global_grad_norm()))
    return norms[0], norms[1]


def test_a_refused_batch_size_changes_nothing(ranks2: RankPool) -> None:
    for after, without in ranks2.run(refuse_a_size):
        assert after == without


class InPlace(nn.Module):
    """Starts with an operation in place and returns a tuple of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        (x,) = x if isinstance(x, tuple) else (x.clone(),)
        return (self.linear(x.mul_(1.5)),)


def last(x: Any) -> Tensor:
    return x[0].square().mean()


def train_in_place(rank: int, schedule: str) -> tuple[float, float]:
    """(loss, gradient norm) of a step whose stages begin in place, pass tuples of one, and whose output is the loss."""
    config = job(schedule, 2 if schedule == "bitpipe" else 4)
    torch.manual_seed(0)
    layers = [*(InPlace() for _ in range(4)), last]
    model = ds_ext.PipelineModule(
        layers, config, partition_method=[0, 1, 2, 3, 5] if schedule == "bitpipe" else [0, 2, 5]
    )
    engine, *_ = ds_ext.initialize(model=model, config=config, model_parameters=model.parameters())
    batches = iter([(Squares()[i][0].unsqueeze(0), None) for i in range(4)])
    if schedule == "bitpipe" and engine.mpu.get_data_parallel_rank() == 1:
        batches = itertools.islice(batches, 2, None)
    loss = float(engine.train_batch(batches))
    return loss, float(engine.get_global_grad_norm())


@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe"])
def test_stages_in_place_with_tuples_of_one_and_no_loss_function(ranks2: RankPool, schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(InPlace() for _ in range(4)))
    losses = [last(model(Squares()[i][0].unsqueeze(0))) for i in range(4)]
    torch.stack(losses).mean().backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    for found in ranks2.run(train_in_place, schedule):
        assert found == pytest.approx((torch.stack(losses).mean().item(), norm), rel=1e-5)


def recompute(rank: int, interval: int) -> tuple[float, float, int]:
    """(loss, norm, forwards of the counted layer) with activation checkpointing every ``interval`` layers."""
    config = job("bitpipe", 2)
    config["pipeline"] = {"activation_checkpoint_interval": interval, "use_reentrant": False}
    torch.manual_seed(0)
    calls: list[int] = []

    class Counted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(input)

    layers = [Counted(4, 4) for _ in range(8)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    engine, *_ = ds_ext.initialize(
        model=model, config=config, model_parameters=model.parameters(), training_data=Squares()
    )
    return float(engine.train_batch()), float(engine.get_global_grad_norm()), len(calls)


def test_activation_checkpointing_of_any_module(ranks2: RankPool) -> None:
    plain, recomputed = ranks2.run(recompute, 0), ranks2.run(recompute, 1)
    for (loss, norm, calls), (loss_again, norm_again, calls_again) in zip(plain, recomputed, strict=True):
        assert (loss, norm) == (loss_again, norm_again)
        assert calls_again == 2 * calls


def train_half_frozen(rank: int) -> list[bool]:
    config = job("bitpipe", 2)
    layers = [nn.Linear(4, 4) for _ in range(8)]
    for layer in layers[::2]:
        layer.requires_grad_(False)
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = ds_ext.initialize(
        model=model, config=config, model_parameters=trainable, training_data=Squares()
    )
    before = [p.detach().clone() for p in model.parameters()]
    engine.train_batch()
    return [p.requires_grad != torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]


def test_frozen_parameters_stay(ranks2: RankPool) -> None:
    for changed_as_expected in ranks2.run(train_half_frozen):
        assert all(changed_as_expected)
