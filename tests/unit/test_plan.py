"""From the JSON and the world size to a printable plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_ext.config import load_config
from ds_ext.errors import CheckpointError, ConfigError
from ds_ext.plan import Plan, describe, layer_boundaries, make_plan
from ds_ext.preflight import JOB_FILE, check_resume, describe_job

JSON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 4,
    "ds_ext": {"schedule": "bitpipe", "pipeline_parallel_size": 4},
}


def plan(world_size: int | None = None, **section: Any) -> Plan:
    return make_plan(load_config(JSON | {"ds_ext": JSON["ds_ext"] | section}), world_size)


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
            r"6 processes cannot hold pipeline_parallel_size 4 x tensor_parallel_size 1: .* Start 4 or 8 processes",
        ),
        (4, {"tensor_parallel_size": 2}, r"4 processes cannot hold .* multiple of 8. Start 8 processes"),
        (5, {"pipeline_parallel_size": 5}, r"even number of stages .* got 5. Use 4 or 6"),
        (6, {"pipeline_parallel_size": 6}, r"multiple of 6 .* got 8. Use 6 or 12, .*steps 3 or 6"),
    ],
)
def test_what_does_not_fit(world: int, section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(world, **section)


def test_layers_are_cut_evenly() -> None:
    assert layer_boundaries(8, 2, 2, 4, "1f1b") == [0, 4, 6, 8, 12]
    assert layer_boundaries(3, 0, 0, 3, "1f1b") == [0, 1, 2, 3]
    assert layer_boundaries(5, 1, 2, 1, "1f1b") == [0, 8]


@pytest.mark.parametrize(
    ("layers", "ways"), [(12, "8 or 16"), (7, "8"), (0, "8"), (-8, "8"), (17, "16 or 24")]
)
def test_layers_that_do_not_divide(layers: int, ways: str) -> None:
    sentence = rf"bitpipe cuts the model into 8 stages, and {layers} layers do not .* Use num_layers {ways}, or another"
    with pytest.raises(ConfigError, match=sentence):
        layer_boundaries(layers, 2, 2, 8, "bitpipe")


def test_one_of_a_thing_is_not_many() -> None:
    with pytest.raises(
        ConfigError, match=r"1f1b cuts the model into 1 stage, and 0 layers do not divide into 1\."
    ):
        layer_boundaries(0, 2, 2, 1, "1f1b")
    with pytest.raises(ConfigError, match=r"into 2 stages, and 1 layer does not divide"):
        layer_boundaries(1, 2, 2, 2, "1f1b")
    made = make_plan(load_config({"train_batch_size": 1}))
    text = describe(made, boundaries=[0, 1], layer_names=["head"], message_bytes=4)
    assert "1 micro-batch of 1 per pipeline group, 1 sample a step" in text


def test_the_plan_as_text() -> None:
    made = plan(16, tensor_parallel_size=2)
    names = ["embedding", "positions", *(f"layer {i}" for i in range(16)), "final norm", "head"]
    boundaries = layer_boundaries(16, 2, 2, 8, "bitpipe")
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
        "bubble    11.1% (simulated, forward : backward = 1 : 2, free messages)",
        "peak      3.5, 4, 4, 3.5 live activations per device, in units of 1/4 of the model and a micro-batch",
    ]
    assert "messages  96 a step and pipeline group, 65,536 bytes each" in text
    assert "weights   2 copies of the model per pipeline group" in text
    assert "also with room for 1 message on a link; the loss is on device 0, 3" in text
    assert "\nrank 3  4 5 . 0 0 1" in text
    without = describe(made, boundaries=boundaries, layer_names=names, message_bytes=65536, grid=False)
    assert text.startswith(without) and "rank 3" not in without


def test_a_json_without_our_section_is_said_to_have_none() -> None:
    made = make_plan(load_config({"train_batch_size": 4}))
    options = {"boundaries": [0, 1], "layer_names": ["head"], "message_bytes": 4}
    assert describe(made, **options).splitlines()[:2] == [
        'the JSON has no "ds_ext" section: schedule and sizes are the defaults',
        "schedule  1f1b, 1 micro-batch of 4 per pipeline group, 4 samples a step",
    ]
    assert 'no "ds_ext"' not in describe(
        make_plan(load_config({"train_batch_size": 4, "ds_ext": {}})), **options
    )


def test_a_plan_is_made_without_torch() -> None:
    code = (
        "import sys; from ds_ext.arguments import build_parser; from ds_ext.plan import make_plan;"
        "build_parser('x'); from ds_ext.config import load_config;"
        "make_plan(load_config({'train_batch_size': 4})).simulation; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


LINEAR = {"schedule": "1f1b"}
ZERO_1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}


def job(world: int, section: dict[str, Any], more: dict[str, Any]) -> Plan:
    return make_plan(load_config(JSON | more | {"ds_ext": JSON["ds_ext"] | section}), world)


def checkpoint_of(plan: Plan, folder: Path) -> str:
    (folder / "step_3").mkdir()
    (folder / "latest").write_text("step_3")
    (folder / "step_3" / JOB_FILE).write_text(json.dumps(describe_job(plan)))
    return str(folder)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((4, {}, ZERO_1), (4, {}, ZERO_1)),
        ((4, LINEAR, ZERO_1), (4, {"schedule": "gpipe"}, ZERO_1)),
        ((4, {}, {}), (8, {}, {})),
        ((8, LINEAR, {}), (4, {"schedule": "gpipe"}, {})),
        ((4, LINEAR, ZERO_1 | BF16), (4, LINEAR, ZERO_1 | BF16)),
    ],
)
def test_checkpoints_that_fit(saved: Any, loaded: Any, tmp_path: Path) -> None:
    check_resume(checkpoint_of(job(*saved), tmp_path), job(*loaded))


@pytest.mark.parametrize(
    ("saved", "loaded", "sentence"),
    [
        (
            (4, LINEAR, ZERO_1),
            (4, {}, ZERO_1),
            r"step_3 was written with schedule 1f1b, PP 4 x TP 1 x DP 1, ZeRO stage 1 and fp32; this job has schedule "
            r"bitpipe, PP 4 .* on 4 processes, or leave --load out\.",
        ),
        ((4, {}, {}), (4, {"schedule": "chimera"}, {}), r"this job has schedule chimera"),
        ((4, LINEAR, {}), (4, {"schedule": "interleaved"}, {}), r"this job has schedule interleaved"),
        (
            (4, {}, {}),
            (2, {"pipeline_parallel_size": 2}, {}),
            r"this job has schedule bitpipe, PP 2 x TP 1 x DP 1",
        ),
        (
            (8, {}, {}),
            (8, {"tensor_parallel_size": 2}, {}),
            r"TP 1 x DP 2.* has .* TP 2 x DP 1.* on 8 processes",
        ),
        ((4, {}, ZERO_1), (8, {}, ZERO_1), r"DP 1, ZeRO stage 1 .* this job has .* DP 2, ZeRO stage 1"),
        ((4, {}, ZERO_1), (4, {}, {}), r"ZeRO stage 1 and fp32; .* ZeRO stage 0 and fp32"),
        ((4, {}, ZERO_1 | BF16), (4, {}, ZERO_1), r"and bf16; .* and fp32"),
        (
            (4, {}, BF16),
            (4, {}, BF16),
            r"bf16 and without ZeRO; .* needs \"zero_optimization\": {\"stage\": 1}",
        ),
    ],
)
def test_checkpoints_that_do_not_fit(saved: Any, loaded: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        check_resume(checkpoint_of(job(*saved), tmp_path), job(*loaded))


def test_a_dry_run_does_not_know_the_data_parallel_size(tmp_path: Path) -> None:
    saved = checkpoint_of(job(8, {}, ZERO_1), tmp_path)
    check_resume(saved, job(4, {}, ZERO_1), world_is_known=False)


def test_checkpoints_that_do_not_say_what_they_are(tmp_path: Path) -> None:
    made = job(4, {}, {})
    file = Path(checkpoint_of(made, tmp_path)) / "step_3" / JOB_FILE
    for text in ("{", "[]", '{"schedule": "1f1b"}'):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"ds_ext\.json, which says how .* loaded unchecked"):
            check_resume(str(tmp_path), made)
    file.unlink()
    check_resume(str(tmp_path), made)


def auto(world_size: int | None = None, **changes: Any) -> Plan:
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 1,
        "ds_ext": {"schedule": "auto", "pipeline_parallel_size": 4, **changes},
    }
    return make_plan(load_config(config), world_size)


def test_auto_is_planned_for_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    one, two = auto(), auto(8)
    assert (one.layout.data_parallel_size, two.layout.data_parallel_size) == (1, 2)
    assert (one.timetable.micro_batches, two.timetable.micro_batches) == (16, 8)
    assert one.sizes.train_batch_size == two.sizes.train_batch_size == 16
    assert one.timetable.schedule == two.timetable.schedule == "bitpipe_zb"
    with pytest.raises(ConfigError, match="6 processes cannot hold pipeline_parallel_size 4"):
        auto(6)


def test_the_plan_shows_what_auto_chose_from() -> None:
    made = auto(schedule_options={"costs": "comm=0.2"})
    assert made.choice is not None and made.choice.best is not None
    stages = made.layout.placement.stages
    boundaries = layer_boundaries(stages, 0, 0, stages, "auto")
    text = describe(made, boundaries=boundaries, layer_names=["layer"] * stages, message_bytes=4)
    lines = text.splitlines()
    at = lines.index(f"auto      {made.choice.reason()}")
    assert lines[at + 1].split() == ["schedule", "recompute", "time", "bubble", "memory"]
    shown = lines[at + 2 : at + 7]
    labels = [row.label for row in made.choice.fitting[:5]]
    assert [line.strip().startswith(label) for line, label in zip(shown, labels, strict=True)] == [True] * 5
    assert "auto " not in describe(plan(), boundaries=[0] * 8 + [1], layer_names=["layer"], message_bytes=4)
