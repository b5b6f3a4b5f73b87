"""What ``python -m ds_ext plan`` shows of the ways to cut a cluster: a table, the reasons, the JSON that trains so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..planner.candidates import Candidate, aligned, format_bytes
from ..planner.memory import ModelSizes
from ..planner.parallel_sizes import Cluster, Cut, Cuts, job_section

SHOWN = 10  # of the ways to cut the devices
# Usual for GPT, to be set for the run; torch's own Adam needs no compiler.
_ADAM = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True}


def table(found: Sequence[Cut]) -> list[str]:
    """A line for each way, below a head."""
    cells = [("TP", "PP", "DP", "N", "schedule", "recompute", "step", "bubble", "memory", "")]
    for way in found:
        row = way.row
        sizes = (str(way.tensor), str(way.pipeline), str(way.data), str(way.micro_batches))
        if row is None:
            cells.append((*sizes, "-", "-", "-", "-", "-", way.choice.reason()))
        else:
            cells.append((*sizes, row.label, row.recompute, *_figures(way, row)))
    return aligned(cells, left=(4, 5, 9))


def _figures(cut: Cut, row: Candidate) -> tuple[str, str, str, str]:
    size = format_bytes(row.memory_bytes or 0)
    return f"{cut.step_s:.4g} s", f"{row.bubble or 0:.1%}", size, "" if cut.fits else "too large"


def why(cuts: Cuts) -> str:
    """The best cut, why its schedule, and how the next one compares."""
    best = cuts.found[0]
    name = f"TP {best.tensor} x PP {best.pipeline} x DP {best.data}"
    if not best.fits:
        return f"nearest: {name}\n  {best.choice.reason()}"
    others = [cut for cut in cuts.found[1:] if cut.fits and cut.step_s is not None]
    if not others or best.step_s is None:
        return f"best: {name}, the only one that fits\n  {best.choice.reason()}"
    second, longer = others[0], (others[0].step_s or 0.0) / best.step_s - 1
    than = f"TP {second.tensor} x PP {second.pipeline} x DP {second.data}"
    how = f"{than} takes {longer:.1%} longer" if longer > 5e-4 else f"as fast as {than} and not larger"
    return f"best: {name}; {how}\n  {best.choice.reason()}"


def config_of(way: Cut, cluster: Cluster, model: ModelSizes) -> dict[str, Any]:
    """The keys of a DeepSpeed JSON that the plan decides."""
    copies = way.data * (1 if way.row is None else way.row.weights)
    return {
        "train_batch_size": cluster.batch,
        "train_micro_batch_size_per_gpu": model.micro_batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": min(model.zero_stage, copies - 1)},
        "optimizer": {"type": "AdamW", "params": _ADAM},
        "ds_ext": job_section(way, model),
    }


def json_text(config: dict[str, Any]) -> str:
    """As the files in configs/ are written: a line per key, and per key of "ds_ext"."""
    lines = []
    for key, value in config.items():
        text = json.dumps(value)
        if key == "ds_ext":
            inner = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            text = f"{{\n{inner}\n  }}"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def as_dict(cuts: Cuts, config: dict[str, Any] | None) -> dict[str, Any]:
    """For programs; ``config`` is of the best."""
    return {
        "best": [_cut_as_dict(cut) for cut in cuts.found[:SHOWN]],
        "reason": why(cuts),
        "fits": cuts.found[0].fits,
        "refused": [{"sizes": sizes, "reason": reason} for sizes, reason in cuts.refused],
        "config": config,
    }


def _cut_as_dict(cut: Cut) -> dict[str, Any]:
    row = cut.row
    found: dict[str, Any] = {
        "tensor_parallel_size": cut.tensor,
        "pipeline_parallel_size": cut.pipeline,
        "data_parallel_size": cut.data,
        "micro_batches": cut.micro_batches,
        "fits": cut.fits,
        "reason": cut.choice.reason(),
    }
    if row is not None:
        found |= {
            "schedule": row.schedule,
            "schedule_options": row.settings,
            "recompute": row.recompute,
            "step_s": cut.step_s,
            "bubble": row.bubble,
            "memory_bytes": row.memory_bytes,
        }
    return found
