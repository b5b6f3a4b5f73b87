"""Layers are cut into stages evenly, and what is left over goes where it costs the least."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.errors import ConfigError
from ds_ext.partition import layer_boundaries, stage_weights
from ds_ext.pipe_schedules.placement import Placement, bidirectional_v, linear, v


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
        with pytest.raises(ConfigError, match=rf"{placement.stages} stages, and num_layers is {layers}: "):
            counts(layers, placement)
        return
    found = counts(layers, placement)
    assert sum(found) == layers and max(found) - min(found) <= 1
    loads = [0] * placement.ranks
    for pipe in placement.pipes:
        for stage, device in enumerate(pipe):
            loads[device] += found[stage]
    assert max(loads) - min(loads) <= placement.replicas


def test_layers_of_every_stage_may_be_given() -> None:
    assert counts(8, linear(4), "3,2,2,1") == [3, 2, 2, 1]
    assert counts(8, linear(3), "0,8,0") == [0, 8, 0]
    for text, sentence in [
        ("3,2,2", "gives 3 stages 7 layers in all; any cuts the model into 4 stages, and num_layers is 8"),
        ("3,2,2,2", "gives 4 stages 9 layers in all"),
        ("4,4,0,0", "leaves stage 2 with 0 layers. Give it at least 1"),
        ("9,-1,0,0", "leaves stage 1 with -1 layers"),
        ("3,2,two,1", "a list of numbers with commas, for example \"2,3,2\"; got '3,2,two,1'"),
    ]:
        with pytest.raises(ConfigError) as caught:
            counts(8, linear(4), text)
        assert sentence in str(caught.value)


def test_weights_of_stages() -> None:
    assert stage_weights([0, 4, 6, 8, 12], 2, 2) is None
    assert stage_weights([0, 4, 7, 8, 12], 2, 2) == (1.0, 1.5, 0.5, 1.0)
