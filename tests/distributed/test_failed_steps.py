"""After an exception that a script caught: the engine continues if nothing began, and names the failure otherwise."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.schedule import ForwardPass
from torch import Tensor, nn

import ds_ext
from ds_ext.engine import PipelineEngine
from ds_ext.engine.batches import MicroBatches
from ds_ext.errors import ConfigError
from tests.plans import batch_of
from tests.ranks import Ranks

Pair = tuple[Tensor, Tensor]
pytestmark = pytest.mark.quick


def samples(count: int) -> list[Pair]:
    return [(torch.full((4,), float(number)), torch.ones(4)) for number in range(count)]


class Fails:
    """Loss function that fails in one of its calls."""

    def __init__(self, call: int | None) -> None:
        self.calls, self.call = 0, call

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call:
            raise ValueError("the labels are wrong")
        return nn.functional.mse_loss(outputs, labels)


def engine_of(devices: int, training_data: Any, fail_in_call: int | None = None) -> PipelineEngine:
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "ds_ext": {"print_plan": False},
    }
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    model = ds_ext.PipelineModule(layers, config, num_stages=devices, loss_fn=Fails(fail_in_call))
    parameters = model.parameters()
    return ds_ext.initialize(model=model, model_parameters=parameters, training_data=training_data)[0]


def use_good_data_after_bad(rank: int) -> tuple[list[float], list[float]]:
    bad = [torch.zeros(2, 4)] * 4  # not pairs
    engine, fresh = engine_of(2, None), engine_of(2, samples(16))
    for call in (engine.train_batch, engine.eval_batch, engine.train_batch):
        with pytest.raises(ConfigError, match="pair"):
            call(iter(bad))
    batches = MicroBatches(samples(16), 2, repeat=True)
    losses = [float(engine.train_batch(batches)) for _ in range(3)]
    return losses, [float(fresh.train_batch()) for _ in range(3)]


def test_good_data_after_bad(ranks: Ranks) -> None:
    for losses, expected in ranks(2).run(use_good_data_after_bad):
        assert losses == expected


def use_good_arguments_after_bad(rank: int) -> tuple[list[str], float, float]:
    engine, fresh = engine_of(2, samples(16)), engine_of(2, samples(16))
    keys = []
    with pytest.raises(ConfigError) as refusal:
        engine.eval_batch(samples(32)[16:], num_micro_batches=0)
    keys.append(str(refusal.value).partition(":")[0])
    handlers: Any = {**engine._INSTRUCTION_MAP, ForwardPass: engine_of}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_INSTRUCTION_MAP", handlers, raising=False)
        with pytest.raises(ConfigError) as refusal:
            engine.eval_batch(samples(32)[16:])
        keys.append(str(refusal.value).partition(":")[0])
    return keys, float(engine.train_batch()), float(fresh.train_batch())


def test_training_after_a_refused_evaluation(ranks: Ranks) -> None:
    for keys, loss, expected in ranks(2).run(use_good_arguments_after_bad):
        assert keys == ["num_micro_batches", "_INSTRUCTION_MAP[ForwardPass]"]
        assert loss == expected


def step_after_a_failure(rank: int, devices: int) -> tuple[float, list[str]]:
    """Fail in the second step, at the second micro-batch of the last stage."""
    engine = engine_of(devices, samples(16), fail_in_call=6)
    loss, texts = float(engine.train_batch()), []
    with pytest.raises(Exception) as first:
        engine.train_batch()
    for _ in range(2):
        with pytest.raises(RuntimeError) as later:
            engine.train_batch()
        texts.append(str(later.value))
    with pytest.raises(RuntimeError) as later:
        engine.eval_batch(samples(16))
    assert engine.global_steps == 1
    kind = type(first.value).__name__
    return loss, [text for text in (*texts, str(later.value)) if "step 2" in text and kind in text]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_after_a_failed_one_names_the_failure(ranks: Ranks, devices: int) -> None:
    for _, named in ranks(devices).run(step_after_a_failure, devices):
        assert len(named) == 3


def evaluate_too_little(rank: int) -> tuple[str, float, float]:
    engine = engine_of(2, samples(16))
    with pytest.raises(ConfigError) as refusal:
        engine.eval_batch(samples(6))
    loss = float(engine.eval_batch(samples(6), num_micro_batches=3))
    return str(refusal.value), loss, float(engine.train_batch())


def test_an_evaluation_set_smaller_than_a_batch(ranks: Ranks) -> None:
    for text, loss, trained in ranks(2).run(evaluate_too_little):
        assert "8 samples, 4 micro-batches of 2 (got 6)" in text
        assert "evaluation" in text and "num_micro_batches" in text
        assert loss > 0 and trained > 0


def train_too_little(rank: int) -> str:
    engine = engine_of(2, None)
    with pytest.raises(ConfigError) as refusal:
        engine.train_batch(MicroBatches(samples(6), 2))
    return str(refusal.value)


def test_training_data_smaller_than_a_batch(ranks: Ranks) -> None:
    for text in ranks(2).run(train_too_little):
        assert "training step" in text and "8 samples" in text and "(got 6)" in text


def end_early(
    rank: int, schedule: str, pp: int, tp: int, lengths: list[int], mode: str, loss: str
) -> tuple[str, int]:
    """Give every rank an iterator of its length, in steps of 4 micro-batches. Return the error and the steps before."""
    config = {
        **batch_of(schedule, 4, pp * tp),
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "ds_ext": {
            "print_plan": False,
            "schedule": schedule,
            "pipeline_parallel_size": pp,
            "tensor_parallel_size": tp,
            "transport_options": {"timeout_s": 300},
        },
    }
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(8)]
    loss_fn = Counted() if loss == "counted" else nn.functional.mse_loss
    model = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn)
    engine, *_ = ds_ext.initialize(model=model, config=config)
    data = iter([(torch.ones(2, 4), torch.zeros(2, 4))] * lengths[rank])
    endless = iter(lambda: (torch.ones(2, 4), torch.zeros(2, 4)), None)
    with pytest.raises(ConfigError) as raised:
        for _ in range(4):
            engine.train_batch(data if mode == "train" else endless)
            if mode != "train":
                engine.eval_batch(data, compute_loss=mode == "evaluate")
    return str(raised.value), engine.global_steps


class Counted:
    """Loss whose labels are read at the start of a step."""

    def __call__(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (outputs - labels).square().sum(), self.counts(labels)

    def counts(self, labels: Tensor) -> Tensor:
        return torch.tensor(labels.numel())


# schedule, devices, tensor-parallel size, micro-batches by rank, mode, loss -> ranks that ended, micro-batches, steps
ENDS = [
    ("1f1b", 1, 1, [40, 10], "train", "mean", {1: 2}, 2),
    ("1f1b", 1, 1, [8, 40], "train", "counted", {0: 0}, 2),
    ("1f1b", 1, 1, [3, 40], "train", "mean", {0: 3}, 0),
    ("1f1b", 2, 1, [40, 5], "train", "mean", {1: 1}, 1),
    ("1f1b", 2, 1, [8, 8], "train", "mean", {0: 0, 1: 0}, 2),
    ("bitpipe", 2, 1, [9, 40], "train", "mean", {0: 1}, 2),
    ("zb_h1", 2, 1, [6, 40], "train", "counted", {0: 2}, 1),
    ("dpp", 2, 1, [40, 7], "train", "mean", {1: 3}, 1),
    ("1f1b", 1, 2, [40, 11], "train", "mean", {1: 3}, 2),
    ("1f1b", 2, 1, [6, 40], "evaluate", "mean", {0: 2}, 2),
    ("bitpipe", 2, 1, [40, 4], "evaluate", "mean", {1: 0}, 2),
    ("1f1b", 1, 1, [7, 40], "outputs", "mean", {0: 3}, 2),
    ("1f1b", 1, 1, [40, 0], "train", "mean", {1: 0}, 0),
]


@pytest.mark.parametrize(("schedule", "pp", "tp", "lengths", "mode", "loss", "ended", "steps"), ENDS)
def test_every_rank_reports_data_that_ends(
    ranks: Ranks,
    schedule: str,
    pp: int,
    tp: int,
    lengths: list[int],
    mode: str,
    loss: str,
    ended: dict[int, int],
    steps: int,
) -> None:
    begin = time.monotonic()
    results = ranks(2).run(end_early, schedule, pp, tp, lengths, mode, loss, timeout_s=120)
    numbers = ", ".join(f"{got} on rank {rank}" for rank, got in ended.items())
    for text, steps_before in results:
        assert text.startswith("data_iter: ") and f"(got {numbers})" in text and "takes 4 " in text
        assert f"step {steps + (mode == 'train')}," in text
        assert steps_before == steps
    assert time.monotonic() - begin < 300  # the time limit of a wait
