"""``"schedule": "auto"`` in a JSON: the sizes of the job decide."""

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
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.auto import model_of_train, training_sizes, vocabulary
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.planner.request import Request
from ds_ext.planner.search import choose
from ds_ext.planner.training_sizes import TrainingSizes
from tests.plans import candidates_of, placement_of, plan_job, timetable_of

TRAIN = {"num_layers": 16, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128}
AUTO: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "ds_ext": {"schedule": "auto", "pipeline_parallel_size": 4, "train": TRAIN},
}


def auto(batch: dict[str, Any] | None = None, **section: Any) -> JobConfig:
    return load_config(AUTO | (batch or {}) | {"ds_ext": AUTO["ds_ext"] | section})


def test_the_job_runs_the_best_candidate() -> None:
    job = auto(
        schedule_options={"costs": "b=1.2,comm=0.1", "vocab_size": 5000, "memory": "1GB", "headroom": 0}
    )
    candidates = candidates_of(job)
    sizes = TrainingSizes(
        num_layers=16,
        hidden_size=256,
        num_attention_heads=4,
        vocab_size=5000,
        seq_length=128,
        micro_batch=2,
        optimizer="for-loop",
    )
    request = Request(4, 8, Costs(backward_input=1.2, comm=0.1), sizes, 10**9, ("none",))
    best = candidates.best
    assert candidates == choose(request) and best is not None
    timetable = make_job_plan(job).timetable
    assert timetable == get_schedule(best.schedule).timetable(4, 8, best.settings)
    # Costs per stage: the head is V / (12h + 2s) layers.
    assert best.costs.stages is not None and best.layers is not None and sum(best.layers) == 16
    assert simulate(timetable, best.costs).makespan == best.time
    assert placement_of(job) == timetable.placement and job.ds_ext.schedule == "auto"


def test_options_of_the_llama_family_are_sizes() -> None:
    options = {
        "ffn_hidden_size": 512,
        "num_query_groups": 2,
        "kv_channels": 32,
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
    }
    job = auto(train=TRAIN | options, schedule_options={"vocab_size": 5000, "memory": "1GB", "headroom": 0})
    sizes = TrainingSizes(
        16, 256, 4, seq_length=128, vocab_size=5000, micro_batch=2, optimizer="for-loop",
        ffn_hidden_size=512, num_query_groups=2, kv_channels=32, swiglu=True,
        untie_embeddings_and_output_weights=True, position_embedding_type="rope",
    )  # fmt: skip
    assert candidates_of(job) == choose(Request(4, 8, Costs(), sizes, 10**9, ("none",)))


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({}, {"precision": "fp32", "zero_stage": 0, "reduced_bytes": 4, "bucket": 5 * 10**8}),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 9}}, {"zero_stage": 1, "bucket": 9}),
        ({"bf16": {"enabled": True}}, {"precision": "bf16", "reduced_bytes": 4}),
        ({"bf16": {"enabled": True}, "communication_data_type": "bf16"}, {"reduced_bytes": 2}),
        ({"fp16": {"enabled": True}}, {"precision": "fp16", "reduced_bytes": 2}),
        ({"optimizer": {"type": "AdamW"}}, {"optimizer": "fused"}),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {"optimizer": "for-loop"}),
    ],
)
def test_bytes_of_a_job_follow_its_json(config: dict[str, Any], fields: dict[str, Any]) -> None:
    model = model_of_train(TRAIN, 100)
    assert model is not None
    sizes = training_sizes(config, model, 2, 1, 1)
    assert sizes.micro_batch == 2
    assert {name: getattr(sizes, name) for name in fields} == fields


def test_a_tenth_of_the_memory_stays_free() -> None:
    def limit(**options: Any) -> int | None:
        return candidates_of(auto(schedule_options={"memory": "1GB", **options})).memory_bytes

    assert (limit(), limit(headroom=0), limit(headroom=0.25)) == (9 * 10**8, 10**9, 75 * 10**7)
    with pytest.raises(ConfigError, match=r"headroom: .*below 1.*got 1"):
        limit(headroom=1)


def test_samples_do_not_depend_on_the_choice() -> None:
    tight = auto(schedule_options={"memory": "120MB", "vocab_size": 100})
    wide = auto(schedule_options={"vocab_size": 100})
    replicas = [placement_of(job).replicas for job in (tight, wide)]
    assert replicas == [1, 2]
    for job, count in zip((tight, wide), replicas, strict=True):
        sizes = batch_sizes(job.deepspeed, count, 1)
        assert (sizes.micro_batches, sizes.train_batch_size) == (8, 16)


def test_micro_batches_are_those_of_a_pipeline_group() -> None:
    def micro_batches(world: int | None = None) -> int:
        [row] = [row for row in candidates_of(auto(train={}), world).ranked if row.label == "1f1b"]
        return round((row.time or 0) / 3) - 3  # 1F1B takes 3 (N + D - 1) at f = b = w = 1

    assert (micro_batches(), micro_batches(8)) == (8, 4)


def test_memory_follows_precision_and_recomputation() -> None:
    def largest(batch: dict[str, Any], **train: Any) -> int:
        candidates = candidates_of(auto(batch, train=TRAIN | train, schedule_options={"vocab_size": 1000}))
        [row] = [row for row in candidates.ranked if row.label == "gpipe"]
        assert row.recompute == train.get("recompute_granularity", "none") and row.memory_bytes
        return row.memory_bytes

    half = largest({})
    assert largest({"bf16": {"enabled": False}}) > 1.5 * half
    assert largest({}, recompute_granularity="full") < half
    # With one copy of the weights, ZeRO has nothing to shard.
    assert largest({"zero_optimization": {"stage": 0}}) == half


