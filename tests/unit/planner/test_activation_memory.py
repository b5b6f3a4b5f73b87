"""Order of a job whose activations have a limit in bytes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ds_ext.config.job import load_config
from ds_ext.errors import ConfigError
from ds_ext.model.config import TransformerConfig
from ds_ext.planner.activation_memory import within_activation_memory
from ds_ext.planner.auto import training_sizes
from ds_ext.planner.job_plan import JobPlan, make_job_plan
from ds_ext.planner.memory import memory
from ds_ext.planner.training_sizes import TrainingSizes
from tests.plans import batch_of

MODEL = TransformerConfig(
    num_layers=16, hidden_size=64, num_attention_heads=4, seq_length=256, vocab_size=500, hidden_dropout=0.0
)


def make(
    limit: str, schedule: str = "zb_v", slices: int = 1, **options: Any
) -> tuple[JobPlan, TrainingSizes]:
    section = {
        **{"schedule": schedule, "pipeline_parallel_size": 4, "sequence_slices": slices},
        **{"max_activation_memory": limit, "schedule_options": options},
    }
    config = {**batch_of(schedule, 8, 4, 1, options), "ds_ext": section}
    plan = make_job_plan(load_config(config))
    return plan, training_sizes(config, MODEL, 1, 1, 1)


def peak(plan: JobPlan, sizes: TrainingSizes) -> int:
    return max(device.activations for device in memory(plan.timetable, sizes))


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize(
    ("schedule", "options"), [("zb_v", {}), ("bitpipe_zb", {}), ("bitpipe", {"mode": "greedy"})], ids=str
)
def test_the_order_keeps_within_the_memory_and_uses_it(
    schedule: str, options: dict[str, Any], slices: int
) -> None:
    plan, sizes = make("1TB", schedule, slices, **options)
    assert within_activation_memory(plan, sizes) is plan
    most = peak(plan, sizes)
    limit = int(0.95 * most)
    plan, sizes = make(f"{limit}B", schedule, slices, **options)
    small = within_activation_memory(plan, sizes)
    assert 0.5 * limit < peak(small, sizes) <= limit < most
    # One more slice of a stage does not fit, or changes nothing.
    unit = 4 / plan.timetable.placement.stages / slices
    most_activations = small.options["max_activations"]
    more = small.with_options({**options, "max_activations": most_activations + unit})
    assert peak(more, sizes) > limit
    assert small.simulation.makespan >= plan.simulation.makespan


def test_the_least_memory_in_the_error_is_enough() -> None:
    for schedule in ("zb_v", "bitpipe_zb"):
        plan, sizes = make("1KB", schedule, 4)
        with pytest.raises(ConfigError) as caught:
            within_activation_memory(plan, sizes)
        (least,) = re.findall(r"at least ([\d.]+MB)", str(caught.value))
        within_activation_memory(*make(least, schedule, 4))


@pytest.mark.parametrize(
    ("limit", "schedule", "options", "match"),
    [
        ("100KB", "zb_v", {}, r"at least [\d.]+MB"),
        ("1MB", "bitpipe", {}, "greedy"),
        ("20GB", "dpp", {}, "bitpipe_zb"),
        ("20GB", "1f1b", {}, "zb_v"),
        ("20GB", "zb_v", {"max_activations": 2}, "contradicts"),
        ("20Gb", "zb_v", {}, "bits"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(
    limit: str, schedule: str, options: dict[str, Any], match: str
) -> None:
    plan, sizes = make(limit, schedule, **options)
    with pytest.raises(ConfigError, match=match):
        within_activation_memory(plan, sizes)
