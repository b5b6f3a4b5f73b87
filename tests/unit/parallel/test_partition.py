"""Layers are cut into stages evenly, and what is left over goes where it costs the least."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.errors import ConfigError
from ds_ext.parallel.partition import end_weights, layer_boundaries, stage_weights
from ds_ext.pipe_schedules.placement import Placement, bidirectional_v, linear, v
from ds_ext.training.setup import cut_layers, plan_job


def counts(layers: int, placement: Placement, given: str | None = None) -> list[int]:
    found = layer_boundaries(layers, 2, 3, placement, "any", given)
    assert (found[0], found[-1]) == (0, layers + 5)
    inner = [2, *found[1:-1], layers + 2]
    return [stop - start for start, stop in pairwise(inner)]


def test_layers_that_divide_are_cut_evenly() -> None:
    assert layer_boundaries(8, 2, 2, linear(4), "1f1b") == [0, 4, 6, 8, 12]
    assert layer_boundaries(3, 0, 0, linear(3), "1f1b") == [0, 1, 2, 3]
    assert layer_boundaries(5, 1, 2, linear(1), "1f1b") == [0, 8]


def test_what_is_left_over_avoids_the_ends_and_full_devices() -> None:
    assert counts(9, linear(4)) == [2, 2, 3, 2]
    assert counts(10, linear(4)) == [2, 3, 3, 2]
    assert counts(11, linear(4)) == [2, 3, 3, 3]
    # Device 0 of a V holds both ends of the model; device 1 gets one of its two stages enlarged.
    assert counts(5, v(2)) == [1, 1, 2, 1]
    assert counts(6, v(2)) == [1, 1, 2, 2]
    # Stages 1 and 6 are on one device, so that one of them is enough before another device has its turn.
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
            match=rf"{stages} stages(, \d for each .*)?, and num_layers is {layers}: .*least {stages} ",
        ):
            counts(layers, placement)
        return
    found = counts(layers, placement)
    assert sum(found) == layers and max(found) - min(found) <= 1
    loads = [0] * placement.ranks
    for pipe in placement.pipes:
        for stage, device in enumerate(pipe):
            loads[device] += found[stage]
    assert max(loads) - min(loads) <= placement.replicas


@pytest.mark.parametrize(
    ("layers", "placement", "sentence"),
    [
        (3, linear(4), "into 4 stages, and num_layers is 3: .* layers, or .* of at most 3 (now 4)."),
        (7, v(4), "into 8 stages, 2 for each of 4 devices, and .* of at most 3 (now 4)."),
        (7, bidirectional_v(4), "into 8 stages, 2 for each of 4 devices, and .* of at most 2 (now 4)."),
        (3, bidirectional_v(4), "a stage needs at least 1 transformer layer. Use at least 8 layers."),
    ],
)
def test_too_few_layers_with_the_ways_out(layers: int, placement: Placement, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(").replace(")", r"\)") + "$"):
        counts(layers, placement)


def weighed(layers: int, placement: Placement, head: float) -> list[int]:
    bounds = layer_boundaries(layers, 1, 1, placement, "any", None, (0.0, head))
    found = [stop - start for start, stop in pairwise(bounds)]
    return [found[0] - 1, *found[1:-1], found[-1] - 1] if len(found) > 1 else [found[0] - 2]


def test_balanced_is_by_the_work_of_the_job() -> None:
    config = Path(__file__).parents[3] / "configs" / "1f1b.json"
    before, after = ["embedding"], ["norm", "head"]
    vocab = 4 * (12 * 128 + 2 * 128)  # as much work as four layers
    for flags, layers in [
        ([], [2, 2, 2, 2]),
        (["--stage-layers", "balanced"], [2, 3, 3, 0]),
        (["--stage-layers", "balanced", "--num-layers", "16"], [5, 5, 5, 1]),
        # A layer's work grows by a third, and the head's does not.
        (
            ["--stage-layers", "balanced", "--num-layers", "16", "--recompute-granularity", "full"],
            [4, 5, 5, 2],
        ),
        (["--stage-layers", "4,2,1,1"], [4, 2, 1, 1]),
    ]:
        args, plan = plan_job("train_gpt.py", ["--deepspeed_config", str(config), "--dry-run", *flags], "gpt")
        bounds = cut_layers(args, plan, before, after, vocab)
        found = [stop - start for start, stop in pairwise(bounds)]
        assert [found[0] - 1, *found[1:-1], found[-1] - 2] == layers


def test_a_heavy_end_leaves_its_stage_fewer_layers() -> None:
    assert weighed(8, linear(4), 0.9) == [2, 2, 2, 2]
    assert weighed(32, linear(4), 2.24) == [8, 9, 9, 6]
    # More work than the others' whole share: the last stage does without layers.
    assert weighed(8, linear(4), 4.0) == [2, 3, 3, 0]
    # Both ends are on device 0, and its stages are as even as they can be.
    assert weighed(16, v(2), 2.0) == [4, 4, 5, 3]
    assert weighed(5, linear(1), 3.0) == [5]
    assert end_weights(4096, 4096, 128256) == (0.0, 128256 / 57344)
    assert end_weights(4096, 4096, 128256, again=1.0)[1] == pytest.approx(128256 / 57344 * 3 / 4)


@given(
    st.integers(16, 60),
    st.floats(0, 6),
    st.sampled_from([linear(1), linear(4), v(3), bidirectional_v(4), bidirectional_v(4, 2)]),
)
def test_no_layer_could_move_to_a_less_busy_device(layers: int, head: float, placement: Placement) -> None:
    found = weighed(layers, placement, head)
    assert sum(found) == layers and min(found[:-1], default=1) >= 1 and found[-1] >= (0 if head >= 1 else 1)
    loads = [0.0] * placement.ranks
    for pipe in placement.pipes:
        for stage, device in enumerate(pipe):
            loads[device] += found[stage] + head * (stage == placement.stages - 1)
    least = [1] * placement.stages
    least[-1] = int(head < 1)
    # Those whose stages could give a layer away are at most that layer busier than the least busy.
    for device in range(placement.ranks):
        if any(found[s] > least[s] for pipe in placement.pipes for s, d in enumerate(pipe) if d == device):
            assert loads[device] <= min(loads) + 1 + 1e-6


def test_layers_of_every_stage_may_be_given() -> None:
    assert counts(8, linear(4), "3,2,2,1") == [3, 2, 2, 1]
    assert counts(8, linear(3), "0,8,0") == [0, 8, 0]
    for text, sentence in [
        (
            "3,2,2",
            "gives 3 stages 7 layers in all; any cuts the model into 4 stages, and num_layers is 8. Give one number a "
            "stage, 8 layers in all, for example --stage-layers 2,2,2,2, or",
        ),
        ("3,2,2,2", "gives 4 stages 9 layers in all"),
        (
            "4,4,0,0",
            "gives stage 2, counted from 0 to 3, 0 layers, and it needs at least 1 (only the first and the last may do "
            "without: other layers are there too). Move some there, for example --stage-layers 2,2,2,2, or leave",
        ),
        ("9,-1,0,0", "gives stage 1, counted from 0 to 3, -1 layers, and it needs at least 1"),
        (
            "0,4,5,-1",
            "gives stage 3, counted from 0 to 3, -1 layers, and it needs at least 0. Move some there",
        ),
        ("3,2,two,1", 'a list of numbers with commas, for example "2,3,2", or "balanced"; got \'3,2,two,1\''),
    ]:
        with pytest.raises(ConfigError) as caught:
            counts(8, linear(4), text)
        assert sentence in str(caught.value)


def test_weights_of_stages() -> None:
    assert stage_weights([0, 4, 6, 8, 12], 2, 2) is None
    assert stage_weights([0, 4, 7, 8, 12], 2, 2) == (1.0, 1.5, 0.5, 1.0)
    assert stage_weights([0, 4, 6, 8, 12], 2, 2, (0.0, 2.0)) == (0.8, 0.8, 0.8, 1.6)
    assert stage_weights([0, 4, 6, 8, 10], 2, 2, (0.0, 2.0)) is None
