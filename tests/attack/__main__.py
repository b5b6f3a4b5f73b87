"""Attack small jobs: ``python -m tests.attack --minutes 60``.

python -m tests.attack --seed 12345 --count 1     # one attack again
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from tests.hosts.cluster import Cluster, cluster

from .draw import draw_attack
from .job import HOSTS, References
from .run import Outcome, run

FOLDER = Path("build/attack")


class Attacks:
    """Runs attacks and counts what happened."""

    def __init__(self, folder: Path, cluster: Cluster | None) -> None:
        self.folder, self.cluster, self.references = folder, cluster, References(folder / "references")
        self.counts: Counter[str] = Counter()
        self.faulty: list[int] = []

    def run(self, seed: int) -> Outcome:
        """Run the attack of a seed; print it and keep its files if it finds a fault."""
        attack, begin = draw_attack(seed, hosts=self.cluster is not None), time.monotonic()
        outcome = run(attack, self.references, self.folder / "attack", self.cluster)
        took_s = time.monotonic() - begin
        self._count(attack.theme, outcome)
        print(f"seed {seed}: {attack.theme}, {len(attack.launches)} launches, {took_s:.0f} s", flush=True)
        if outcome.faults:
            self.faulty.append(seed)
            FOLDER.mkdir(parents=True, exist_ok=True)
            path = FOLDER / f"{seed}.txt"
            faults = "\n".join(f"    {fault}" for fault in outcome.faults)
            path.write_text(f"{attack}\n{faults}\n{outcome.text}\n")
            print(
                f"seed {seed}: {path}:\n{faults}\n    python -m tests.attack --seed {seed} --count 1",
                flush=True,
            )
        return outcome

    def _count(self, theme: str, outcome: Outcome) -> None:
        self.counts[f"theme {theme}"] += 1
        for happened in outcome.launches:
            launch = happened.launch
            self.counts["launches in all"] += 1
            self.counts["starts again after exits"] += happened.job.start
            self.counts[f"launcher {launch.launcher}"] += 1
            self.counts[f"wrapper {launch.wrapper or 'none'}"] += 1
            self.counts[f"layout {launch.layout}"] += 1
            self.counts["events missed"] += len(happened.missed)
            self.counts["events without effect"] += len(happened.idle)
            if launch.change:
                self.counts[f"before {launch.change}"] += 1
            for deed, moment, _ in happened.deeds:
                self.counts[f"deed {deed.what}"] += 1
                self.counts[f"target {deed.target or 'folder'}"] += 1
                self.counts[f"moment {moment.point}"] += 1

    def summary(self, seconds: float) -> str:
        """Return the counts."""
        groups: dict[str, list[str]] = {}
        for choice, count in sorted(self.counts.items()):
            group, _, name = choice.partition(" ")
            groups.setdefault(group, []).append(f"{name} {count}")
        attacks = sum(count for name, count in self.counts.items() if name.startswith("theme "))
        lines = [f"{attacks} attacks in {seconds:.0f} s: {len(self.faulty)} with faults: {self.faulty}"]
        return "\n".join([*lines, *(f"{group}: {', '.join(names)}" for group, names in groups.items())])


def main() -> int:
    """Return 1 if an attack found a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="time limit")
    parser.add_argument("--seed", type=int, help="seed of the first attack; default: random")
    parser.add_argument("--count", type=int, default=10**9, help="maximum number of attacks")
    parser.add_argument("--stop-at-first", action="store_true", help="stop at the first fault")
    parser.add_argument("--hosts", action="store_true", help="two hosts, which needs root (tests/hosts)")
    options = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"first seed: {seed}", flush=True)
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attack_")))
        attacks = Attacks(folder, stack.enter_context(cluster(HOSTS)) if options.hosts else None)
        try:
            for number in range(seed, seed + options.count):
                if time.monotonic() - begin > 60 * options.minutes:
                    break
                if attacks.run(number).faults and options.stop_at_first:
                    break
        finally:
            print(attacks.summary(time.monotonic() - begin))
    return int(bool(attacks.faulty))


if __name__ == "__main__":
    sys.exit(main())
