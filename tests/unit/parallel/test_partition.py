"""Layers are divided evenly, and surplus layers go to the least busy devices."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.errors import ConfigError
from ds_ext.model.config import TransformerConfig
from ds_ext.parallel.partition import LayerWork, layer_boundaries, stage_weights
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.placement import Placement, bidirectional_v, linear, v
from ds_ext.recipes.training.job import stage_boundaries
from ds_ext.recipes.training.setup import model_fields
from tests.plans import plan_job


def counts(layers: int, placement: Placement, stage_layers: str | None = None) -> list[int]:
    boundaries = layer_boundaries(layers, 2, 3, placement, "any", stage_layers)
    assert (boundaries[0], boundaries[-1]) == (0, layers + 5)
    inner = [2, *boundaries[1:-1], layers + 2]
    return [stop - start for start, stop in pairwise(inner)]


def test_divisible_layers_are_even() -> None:
    assert layer_boundaries(8, 2, 2, linear(4), "1f1b") == [0, 4, 6, 8, 12]
    assert layer_boundaries(3, 0, 0, linear(3), "1f1b") == [0, 1, 2, 3]
    assert layer_boundaries(5, 1, 2, linear(1), "1f1b") == [0, 8]


def test_surplus_layers_avoid_the_ends_and_busy_devices() -> None:
    assert counts(9, linear(4)) == [2, 2, 3, 2]
    assert counts(10, linear(4)) == [2, 3, 3, 2]
    assert counts(11, linear(4)) == [2, 3, 3, 3]
    # Device 0 of a V holds both ends of the model, so device 1 gets the surplus layer.
    assert counts(5, v(2)) == [1, 1, 2, 1]
    assert counts(6, v(2)) == [1, 1, 2, 2]
    # Stages 1 and 6 are on the same device: after one of them, another device is next.
    assert counts(10, v(4)) == [1, 1, 1, 1, 1, 2, 2, 1]
    assert counts(11, v(4)) == [1, 1, 1, 1, 2, 2, 2, 1]


@given(
    st.integers(1, 60),
    st.sampled_from([linear(1), linear(4), v(3), bidirectional_v(4), bidirectional_v(4, 2)]),
)
def test_devices_differ_by_little(layers: int, placement: Placement) -> None:
    if layers < placement.stages:
        stages = placement.stages
        with pytest.raises(
            ConfigError,
            match=rf"^num_layers: .*\b{stages} stages.*\b1 .*\b{layers}\).*\b{stages} layers",
        ):
            counts(layers, placement)
        return
    layers_of = counts(layers, placement)
    assert sum(layers_of) == layers and max(layers_of) - min(layers_of) <= 1
    loads = [0] * placement.num_devices
    for pipe in placement.pipes:
        for stage, device in enumerate(pipe):
            loads[device] += layers_of[stage]
    assert max(loads) - min(loads) <= placement.replicas


@pytest.mark.parametrize(
    ("layers", "placement", "numbers"),
    [
        (3, linear(4), r"4 stages .*3\).* 4 layers.*pipeline_parallel_size .*3 .*4"),
        (7, v(4), r"8 stages \(2 .*7\).* 8 layers.*pipeline_parallel_size .*3 .*4"),
        (7, bidirectional_v(4), r"8 stages \(2 .*7\).* 8 layers.*pipeline_parallel_size .* even .*2 .*4"),
        (15, bidirectional_v(8), r"16 stages \(2 .*15\).* 16 layers.*pipeline_parallel_size .* even .*6 .*8"),
        (3, bidirectional_v(4), r"8 stages \(2 .*3\).* 8 layers\.$"),
    ],
)
def test_too_few_layers(layers: int, placement: Placement, numbers: str) -> None:
    with pytest.raises(ConfigError, match=f"^num_layers: any .*{numbers}"):
        counts(layers, placement)


@pytest.mark.parametrize(("schedule", "option"), [("bitpipe_zb", "waves"), ("interleaved", "chunks")])
def test_too_few_layers_name_an_option_of_the_schedule(schedule: str, option: str) -> None:
    placement = get_schedule(schedule).placement(4, {option: 4 if option == "chunks" else 2})
    with pytest.raises(ConfigError, match=f"or fewer {option} in schedule_options"):
        layer_boundaries(8, 0, 0, placement, schedule)


def weighed(layers: int, placement: Placement, head: float) -> list[int]:
    bounds = layer_boundaries(layers, 1, 1, placement, "any", None, (0.0, head))
    layers_of = [stop - start for start, stop in pairwise(bounds)]
    layers_of[0] -= 1
    layers_of[-1] -= 1
    return layers_of


def test_balanced_uses_the_work_of_the_job(tmp_path: Path) -> None:
    job = json.loads((Path(__file__).parents[3] / "configs" / "1f1b.json").read_text())
    del job["ds_ext"]["train"]["stage_layers"]
    config = tmp_path / "1f1b.json"
    config.write_text(json.dumps(job))
    before, after = ["embedding"], ["norm", "head"]
    vocab = 4 * (12 * 128 + 2 * 128)  # as much work as four layers
    for flags, layers in [
        ([], [2, 2, 2, 2]),
        (["--stage-layers", "balanced"], [2, 3, 3, 0]),
        (["--stage-layers", "balanced", "--num-layers", "16"], [5, 5, 5, 1]),
        # Recomputation adds a third to a layer's work and nothing to the head's.
        (
            ["--stage-layers", "balanced", "--num-layers", "16", "--recompute-granularity", "full"],
            [4, 5, 5, 2],
        ),
        (["--stage-layers", "4,2,1,1"], [4, 2, 1, 1]),
    ]:
        args, plan = plan_job("train_gpt.py", ["--deepspeed_config", str(config), "--dry-run", *flags], "gpt")
        model = TransformerConfig(**model_fields(args, plan.job), vocab_size=vocab)
        bounds = stage_boundaries(args, plan, before, after, model)
        layers_of = [stop - start for start, stop in pairwise(bounds)]
        assert [layers_of[0] - 1, *layers_of[1:-1], layers_of[-1] - 2] == layers


def test_a_heavy_end_leaves_its_stage_fewer_layers() -> None:
    assert weighed(8, linear(4), 0.9) == [2, 2, 2, 2]
    assert weighed(32, linear(4), 2.24) == [8, 9, 9, 6]
    # The head's work exceeds the mean: the last stage gets no layers.
    assert weighed(8, linear(4), 4.0) == [2, 3, 3, 0]
    # Both ends are on device 0, whose stages stay as even as possible.
    assert weighed(16, v(2), 2.0) == [4, 4, 5, 3]
    assert weighed(5, linear(1), 3.0) == [5]
    gpt = TransformerConfig(32, 4096, 32, 4096, 128256)
    assert gpt.head_work() == 128256 / 57344
    assert gpt.head_work(1.0) == pytest.approx(128256 / 57344 * 3 / 4)
    assert replace(gpt, chunked_loss=True).head_work() == pytest.approx(128256 / 57344 * 4 / 3)


def test_work_of_a_layer() -> None:
    assert TransformerConfig(1, 16, 4, 8, 10).layer_work == LayerWork(12 * 256, 2 * 8 * 16)
    llama = TransformerConfig(
        1, 16, 4, 8, 10, ffn_hidden_size=40, num_query_groups=2, kv_channels=6, swiglu=True
    )
    assert llama.layer_work == LayerWork(16 * (24 + 2 * 12 + 24 + 3 * 40), 2 * 8 * 24)


@given(
    st.integers(16, 60),
    st.floats(0, 6),
    st.sampled_from([linear(1), linear(4), v(3), bidirectional_v(4), bidirectional_v(4, 2)]),
)
def test_no_layer_could_move_to_a_less_busy_device(layers: int, head: float, placement: Placement) -> None:
    layers_of = weighed(layers, placement, head)
    assert sum(layers_of) == layers
    assert min(layers_of[:-1], default=1) >= 1 and layers_of[-1] >= (0 if head >= 1 else 1)
    loads = [0.0] * placement.num_devices
    for pipe in placement.pipes:
        for stage, device in enumerate(pipe):
            loads[device] += layers_of[stage] + head * (stage == placement.stages - 1)
    least = [1] * placement.stages
    least[-1] = int(head < 1)
    # A device that could give a layer away is at most one layer busier than the least busy device.
    for device in range(placement.num_devices):
        if any(
            layers_of[s] > least[s] for pipe in placement.pipes for s, d in enumerate(pipe) if d == device
        ):
            assert loads[device] <= min(loads) + 1 + 1e-6


def test_stage_layers_option() -> None:
    assert counts(8, linear(4), "3,2,2,1") == [3, 2, 2, 1]
    assert counts(8, linear(3), "0,8,0") == [0, 8, 0]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3,2,2", r"4 stages .*num_layers 8 .*3 numbers, sum 7.* 2,2,2,2 .*balanced"),
        ("3,2,2,2", "4 numbers, sum 9"),
        ("4,4,0,0", r"stage 2 .*0\.\.3.*1 .*0 in 4,4,0,0.* 2,2,2,2 .*balanced"),
        ("9,-1,0,0", r"stage 1 .*0\.\.3.*1 .*-1 in"),
        ("0,4,5,-1", r"stage 3 .*0\.\.3.*0 .*-1 in"),
        ("3,2,two,1", "'3,2,two,1'.* 2,2,2,2 .*balanced"),
    ],
)
def test_stage_layers_that_do_not_fit(text: str, numbers: str) -> None:
    with pytest.raises(ConfigError, match=f"^--stage-layers: .*{numbers}"):
        counts(8, linear(4), text)


def test_weights_of_stages() -> None:
    assert stage_weights([0, 4, 6, 8, 12], 2, 2) is None
    assert stage_weights([0, 4, 7, 8, 12], 2, 2) == (1.0, 1.5, 0.5, 1.0)
    assert stage_weights([0, 4, 6, 8, 12], 2, 2, (0.0, 2.0)) == (0.8, 0.8, 0.8, 1.6)
    assert stage_weights([0, 4, 6, 8, 10], 2, 2, (0.0, 2.0)) is None
