"""Forward ranks with layers of a user's own: slow ones, such as keep buffers, and those of the benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ext.comm.groups import limit_waits
from ds_ext.engine import PipelineModule, initialize
from ds_ext.errors import ConfigError
from tests.engine_runs import StepBatches
from tests.losses import learned
from tests.ranks import Ranks
from tests.selection import extensive


class Slow(nn.Linear):
    """Takes its time."""

    def forward(self, input: Tensor) -> Tensor:
        time.sleep(0.3)
        return super().forward(input)


def train_slowly(rank: int, limit_s: float) -> tuple[float, float, float]:
    """A step and an evaluation with a limit of so many seconds; how long the step took."""
    section = {"schedule": "fbd", "pipeline_parallel_size": 2}
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
        "ds_ext": section,
    }
    model = PipelineModule([Slow(2, 2), Slow(2, 2)], config, loss_fn=nn.MSELoss(), partition_method="uniform")
    engine, *_ = initialize(model=model, config=config)
    engine.transport.timeout_s = limit_s  # pyright: ignore[reportAttributeAccessIssue]
    limit_waits(limit_s)
    data = StepBatches([[(torch.ones(1, 2), torch.zeros(1, 2))] * 8] * 2)
    started = time.monotonic()
    loss = float(engine.train_batch(data))
    took = time.monotonic() - started
    evaluated = float(engine.eval_batch(data))
    engine.transport.close()
    return loss, evaluated, took


def test_a_step_may_take_longer_than_a_message(ranks: Ranks) -> None:
    """The last stage's forward rank computes nothing in a step, and backward ranks nothing in an evaluation."""
    limit_s = 2.0
    results = ranks(4).run(train_slowly, limit_s, timeout_s=60)
    assert len({(loss, evaluated) for loss, evaluated, _ in results}) == 1
    assert all(evaluated < loss for loss, evaluated, _ in results)
    assert min(took for *_, took in results) > limit_s


def train_in_double(rank: int) -> list[float]:
    """Two steps of layers with fp64 weights."""
    config = {
        **{"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0},
        **{"steps_per_print": 10**9, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
        "ds_ext": {"schedule": "fbd", "pipeline_parallel_size": 2},
    }
    model = PipelineModule(doubles(), config, loss_fn=nn.MSELoss(), partition_method="uniform")
    engine, *_ = initialize(model=model, config=config)
    data = StepBatches([ROWS] * 2)
    losses = [float(engine.train_batch(data)) for _ in range(2)]
    engine.transport.close()
    return losses


ROWS = [(torch.full((1, 2), 1 / n, dtype=torch.float64), torch.zeros(1, 2).double()) for n in (3, 7)]


def doubles() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(2, 2, dtype=torch.float64) for _ in range(2)]


def test_weights_in_double_stay_so_on_forward_ranks(ranks: Ranks) -> None:
    layers = nn.Sequential(*doubles())
    optimizer, expected = torch.optim.SGD(layers.parameters(), 0.1), []
    for _ in range(2):
        loss = torch.stack([nn.functional.mse_loss(layers(x), y) for x, y in ROWS]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in ranks(4).run(train_in_double):
        assert losses == pytest.approx(learned(expected), rel=1e-6)


class Counting(nn.Linear):
    """Has a running mean of its inputs, as batch normalisation has, and takes it off."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(input.detach().mean(0), alpha=0.1)
            self.seen.add_(1)
        return super().forward(input - self.mean)


def train_own_layers(rank: int) -> dict[str, Any]:
    """Two backward pipelines from one iterator, of batches that change their size; what evaluations make of buffers."""
    section = {"schedule": "fbd", "pipeline_parallel_size": 2, "fbd": {"backward_per_forward": 2}}
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
        "ds_ext": section,
    }
    model = PipelineModule([Counting(), Counting()], config, loss_fn=nn.MSELoss(), partition_method="uniform")
    engine, *_ = initialize(model=model, config=config)
    pipe, pipes = engine.mpu.get_data_parallel_rank(), 1 if model.role_name == "forward" else 2
    sizes = [2, 3, 3]  # micro-batches of a backward pipeline in a step

    def batches() -> Iterator[Any]:
        first = 0
        for each in sizes:
            mine = range(2 * each) if pipes == 1 else range(pipe * each, (pipe + 1) * each)
            yield from ((torch.full((1, 2), 0.1 * (first + m)), torch.ones(1, 2)) for m in mine)
            first += 2 * each

    data = batches()
    losses = [float(engine.train_batch(data))]
    refusals = []
    for size in (5, 7):  # not as many for both pipelines
        with pytest.raises(ValueError, match=r"divisible|multiple of 2"):
            engine.set_train_batch_size(size)
        refusals.append(engine.train_batch_size())
    engine.set_train_batch_size(6)
    losses.append(float(engine.train_batch(data)))
    point = [(torch.ones(1, 2), torch.zeros(1, 2))] * 2
    evaluated = float(engine.eval_batch(StepBatches([point]), num_micro_batches=1))
    losses.append(float(engine.train_batch(data)))
    ended = ""
    if rank == 0:
        with pytest.raises(ConfigError) as error:
            engine.batches.get(0)  # pyright: ignore[reportOptionalMemberAccess]
        ended = str(error.value)
    layer = engine.module.stage_funcs[model.stages[0]][0]
    assert isinstance(layer, Counting)
    engine.transport.close()
    return {
        "losses": losses,
        "refusals": refusals,
        "evaluated": evaluated,
        "buffers": [layer.mean.tolist(), int(layer.seen)],
        "stage": model.stages[0],
        "samples": engine.global_samples,
        "ended": ended,
    }


def test_own_layers_with_buffers_and_an_iterator(ranks: Ranks) -> None:
    """Forward ranks get buffers too, whose last stage computes nothing in training."""
    results = ranks(6).run(train_own_layers, timeout_s=60)
    assert all(result["losses"] == results[0]["losses"] for result in results)
    assert {result["evaluated"] for result in results} == {results[0]["evaluated"]}
    assert all(result["refusals"] == [4, 4] and result["samples"] == 16 for result in results)
    for stage in range(2):
        forward, first, _ = [result["buffers"] for result in results if result["stage"] == stage]
        assert forward == first and first[1] == 8 and first[0] != [0.0, 0.0]
    ended = results[0]["ended"]
    assert ended.startswith("data_iter: ") and "6 micro-batches" in ended and "(got 0)" in ended


@extensive
def test_the_benchmark() -> None:
    """No step can be shorter than the waiting of its layers, which the simulation adds up."""
    command = [sys.executable, "-m", "ds_ext", "bench", "fbd", "--json", "--steps", "1", "--forward-ms", "2"]
    done = subprocess.run([*command, "--cases", "merged"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)
    assert (found["name"], found["unit"], found["repeats"], found["params"]["ranks"]) == (
        "merged",
        "ms",
        1,
        6,
    )
    assert found["params"]["simulated"] == 28 * 2 <= found["best"] == found["median"]
    wrong = subprocess.run([*command, "--cases", "x"], capture_output=True, text=True, timeout=900)
    assert wrong.returncode == 2 and "--cases" in wrong.stderr and "plain_48" in wrong.stderr
