"""From the JSON and the world size to a printable plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_ext.config.job import load_config
from ds_ext.errors import ConfigError
from ds_ext.pipe_schedules.costs import read_costs
from ds_ext.pipe_schedules.draw.grid import time_grid
from ds_ext.pipe_schedules.simulate import simulate
from ds_ext.planner.job_plan import JobPlan, make_job_plan
from ds_ext.training.plan_text import describe

JSON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 4,
    "ds_ext": {"schedule": "bitpipe", "pipeline_parallel_size": 4},
}


def plan(world_size: int | None = None, **section: Any) -> JobPlan:
    return make_job_plan(load_config(JSON | {"ds_ext": JSON["ds_ext"] | section}), world_size)


def test_sizes_follow_from_the_world() -> None:
    one, two = plan(), plan(8)
    assert (one.layout.world_size, one.sizes.micro_batches, one.sizes.train_batch_size) == (4, 8, 24)
    assert (two.layout.world_size, two.sizes.micro_batches, two.sizes.train_batch_size) == (8, 8, 48)
    assert two.layout.data_parallel_size == 2
    assert one.timetable.micro_batches == 8


@pytest.mark.parametrize(
    ("world", "section", "sentence"),
    [
        (
            6,
            {},
            "world size: .*pipeline_parallel_size 4 x tensor_parallel_size 1 .*6.* 4 or 8 ",
        ),
        (4, {"tensor_parallel_size": 2}, "world size: .*8 .*4.* 8 "),
        (5, {"pipeline_parallel_size": 5}, r"even number of stages .* got 5. Use 4 or 6"),
        (6, {"pipeline_parallel_size": 6}, r"multiple of 6 .* got 8. Use 6 or 12, .*steps 3 or 6"),
    ],
)
def test_what_does_not_fit(world: int, section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(world, **section)


def test_one_of_a_thing_is_not_many() -> None:
    made = make_job_plan(load_config({"train_batch_size": 1}))
    text = describe(made, boundaries=[0, 1], layer_names=["head"], message_bytes=4)
    assert "1 micro-batch of 1 per pipeline group, 1 sample a step" in text


def test_uneven_stages_are_priced_as_they_are_cut() -> None:
    def bubble(weights: tuple[float, ...] | None) -> str:
        names = [f"layer {i}" for i in range(10)]
        text = describe(
            plan(), boundaries=[0, 2, 4, *range(5, 11)], layer_names=names, message_bytes=4, weights=weights
        )
        return next(line for line in text.splitlines() if line.startswith("bubble"))

    assert bubble(None) != bubble((1.6, 1.6, *[0.8] * 6))


def test_the_plan_as_text() -> None:
    made = plan(16, tensor_parallel_size=2)
    names = ["embedding", "positions", *(f"layer {i}" for i in range(16)), "final norm", "head"]
    boundaries = [0, *range(4, 18, 2), 20]
    text = describe(made, boundaries=boundaries, layer_names=names, message_bytes=65536)
    assert text.splitlines()[:17] == [
        "schedule  bitpipe, 8 micro-batches of 3 per pipeline group, 48 samples a step",
        "world 16 = 4 pipeline x 2 tensor x 2 data",
        "  tensor    [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]",
        "  pipeline  [0,4,8,12] [1,5,9,13] [2,6,10,14] [3,7,11,15]",
        "  data      [0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]",
        "  mirror    [0,12] [1,13] [2,14] [3,15] [4,8] [5,9] [6,10] [7,11]",
        "stages",
        "  stage 0   device 0, 3    embedding, positions, layer 0-1",
        "  stage 1   device 1, 2    layer 2-3",
        "  stage 2   device 2, 1    layer 4-5",
        "  stage 3   device 3, 0    layer 6-7",
        "  stage 4   device 3, 0    layer 8-9",
        "  stage 5   device 2, 1    layer 10-11",
        "  stage 6   device 1, 2    layer 12-13",
        "  stage 7   device 0, 3    layer 14-15, final norm, head",
        "bubble    11.1% (simulated of the layers alone, forward : backward = 1 : 2, free messages)",
        "peak      3.5, 4, 4, 3.5 live activations per device, in units of 1/4 of the model and a micro-batch",
    ]
    assert "messages  96 a step and pipeline group, 65,536 bytes each" in text
    assert "weights   2 copies of the model per pipeline group" in text
    assert "also with room for 1 message on a link; the loss is on device 0, 3" in text
    assert "\nrank 3  4 5 . 0 0 1" in text
    without = describe(made, boundaries=boundaries, layer_names=names, message_bytes=65536, grid=False)
    assert text.startswith(without) and "rank 3" not in without


def test_a_plan_is_made_without_torch() -> None:
    code = (
        "import sys; from ds_ext.training.arguments import build_parser; build_parser('x');"
        "from ds_ext.planner.job_plan import make_job_plan; from ds_ext.config.job import load_config;"
        "make_job_plan(load_config({'train_batch_size': 4})).simulation; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def auto(world_size: int | None = None, **changes: Any) -> JobPlan:
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 1,
        "ds_ext": {"schedule": "auto", "pipeline_parallel_size": 4, **changes},
    }
    return make_job_plan(load_config(config), world_size)


def test_auto_is_planned_for_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    one, two = auto(), auto(8)
    assert (one.layout.data_parallel_size, two.layout.data_parallel_size) == (1, 2)
    assert (one.timetable.micro_batches, two.timetable.micro_batches) == (16, 8)
    assert one.sizes.train_batch_size == two.sizes.train_batch_size == 16
    assert one.timetable.schedule == two.timetable.schedule == "bitpipe_zb"
    with pytest.raises(ConfigError, match=r"world size: .*pipeline_parallel_size 4 .*6"):
        auto(6)


def test_the_plan_is_priced_with_the_costs_that_are_given(tmp_path: Path) -> None:
    """In the headline and in the grid: those of "auto", of a planned schedule, and of a file."""
    file = tmp_path / "costs.json"
    file.write_text('{"comm": 0.5, "links": {"0>1": 2}}')
    options = {"boundaries": [*range(9)], "layer_names": ["layer"] * 8, "message_bytes": 4}
    for costs, words in (
        ("b=1.5,comm=0.5", "f=1,b=1.5,w=1,comm=0.5"),
        (str(file), "f=1,b=1,w=1,comm=0.5, links by their own times"),
    ):
        made = plan(schedule="bitpipe_zb", schedule_options={"costs": costs})
        priced = simulate(made.timetable, read_costs(costs))
        text = describe(made, **options)
        assert f"bubble    {priced.bubble:.1%} (simulated with {words})\n" in text
        assert text.endswith(f"{time_grid(priced)}\n{text.splitlines()[-1]}")
        weighed = describe(made, **options, weights=(0.5,) * 4 + (1.5,) * 4)
        assert f"(simulated with {words.partition(', links')[0]}, stages by their factors" in weighed
    made = auto(schedule_options={"costs": "comm=0.2"})
    assert made.choice is not None and made.choice.best is not None
    stages = made.layout.placement.stages
    options = {"boundaries": [*range(stages + 1)], "layer_names": ["layer"] * stages, "message_bytes": 4}
    text = describe(made, **options)
    assert f"bubble    {made.choice.best.bubble:.1%} (simulated with f=1,b=1,w=1,comm=0.2)\n" in text
    assert "chosen for a vocabulary" not in text


def test_the_plan_says_for_which_vocabulary_auto_chose() -> None:
    sizes = {"num_layers": 16, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
    made = auto(train=sizes, schedule_options={"vocab_size": 1000})
    stages = made.layout.placement.stages
    options = {"boundaries": [*range(stages + 1)], "layer_names": ["layer"] * stages, "message_bytes": 4}
    text = describe(made, **options)
    assert '  chosen for a vocabulary of 1,000 ("vocab_size")\n' in text
    assert "comm=0, stages by their factors)" in text
    text = describe(auto(train=sizes), boundaries=[0] * 99, layer_names=["layer"], message_bytes=4)
    assert "  chosen for a vocabulary of 50,257 (GPT-2, as nothing says another one)\n" in text


def test_the_plan_shows_what_auto_chose_from() -> None:
    made = auto(schedule_options={"costs": "comm=0.2"})
    assert made.choice is not None and made.choice.best is not None
    stages = made.layout.placement.stages
    boundaries = [*range(stages + 1)]
    text = describe(made, boundaries=boundaries, layer_names=["layer"] * stages, message_bytes=4)
    lines = text.splitlines()
    at = lines.index(f"auto      {made.choice.reason()}")
    assert lines[at + 1].split() == ["schedule", "recompute", "time", "bubble", "memory"]
    shown = lines[at + 2 : at + 7]
    labels = [row.label for row in made.choice.fitting[:5]]
    assert [line.strip().startswith(label) for line, label in zip(shown, labels, strict=True)] == [True] * 5
    assert "auto " not in describe(plan(), boundaries=[0] * 8 + [1], layer_names=["layer"], message_bytes=4)
