"""A JSON that says ``"schedule": "auto"``: the schedule follows from the job's own sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ext.config.batch_sizes import batch_sizes
from ds_ext.config.job import JobConfig, load_config
from ds_ext.errors import ConfigError
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.simulate import simulate
from ds_ext.planner.auto import vocabulary
from ds_ext.planner.candidates import Candidate
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.planner.memory import ModelSizes
from ds_ext.planner.search import Request, choose
from ds_ext.training.arguments import parse
from tests.plans import choice_of, placement_of, timetable_of

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
    choice = choice_of(job)
    sizes = ModelSizes(layers=16, hidden=256, heads=4, vocab=5000, seq=128, micro_batch=2, zero_stage=1)
    request = Request(4, 16, Costs(backward_input=1.2, comm=0.1), sizes, 10**9, ("none",))
    assert choice == choose(request) and choice is not None and choice.best is not None
    found = make_job_plan(job).timetable
    best = get_schedule(choice.best.schedule)
    assert found == best.timetable(4, 16, choice.best.settings)
    # Every device has the work of its stages: the head is as much as V / (12h + 2s) layers.
    assert choice.best.costs.stages is not None and choice.best.layers is not None
    assert sum(choice.best.layers) == 16
    assert simulate(found, choice.best.costs).makespan == choice.best.time
    # What the PipelineModule asks: the schedule's placement with the options of the JSON.
    assert placement_of(job) == found.placement
    assert job.ds_ext.schedule == "auto"


def test_auto_has_the_same_samples_whatever_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    tight = auto(schedule_options={"memory": "90MB", "vocab_size": 100})
    wide = auto(schedule_options={"vocab_size": 100})
    replicas = [placement_of(job).replicas for job in (tight, wide)]
    assert replicas == [1, 2]
    for job, count in zip((tight, wide), replicas, strict=True):
        sizes = batch_sizes(job.deepspeed, count, 1)
        assert (sizes.micro_batches, sizes.train_batch_size) == (16, 32)


def test_auto_counts_the_micro_batches_of_a_pipeline_group() -> None:
    def micro_batches(world: int | None = None) -> set[int]:
        choice = choice_of(auto(train={}), world)
        assert choice is not None
        # 1F1B at b = w = f = 1 takes 3 (N + D - 1).
        [row] = [row for row in choice.table if row.label == "1f1b"]
        return {round((row.time or 0) / 3) - 3}

    assert micro_batches() == {16} and micro_batches(8) == {8} and micro_batches(16) == {4}


def test_auto_counts_bytes_as_the_job_is_trained() -> None:
    def largest(batch: dict[str, Any], **train: Any) -> int:
        options = {"vocab_size": 1000}
        job = auto(batch, train=AUTO["ds_ext"]["train"] | train, schedule_options=options)
        choice = choice_of(job)
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
        ({"train_batch_size": "x"}, {}, "train_batch_size.*'x'"),
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
            r"no schedule fits 1.0 MB; the nearest, .* MB too much\. Use more devices \(pipeline_parallel_size, "
            r"tensor_parallel_size\), a smaller micro-batch or recompute_granularity full\.$",
        ),
        (
            {},
            {"schedule_options": {"memory": "1GB"}, "train": {"num_layers": 16}},
            r"needs the model's sizes: give num_layers, hidden_size, num_attention_heads, seq_length in",
        ),
        (
            {},
            {"train": AUTO["ds_ext"]["train"] | {"num_layers": 3}},
            r'"auto": num_layers 3 is less than pipeline_parallel_size 4, .* Use at least 4 layers, or a '
            r"pipeline_parallel_size of at most 3\.$",
        ),
        (
            {"zero_optimization": {"stage": 0}},
            {
                "schedule_options": {"memory": "1MB"},
                "train": AUTO["ds_ext"]["train"] | {"recompute_granularity": "auto"},
            },
            r"Use more devices \(.*\), a smaller micro-batch or ZeRO stage 1, which shards .* ranks\.$",
        ),
        (
            {},
            {"train": AUTO["ds_ext"]["train"] | {"stage_layers": "4,4,4,4,4"}},
            r"no schedule is possible: .*--stage-layers: .*4,4,4,4,4",
        ),
    ],
)
def test_what_auto_cannot_choose(batch: dict[str, Any], section: dict[str, Any], sentence: str) -> None:
    # Reading a JSON is no error yet: a flag may still change it.
    job = auto({}, **section)
    job = load_config({k: v for k, v in (job.deepspeed | batch).items() if v is not None})
    with pytest.raises(ConfigError, match=sentence):
        placement_of(job)


def test_the_vocabulary_is_that_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"vocab_size": 777}')
    train = AUTO["ds_ext"]["train"]

    def used(options: dict[str, Any], data_path: Any) -> tuple[int, str, int]:
        job = auto(schedule_options=options, train=train | {"data_path": data_path})
        choice = choice_of(job)
        assert choice is not None and choice.best is not None and choice.best.memory_bytes is not None
        return *vocabulary(options.get("vocab_size", 0), job.ds_ext.train), choice.best.memory_bytes

    folder, source = str(tmp_path), str(tmp_path / "meta.json")
    *said, least = used({}, folder)
    assert said == [777, source]
    for path in (f"{folder}/text_document", [f"{folder}/text_document.bin"], f"1 {folder} 2 elsewhere"):
        assert used({}, path) == (777, source, least)
    assert used({"vocab_size": 777}, folder) == (777, '"vocab_size"', least)
    assert used({"vocab_size": 5000}, folder)[2] > least
    entries, source, most = used({}, str(tmp_path / "none"))
    assert (entries, source) == (50257, "GPT-2, as nothing says another one") and most > least


def test_costs_from_a_file(tmp_path: Path) -> None:
    """Also costs that cannot be written as text; and "zb_v" of a job plans for them too."""
    file = tmp_path / "costs.json"
    file.write_text('{"b": 1.5, "links": {"0>1": 2.0}}')
    costs = Costs(backward_input=1.5, links={(0, 1): 2.0})
    job = auto(train={}, schedule_options={"costs": str(file)})
    assert choice_of(job) == choose(Request(4, 16, costs))
    choice = choice_of(job)
    assert choice is not None and choice.best is not None
    assert simulate(make_job_plan(job).timetable, costs).makespan == choice.best.time
    options = {"costs": str(file)}
    named = {"ds_ext": {"schedule": "zb_v", "pipeline_parallel_size": 4, "schedule_options": options}}
    assert timetable_of(named, 8) == get_schedule("zb_v").timetable(4, 8, {}, costs)
    missing = auto(train={}, schedule_options={"costs": "none.json"})
    with pytest.raises(ConfigError, match=r'"auto": costs none.json: No such file'):
        placement_of(missing)


def test_auto_prices_the_layers_that_are_given() -> None:
    train = AUTO["ds_ext"]["train"] | {"stage_layers": "5,5,4,2"}
    choice = choice_of(auto(train=train))
    assert choice is not None and choice.best is not None
    assert choice.best.layers == (5, 5, 4, 2) and {row.stages for row in choice.fitting} == {4}


def test_recomputation_is_chosen_where_the_flags_leave_it_open(tmp_path: Path) -> None:
    """By train_gpt.py's own way from the flags: with room for all without it, and with too little for that."""
    config = json.loads(json.dumps(AUTO))
    config["ds_ext"]["train"].pop("recompute_granularity", None)
    file = tmp_path / "auto.json"

    def chosen(memory: int | None, *flags: str) -> tuple[str, int]:
        config["ds_ext"]["schedule_options"] = {} if memory is None else {"memory": f"{memory}B"}
        file.write_text(json.dumps(config))
        _, job = parse("train_gpt.py", ["--deepspeed_config", str(file), "--data-path", "x", *flags])
        choice = choice_of(job)
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
    choice = choice_of(job)
    assert choice is not None
    return choice.table
