"""Steps of the GPU tests: processes with time limits, run one after the other, and their report in Markdown."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_SUMMARY = re.compile(r"^(?=.*\d+ (?:passed|failed|skipped|error))[\d a-z,]+ in [\d.]+s")
_MAX_LINE = 200  # characters of a failure in the report


@dataclass(frozen=True)
class Step:
    """One step.

    Args:
        command: command of its process.
        limit_s: time limit in seconds.
        figures: True if the output belongs in the report.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    figures: bool = False


@dataclass(frozen=True)
class Result:
    """Outcome of a step.

    Attributes:
        outcome: ``passed``, ``skipped``, ``failed`` or ``over limit``.
        detail: first line of a failure, or pytest's summary.
        output: standard output and error.
    """

    step: Step
    seconds: float
    outcome: str
    detail: str
    output: str


def run_steps(
    steps: Sequence[Step], limit_s: float, show: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """Run all steps in order, also after a failure.

    Args:
        limit_s: limit on all steps in seconds. A step's own limit shrinks to the time left, and the steps after it do
            not start.
        show: called with each result.
    """
    deadline, results = time.monotonic() + limit_s, []
    for step in steps:
        left = min(step.limit_s, deadline - time.monotonic())
        result = run(step, left) if left > 0 else Result(step, 0.0, "over limit", "not started", "")
        results.append(result)
        show(result)
    return results


def run(step: Step, limit_s: float) -> Result:
    """Run one step, and kill its processes at the limit."""
    start = time.monotonic()
    # A separate session: at the limit, its ranks end too.
    process = subprocess.Popen(
        step.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        outcome = "failed" if process.returncode else "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        outcome = "over limit"
    seconds = time.monotonic() - start
    summary = next((line for line in reversed(output.splitlines()) if _SUMMARY.match(line)), "")
    if outcome == "passed" and "skipped" in summary and "passed" not in summary:
        outcome = "skipped"
    if outcome == "over limit":
        detail = f"limit {limit_s:.0f} s"
    else:
        detail = summary if outcome == "passed" else first_failure(output)
    return Result(step, seconds, outcome, detail, output)


def first_failure(output: str) -> str:
    """Return the line of an output that states the first failure: pytest's, an ``error:``, or the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    starts = ("E  ", "error:", "SKIPPED")
    found = next((line for line in lines if line.startswith(starts)), lines[-1] if lines else "no output")
    return found.removeprefix("E").strip()[:_MAX_LINE]


def report(results: Sequence[Result], facts: Mapping[str, str]) -> str:
    """Return the report in Markdown: facts of the host, a table of the steps, and the figures."""
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| step | seconds | result | detail |", "| --- | --- | --- | --- |"]
    for result in results:
        detail = result.detail.replace("|", "\\|")
        lines.append(f"| {result.step.name} | {result.seconds:.0f} | {result.outcome} | {detail} |")
    for result in results:
        if result.step.figures and result.outcome == "passed":
            lines += ["", f"`{' '.join(result.step.command[1:])}`", ""]
            lines += [f"    {line}".rstrip() for line in result.output.splitlines()]
    return "\n".join(lines) + "\n"
