"""Train with a JSON of configs/, then run the first steps in turn with 1f1b, and compare them: ``make train``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from ds_ext.comm.spin import usable_cores
from ds_ext.pipe_schedules import get_schedule

FOLDER = Path("build/first_run")
MOST_RANKS = 4
STEPS = 12  # of each run of the comparison
WARM_UP = 2  # steps that are not measured
BASELINE = "1f1b"
WHOLE_HEAD = ("dpp", "fbd")  # refuse a head in parts
CONFIG = Path("configs/bitpipe_zb.json")
CONFIG_OF_TWO = Path(
    "configs/bitpipe.json"
)  # has no bubble on two devices either, and whole backwards cost less


def main() -> int:
    """Run both jobs, print the comparison, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "config", type=Path, nargs="?", help=f"default: {CONFIG}, with two ranks {CONFIG_OF_TWO}"
    )
    parser.add_argument("--ranks", type=int, help="default: as many as GPUs or cores, at most 4")
    parser.add_argument("--port", default="29500")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"of each run of the comparison (default: {STEPS})"
    )
    args = parser.parse_args()
    gpus, cores = torch.cuda.device_count(), int(usable_cores())
    devices = gpus if gpus > 1 else cores
    config = args.config or default_config(args.ranks or devices)
    job = json.loads(config.read_text(encoding="utf-8"))
    ranks = args.ranks or ranks_of(job, devices)
    environment = dict(os.environ)
    if gpus < ranks:
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    fit(job, ranks)
    is_bert = "bert" in config.name
    script = "train_bert.py" if is_bert else "train_gpt.py"
    if not is_bert and divides_head(job["ds_ext"]):
        job["ds_ext"]["vocabulary_parallel_head"] = True
    FOLDER.mkdir(parents=True, exist_ok=True)

    def run(name: str, job: dict[str, Any], *flags: str, quiet: bool = False) -> list[dict[str, Any]]:
        """Run a job, and return the records of its steps after the warm-up."""
        path, metrics, log = (FOLDER / f"{name}.{suffix}" for suffix in ("json", "jsonl", "log"))
        path.write_text(f"{json.dumps(job, indent=2)}\n", encoding="utf-8")
        metrics.unlink(missing_ok=True)
        words = ["deepspeed", "--num_gpus", str(ranks), "--master_port", args.port, script]
        words += [
            "--deepspeed_config",
            str(path),
            "--metrics-file",
            str(metrics),
            "--log-interval",
            "10",
            *flags,
        ]
        print(f"+ {shlex.join(words)}" + (f" > {log} 2>&1" if quiet else ""), flush=True)
        with open(log, "w", encoding="utf-8") if quiet else nullcontext() as output:
            code = subprocess.run(words, env=environment, stdout=output, stderr=output).returncode
        if code:
            if quiet:
                print(log.read_text(encoding="utf-8"), flush=True)
            sys.exit(code)
        return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()][WARM_UP:]

    schedule = job["ds_ext"]["schedule"]
    run(schedule, job)
    if schedule == BASELINE:
        return 0
    print(
        f"\nThe first {args.steps} steps with {BASELINE}, with {schedule}, and once more in the other order:",
        flush=True,
    )
    rows: dict[str, list[dict[str, Any]]] = {BASELINE: [], schedule: []}
    for name in (BASELINE, schedule, schedule, BASELINE):  # a host that slows down meanwhile slows both
        flags = ("--train-iters", str(args.steps), "--eval-iters", "0")
        rows[name] += run(f"{name}_{args.steps}", compared(job, name), *flags, quiet=True)
    shares_cores = gpus < ranks and ranks > cores
    print("\n" + "\n".join(comparison(rows, schedule, shares_cores)), flush=True)
    if shares_cores:
        print(
            f"not measured: {ranks} ranks share {cores} cores, so a rank that waits leaves its core to another one"
        )
    return 0


def default_config(devices: int) -> Path:
    """Return the JSON of the schedule that is fastest on a pipeline of these devices."""
    return CONFIG if devices >= MOST_RANKS else CONFIG_OF_TWO


def ranks_of(job: dict[str, Any], devices: int) -> int:
    """Return the ranks of a job on this host: all of the JSON, or fewer for a pipeline without other groups."""
    section = job["ds_ext"]
    own = section["pipeline_parallel_size"] * section.get("tensor_parallel_size", 1)
    if section["schedule"] == "fbd" or section.get("tensor_parallel_size", 1) > 1:
        return own * (2 if section["schedule"] == "fbd" else 1)
    ranks = max(2, min(own, MOST_RANKS, devices))
    return ranks - ranks % 2 if get_schedule(section["schedule"]).even_devices else ranks


def fit(job: dict[str, Any], ranks: int) -> None:
    """Shorten the pipeline of a job to the ranks, with as many micro-batches per device."""
    section = job["ds_ext"]
    devices = section["pipeline_parallel_size"]
    if ranks < devices:
        section["pipeline_parallel_size"] = ranks
        job["train_batch_size"] = job["train_batch_size"] * ranks // devices


def divides_head(section: dict[str, Any]) -> bool:
    """Return whether a head in parts helps: not where each device has the whole head of a pipe already."""
    if section["schedule"] in (*WHOLE_HEAD, BASELINE):
        return False
    options = section.get("schedule_options", {})
    placement = get_schedule(section["schedule"]).placement(section["pipeline_parallel_size"], options)
    return len({devices[-1] for devices in placement.pipes}) < placement.num_devices


def compared(job: dict[str, Any], schedule: str) -> dict[str, Any]:
    """Return the job with its schedule, or with 1f1b and balanced stages; nothing is saved."""
    section = dict(job["ds_ext"])
    section["train"] = {name: value for name, value in section["train"].items() if name != "save"}
    if schedule == BASELINE:
        for key in ("schedule_options", "vocabulary_parallel_head"):
            section.pop(key, None)
        section["schedule"] = BASELINE
        section["train"]["stage_layers"] = "balanced"
    return job | {"ds_ext": section}


def comparison(rows: dict[str, list[dict[str, Any]]], schedule: str, planned_only: bool) -> list[str]:
    """Return a table with a row for each schedule."""
    lines = [f"{'':12}{'bubble planned':>15}" + ("" if planned_only else f"{'measured':>10}{'s/step':>9}")]
    seconds = {}
    for name in (BASELINE, schedule):
        records = rows[name]
        seconds[name] = median(record["iter_time_s"] for record in records)
        cells = f"{name:12}{records[0]['bubble_simulated']:>15.1%}"
        if not planned_only:
            bubble = fmean(record["bubble_measured"] for record in records)
            cells += f"{bubble:>10.1%}{seconds[name]:>9.3f}"
        lines.append(cells)
    if not planned_only:
        lines[-1] += f"   {seconds[BASELINE] / seconds[schedule]:.2f} times as fast"
    return lines


if __name__ == "__main__":
    sys.exit(main())
