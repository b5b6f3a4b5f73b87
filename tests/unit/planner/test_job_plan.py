"""Job plan of a JSON and a world size, and its text."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_ext.config.job import load_config
from ds_ext.errors import ConfigError
from ds_ext.parallel.partition import StageWork
from ds_ext.pipe_schedules import SCHEDULES
from ds_ext.pipe_schedules.costs import Costs, read_costs
from ds_ext.pipe_schedules.draw.grid import time_grid
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.job_plan import JobPlan, make_job_plan, make_stage_plan
from ds_ext.planner.job_text import describe
from ds_ext.planner.memory import DeviceMemory

ROOT = Path(__file__).parents[3]
JSON: dict[str, Any] = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 3,
    "ds_ext": {"schedule": "bitpipe", "pipeline_parallel_size": 4},
}
SIZES = {"num_layers": 16, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}


def plan(world_size: int | None = None, samples: int = 24, **section: Any) -> JobPlan:
    config = {**JSON, "train_batch_size": samples, "ds_ext": JSON["ds_ext"] | section}
    return make_job_plan(load_config(config), world_size)


def auto(world_size: int | None = None, **section: Any) -> JobPlan:
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "ds_ext": {"schedule": "auto", "pipeline_parallel_size": 4, **section},
    }
    return make_job_plan(load_config(config), world_size)


def text_of(plan: JobPlan, **options: Any) -> str:
    """Return the text of a plan with one layer per stage."""
    stages = plan.layout.placement.stages
    layers = {"boundaries": [*range(stages + 1)], "layer_names": ["layer"] * stages, "message_bytes": 4}
    return describe(plan, **{**layers, **options})


def test_the_bubble_of_equal_stages_is_printed_for_equal_stages_only() -> None:
    equal = plan()
    stages = equal.layout.placement.stages
    unequal = {"boundaries": [0, *range(3, stages + 3)], "layer_names": ["layer"] * (stages + 2)}

    def bubbles(planned: JobPlan, **options: Any) -> list[str]:
        return re.findall(r"^bubble +([\d.]+)%", text_of(planned, **options), re.MULTILINE)

    assert bubbles(equal) == [f"{100 * equal.simulation.bubble:.1f}"] and bubbles(equal, **unequal) == []
    weights = (3.0, *(1.0,) * (stages - 1))
    known = equal.with_work(StageWork(tuple(w * stages / sum(weights) for w in weights), None))
    assert [float(text) for text in bubbles(known, **unequal)] > [float(text) for text in bubbles(equal)]
    factors = "f=1,b=1,w=1,stages=3" + "/1" * (stages - 1)
    given = plan(schedule_options={"mode": "greedy", "costs": factors})
    assert len(bubbles(given, **unequal)) == 1


def test_sizes_follow_from_the_world() -> None:
    one, two = plan(), plan(8)
    assert (one.layout.world_size, one.sizes.micro_batches, one.sizes.train_batch_size) == (4, 8, 24)
    assert (two.layout.world_size, two.sizes.micro_batches, two.sizes.train_batch_size) == (8, 4, 24)
    assert two.layout.data_parallel_size == 2
    assert one.timetable.micro_batches == 8


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.json")), ids=lambda file: file.stem)
def test_every_schedule_has_the_batch_of_a_configuration(file: Path) -> None:
    config = json.loads(file.read_text())
    section = {
        key: value for key, value in config["ds_ext"].items() if key not in ("fbd", "schedule_options")
    }
    world = None if section["schedule"] == "fbd" else make_job_plan(load_config(config)).layout.world_size
    batches = {
        make_job_plan(
            load_config(config | {"ds_ext": section | {"schedule": name}}), world
        ).sizes.train_batch_size
        for name in ("gpipe", "1f1b", "interleaved", "bitpipe", "bitpipe_zb", "zb_h1", "zb_v", "dpp")
    }
    assert batches == {config["train_batch_size"]}


BATCHES = [
    {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 16},
    {"train_micro_batch_size_per_gpu": 3},
    {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 3},
    {"train_batch_size": 96, "gradient_accumulation_steps": 16},
    {"train_batch_size": 48, "gradient_accumulation_steps": 8, "train_micro_batch_size_per_gpu": 3},
]


@pytest.mark.parametrize("world", [None, 8])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_a_json_trains_the_same_samples_with_every_schedule(batch: dict[str, int], world: int | None) -> None:
    samples: dict[str, int] = {}
    for name in (*SCHEDULES, "auto", "fbd 3"):
        schedule, _, backward = name.partition(" ")
        section = {"schedule": schedule, "pipeline_parallel_size": 2 if backward else 4}
        fbd = {"fbd": {"backward_per_forward": int(backward)}} if backward else {}
        with contextlib.suppress(ConfigError):
            samples[name] = make_job_plan(
                load_config({**batch, "ds_ext": section | fbd}), world
            ).sizes.train_batch_size
    assert samples and len(set(samples.values())) == 1
    assert "train_batch_size" in batch or not samples.keys() & {"bitpipe", "bitpipe_zb", "chimera", "fbd"}


@pytest.mark.parametrize(
    ("schedule", "steps", "world", "numbers"),
    [
        ("bitpipe", 16, None, {48, 96}),
        ("bitpipe", 6, None, {36}),  # 6 micro-batches, as with 1f1b, are not supported
        ("bitpipe_zb", 6, 8, {36, 72}),
        ("bitpipe", None, None, {12}),
        ("fbd", 16, 8, {96, 48}),
    ],
)
def test_both_meanings_of_accumulation_are_shown(
    schedule: str, steps: int | None, world: int | None, numbers: set[int]
) -> None:
    section = {"schedule": schedule, "pipeline_parallel_size": 4}
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": steps, "ds_ext": section}
    with pytest.raises(ConfigError, match=r"^train_batch_size: .*\(got .*\)") as caught:
        make_job_plan(load_config(config), world)
    fix = str(caught.value).partition("Set train_batch_size to ")[2]
    assert {int(number) for number in re.findall(r"(?:^| or )(\d+)", fix)} == numbers
    for number in numbers:
        sizes = {"train_batch_size": number, "gradient_accumulation_steps": None}
        assert make_job_plan(load_config(config | sizes), world).sizes.train_batch_size == number


def test_what_a_schedule_does_not_support_may_come_later_too() -> None:
    fbd = {"ds_ext": {"schedule": "fbd", "pipeline_parallel_size": 4}, "train_batch_size": 4}
    early = make_job_plan(load_config(fbd | {"train_micro_batch_size_per_gpu": 1}))
    audited = load_config(early.job.deepspeed | {"ds_ext": {**fbd["ds_ext"], "audit_interval": 5}})
    for plan in (early, early.stages):
        with pytest.raises(ConfigError, match="audit_interval"):
            plan.complete(audited)


def test_the_batch_sizes_may_come_later() -> None:
    early = make_stage_plan(load_config({"ds_ext": JSON["ds_ext"]}), 8)
    complete = early.complete(load_config(JSON))
    assert (early.layout, early.schedule.name) == (complete.layout, "bitpipe")
    assert complete.program == plan(8).program and complete.sizes.train_batch_size == 24
    same = complete.complete(load_config(JSON | {"gradient_accumulation_steps": 2, "steps_per_print": 1}))
    assert same.program is complete.program and same.job.deepspeed["steps_per_print"] == 1
    other = complete.complete(load_config(JSON | {"train_batch_size": 48}))
    assert other.timetable.micro_batches == 8 and isinstance(other, JobPlan)
    with pytest.raises(ConfigError, match="train_batch_size"):
        early.complete(early.job)


@pytest.mark.parametrize(
    ("world", "section", "words"),
    [
        (6, {}, "world size: .*pipeline_parallel_size 4 x tensor_parallel_size 1 .*6.* 4 or 8 "),
        (4, {"tensor_parallel_size": 2}, "world size: .*8 .*4.* 8 "),
        (5, {"pipeline_parallel_size": 5}, r"bitpipe.*got 5.* 4 or 6"),
        (6, {"pipeline_parallel_size": 6}, r"6.*got 8.* 6 or 12.* 18 or 36"),
    ],
)
def test_sizes_that_do_not_fit(world: int, section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(world, **section)


def test_auto_plans_for_the_world() -> None:
    one, two = auto(), auto(8)
    assert (one.layout.data_parallel_size, two.layout.data_parallel_size) == (1, 2)
    assert (one.timetable.micro_batches, two.timetable.micro_batches) == (8, 4)
    assert one.sizes.train_batch_size == two.sizes.train_batch_size == 8
    assert one.timetable.schedule == two.timetable.schedule == "bitpipe_zb"
    with pytest.raises(ConfigError, match=r"world size: .*pipeline_parallel_size 4 .*6"):
        auto(6)


def test_planning_and_its_checks_import_no_torch() -> None:
    code = (
        "import sys, ds_ext.recipes.training.setup\n"
        "from ds_ext.recipes.training.arguments import build_parser; build_parser('x');"
        "from ds_ext.planner.job_plan import make_job_plan; from ds_ext.config.job import load_config;"
        "make_job_plan(load_config({'train_batch_size': 4})).simulation; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- text ------------------------------------------------------------------------------------------------------------


def test_text_of_a_plan() -> None:
    planned = plan(16, 48, tensor_parallel_size=2).with_work(StageWork(None, None))
    names = ["embedding", "positions", *(f"layer {i}" for i in range(16)), "final norm", "head"]
    layers = {"boundaries": [0, *range(4, 18, 2), 20], "layer_names": names, "message_bytes": 65536}
    text = describe(planned, **layers)
    lines = text.splitlines()
    assert lines[0].startswith("schedule  bitpipe, 8 micro-batches of 3 ") and " 48 samples " in lines[0]
    assert lines[1:15] == [
        "world 16 = 4 pipeline x 2 tensor x 2 data",
        "  tensor    [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]",
        "  pipeline  [0,4,8,12] [1,5,9,13] [2,6,10,14] [3,7,11,15]",
        "  data      [0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]",
        "  mirror    [0,12] [1,13] [2,14] [3,15] [4,8] [5,9] [6,10] [7,11]",
        "stages    8, 2 to 4 pipeline layers each",
        "  stage 0   device 0, 3    embedding, positions, layer 0-1",
        "  stage 1   device 1, 2    layer 2-3",
        "  stage 2   device 2, 1    layer 4-5",
        "  stage 3   device 3, 0    layer 6-7",
        "  stage 4   device 3, 0    layer 8-9",
        "  stage 5   device 2, 1    layer 10-11",
        "  stage 6   device 1, 2    layer 12-13",
        "  stage 7   device 0, 3    layer 14-15, final norm, head",
    ]
    figures = {line.split()[0]: line for line in lines[15:22]}
    for label, numbers in {
        "bubble": "11.1% 1 2",
        "peak": "3.5 4 4 3.5 1/4",
        "messages": "96 65,536",
        "weights": "2",
        "checked": "1",
        "loss": "0 3",
        "nccl": "4 2.1 512 24 4",
    }.items():
        assert re.findall(r"\d[\d.,/]*%?(?<!,)", figures[label]) == numbers.split()
    assert re.search(r"^\w+ 3  4 5 \. 0 0 1", text, re.MULTILINE)
    assert "nccl" not in describe(planned, **layers, gpus=False)


def test_the_plan_has_ten_lines() -> None:
    """Without the lines that only some jobs have, on flags, recovery, hosts and the choice of "auto"."""
    planned = plan(16, tensor_parallel_size=2)
    layers = {"boundaries": [*range(9)], "layer_names": ["layer"] * 8, "model": "123 parameters"}
    memory = [DeviceMemory(1, 2, 3, 4)] * 4
    options = {**layers, "memory": memory, "parameters": [1, 2, 3, 4], "settings": ["rate      0.1"]}
    short, whole = (describe(planned, **options, verbose=verbose).splitlines() for verbose in (False, True))
    assert [line.split()[0] for line in short] == [
        *("schedule", "rate", "world", "stages", "model", "bubble", "memory", "more"),
    ]
    assert set(short[:-1]) <= set(whole) and len(whole) > 30
    assert all(len(line) <= 180 for line in short)


def test_the_plan_names_stages_without_parameters() -> None:
    lines = text_of(plan(), empty_stages=[2, 3, 6]).splitlines()
    (line,) = (line for line in lines if line.startswith("stages "))
    assert line.endswith("stages 2-3, 6") and re.findall(r"\d+", line) == ["8", "1", "2", "3", "6"]
    (line,) = (line for line in text_of(plan(), empty_stages=[2]).splitlines() if line.startswith("stages "))
    assert line.endswith("stage 2")


def test_singular_forms() -> None:
    text = text_of(make_job_plan(load_config({"train_batch_size": 1})))
    assert "1 micro-batch of 1 " in text and "1 sample " in text


def bubble_of(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("bubble"))


def test_text_uses_the_costs_of_the_plan(tmp_path: Path) -> None:
    """In the bubble and in the grid; weights of the stages replace equal factors."""
    weights = (1.6, 1.6, *[0.8] * 6)
    equal, uneven = (bubble_of(text_of(plan().with_work(StageWork(w, None)))) for w in (None, weights))
    assert equal != uneven
    file = tmp_path / "costs.json"
    file.write_text('{"comm": 0.5, "links": {"0>1": 2}}')
    for costs, words in (("b=1.5,comm=0.5", "f=1,b=1.5,w=1,comm=0.5"), (str(file), "f=1,b=1,w=1,comm=0.5")):
        planned = plan(schedule="bitpipe_zb", schedule_options={"costs": costs})
        simulation = simulate(planned.timetable, read_costs(costs))
        text = text_of(planned)
        assert f"{simulation.bubble:.1%}" in bubble_of(text) and words in bubble_of(text)
        assert text.endswith(f"{time_grid(simulation)}\n{text.splitlines()[-1]}")
        weighed = bubble_of(text_of(planned.with_work(StageWork((0.5,) * 4 + (1.5,) * 4, None))))
        assert words in weighed and weighed != bubble_of(text)


def test_the_work_of_the_stages_is_in_the_simulation() -> None:
    """Also of a plan with other accumulation steps; costs with factors of the stages replace it."""
    work = StageWork((1.6, 1.6, *[0.8] * 6), None)
    weighed = plan().with_work(work)
    assert weighed.costs == Costs(stages=work.stages) and not work.is_balanced
    assert (
        weighed.simulation.bubble
        == simulate(weighed.timetable, weighed.costs).bubble
        > plan().simulation.bubble
    )
    assert weighed.resized(8).costs == weighed.costs
    assert weighed.complete(weighed.job).simulation == weighed.simulation
    planned = plan(schedule="bitpipe_zb", schedule_options={"costs": "stages=1x7/2"})
    assert planned.with_work(work).simulation == planned.simulation


@pytest.mark.parametrize("head_parts", [False, True])
@pytest.mark.parametrize("schedule", ["zb_v", "bitpipe_zb"])
def test_a_planned_order_fits_the_work(schedule: str, head_parts: bool) -> None:
    """The order of a run is at least as fast as the one that `compare` promises for these costs."""
    work = StageWork((0.6, *[0.9] * 6, 2.0), None, head=0.7 if head_parts else 0.0)
    equal = plan(schedule=schedule, vocabulary_parallel_head=head_parts)
    weighed = equal.with_work(work)
    options = {"costs": "stages=0.6/0.9x6/2" + ",head=0.7" * head_parts}
    given = plan(schedule=schedule, vocabulary_parallel_head=head_parts, schedule_options=options)
    kept = simulate(equal.timetable, weighed.costs).makespan
    assert weighed.costs == given.costs
    assert weighed.simulation.makespan == min(given.simulation.makespan, kept)
    assert head_parts or given.simulation.makespan < kept
    assert weighed.program.timetable is weighed.timetable
    assert weighed.resized(16).timetable.orders != equal.resized(16).timetable.orders


def test_text_lists_the_candidates_of_auto() -> None:
    planned = auto(schedule_options={"costs": "comm=0.2"})
    assert planned.candidates is not None and planned.candidates.best is not None
    text = text_of(planned)
    assert f"{planned.candidates.best.bubble:.1%}" in bubble_of(text) and "comm=0.2" in bubble_of(text)
    lines = text.splitlines()
    index = lines.index(f"auto      {planned.candidates.reason()}")
    assert lines[index + 1].split() == ["schedule", "recompute", "time", "bubble", "memory"]
    for line, row in zip(lines[index + 2 : index + 7], planned.candidates.usable[:5], strict=True):
        assert (
            line.strip().startswith(row.label) and f"{row.time:.4g}" in line and f"{row.bubble:.1%}" in line
        )
    assert "vocabulary" not in text and "auto " not in text_of(plan())


def test_text_has_the_vocabulary_of_auto() -> None:
    given, default = (text_of(auto(train=SIZES, schedule_options=o)) for o in ({"vocab_size": 1000}, {}))
    assert '  vocabulary 1,000 ("vocab_size")\n' in given and "  vocabulary 50,257 (" in default


@pytest.mark.parametrize(("name", "split"), [("zb_h1", True), ("1f1b", False)])
def test_layers_that_defer_nothing_have_the_bubble_of_whole_backwards(name: str, split: bool) -> None:
    planned = plan(schedule=name)

    def bubble(**options: Any) -> dict[str, float]:
        found = re.findall(r"^(bubble|te) .*?([\d.]+)%", text_of(planned, **options), re.MULTILINE)
        return {label: float(value) for label, value in found}

    assert "te" not in bubble()
    assert ("te" in bubble(defers=False)) == split
    if split:
        whole = plan(schedule="1f1b").simulation.bubble
        assert bubble(defers=False)["te"] == pytest.approx(100 * whole, abs=0.1)
        assert bubble()["bubble"] < 100 * whole


@pytest.mark.parametrize(("name", "remedies"), [("1f1b", 2), ("fbd", 1)])
def test_a_slow_last_stage_may_divide_its_head(name: str, remedies: int) -> None:
    """The shortest bubble comes first; it is that of a job with the key."""
    work = StageWork((0.5, 0.5, 0.5, 2.5), (0.9, 0.9, 0.9, 1.3), parts=StageWork(None, None, head=2.0))
    text = text_of(plan(schedule=name).with_work(work))
    [note] = re.findall("^note: stage.*", text, re.MULTILINE)
    bubbles = re.findall(r"(--[\w-]+)[\w ]* gives a bubble of ([\d.]+)%", note)
    assert len(bubbles) == remedies and bubbles == sorted(bubbles, key=lambda item: float(item[1]))
    if remedies == 2:
        divided = plan(schedule=name, vocabulary_parallel_head=True).with_work(
            StageWork(None, None, head=2.0)
        )
        assert bubbles[0] == ("--vocabulary-parallel-head", f"{100 * divided.simulation.bubble:.1f}")


@pytest.mark.parametrize(
    ("world", "more", "overlaps"),
    [(8, {"zero_optimization": {"stage": 1}}, 1), (8, {"bf16": {"enabled": True}}, 1), (8, {}, 0)],
)
def test_a_plan_has_a_line_for_gathers_beside_the_next_step(
    world: int, more: dict[str, Any], overlaps: int
) -> None:
    section = JSON["ds_ext"] | {"schedule": "1f1b"}
    for value in (False, True):
        job = load_config(JSON | more | {"ds_ext": {**section, "overlap_across_steps": value}})
        lines = text_of(make_job_plan(job, world)).splitlines()
        assert sum("overlap_across_steps" in line for line in lines) == overlaps * value
    job = load_config(JSON | more | {"ds_ext": {**section, "overlap_across_steps": True}})
    assert not make_job_plan(job, 4).overlaps_steps  # one copy of the weights


@pytest.mark.parametrize(
    ("schedule", "devices", "remedies"),
    [("bitpipe", 4, 1), ("bitpipe", 2, 0), ("chimera", 2, 0), ("1f1b", 3, 1), ("1f1b", 2, 0)],
)
def test_a_slow_stage_has_the_remedies_of_its_pipeline(schedule: str, devices: int, remedies: int) -> None:
    """A smaller pipeline has at least 2 devices."""
    planned = plan(schedule=schedule, pipeline_parallel_size=devices)
    weights = (0.5,) * (planned.layout.placement.stages - 1) + (4.0,)
    text = text_of(planned.with_work(StageWork(weights, weights)))
    [note] = re.findall("^note: stage.*", text, re.MULTILINE)
    assert "8 times" in note and note.count(";") == remedies and note[-1].isalpha()


@pytest.mark.parametrize(
    ("zero", "buffers", "elements"),
    [
        ({"stage": 1}, 10**9, "500,000,000"),
        ({"stage": 1, "reduce_bucket_size": 1e6}, 10**9, "1,000,000"),
        ({"stage": 1}, 1, ""),
        ({"stage": 0}, 10**9, ""),
    ],
)
def test_the_memory_names_the_key_of_large_buckets(zero: dict[str, Any], buffers: int, elements: str) -> None:
    planned = make_job_plan(load_config({**JSON, "zero_optimization": zero}))
    text = text_of(planned, memory=[DeviceMemory(10, 20, 30, 40, buffers)] * 4)
    [line] = re.findall("^memory .*", text, re.MULTILINE)
    assert re.findall(r"zero_optimization\.reduce_bucket_size ([\d,]+)\)", line) == [elements] * bool(
        elements
    )


@pytest.mark.parametrize(
    ("train", "fitting"), [(60, "32 or 64"), (48, "32 or 64"), (8, "32"), (72, "64 or 96")]
)
def test_batch_errors_propose_what_the_schedule_supports(train: int, fitting: str) -> None:
    """BitPipe on 4 devices needs a multiple of 4 micro-batches."""
    config = {"train_batch_size": train, "train_micro_batch_size_per_gpu": 8}
    section = {"schedule": "bitpipe", "pipeline_parallel_size": 4}
    with pytest.raises(ConfigError, match=rf"train_batch_size.* {fitting}\.$"):
        make_job_plan(load_config({**config, "ds_ext": section}), 4)
    for size in fitting.split(" or "):
        make_job_plan(load_config({**config, "train_batch_size": int(size), "ds_ext": section}), 4)


@pytest.mark.parametrize("layers", [4, 8, 15, None])
def test_auto_takes_no_more_stages_than_layers(layers: int | None) -> None:
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW"}}
    section = {"schedule": "auto", "pipeline_parallel_size": 4}
    plan = make_stage_plan(load_config({**config, "ds_ext": section}), 4, layers)
    stages = plan.layout.placement.stages
    assert stages == 16 if layers is None else stages <= layers
