"""Folders of a run for the report: metrics, record and traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_ext.observe.run_record import RunRecord
from tests.trace_folders import PRICED, UNIT_US, write_traces

MIB = 1 << 20
FACTS: dict[str, Any] = {
    "schedule": "bitpipe", "world_size": 4, "pipeline_parallel_size": 4, "tensor_parallel_size": 1,
    "data_parallel_size": 1, "micro_batches": 8, "micro_batch_size": 2, "train_batch_size": 16,
    "precision": "fp32", "zero_stage": 1, "total_steps": 40,
    "ranks": [
        {"host": f"node{rank // 2}", "name": "cpu", "device": rank, "parameters": 1000 + rank} for rank in range(4)
    ],
    "versions": {"python": "3.11", "torch": "2.13.0"}, "trace_dir": None, "plan": "world 4 <&>",
    "config": {"zero_optimization": {"stage": 1}},
    "model": {"num_layers": 8, "hidden_size": 32, "num_attention_heads": None},
}  # fmt: skip


def metrics_row(step: int, **values: Any) -> dict[str, Any]:
    """Return the metrics of a step of the simulated run, with some other values."""
    return {
        "step": step, "loss": 8.0 / step, "grad_norm": 1.0, "lr": 1e-3 * step,
        "iter_time_s": PRICED.makespan * UNIT_US / 1e6, "samples_per_s": 40.0, "tokens_per_s": 640.0,
        "tflops_per_device": None, "mfu": None, "consumed_samples": 16 * step, "schedule": "bitpipe",
        "transport": "shm", "peak_memory_bytes": 300 * MIB, "bubble_measured": PRICED.bubble,
        "bubble_simulated": 0.125, "losses": {}, "validation_loss": None, "validation_losses": {}, "snapshot_s": None,
        "recovered_from_step": None, **values,
    }  # fmt: skip


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append metrics to a file."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_run(folder: Path, steps: int = 20, *, traced: int = 3) -> Path:
    """Write a run that stopped after step 12, went on from step 10, and traced its first steps.

    Returns the metrics file.
    """
    metrics, events = folder / "metrics.jsonl", list[dict[str, Any]]()
    at = {"path": "/saved/step_10", "step": 10, "seconds": 0.25}
    record = RunRecord(metrics, FACTS, events)
    record.note_memory([100 * MIB] * 4)
    write_rows(metrics, [metrics_row(step) for step in range(1, 13)])
    events.append({"event": "saved", **at, "at": 1.8e9})
    record.write()
    events = [{"event": "loaded", **at, "at": 1.8e9 + 60}]
    record = RunRecord(metrics, {**FACTS, "trace_dir": str(folder / "traces")}, events)
    rows = [metrics_row(step, loss=4.0 / step) for step in range(11, steps + 1)]
    rows[-1]["validation_loss"] = 0.5
    write_rows(metrics, rows)
    record.note_memory([(200 + 10 * rank) * MIB for rank in range(4)])
    if traced:
        write_traces(folder / "traces", PRICED, steps=traced)
    return metrics
