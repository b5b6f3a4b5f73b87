"""Tokens of the slices of a sequence."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from itertools import accumulate, pairwise

import pytest

from ds_ext.config.job import load_config
from ds_ext.errors import ConfigError
from ds_ext.parallel.slices import balanced_lengths, slice_bounds
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.planner.stage_costs import slice_costs
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.recipes.training.job import TrainingJob

LLAMA = GPTConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    swiglu=True,
    vocab_size=128256,
    seq_length=131072,
    position_embedding_type="rope",
)


def work_of(model: GPTConfig, lengths: list[int]) -> list[float]:
    return [model.work_until(b) - model.work_until(a) for a, b in pairwise(accumulate(lengths, initial=0))]


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("count", [2, 4, 7])
def test_balanced_slices_have_equal_work(count: int, window: int | None) -> None:
    model = dataclasses.replace(LLAMA, sliding_window=window)
    lengths = balanced_lengths(model.work_until, 131072, count, 128)
    assert sum(lengths) == 131072 and all(length % 128 == 0 for length in lengths)
    assert work_of(model, lengths) == pytest.approx([model.work_until(131072) / count] * count, rel=0.02)
    assert lengths == sorted(lengths, reverse=True)
    if window is None:
        assert lengths[0] > 1.25 * 131072 / count


def test_work_counts_every_token_and_key() -> None:
    model = GPTConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=6, vocab_size=10, sliding_window=3
    )
    matrices = 2 * 12 * 8 * 8 + 10 * 8
    # A token reads half a key less than its position: its own counts half.
    keys = [0.5, 1.5, 2.5, 3, 3, 3]
    assert model.work_until(6) == pytest.approx(6 * matrices + 2 * sum(keys) * 2 * 8)


def test_balanced_slices_shorten_the_pipeline() -> None:
    timetable = get_schedule("1f1b").timetable(8, 8, slices=4)
    equal = simulate(timetable, slice_costs(Costs(), LLAMA, [131072 / 4] * 4)).bubble
    lengths = balanced_lengths(LLAMA.work_until, 131072, 4, 128)
    balanced = simulate(timetable, slice_costs(Costs(), LLAMA, lengths)).bubble
    assert balanced == pytest.approx(simulate(timetable).bubble, abs=2e-3)
    assert equal > balanced + 0.2


@pytest.mark.parametrize(("tokens", "count", "multiple"), [(130, 2, 4), (8, 4, 4)])
def test_slices_that_do_not_fit_are_refused(tokens: int, count: int, multiple: int) -> None:
    with pytest.raises(ConfigError, match=rf"slice_lengths: .*{tokens}"):
        balanced_lengths(float, tokens, count, multiple)


def test_bounds() -> None:
    assert slice_bounds(12, 3) == [(0, 4), (4, 8), (8, 12)]
    assert slice_bounds(12, 2, [8, 4], shards=4) == [(0, 8), (8, 12)]
    wrong: list[tuple[int, int, str | list[int], int]]
    wrong = [(13, 3, "equal", 1), (12, 2, [8, 3], 1), (12, 2, [9, 3], 4)]
    for tokens, count, lengths, shards in wrong:
        with pytest.raises(ConfigError, match="sequence_slices"):
            slice_bounds(tokens, count, lengths, shards)


def test_the_plan_of_a_script_has_the_balanced_lengths() -> None:
    section = {
        "schedule": "1f1b",
        "pipeline_parallel_size": 2,
        "sequence_slices": 4,
        "slice_lengths": "balanced",
    }
    job = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "ds_ext": section}
    plan = make_job_plan(load_config(job))
    ends = ["embedding"], ["head"]
    plan = TrainingJob(Namespace(), plan, LLAMA, *ends, [0, 17, 34]).with_stage_work().plan
    lengths = plan.settings.slice_lengths
    assert lengths == balanced_lengths(LLAMA.work_until, 131072, 4, 128)
    assert plan.costs.slices == pytest.approx([1] * 4, rel=0.02) and plan.simulation.costs == plan.costs
