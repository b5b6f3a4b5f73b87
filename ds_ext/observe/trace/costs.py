"""Costs measured in traces: times of every stage, of the work between ops, and of messages.

A time is the median of a step's ops (or gaps, or messages) of a kind, and then the median over the steps. The spread is
half the interquartile range over the steps. All times are in milliseconds.

- The overhead is the gap before an op that did not wait: its inputs ended before the previous op began.
- A message takes from the end of the op that sends it to the start of the op that waits for it, less the overhead.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ...pipe_schedules import Op, Placement, Timetable
from ...pipe_schedules.costs import MEASURED_SIZES, Costs
from ...pipe_schedules.ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE
from ...pipe_schedules.stage_kinds import HEAD_PART
from .read import Row, Traces, op_of

_DIGITS = 5  # of a time

Spans = list[tuple[Op, float, float]]  # (op, start, end)
Quantity = tuple[str, int]  # (kind of op, stage), or one of these
INSIDE, BETWEEN, OVERHEAD = ("message inside a host", 0), ("message between hosts", 0), ("overhead", 0)


def measure_costs(traces: Traces) -> Costs:
    """Return the costs of the steps that are complete on every device, from the first rank of each device."""
    timetable = traces.timetable(traces.run["micro_batches"])
    if timetable is None:
        raise ConfigError(f"{traces.folder}: no timetable.txt. Copy it from rank 0's trace folder.")
    placement = timetable.placement
    rows = _read_rows(traces, timetable.micro_batches)
    hosts = {row: str(trace.run.get("host")) for row, trace in traces.rows().items()}
    steps = set.intersection(*map(set, rows.values()))
    values: dict[Quantity, list[float]] = defaultdict(list)  # medians of the steps
    for step in steps:
        for quantity, times in _samples({row: rows[row][step] for row in rows}, hosts, timetable).items():
            values[quantity].append(statistics.median(times))
    medians = {quantity: _rounded(statistics.median(times)) for quantity, times in values.items()}
    spreads = {quantity: _rounded(_spread(times)) for quantity, times in values.items()}
    missing_stages = [i for i, times in enumerate(stage_times(medians, placement.stages)) if None in times]
    if missing_stages:
        raise ConfigError(
            f"{traces.folder}: stages without a forward and a backward in a complete step (got "
            f"{', '.join(map(str, missing_stages))}). Trace at least one whole step, and copy the files of all ranks."
        )
    inside, between = medians.get(INSIDE, medians.get(BETWEEN, 0.0)), medians.get(BETWEEN, 0.0)
    host_of = {device: host for (_, device), host in hosts.items()}
    crossing = [(a, b) for a in host_of for b in host_of if host_of[a] != host_of[b]]
    keys = ("schedule", "micro_batches", "data_parallel_size", *MEASURED_SIZES)
    measured = {
        "devices": placement.devices_per_pipe,
        **{key: traces.run[key] for key in keys if key in traces.run},
        "whole_backwards": all(kind != BACKWARD_INPUT for kind, _ in medians),
        "steps": len(steps),
        "unit": "ms",
        "spread": {
            "stages": stage_times(spreads, placement.stages),
            **(
                {"head_part": _means_of_parts(spreads, placement)}
                if HEAD_PART in placement.stage_kinds
                else {}
            ),
            **{key[0]: spreads[key] for key in (OVERHEAD, INSIDE, BETWEEN) if key in spreads},
        },
    }
    links, overhead = dict.fromkeys(crossing, between), medians.get(OVERHEAD, 0.0)
    return costs_of_ops(medians, placement, comm=inside, links=links, overhead=overhead, measured=measured)


def stage_times(values: Mapping[Quantity, float], stages: int) -> list[tuple[float | None, ...]]:
    """Return the forward, backward_input and backward_weight of every stage; None where a value is missing.

    The halves of a whole backward are equal. A repeated forward replaces that of a forward device, which has its own
    speed.
    """
    rows: list[tuple[float | None, ...]] = []
    for stage in range(stages):
        backward = values.get((BACKWARD, stage))
        half = None if backward is None else backward / 2
        forward = values.get((RECOMPUTE, stage), values.get((FORWARD, stage)))
        rows.append(
            (forward, *(values.get((kind, stage), half) for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT)))
        )
    return rows


def costs_of_ops(values: Mapping[Quantity, float], placement: Placement, **others: Any) -> Costs:
    """Return the costs for the times of ops; a missing stage has the mean of the others. ``others`` are for Costs."""
    means: list[float] = []
    columns: list[list[float]] = []
    for column in zip(*stage_times(values, placement.stages), strict=True):
        known = [time for time in column if time is not None]
        mean = statistics.fmean(known) if known else 0.0
        columns.append(
            [round(time / mean, _DIGITS) if time and mean else float(time is None) for time in column]
        )
        means.append(_rounded(mean * placement.stages / placement.devices_per_pipe))
    head = _head_factors(values, placement, *means) if HEAD_PART in placement.stage_kinds else 0.0
    return Costs(*means, stages=tuple(zip(*columns, strict=True)), head=head, **others)


def _head_factors(
    values: Mapping[Quantity, float],
    placement: Placement,
    forward: float,
    backward_input: float,
    backward_weight: float,
) -> tuple[float, float, float]:
    """Return the factors of the head from its parts. The forward of a part includes its input gradient."""
    part_forward, part_weight = _means_of_parts(values, placement)
    count = len(placement.stages_of_kind(HEAD_PART))
    forward_and_input = round(count * part_forward / (forward + backward_input or 1.0), _DIGITS)
    weight = round(count * part_weight / (backward_weight or 1.0), _DIGITS)
    return forward_and_input, forward_and_input, weight


def _means_of_parts(values: Mapping[Quantity, float], placement: Placement) -> tuple[float, float]:
    """Return the means over the head parts of their forwards and of their weight gradients; 0 if not measured."""

    def mean(kind: str) -> float:
        stages = placement.stages_of_kind(HEAD_PART)
        known = [values[kind, stage] for stage in stages if (kind, stage) in values]
        return statistics.fmean(known) if known else 0.0

    return mean(FORWARD), mean(BACKWARD_WEIGHT)


def _read_rows(traces: Traces, micro_batches: int) -> dict[Row, dict[int, Spans]]:
    """Return the ops of every complete step with this N on rank 0's clock, in milliseconds."""
    rows: dict[Row, dict[int, Spans]] = {}
    for row, trace in traces.rows().items():
        rows[row] = {}
        for step, (whole, *spans) in trace.steps().items():
            if whole["args"]["micro_batches"] == micro_batches:
                ops = [trace.aligned(span) for span in spans if span["tid"] == "compute"]
                rows[row][step] = [(op_of(e), e["ts"] / 1e3, e["ts"] / 1e3 + e["dur"] / 1e3) for e in ops]
    return rows


