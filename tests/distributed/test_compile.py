"""``engine.compile()`` compiles the layers of every schedule, and losses, gradients and checkpoints stay."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.engine import PipelineEngine
from tests.distributed.test_llama import LLAMA
from tests.engine_runs import MODEL, Job, StepBatches, batches_of, build
from tests.ranks import RankPool
from tests.reference import assert_close_gradients
from tests.selection import select

STEPS = 2
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


class Counter:
    """torch.compile backend that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def train_compiled(
    rank: int, schedule: str, folder: str
) -> list[tuple[list[float], float | None, int, float]]:
    """(losses, deferred share, graphs, loss after loading) without and with compiled layers."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()  # or graphs of an earlier call would be used again
        job, counter = (
            Job(schedule, 2, 1, 1, 4, MODEL, steps=STEPS + 1, partition_method="uniform"),
            Counter(),
        )
        engine, _ = build(job)
        if compiled:
            engine.compile(backend=counter)
        batches = StepBatches(batches_of(job))
        losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
        engine.save_checkpoint(f"{folder}/{compiled}", tag="saved")
        engine.load_checkpoint(f"{folder}/{compiled}", tag="saved")
        after = float(engine.train_batch(batches))
        found.append((losses, getattr(engine, "deferred_share", None), counter.graphs, after))
        engine.transport.close()
    return found


@pytest.mark.parametrize("schedule", select(["1f1b", "bitpipe", "bitpipe_zb", "zb_h1"], ["bitpipe_zb"]))
def test_compiled_layers_train_alike(ranks2: RankPool, tmp_path: Any, schedule: str) -> None:
    for plain, compiled in ranks2.run(train_compiled, schedule, str(tmp_path), timeout_s=180):
        assert plain[2] == 0 and compiled[2] > 0
        assert compiled[0] == pytest.approx(plain[0], rel=1e-5)
        assert compiled[3] == pytest.approx(plain[3], rel=1e-5)
        assert compiled[1] == plain[1]  # the same weight gradients are deferred


class InPlace(nn.Module):
    """Starts with an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(1.5))


def train_in_place(rank: int) -> list[list[float]]:
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": "1f1b", "pipeline_parallel_size": 2},
    }
    generator, found = torch.Generator().manual_seed(0), []
    step = [tuple(torch.randn(2, 2, 4, generator=generator)) for _ in range(4)]
    for compiled in (False, True):
        torch._dynamo.reset()
        layers = [LayerSpec(nn.Linear, 4, 4), *(LayerSpec(InPlace) for _ in range(3))]
        model = ds_ext.PipelineModule(
            layers, settings, loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
        engine, *_ = ds_ext.initialize(model=model, config=settings, model_parameters=model.parameters())
        if compiled:
            engine.compile(backend="aot_eager")
        batches = StepBatches([step] * STEPS)
        found.append([float(engine.train_batch(batches)) for _ in range(STEPS)])
        engine.transport.close()
    return found


def test_compiled_stages_that_start_in_place(ranks2: RankPool) -> None:
    for plain, compiled in ranks2.run(train_in_place, timeout_s=180):
        assert compiled == pytest.approx(plain, rel=1e-5)


def engine_of(schedule: str, model: str) -> tuple[PipelineEngine, StepBatches]:
    """An engine on two ranks, for a Llama or for torch's own linear layers, and its batches."""
    if model == "llama":
        job = Job(schedule, 2, 1, 1, 4, LLAMA, steps=1)
        return build(job)[0], StepBatches(batches_of(job))
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2},
    }
    layers = [spec for _ in range(4) for spec in (LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.GELU))]
    module = ds_ext.PipelineModule(
        layers, settings, loss_fn=nn.functional.mse_loss, partition_method="uniform", base_seed=5
    )
    engine, *_ = ds_ext.initialize(model=module, config=settings, model_parameters=module.parameters())
    generator = torch.Generator().manual_seed(0)
    return engine, StepBatches([[tuple(torch.randn(2, 2, 4, generator=generator)) for _ in range(4)]])


def gradients(rank: int, schedule: str, model: str, backend: str) -> list[tuple[float, dict[str, Tensor]]]:
    """(loss, accumulated gradients of this rank) of a step, without and with compiled layers."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        engine, batches = engine_of(schedule, model)
        grads: dict[str, Tensor] = {}
        for name, parameter in engine.module.named_parameters():

            def keep(parameter: Tensor, name: str = name, grads: dict[str, Tensor] = grads) -> None:
                assert parameter.grad is not None
                grads[name] = parameter.grad.clone()

            parameter.register_post_accumulate_grad_hook(keep)
        if compiled:
            engine.compile(backend=backend)
        found.append((float(engine.train_batch(batches)), grads))
        assert grads.keys() == dict(engine.module.named_parameters()).keys()
        engine.transport.close()
    return found


@pytest.mark.parametrize(
    ("schedule", "model", "backend"),
    [
        ("1f1b", "llama", "aot_eager"),
        ("bitpipe_zb", "llama", "aot_eager"),
        ("zb_h1", "linear", "aot_eager"),
        pytest.param("zb_h1", "linear", "inductor", marks=needs_compiler),
        *select(
            [
                ("1f1b", "linear", "aot_eager"),
                pytest.param("bitpipe_zb", "llama", "inductor", marks=needs_compiler),
            ],
            [],
        ),
    ],
)
def test_compiled_layers_have_the_same_gradients(
    ranks2: RankPool, schedule: str, model: str, backend: str
) -> None:
    for (loss, grads), (compiled_loss, compiled) in ranks2.run(
        gradients, schedule, model, backend, timeout_s=180
    ):
        assert compiled_loss == pytest.approx(loss, rel=1e-5)
        assert compiled.keys() == grads.keys()
        for name, grad in grads.items():
            assert_close_gradients(compiled[name], grad, name)
