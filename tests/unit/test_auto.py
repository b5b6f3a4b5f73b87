"""A JSON that says ``"schedule": "auto"``: the schedule follows from the job's own sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ext.arguments import parse
from ds_ext.choice import Candidate
from ds_ext.choose import Request, choose
from ds_ext.config import JobConfig, batch_sizes, load_config, parse_section
from ds_ext.errors import ConfigError
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.memory import ModelSizes
from ds_ext.pipe_schedules.simulate import simulate

AUTO: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "ds_ext": {
        "schedule": "auto",
        "pipeline_parallel_size": 4,
        "train": {"num_layers": 16, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128},
    },
}


def auto(batch: dict[str, Any] | None = None, **section: Any) -> JobConfig:
    return load_config(AUTO | (batch or {}) | {"ds_ext": AUTO["ds_ext"] | section})


def test_auto_is_the_best_schedule_for_the_jobs_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    job = auto(schedule_options={"costs": "b=1.2,comm=0.1", "vocab_size": 5000, "memory": "1GB"})
    choice = job.ds_ext.choice()
    sizes = ModelSizes(layers=16, hidden=256, heads=4, vocab=5000, seq=128, micro_batch=2, zero_stage=1)
    request = Request(4, 16, Costs(b=1.2, comm=0.1), sizes, 10**9, ("none",))
    assert choice == choose(request) and choice is not None and choice.best is not None
    found = job.ds_ext.timetable(16)
    best = get_schedule(choice.best.schedule)
    assert found == best.timetable(4, 16, choice.best.settings)
    assert simulate(found, request.costs).makespan == choice.best.time
    # What the PipelineModule asks: the schedule's placement with the options of the JSON.
    placement = job.ds_ext.resolve_schedule().placement(4, job.ds_ext.schedule_options)
    assert placement == job.ds_ext.placement() == found.placement
    assert job.ds_ext.schedule == "auto"


def test_auto_has_the_same_samples_whatever_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    tight = auto(schedule_options={"memory": "100MB", "vocab_size": 100})
    wide = auto()
    replicas = [job.ds_ext.placement().replicas for job in (tight, wide)]
    assert replicas == [1, 2]
    for job, count in zip((tight, wide), replicas, strict=True):
        sizes = batch_sizes(job.deepspeed, count, 1)
        assert (sizes.micro_batches, sizes.train_batch_size) == (16, 32)


def test_auto_knows_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    def micro_batches(world: int | None = None) -> set[int]:
        choice = auto(schedule_options={}).ds_ext.choice(world)
        assert choice is not None
        # 1F1B at b = w = f = 1 takes 3 (N + D - 1).
        [row] = [row for row in choice.table if row.label == "1f1b"]
        return {round((row.time or 0) / 3) - 3}

    monkeypatch.setenv("WORLD_SIZE", "8")
    assert micro_batches() == {8} and micro_batches(16) == {4}
    monkeypatch.delenv("WORLD_SIZE")
    assert micro_batches() == {16} and micro_batches(8) == {8}


def test_auto_counts_bytes_as_the_job_is_trained() -> None:
    def largest(batch: dict[str, Any], **train: Any) -> int:
        job = auto(batch, train=AUTO["ds_ext"]["train"] | train)
        choice = job.ds_ext.choice()
        assert choice is not None
        [row] = [row for row in choice.table if row.label == "gpipe"]
        assert row.recompute == train.get("recompute_granularity", "none") and row.memory_bytes
        return row.memory_bytes

    half = largest({})
    assert largest({"bf16": {"enabled": False}}) > 1.5 * half
    assert largest({}, recompute_granularity="full") < half
    # Without replicas and one pipeline group, ZeRO has nothing to shard.
    assert largest({"zero_optimization": {"stage": 0}}) == half


@pytest.mark.parametrize(
    ("batch", "section", "sentence"),
    [
        (
            {"train_batch_size": None},
            {},
            r'give "train_batch_size" and "train_micro_batch_size_per_gpu", and leave',
        ),
        ({"train_micro_batch_size_per_gpu": None}, {}, r'"auto" needs the batch of all pipeline groups'),
        ({"gradient_accumulation_steps": 4}, {}, r'leave "gradient_accumulation_steps" out\.$'),
        (
            {"train_batch_size": 33},
            {},
            r"33 does not divide into micro-batches of 2 for 1 .*group\. Use 32 or 34",
        ),
        ({"train_batch_size": "x"}, {}, r'"train_batch_size" must be a positive integer; got \'x\''),
        (
            {},
            {"schedule_options": {"chunks": 2}},
            r"auto has no option 'chunks'; its options: costs, memory, vocab",
        ),
        (
            {},
            {"schedule_options": {"memory": "16"}},
            r"a size in bytes is written 80GB, 512MB or 16GiB; got '16'",
        ),
        ({}, {"schedule_options": {"costs": "g=1"}}, r'"schedule": "auto": costs are f, b, w, comm'),
        (
            {},
            {"schedule_options": {"memory": "1MB"}},
            r"no schedule fits 1.0 MB; the nearest, .* MB too much\. Use more devices, a smaller micro-batch",
        ),
        (
            {},
            {"schedule_options": {"memory": "1GB"}, "train": {"num_layers": 16}},
            r"needs the model's sizes: give num_layers, hidden_size, num_attention_heads, seq_length in",
        ),
        (
            {},
            {"train": AUTO["ds_ext"]["train"] | {"num_layers": 6}},
            r'"auto": no schedule is possible: .*6 layers do not divide into 4 stages; and',
        ),
    ],
)
def test_what_auto_cannot_choose(batch: dict[str, Any], section: dict[str, Any], sentence: str) -> None:
    # Reading a JSON is no error yet: a flag may still change it.
    job = auto({}, **section)
    job = load_config({k: v for k, v in (job.deepspeed | batch).items() if v is not None})
    with pytest.raises(ConfigError, match=sentence):
        job.ds_ext.placement()


def test_auto_needs_the_whole_json() -> None:
    with pytest.raises(
        ConfigError, match="needs the whole DeepSpeed JSON, as load_config reads it, and not its"
    ):
        parse_section(AUTO["ds_ext"]).placement()


def test_recomputation_is_chosen_where_the_flags_leave_it_open(tmp_path: Path) -> None:
    """By train_gpt.py's own way from the flags: with room for all without it, and with too little for that."""
    config = json.loads(json.dumps(AUTO))
    config["ds_ext"]["train"].pop("recompute_granularity", None)
    file = tmp_path / "auto.json"

    def chosen(memory: int | None, *flags: str) -> tuple[str, int]:
        config["ds_ext"]["schedule_options"] = {} if memory is None else {"memory": f"{memory}B"}
        file.write_text(json.dumps(config))
        _, job = parse("train_gpt.py", ["--deepspeed_config", str(file), "--data-path", "x", *flags])
        choice = job.ds_ext.choice()
        assert choice is not None and choice.best is not None and choice.best.memory_bytes is not None
        return choice.best.recompute, choice.best.memory_bytes

    kind, most = chosen(None)
    assert kind == "none"
    least = min(row.memory_bytes for row in table(file) if row.memory_bytes and row.recompute == "none")
    assert least <= most
    kind, less = chosen(least - 1)
    assert kind == "full" and less < least
    with pytest.raises(ConfigError, match="no schedule fits"):
        chosen(least - 1, "--recompute-granularity", "none")


def table(file: Path) -> tuple[Candidate, ...]:
    _, job = parse("train_gpt.py", ["--deepspeed_config", str(file), "--data-path", "x"])
    choice = job.ds_ext.choice()
    assert choice is not None
    return choice.table