def _samples(
    rows: Mapping[Row, Spans], hosts: Mapping[Row, str], timetable: Timetable
) -> dict[Quantity, list[float]]:
    """Return the times in one step of ops and messages. The overhead is a median, already taken off the messages."""
    ends = {(group, device, op): end for (group, device), spans in rows.items() for op, _, end in spans}
    samples: dict[Quantity, list[float]] = defaultdict(list)
    for (group, device), spans in rows.items():
        begin_before = end_before = -math.inf  # of the previous op
        for op, begin, end in spans:
            samples[op.kind, op.stage].append(end - begin)
            needs = [
                (ends.get((group, owner, need)), owner) for need, owner in timetable.dependencies.needs(op)
            ]
            remote = [(sent, owner) for sent, owner in needs if owner != device and sent is not None]
            sent, owner = max(remote, default=(-math.inf, device))
            if sent > end_before:
                inside = hosts[group, owner] == hosts[group, device]
                samples[INSIDE if inside else BETWEEN].append(begin - sent)
            elif sent < begin_before:
                samples[OVERHEAD].append(begin - end_before)
            begin_before, end_before = begin, end
    overhead = statistics.median(samples[OVERHEAD] or [0.0])
    samples[OVERHEAD] = [overhead]
    for key in samples.keys() & {INSIDE, BETWEEN}:
        samples[key] = [max(0.0, time - overhead) for time in samples[key]]
    return samples


def _spread(values: list[float]) -> float:
    """Return half the interquartile range; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / 2


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
