"""Handlers that a script puts into the instruction map of an engine or of one of its base classes."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from deepspeed.runtime.pipe.schedule import ForwardPass, OptimizerStep, ReduceGrads

from ds_ext.engine import PipelineEngine
from ds_ext.engine.deepspeed_api.handlers import merge_patches
from ds_ext.errors import ConfigError

OWN, THEIRS = PipelineEngine._INSTRUCTION_MAP, DeepSpeedPipelineEngine._INSTRUCTION_MAP


def patch(engine: PipelineEngine) -> None:
    raise AssertionError


def other(engine: PipelineEngine) -> None:
    raise AssertionError


def test_the_nearest_map_counts() -> None:
    assert merge_patches(OWN, OWN, THEIRS) == {**THEIRS, **OWN}
    found = merge_patches(
        OWN, {**OWN, ReduceGrads: patch}, {**THEIRS, ReduceGrads: other, OptimizerStep: other}
    )
    assert (found[ReduceGrads], found[OptimizerStep]) == (patch, other)
    found = merge_patches({**OWN, ReduceGrads: other}, {**OWN, ReduceGrads: patch}, THEIRS)
    assert found[ReduceGrads] is other


def test_a_handler_for_other_arguments_is_refused() -> None:
    with pytest.raises(ConfigError, match="ForwardPass"):
        merge_patches(OWN, {**OWN, ForwardPass: patch}, THEIRS)
