"""A checkpoint that was written under any schedule and sizes goes on under any other, from where it was."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn

from ds_ext.engine.checkpoint import background, save
from ds_ext.engine.checkpoint.file import TensorFile, layer_file, read_plain
from ds_ext.engine.checkpoint.folder import complete_checkpoints
from ds_ext.errors import CheckpointError, ConfigError
from ds_ext.recipes.models.gpt import gpt_layer_specs
from ds_ext.tensor_parallel import DropoutClock, TensorParallel
from tests.engine_runs import MODEL, Job, StepBatches, build
from tests.precisions import needs
from tests.ranks import Ranks
from tests.reference import random_batches
from tests.selection import covering

# The padded vocabulary is 88 without tensor parallelism and 96 with two ranks.
GPT = dataclasses.replace(MODEL, vocab_size=84)
STEPS, AT = 8, 4
EXACT = 1e-5  # sums in another order
HALF = 1e-3  # computed in 8 or 11 bits in another order; see test_precision.py

Sizes = tuple[str, int, int, int, int]  # schedule, PP, TP, DP, micro-batches of a pipeline group


def settings(precision: str, zero: int) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 3}},
    }
    return sections[precision] | {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 15, "warmup_type": "linear"}},
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 10**6},
    }


def train_and_save(rank: int, job: Job, folder: str) -> list[float]:
    """The losses of all steps; a checkpoint on the way."""
    engine, _ = build(job)
    batches = StepBatches(random_batches(job.model, STEPS, job.micro_batches * job.dp))
    losses = []
    for step in range(STEPS):
        if step == AT:
            engine.save_checkpoint(folder, tag="saved", client_state={"step": AT, "note": ["kept", 1.5]})
        losses.append(float(engine.train_batch(batches)))
    engine.transport.close()
    return losses


def go_on(
    rank: int, job: Job, folder: str, tag: str | None, again: str
) -> tuple[list[float], dict[str, Any]]:
    """The losses of the steps after the checkpoint, and what was loaded; it is saved again before they begin."""
    engine, _ = build(job)
    path, state = engine.load_checkpoint(folder, tag)
    assert path is not None and state is not None
    loaded = {
        **state,
        "tag": Path(path).name,
        "steps": engine.global_steps,
        "samples": engine.global_samples,
        "lr": engine.get_lr(),
        "scale": getattr(engine.optimizer, "loss_scale", None),
    }
    engine.save_checkpoint(folder, tag=again, client_state=state, save_latest=False)
    batches = StepBatches(random_batches(job.model, STEPS, job.micro_batches * job.dp))
    batches.step = AT
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS - AT)]
    engine.transport.close()
    return losses, loaded


def contents(checkpoint: Path) -> dict[str, Any]:
    """Every whole weight and optimizer state by name, put together without the code under test."""
    manifest = json.loads((checkpoint / "ds_ext.json").read_text())
    shards = manifest["job"]["tensor_parallel_size"]
    found: dict[str, Any] = {}
    for name, record in manifest["parameters"].items():
        parts = record.get("parts", 1)
        numbers = range(shards * parts if record["dim"] is not None else 1)

        def whole(shards: list[Tensor], record: dict[str, Any] = record) -> Tensor:
            dim = record["dim"] or 0
            length, joined = record["shape"][dim], torch.cat(shards, dim)
            assert not joined.narrow(dim, length, joined.size(dim) - length).any()  # padding is zero
            return joined.narrow(dim, 0, length)

        layers = [read_plain(checkpoint / layer_file(record["layer"], n, shards * parts)) for n in numbers]
        found[name] = whole([layer[record["key"]] for layer in layers])
        found[f"{name} values"] = record["values"], record["group"]
        for state in record["states"]:
            shard_states = []
            for number in numbers:
                shard = torch.zeros(math.prod(record["shard"]))
                times = torch.zeros_like(shard)
                for file, start, count in record["fragments"][str(number)]:
                    saved_name = name if parts == 1 else f"{name}/part_{number // shards}"
                    shard[start : start + count] = TensorFile(checkpoint / file).read(
                        f"{saved_name}/{state}", 0, count
                    )
                    times[start : start + count] += 1
                assert times.eq(1).all(), f"{name}/{state}: not every element is written once"
                shard_states.append(shard.view(record["shard"]))
            found[f"{name} {state}"] = whole(shard_states)
    return found


def same_contents(one: Path, other: Path) -> None:
    ours, theirs = contents(one), contents(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value == theirs[name]
        assert same, name


BITPIPE_4, F1B_2, F1B_2_TP_2 = ("bitpipe", 4, 1, 1, 4), ("1f1b", 2, 1, 1, 4), ("1f1b", 2, 2, 1, 4)
F1B_2_DP_2, ZERO_BUBBLE_4 = ("1f1b", 2, 1, 2, 2), ("bitpipe_zb", 4, 1, 1, 4)
# before, after, precision, ZeRO stage, relative difference of losses
CASES: list[tuple[Sizes, Sizes, str, int, float]] = [
    (BITPIPE_4, F1B_2, "fp32", 0, EXACT),
    (F1B_2_TP_2, ZERO_BUBBLE_4, "fp32", 1, EXACT),
    (F1B_2_DP_2, F1B_2, "fp32", 1, EXACT),
    (("zb_v", 2, 1, 1, 4), ("bitpipe", 2, 2, 1, 4), "fp32", 1, EXACT),
    (BITPIPE_4, F1B_2, "bf16", 1, EXACT),
    (F1B_2_DP_2, F1B_2, "bf16", 1, EXACT),
    (F1B_2_TP_2, ZERO_BUBBLE_4, "bf16", 1, HALF),
    (BITPIPE_4, F1B_2, "bf16", 0, EXACT),
    (("interleaved", 2, 1, 1, 4), ("bitpipe", 2, 1, 1, 4), "fp16", 1, HALF),
]


@pytest.mark.parametrize(
    ("before", "after", "precision", "zero", "tolerance"),
    [
        pytest.param(
            *case,
            marks=pytest.mark.quick if case is CASES[0] else needs(case[2]),
            id=f"{case[0][0]}-{case[1][0]}-{case[2]}-ZeRO{case[3]}",
        )
        for case in covering(CASES, 1, lambda case: (case[0][0], case[1][0], case[2], case[3]))
    ],
)
def test_going_on_under_other_sizes(
    ranks: Ranks, tmp_path: Path, before: Sizes, after: Sizes, precision: str, zero: int, tolerance: float
) -> None:
    """Losses after a checkpoint equal those of an uninterrupted run."""
    first, second = (
        Job(*sizes, GPT, STEPS, deepspeed=settings(precision, zero)) for sizes in (before, after)
    )
    here, there = ranks(first.world_size), ranks(second.world_size)
    straight = here.run(train_and_save, first, str(tmp_path), timeout_s=120)[0]
    assert len(set(straight)) == STEPS
    results = there.run(go_on, second, str(tmp_path), None, "again", timeout_s=120)
    for losses, loaded in results:
        assert losses == pytest.approx(straight[AT:], rel=tolerance)
        assert loaded | {"step": AT, "note": ["kept", 1.5], "tag": "saved", "steps": AT} == loaded
        assert loaded["samples"] == AT * 8
        assert loaded["lr"] == pytest.approx([1e-2 * (AT - 1) / 15])
        if precision == "fp16":
            assert loaded["scale"] == 2.0**13  # AT steps without an overflow: doubled once
    # Weights, master weights and states are the same numbers, and each of them was written once.
    same_contents(tmp_path / "saved", tmp_path / "again")
    if tolerance > EXACT:
        # Half precision computes other losses under other sizes; back under the first they are the same.
        back = here.run(go_on, first, str(tmp_path), "again", "back", timeout_s=120)
        assert back[0][0] == pytest.approx(straight[AT:], rel=EXACT)


@needs("bf16")
def test_precision_and_zero_stage_may_change(ranks: Ranks, tmp_path: Path) -> None:
    half = Job(*F1B_2, GPT, STEPS, deepspeed=settings("bf16", 1))
    full = Job(*F1B_2, GPT, STEPS, deepspeed=settings("fp32", 0))
    straight = ranks(2).run(train_and_save, half, str(tmp_path), timeout_s=120)[0]
    in_full, _ = ranks(2).run(go_on, full, str(tmp_path), None, "full", timeout_s=120)[0]
    assert in_full == pytest.approx(straight[AT:], rel=HALF) and in_full != straight[AT:]
    saved, full_weights = contents(tmp_path / "saved"), contents(tmp_path / "full")
    masters = [name for name in saved if name.endswith(" fp32")]
    assert masters
    for name in masters:
        assert torch.equal(saved[name], full_weights[name.removesuffix(" fp32")])
    back, _ = ranks(2).run(go_on, half, str(tmp_path), "full", "back", timeout_s=120)[0]
    assert back == straight[AT:]
    same_contents(tmp_path / "saved", tmp_path / "back")


def load_all(rank: int, folder: str, jobs: list[tuple[Job, str | None]]) -> list[str]:
    """What loading the checkpoint says to each job; all ranks must say it."""
    said = []
    for job, tag in jobs:
        engine, _ = build(job)
        before = [p.detach().clone() for p in engine.module.parameters()]
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            engine.load_checkpoint(folder, tag)
        said.append(str(caught.value))
        assert all(map(torch.equal, before, engine.module.parameters()))  # nothing was changed
        engine.transport.close()
    return said


def test_what_does_not_fit_is_refused_by_its_name(ranks: Ranks, tmp_path: Path) -> None:
    base = settings("fp32", 0)
    job = Job("1f1b", 2, 1, 1, 4, GPT, deepspeed=base)
    ranks(2).run(train_and_save, job, str(tmp_path), timeout_s=120)

    def model(**sizes: int) -> Job:
        return dataclasses.replace(job, model=dataclasses.replace(GPT, **sizes))

    def changed(**sections: Any) -> Job:
        return dataclasses.replace(job, deepspeed=base | sections)

    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    cosine = {"type": "CosineAnnealingLR", "params": {"T_max": 9}}
    refused: list[tuple[Job, str | None]] = [
        (model(hidden_size=64), None),
        (model(vocab_size=85), None),
        (model(num_layers=4), None),
        (changed(optimizer=sgd, scheduler={}), None),
        (changed(scheduler=cosine), None),
        (job, "nothing"),
    ]
    of_rank_0, of_rank_1 = ranks(2).run(load_all, str(tmp_path), refused, timeout_s=120)
    assert of_rank_0 == of_rank_1
    hidden, vocabulary, layers, optimizer, scheduler, tag = of_rank_0
    saved = str(tmp_path / "saved")
    for text, width in ((hidden, "84 x 64"), (vocabulary, "85 x 32")):
        assert "tied_modules.embed.word_embeddings.weight: " in text
        assert width in text and f"got 84 x 32 in {saved}" in text
    assert "has 8" in layers and "got 12" in layers
    assert "SGD (got states of AdamW)" in optimizer
    assert "CosineAnnealingLR (got the state of WarmupLR)" in scheduler
    assert "(got 'nothing')" in tag and f"{tmp_path / 'latest'}: saved" in tag

    files = sorted(json.loads((tmp_path / "saved" / "ds_ext.json").read_text())["files"])
    for name in (files[-1], next(name for name in files if name.startswith("layer_"))):
        data = bytearray((tmp_path / "saved" / name).read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / "saved" / name).write_bytes(data)
        errors = ranks(2).run(load_all, str(tmp_path), [(job, None)])
        assert errors[0] == errors[1] and f"{tmp_path / 'saved' / name}: damaged" in errors[0][0]


def load_with_deepspeed(rank: int, folder: str) -> dict[str, Tensor]:
    """DeepSpeed's own engine reads the weights of our checkpoint."""
    module = deepspeed.pipe.PipelineModule(
        gpt_layer_specs(GPT, TensorParallel(), DropoutClock()),
        topology=PipeDataParallelTopology(2, 1),
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    path, _ = engine.load_checkpoint(folder, load_module_only=True)
    assert path is not None
    return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def test_deepspeed_reads_the_weights(ranks: Ranks, tmp_path: Path) -> None:
    job = Job("bitpipe", 4, 1, 1, 4, GPT, deepspeed=settings("fp32", 1))
    ranks(4).run(train_and_save, job, str(tmp_path), timeout_s=120)
    found = contents(tmp_path / "saved")
    for weights in ranks(2).run(load_with_deepspeed, str(tmp_path)):
        for name, weight in weights.items():
            assert torch.equal(weight[: found[name].size(0)], found[name]), name


def save_slowly(rank: int, job: Job, folder: str, seconds: float) -> list[float]:
    """A checkpoint that rank 1 writes slowly; then a step."""
    engine, _ = build(job)
    write, begin = save._write_layers, time.monotonic()
    if rank == 1:
        save._write_layers = lambda *args: time.sleep(seconds) or write(*args)  # type: ignore[func-returns-value]
    engine.save_checkpoint(folder)
    waited_s = time.monotonic() - begin
    loss = float(engine.train_batch(StepBatches(random_batches(job.model, 1, job.micro_batches))))
    engine.transport.close()
    return [waited_s, loss]


def test_a_slow_disk_does_not_stop_training(ranks: Ranks, tmp_path: Path) -> None:
    """Saving may take longer than other waits."""
    job = Job("1f1b", 2, 1, 1, 2, GPT, deepspeed=settings("fp32", 1), timeout_s=5)
    for waited_s, loss in ranks(2).run(save_slowly, job, str(tmp_path), 7.0, timeout_s=120):
        assert waited_s > 7 and math.isfinite(loss)


def load_after_save(rank: int, job: Job, folder: str) -> tuple[str, int]:
    """Load while a save in the background goes on. Returns the name and the step of the loaded checkpoint."""
    engine, _ = build(job)
    batches = StepBatches(random_batches(job.model, 2, job.micro_batches))
    slow = f"import time\ntime.sleep(2)\n{background._PROGRAM}"
    with mock.patch.object(background, "_PROGRAM", slow):
        for step in range(2):
            engine.train_batch(batches)
            engine.save_checkpoint(folder, tag=f"step_{step}", background=True)
    path, _ = engine.load_checkpoint(folder)
    engine.transport.close()
    return Path(str(path)).name, engine.global_steps


def test_a_load_waits_for_the_save_in_the_background(ranks: Ranks, tmp_path: Path) -> None:
    job = Job("1f1b", 2, 1, 1, 2, GPT)
    assert ranks(2).run(load_after_save, job, str(tmp_path), timeout_s=120) == [("step_1", 2)] * 2


def lose_writer(rank: int, job: Job, folder: str) -> tuple[str, bool, float]:
    """Save in the background with a writer of rank 1 that is killed, train, and save again."""
    engine, _ = build(job)
    batches = StepBatches(random_batches(job.model, 1, job.micro_batches))
    killed, error = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ""
    with mock.patch.object(background, "_PROGRAM", killed if rank == 1 else background._PROGRAM):
        engine.save_checkpoint(folder, tag="lost", background=True)
    writer = engine.saving
    try:
        engine.wait_for_save()
    except CheckpointError as failure:
        error = str(failure)
    assert writer is not None
    left = Path(folder, "lost").exists() or not writer.is_done()
    loss = float(engine.train_batch(batches))
    engine.save_checkpoint(folder, tag="good", background=True)
    engine.wait_for_save()
    engine.transport.close()
    return error, left, loss


def test_all_ranks_report_a_killed_writer_and_train_on(ranks: Ranks, tmp_path: Path) -> None:
    job = Job("1f1b", 2, 1, 1, 2, GPT, timeout_s=10)
    results = ranks(2).run(lose_writer, job, str(tmp_path), timeout_s=120)
    assert results[0] == results[1]
    error, left, loss = results[0]
    assert "rank 1" in error and "SIGKILL" in error
    assert not left and math.isfinite(loss)
    assert complete_checkpoints(tmp_path) == ["good"] and not [*tmp_path.glob(".lost*")]
