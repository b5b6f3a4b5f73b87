"""Buffers that layers change while they train: a micro-batch counts once, and replicas evaluate the same."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_ext
from ds_ext.engine import replica_buffers
from ds_ext.engine.checkpoint.file import read_plain
from tests.engine_runs import StepBatches
from tests.losses import learned
from tests.ranks import Ranks

STEPS, MICRO_BATCHES, LR, LAYERS = 2, 8, 0.1, 4
Case = tuple[
    str, int, int, int, dict[str, Any]
]  # schedule, PP, replicas, recomputed layers in a block, arguments
REENTRANT = {"activation_checkpoint_func": partial(checkpoint, use_reentrant=True)}
CASES: dict[int, list[Case]] = {
    2: [
        ("1f1b", 2, 1, 1, {}),
        ("1f1b", 2, 1, 2, REENTRANT),
        ("1f1b", 1, 2, 1, {}),
        ("zb_v", 2, 1, 1, {}),
        ("bitpipe", 2, 2, 0, {}),
        ("bitpipe_zb", 2, 2, 1, {}),
    ],
    4: [("fbd", 2, 1, 1, {})],
    6: [("fbd", 2, 2, 0, {"fbd": {"backward_per_forward": 2}})],
}


class Tracking(nn.Module):
    """Has running statistics that count in evaluations only, some assigned, and constants of any value."""

    mean: Tensor
    last: Tensor
    count: Tensor
    wave: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("wave", torch.zeros(4, dtype=torch.complex64))
        table = torch.tensor([1 / 3, float("inf"), -0.0, float("nan")], dtype=torch.float64)
        self.register_buffer("table", table)
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach()[0], alpha=0.1)
            self.last = self.last * 0.5 + x.detach()[1]
            self.count += 1
            self.wave += torch.complex(self.mean, self.last)
        else:
            x = x - self.mean + 0.01 * self.count
        return torch.tanh(self.linear(x))


def layers() -> list[Any]:
    return [LayerSpec(Tracking) for _ in range(LAYERS)]


def batches() -> StepBatches:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(MICRO_BATCHES, 2, 3, 4, generator=generator) + 1
    second = first + 0.1 * torch.randn(first.shape, generator=generator)
    return StepBatches([[tuple(pair) for pair in pairs] for pairs in (first, second, first)])


def train(rank: int, case: Case, folder: str) -> tuple[list[float], dict[int, dict[str, Tensor]], list[str]]:
    """Losses of the steps and of two evaluations, buffers by layer, and what the first step logs on rank 0."""
    schedule, pp, _, interval, options = case
    config = {
        "train_batch_size": 3 * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": pp, "print_plan": False},
    }
    arguments = {key: value for key, value in options.items() if key != "fbd"}
    config["ds_ext"] |= {key: value for key, value in options.items() if key == "fbd"}
    model = ds_ext.PipelineModule(
        layers(),
        config,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
        activation_checkpoint_interval=interval,
        **arguments,
    )
    engine: Any = ds_ext.initialize(model=model, config=config)[0]
    logged: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_buffers.logger, "warning", lambda _, names: logged.append(names))
        data = batches()
        losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    engine.save_checkpoint(folder, "end")
    losses += [float(engine.eval_batch(batches())) for _ in range(2)]
    found = {
        index: {name: buffer.clone() for name, buffer in layer.named_buffers()}
        for stage in model.stages
        for index, layer in model.stage_modules(stage).items()
    }
    engine.transport.close()
    return losses, found, logged


def in_one_process(replicas: int) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses and final buffers of the same steps; every replica has its own buffers until the end."""
    modules = []
    for index, spec in enumerate(layers()):
        torch.manual_seed(1234 + index)  # as the pipeline seeds each layer
        modules.append(spec.build())
    chain = nn.Sequential(*modules)
    optimizer, losses, data = torch.optim.SGD(chain.parameters(), lr=LR), [], batches()
    of_replicas = [{name: buffer.clone() for name, buffer in chain.named_buffers()} for _ in range(replicas)]

    def use(values: dict[str, Tensor]) -> None:
        for name, buffer in chain.named_buffers():
            buffer.copy_(values[name])

    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = []
        for j in range(MICRO_BATCHES):
            replica = j * replicas // MICRO_BATCHES
            use(of_replicas[replica])
            x, y = data.get(j)
            loss = nn.functional.mse_loss(chain(x), y) / MICRO_BATCHES
            loss.backward()
            parts.append(loss.item())
            of_replicas[replica] = {name: buffer.clone() for name, buffer in chain.named_buffers()}
        optimizer.step()
        losses.append(sum(parts))
        data.advance(MICRO_BATCHES)
    first = of_replicas[0]
    use(
        {
            name: torch.stack([values[name] for values in of_replicas]).mean(0)
            if name.endswith(("mean", "var", "last", "wave"))
            else first[name]
            for name in first
        }
    )
    chain.eval()
    data = batches()
    with torch.no_grad():
        pairs = [data.get(j) for j in range(MICRO_BATCHES)]
        evaluated = sum(float(nn.functional.mse_loss(chain(x), y)) / MICRO_BATCHES for x, y in pairs)
    return [*learned(losses), evaluated, evaluated], [dict(module.named_buffers()) for module in modules]


CHANGED = {"mean", "count", "wave", "last", *(f"norm.{name}" for name in ("running_mean", "running_var"))}


@pytest.mark.parametrize(
    ("world_size", "case"),
    [(size, case) for size, cases in CASES.items() for case in cases],
    ids=lambda value: "-".join(map(str, value[:4])) if isinstance(value, tuple) else None,
)
def test_buffers_count_each_micro_batch_once(
    ranks: Ranks, tmp_path: Path, world_size: int, case: Case
) -> None:
    replicas = case[2]
    losses, expected = in_one_process(replicas)
    results = ranks(world_size).run(train, case, str(tmp_path))
    holders: Counter[int] = Counter()
    for found_losses, of_layers, logged in results:
        assert found_losses == pytest.approx(losses, rel=1e-5)
        for index, found in of_layers.items():
            holders[index] += 1
            for name, value in expected[index].items():
                if case[0] == "fbd" and name == "last":
                    continue  # forward ranks do not get buffers that are not persistent
                torch.testing.assert_close(found[name], value, equal_nan=True, msg=f"{index} {name}")
            assert (
                found["table"].view(torch.int64).tolist()
                == expected[index]["table"].view(torch.int64).tolist()
            )
        assert not logged or results[0][2] == logged
    assert set(holders) == set(range(LAYERS))
    for index in range(LAYERS):
        saved = read_plain(tmp_path / "end" / f"layer_{index:02d}-model_states.pt")
        torch.testing.assert_close(saved["mean"], expected[index]["mean"])
        assert int(saved["count"]) == MICRO_BATCHES * STEPS // replicas
    logged = results[0][2]
    assert len(logged) == (replicas > 1)
    for line in logged:
        for index, part in enumerate(line.split("; ")):
            place, names = part.split(": ")
            assert f"layer {index} (Tracking)" == place
            assert set(names.split(", ")) == CHANGED | {"norm.num_batches_tracked"}
