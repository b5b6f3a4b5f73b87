"""``bench recovery``: cost of snapshots and audits without failures, and the time from a kill to the first new step.

The cost is that of a step with emulated layers, beside a plain step. The time to recover is that of a small model: a
rank is killed, ``torchrun`` restarts the ranks, and they continue from host memory. It stands beside the usual way,
checkpoints on disk and a new launch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_ext.errors import ConfigError
from ds_ext.pipe_schedules import Timetable
from ds_ext.pipe_schedules.costs import Costs

from .command import Report, add_number, add_size_flags, check_at_least, json_item, table, timetable_for
from .rank_pool import RankFailure
from .ranks import Job, processors_awake, take_turns

SUMMARY = "cost of snapshots and audits, and the time from a kill to the first new step"
PLAIN, SNAPSHOT, AUDIT = "plain", "snapshot", "audit"
SECTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    SNAPSHOT: {"recovery": {"every": 1}},
    AUDIT: {"audit_interval": 1},
}
MEMORY, DISK = "host memory", "checkpoint on disk"
# Events of rank 0 after the kill, and what the time before each is spent on.
PARTS = {
    "started": "kill to new processes",
    "imported": "import of torch and deepspeed",
    "ready": "process group and engine",
    "loaded": "loading",
    "step": "first step",
}
_LIMIT_S = 300.0
_POLL_S = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmark."""
    add_size_flags(parser, num_devices=4, micro_batches=8)
    parser.add_argument("--schedule", default="bitpipe", metavar="NAME[:OPTION=VALUE]", help="%(default)s")
    add_number(
        parser, "--forward-ms", 40.0, "MS", "forward of 1/D of the model; its backward takes twice as long"
    )
    add_number(parser, "--steps", 10, "K", "steps, after one warm-up step")
    add_number(parser, "--kills", 3, "K", "kills of each kind; 0: measure only the cost without failures")
    add_number(parser, "--save-interval", 10, "K", "steps from one checkpoint on disk to the next")


def measure(args: argparse.Namespace) -> Report:
    """Measure the cost and the recoveries.

    Raises:
        ConfigError: a flag is wrong, or torchrun is missing.
        RankFailure: an engine failed.
        ScheduleError: the schedule does not support the sizes.
    """
    check_at_least("--num-devices", args.num_devices, 2)
    check_at_least("--steps", args.steps, 1)
    check_at_least("--kills", args.kills, 0)
    check_at_least("--save-interval", args.save_interval, 2)
    if not args.forward_ms > 0:
        raise ConfigError(f"--forward-ms: must be greater than 0 (got {args.forward_ms:g}).")
    costs = Costs(args.forward_ms, args.forward_ms, args.forward_ms)
    timetable_for(args.schedule, args.num_devices, args.micro_batches, costs)
    sizes = {"schedule": args.schedule, "stages": args.num_devices, "micro_batches": args.micro_batches}
    items, text = _cost(args, costs, sizes)
    if args.kills:
        with tempfile.TemporaryDirectory(prefix="ds_ext_bench_") as folder:
            kills = [
                (kind, _recover(kind, args, Path(folder)))
                for _ in range(args.kills)
                for kind in (MEMORY, DISK)
            ]
        found = {kind: [one for name, one in kills if name == kind] for kind in (MEMORY, DISK)}
        items += [_item(kind, runs, sizes) for kind, runs in found.items()]
        text += f"\n\n{_as_table(found)}"
    title = (
        f"{args.schedule}, {args.num_devices} devices, {args.micro_batches} micro-batches, {args.steps} steps; "
        f"forward of 1/{args.num_devices} of the model {args.forward_ms:g} ms; {args.kills} kills of each kind"
    )
    return Report(items, title, text)


# --- cost without failures ---


