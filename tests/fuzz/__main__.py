"""Fuzz pipeline jobs: ``python -m tests.fuzz --minutes 30``.

python -m tests.fuzz --seed 12345      # one job
python -m tests.fuzz --actions Toggle,groups   # only jobs with such an action or habit
python build/fuzz/12345.py             # the reduced job of a failure
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from tests.ranks import Ranks

from .habits import HABITS, draw
from .job import Job
from .run import FAULTS, REFUSED, SAME, Outcome, reduce, run

FOLDER = Path("build/fuzz")
SCRIPT = '''"""Job that {kind}; drawn from seed {seed}. Run it from the root of the repository."""

from tests.fuzz.__main__ import repeat
from tests.fuzz.actions import *  # noqa: F403
from tests.fuzz.job import Job, Layout

if __name__ == "__main__":
    repeat(
        {job}
    )
'''


def repeat(job: Job) -> None:
    """Run a job and print its outcome. Exits with status 1 if it fails."""
    torch.set_num_threads(1)
    pools = Ranks()
    try:
        outcome = run(job, pools)
    finally:
        pools.close()
    print(f"{outcome.kind}\n" + "\n".join(outcome.lines))
    sys.exit(outcome.kind in FAULTS)


class Fuzzer:
    """Runs jobs and counts their outcomes.

    Args:
        reduce_runs: maximum number of runs to reduce a failing job.
        wanted: names of habits, of which every job has one; empty: any jobs.
    """

    def __init__(self, reduce_runs: int, wanted: Sequence[str] = ()) -> None:
        self.reduce_runs, self.wanted = reduce_runs, wanted
        self.pools = Ranks()
        self.outcomes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.choices: Counter[str] = Counter()
        self.known: list[frozenset[str]] = []  # features of the reduced jobs

    def fuzz(self, seed: int) -> Outcome | None:
        """Run the job of a seed; reduce and print it if it fails. Returns None if it has no wanted habit."""
        job = draw(seed, self.wanted)
        if job is None:
            return None
        outcome = run(job, self.pools)
        self.outcomes[outcome.kind] += 1
        self.choices.update(job.choices)
        if outcome.kind == REFUSED:
            self.refusals[outcome.key] += 1
        elif outcome.kind in FAULTS:
            self._report(job, outcome)
        elif outcome.kind != SAME:
            print(f"seed {seed}: {outcome.kind} {outcome.lines[0]}\n    {job}", flush=True)
        return outcome

    def _report(self, job: Job, outcome: Outcome) -> None:
        for features in self.known:
            if features <= job.features:
                print(f"seed {job.seed}: {outcome.kind}; has {', '.join(sorted(features))} too", flush=True)
                return
        smaller, outcome = reduce(job, self.pools, outcome, self.reduce_runs)
        if smaller.features:
            self.known.append(smaller.features)
        FOLDER.mkdir(parents=True, exist_ok=True)
        path = FOLDER / f"{job.seed}.py"
        path.write_text(SCRIPT.format(kind=outcome.kind, seed=job.seed, job=smaller))
        details = "\n".join(f"    {line.splitlines()[0]}" for line in outcome.lines[:4])
        print(f"seed {job.seed}: {outcome.kind}; {path}:\n    {smaller}\n{details}", flush=True)

    def summary(self, seconds: float) -> str:
        """Return the counts of outcomes, refusals and choices."""
        outcomes = ", ".join(f"{count} {kind}" for kind, count in self.outcomes.most_common())
        lines = [f"{self.outcomes.total()} jobs in {seconds:.0f} s: {outcomes}"]
        lines += [f"refused {count} times: {key}" for key, count in self.refusals.most_common()]
        groups: dict[str, list[str]] = {}
        for choice, count in sorted(self.choices.items()):
            group, _, name = choice.partition(" ")
            groups.setdefault(group, []).append(f"{name} {count}")
        return "\n".join([*lines, *(f"{group}: {', '.join(names)}" for group, names in groups.items())])


def main() -> int:
    """Return 1 if a job failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="time limit")
    parser.add_argument("--jobs", type=int, default=10**9, help="maximum number of jobs")
    parser.add_argument("--first", type=int, help="seed of the first job; default: random")
    parser.add_argument("--seed", type=int, help="run only the job of this seed")
    parser.add_argument(
        "--actions", default="", metavar="NAME,...", help=f"only jobs with: {', '.join(HABITS)}"
    )
    parser.add_argument("--reduce", type=int, default=60, metavar="RUNS", help="maximum runs to reduce a job")
    parser.add_argument("--stop-at-first", action="store_true", help="stop at the first job that fails")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # its scheduler warns in its constructor
    wanted = [name for name in options.actions.split(",") if name]
    if unknown := {*wanted} - {*HABITS}:
        parser.error(f"--actions: unknown names {', '.join(sorted(unknown))}")
    if options.seed is not None:
        job = draw(options.seed, wanted)
        print(job)
        if job is not None:
            repeat(job)
        return 0
    first = random.randrange(10**6) if options.first is None else options.first
    print(f"first seed: {first}", flush=True)
    fuzzer, begin = Fuzzer(options.reduce, wanted), time.monotonic()
    try:
        for seed in range(first, first + options.jobs):
            if time.monotonic() - begin > 60 * options.minutes:
                break
            outcome = fuzzer.fuzz(seed)
            if options.stop_at_first and outcome is not None and outcome.kind in FAULTS:
                break
    finally:
        fuzzer.pools.close()
        print(fuzzer.summary(time.monotonic() - begin))
    return int(any(fuzzer.outcomes[kind] for kind in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