@pytest.mark.parametrize(
    ("batch", "section", "words"),
    [
        ({"train_batch_size": None}, {}, r"train_batch_size None, train_micro_batch_size_per_gpu 2"),
        ({"train_micro_batch_size_per_gpu": None}, {}, r"train_micro_batch_size_per_gpu None"),
        ({"gradient_accumulation_steps": 4}, {}, r"gradient_accumulation_steps 4"),
        ({"train_batch_size": 33}, {}, r"^train_batch_size: .*2 x 1 .*got 33\)\. Use 32 or 34"),
        ({"train_batch_size": "x"}, {}, "^train_batch_size: .*'x'"),
        ({}, {"schedule_options": {"chunks": 2}}, r"chunks.*costs, headroom, memory, vocab_size"),
        ({}, {"schedule_options": {"memory": "16"}}, r"got '16'.*80GB"),
        ({}, {"schedule_options": {"costs": "g=1"}}, r'"auto": costs.*f, b, w, comm'),
        (
            {},
            {"schedule_options": {"memory": "1MB", "headroom": 0}},
            r" 1\.0 MB.*\d MB too much.*pipeline_parallel_size, tensor_parallel_size\), .*micro-batch or "
            r"recompute_granularity full\.$",
        ),
        (
            {"bf16": {"enabled": False}, "zero_optimization": {"stage": 0}},
            {
                "schedule_options": {"memory": "1MB", "headroom": 0},
                "train": TRAIN | {"recompute_granularity": "auto"},
            },
            r"micro-batch, ZeRO stage 1 or bf16\.$",
        ),
        (
            {},
            {"schedule_options": {"memory": "1GB"}, "train": {"num_layers": 16}},
            r"^schedule_options\.memory: .*'1GB'.*num_layers, hidden_size, num_attention_heads, seq_length",
        ),
        ({}, {"train": TRAIN | {"num_layers": 3}}, r"num_layers: .*4 \(got 3\).* 4 layers.*most 3\.$"),
        ({}, {"train": TRAIN | {"stage_layers": "4,4,4,4,4"}}, r"--stage-layers: .*4,4,4,4,4"),
    ],
)
def test_errors(batch: dict[str, Any], section: dict[str, Any], words: str) -> None:
    # Reading the JSON raises nothing: a flag may change it.
    job = auto({}, **section)
    job = load_config({k: v for k, v in (job.deepspeed | batch).items() if v is not None})
    with pytest.raises(ConfigError, match=words):
        placement_of(job)


def test_the_vocabulary_is_that_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"vocab_size": 777}')
    folder, source = str(tmp_path), str(tmp_path / "meta.json")
    for path in (
        folder,
        f"{folder}/text_document",
        [f"{folder}/text_document.bin"],
        f"1 {folder} 2 elsewhere",
    ):
        assert vocabulary(0, {"data_path": path}) == (777, source)
    assert vocabulary(5000, {"data_path": folder}) == (5000, '"vocab_size"')
    assert vocabulary(0, {"data_path": str(tmp_path / "none")})[0] == 50257

    def memory(options: dict[str, Any]) -> int:
        rows = candidates_of(auto(schedule_options=options, train=TRAIN | {"data_path": folder})).ranked
        return next(row.memory_bytes or 0 for row in rows if row.label == "gpipe")

    assert memory({}) == memory({"vocab_size": 777}) < memory({"vocab_size": 5000})


def test_costs_from_a_file(tmp_path: Path) -> None:
    """Costs of links have no text form. "zb_v" of a job plans for them too."""
    file = tmp_path / "costs.json"
    file.write_text('{"b": 1.5, "links": {"0>1": 2.0}}')
    costs = Costs(backward_input=1.5, links={(0, 1): 2.0})
    job = auto(train={}, schedule_options={"costs": str(file)})
    candidates = candidates_of(job)
    assert candidates == choose(Request(4, 8, costs)) and candidates.best is not None
    assert simulate(make_job_plan(job).timetable, costs).makespan == candidates.best.time
    options = {"costs": str(file)}
    named = {"ds_ext": {"schedule": "zb_v", "pipeline_parallel_size": 4, "schedule_options": options}}
    assert timetable_of(named, 8) == get_schedule("zb_v").timetable(4, 8, {}, costs)
    with pytest.raises(ConfigError, match=r"none\.json"):
        placement_of(auto(train={}, schedule_options={"costs": "none.json"}))


def test_given_layers_are_priced() -> None:
    candidates = candidates_of(auto(train=TRAIN | {"stage_layers": "5,5,4,2"}))
    assert candidates.best is not None and candidates.best.layers == (5, 5, 4, 2)
    assert {row.stages for row in candidates.usable} == {4}


def test_recomputation_is_chosen_unless_a_flag_sets_it(tmp_path: Path) -> None:
    file = tmp_path / "auto.json"

    def rank(memory: int | None, *flags: str) -> Any:
        options = {} if memory is None else {"memory": f"{memory}B", "headroom": 0}
        file.write_text(json.dumps(AUTO | {"ds_ext": AUTO["ds_ext"] | {"schedule_options": options}}))
        words = ["--deepspeed_config", str(file), "--dry-run", "--lr", "1e-3", "--seq-length", "1024", *flags]
        return plan_job("train_gpt.py", words, "gpt")[1].candidates

    wide = rank(None)
    least = min(row.memory_bytes for row in wide.ranked if row.memory_bytes and row.recompute == "none")
    assert wide.best.recompute == "none" and wide.best.memory_bytes >= least
    tight = rank(least - 1)
    assert tight.best.recompute == "full" and tight.best.memory_bytes < least
    with pytest.raises(ConfigError, match="too much"):
        rank(least - 1, "--recompute-granularity", "none")
