"""No option of its schedule makes a JSON in configs/ more than 1 % faster in a simulation with the same memory.

A head in parts is no option of a schedule: dpp and fbd refuse it, and "schedule" is the only key to change in a JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_run import default_config, divides_head, fit, ranks_of
from ds_ext.config.job import JobConfig
from ds_ext.errors import DsExtError
from ds_ext.model.config import TransformerConfig
from ds_ext.pipe_schedules import get_schedule
from ds_ext.planner.memory import memory
from ds_ext.recipes.training import setup
from ds_ext.recipes.training.setup import model_fields

CONFIGS = sorted(Path(__file__).parents[3].joinpath("configs").glob("*.json"))
# Options of the hardware, and limits of memory.
FIXED = ("costs", "forward_slowdown", "backward_per_forward", "merge_forward_tensor_parallel")
LIMITS = ("max_activations", "max_in_flight", "memory")
VOCABULARY = 4096


def config_of(args: argparse.Namespace, job: JobConfig | None) -> TransformerConfig:
    return TransformerConfig(**{**model_fields(args, job), "vocab_size": VOCABULARY})


def time_and_memory(path: Path, is_bert: bool) -> tuple[float, float]:
    """Return the simulated time, relative to a step without a bubble, and the bytes of the fullest device."""
    before, after = ["embedding", "positions"], ["final norm", "head"]
    words = ["--deepspeed_config", str(path), "--dry-run"]
    job = setup.plan_job("", words, "bert" if is_bert else "gpt", config_of, before, after).with_stage_work()
    devices = memory(job.plan.timetable, job.sizes)
    return 1 / (1 - job.plan.simulation.bubble), max(device.total for device in devices)


def variants(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the job with each combination of the options of its schedule."""
    options = get_schedule(job["ds_ext"]["schedule"]).options
    values = {
        name: option.choices or (option.default, int(option.default) + 1)
        for name, option in options.items()
        if name not in (*FIXED, *LIMITS) and (option.choices or isinstance(option.default, int))
    }
    for stages, *chosen in product((None, "balanced"), *values.values()):
        variant = copy.deepcopy(job)
        section = variant["ds_ext"]
        section["train"].pop("stage_layers", None)
        section["train"] |= {"stage_layers": stages} if stages else {}
        section.setdefault("schedule_options", {}).update(zip(values, chosen, strict=True))
        yield variant


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_option_is_faster_with_the_same_memory(path: Path, tmp_path: Path) -> None:
    is_bert, changed = "bert" in path.name, tmp_path / "changed.json"
    time, most_bytes = time_and_memory(path, is_bert)
    planned = 0
    for variant in variants(json.loads(path.read_text())):
        changed.write_text(json.dumps(variant))
        try:
            other_time, other_bytes = time_and_memory(changed, is_bert)
        except DsExtError:
            continue  # a combination that the schedule or the model does not have
        planned += 1
        assert other_time > time / 1.01 or other_bytes > most_bytes, variant["ds_ext"]
    assert planned >= 2


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb_v", "bitpipe", "bitpipe_zb"])
@pytest.mark.parametrize("devices", [2, 4])
def test_make_train_divides_the_head_where_it_helps(schedule: str, devices: int, tmp_path: Path) -> None:
    job = json.loads((CONFIGS[0].parent / "bitpipe_zb.json").read_text())
    job["train_batch_size"] = 8 * devices
    section = job["ds_ext"] | {"schedule": schedule, "pipeline_parallel_size": devices}
    times = []
    for in_parts in (False, True):
        path = tmp_path / f"{in_parts}.json"
        path.write_text(json.dumps({**job, "ds_ext": section | {"vocabulary_parallel_head": in_parts}}))
        times.append(time_and_memory(path, is_bert=False)[0])
    assert times[divides_head(section)] < 1.01 * min(times)


@pytest.mark.parametrize("cores", [2, 3, 4, 5])
def test_make_train_fits_the_cores(cores: int, tmp_path: Path) -> None:
    """With an odd number, one stays free. The planned step is the shortest of BitPipe's."""
    path = CONFIGS[0].parents[1] / default_config(cores)
    job, ranks = json.loads(path.read_text()), cores - cores % 2
    assert ranks_of(job, cores) == ranks
    fit(job, ranks)
    bubbles = {}
    for schedule in ("bitpipe", "bitpipe_zb"):
        changed = tmp_path / f"{schedule}.json"
        changed.write_text(json.dumps({**job, "ds_ext": job["ds_ext"] | {"schedule": schedule}}))
        bubbles[schedule] = 1 - 1 / time_and_memory(changed, is_bert=False)[0]
    assert bubbles[path.stem] <= min(bubbles.values()) + 1e-3