def _cost(args: argparse.Namespace, costs: Costs, sizes: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    job = Job(build, args.num_devices, _LIMIT_S, args.micro_batches, costs, modules=(args.schedule,))
    with processors_awake():
        runs = take_turns(list(SECTIONS), job, 1 + args.steps)
    times = {
        name: [
            1000 * (max(ends) - min(starts))
            for starts, ends in (zip(*a, strict=True) for a in run.rounds[1:])
        ]
        for name, run in runs.items()
    }
    plain = times[PLAIN]
    rows: list[tuple[str, ...]] = [("step", "best", "median", "cost of best", "cost of median")]
    items = []
    for name, values in times.items():
        best = min(values) / min(plain) - 1
        median = statistics.median(values) / statistics.median(plain) - 1
        items.append(json_item(name, {**sizes, "cost_best": best, "cost_median": median}, values, "ms"))
        extra = ("", "") if name == PLAIN else (f"{best:+.1%}", f"{median:+.1%}")
        rows.append((name, f"{min(values):.1f}", f"{statistics.median(values):.1f}", *extra))
    return items, table(rows)


@dataclass(frozen=True)
class StepWorker:
    """Engine of this rank with layers that wait; times include all that follows the last computation."""

    step: Any
    timetable: Timetable
    device: Any

    def run(self) -> tuple[float, float]:
        """Return (start, end) of one step, by time.perf_counter. A step before it fills the caches."""
        import torch.distributed as dist

        self.device.start_step()
        self.step()
        dist.barrier()
        self.device.start_step()
        start = time.perf_counter()
        self.step()
        return start, time.perf_counter()


def build(name: str, job: Job) -> StepWorker:
    """Build the engine called ``name``, one of ``SECTIONS``; the job's module is its schedule."""
    from .command import options_for
    from .emulated import emulated_device, set_exact_timers
    from .rivals import emulated_workload

    set_exact_timers()
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"  # as from torchrun; nothing restarts these ranks
    (request,) = job.modules
    timetable = timetable_for(request, job.num_ranks, job.micro_batches, job.costs)
    device = emulated_device(job.device, job.costs, timetable.placement)
    workload, options = emulated_workload(job, device), options_for(request, job.costs)
    _, step = workload.in_ours(job, timetable, clock=device, schedule_options=options, **SECTIONS[name])
    device.split_backwards = timetable.split_backwards
    return StepWorker(step, timetable, device)


# --- recoveries ---


@dataclass(frozen=True)
class Recovery:
    """One kill: seconds of every part, and the number of steps that ran again."""

    parts: dict[str, float]
    lost_steps: int

    @property
    def total_s(self) -> float:
        """Seconds from the kill to the end of the first new step."""
        return sum(self.parts.values())


def _recover(kind: str, args: argparse.Namespace, folder: Path) -> Recovery:
    """Kill a rank of a job, and wait for its first new step.

    The job saves to disk every ``--save-interval`` steps in both cases, and is killed in the middle between two saves.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    events = folder / "events.jsonl"
    events.touch()
    killed_in = 2 * args.save_interval + args.save_interval // 2
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(args.num_devices)),
        *("--master_port", "0", "--rdzv_endpoint", "127.0.0.1:0", "--rdzv_backend", "c10d"),
        *("--max-restarts", "1" if kind == MEMORY else "0"),
        *("-m", "benchmarks.recovery_ranks", str(folder), kind, args.schedule, str(args.micro_batches)),
        *(str(args.save_interval), str(killed_in + 2)),
    ]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("w") as output:
        launches = [subprocess.Popen(words, env=env, stdout=output, stderr=output, start_new_session=True)]
        try:
            before = _wait(events, launches, lambda found: _steps(found, 0) >= killed_in)
            victim = next(event["pid"] for event in before if event["rank"] == args.num_devices - 1)
            at = time.time()
            os.kill(victim, signal.SIGKILL)
            if kind == DISK:
                launches[0].wait(_LIMIT_S)
                launches.append(
                    subprocess.Popen(words, env=env, stdout=output, stderr=output, start_new_session=True)
                )
            _wait(events, launches, lambda found: _steps(found, 1) > 0)
        except (RankFailure, subprocess.TimeoutExpired) as error:
            raise RankFailure(f"recovery from {kind}: {error}; {_last_line(folder / 'output.txt')}") from None
        finally:
            for launch in launches:
                _end(launch)
    return _result(_read(events), at)


def _result(events: list[dict[str, Any]], killed_at: float) -> Recovery:
    """Return the parts between the first events of rank 0's second start."""
    own = [event for event in events if event["rank"] == 0]
    before = max(event["step"] for event in own if event["event"] == "step" and event["start"] == 0)
    new = [event for event in own if event["start"] == 1]
    first = {name: next(event for event in new if event["event"] == name) for name in PARTS}
    moments = [killed_at, *(first[name]["at"] for name in PARTS)]
    parts = {
        PARTS[name]: later - earlier for name, (earlier, later) in zip(PARTS, pairwise(moments), strict=True)
    }
    return Recovery(parts, before - first["loaded"]["step"])


def _wait(events: Path, launches: list[Any], enough: Any) -> list[dict[str, Any]]:
    deadline = time.monotonic() + _LIMIT_S
    while True:
        found = _read(events)
        if enough(found):
            return found
        if launches[-1].poll() is not None:
            raise RankFailure(f"torchrun ended with exit code {launches[-1].returncode}")
        if time.monotonic() > deadline:
            raise RankFailure(f"no step within {_LIMIT_S:g} s")
        time.sleep(_POLL_S)


def _read(events: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in events.read_text().splitlines() if line.endswith("}")]


def _steps(events: list[dict[str, Any]], start: int) -> int:
    """Return the number of rank 0's last step of a start."""
    steps = [e["step"] for e in events if e["event"] == "step" and e["start"] == start and e["rank"] == 0]
    return max(steps, default=0)


def _last_line(output: Path) -> str:
    lines = [
        line for line in output.read_text(errors="replace").splitlines() if "Error" in line or "error" in line
    ]
    return lines[-1] if lines else "no output"


def _end(launch: subprocess.Popen[bytes]) -> None:
    """End a launcher, which ends its ranks; then whatever is left of its session."""
    launch.terminate()
    try:
        launch.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(launch.pid, signal.SIGKILL)
        launch.wait()


def _item(kind: str, runs: list[Recovery], sizes: dict[str, Any]) -> dict[str, Any]:
    parts = {part: statistics.median(run.parts[part] for run in runs) for part in PARTS.values()}
    lost = statistics.median(run.lost_steps for run in runs)
    return json_item(
        kind, {**sizes, "parts_s": parts, "lost_steps": lost}, [run.total_s for run in runs], "s"
    )


def _as_table(found: dict[str, list[Recovery]]) -> str:
    """Return the medians of every part in seconds, and of the lost steps."""
    rows: list[tuple[str, ...]] = [("seconds from a kill to the first new step", *found)]
    for part in PARTS.values():
        rows.append(
            (part, *(f"{statistics.median(run.parts[part] for run in runs):.2f}" for runs in found.values()))
        )
    rows.append(
        ("in all", *(f"{statistics.median(run.total_s for run in runs):.2f}" for runs in found.values()))
    )
    lost = (f"{statistics.median(run.lost_steps for run in runs):g}" for runs in found.values())
    rows.append(("steps that run again", *lost))
    return table(rows)
