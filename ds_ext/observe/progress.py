"""Progress lines of a training loop, and their texts for numbers."""

from __future__ import annotations

import math
import operator
import shutil
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean

from .step_metrics import StepMetrics

_ERASE = "\x1b[2K"  # erase the line that the terminal's cursor is on
_COLUMNS = 100  # most columns of a progress line
_BETWEEN = 0.1  # least time between steps that a line has, relative to that of a step
_MIB = 1 << 20


def progress_line(
    steps: Sequence[StepMetrics],
    total_steps: int | None = None,
    left_s: float | None = None,
    memory: str = "RSS",
    between_s: float = 0.0,
    omitted: int = 0,
) -> tuple[str, int]:
    """Return a line on consecutive steps, and how many of memory, norm, lr and rate it omits to fit into 100 columns.

    Loss, gradient norm and times are means over the steps; learning rate and memory are those of the last one. If the
    last step of the run is known, there is always room for the remaining time, so that all lines have the same columns.

    Args:
        steps: metrics of the steps, at least one.
        left_s: estimated seconds until the last step; None: unknown.
        memory: name of the quantity ``peak_memory_bytes``.
        between_s: mean time between two steps.
        omitted: number of columns that an earlier line omits.
    """
    last, step_s = steps[-1], fmean(step.iter_time_s for step in steps)
    number, reserve = f"{last.step}", 0
    left = "" if left_s is None else f"{duration_text(left_s)} left"
    if total_steps is not None:
        number = f"{last.step:>{len(str(total_steps))}}/{total_steps}"
        if not left and last.step < total_steps:
            reserve = len(f" | {duration_text(step_s * (total_steps - last.step))} left")
    rates = (_rate(steps, "tokens_per_s"), "tokens/s"), (_rate(steps, "samples_per_s"), "samples/s")
    losses = {name: fmean(step.losses[name] for step in steps if name in step.losses) for name in last.losses}
    between = f" + {between_s:.3g}" if between_s >= _BETWEEN * step_s else ""
    # Cells in their order, with the order in which they are omitted: the largest number first.
    cells = [
        (0, f"step {number}"),
        (0, f"loss {fmean(step.loss for step in steps):.4f}{additional_losses_text(losses)}"),
        (2, f"lr {last.lr:.2e}"),
        (3, cell("norm ", _mean(steps, "grad_norm"), ".3f") or "norm -"),
        (0, f"{step_s:.3g}{between} s/step"),
        (1, next((rate_text(rate, unit) for rate, unit in rates if rate is not None), "")),
        (0, cell("epoch ", last.epoch, ".2f")),
        (4, memory_text(memory, last.peak_memory_bytes)),
        (0, left),
    ]
    while True:
        line = " | ".join(text for order, text in cells if text and order <= 4 - omitted)
        if len(line) + reserve <= _COLUMNS or omitted == 4:
            return line, omitted
        omitted += 1


def _mean(steps: Sequence[StepMetrics], key: str) -> float | None:
    values = [value for step in steps if (value := getattr(step, key)) is not None]
    return fmean(values) if values else None


def _rate(steps: Sequence[StepMetrics], key: str) -> float | None:
    """Return a rate over all steps, from the rate of every step; None if unknown."""
    rates = [getattr(step, key) for step in steps]
    if None in rates:
        return None
    seconds = [step.iter_time_s for step in steps]
    return math.fsum(map(operator.mul, rates, seconds)) / math.fsum(seconds)


def print_line(text: str, keep: bool = True) -> None:
    """Print a line that stays, or with ``keep=False`` a progress line, which the next call replaces.

    Only terminals show progress lines.
    """
    # One write including the newline: launchers run Python unbuffered, and other processes may print in between.
    if not sys.stdout.isatty():
        if keep:
            print(f"{text}\n", end="", flush=True)
        return
    if not keep:
        text = text[: shutil.get_terminal_size().columns - 1]
    end = "\n" if keep else "\r"
    print(f"{_ERASE}{text}{end}", end="", flush=True)


def additional_losses_text(losses: Mapping[str, float]) -> str:
    cells = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in losses.items()]
    return f" ({', '.join(cells)})" if cells else ""


def duration_text(seconds: float) -> str:
    """Return a duration such as ``0:45``, ``2:15``, ``1:23:45`` or ``3 d 04:05:06``."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}:{rest_s:02}"
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"


def memory_text(name: str, size_bytes: int) -> str:
    return f"{name} {size_bytes / _MIB:,.0f} MiB"


def rate_text(rate: float, unit: str) -> str:
    return f"{rate:{',.0f' if rate >= 100 else '.3g'}} {unit}"


def cell(label: str, value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{label}{value:{form}}{unit}"
