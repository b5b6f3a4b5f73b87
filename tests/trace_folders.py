"""Traces written from a simulation, as ranks with different clocks would write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_ext.observe.trace.event import EventText, collective_lanes
from ds_ext.observe.trace.file import CLOCK, TraceFile, metadata, write_timetable
from ds_ext.pipe_schedules import Instruction
from ds_ext.pipe_schedules import timetable as generate
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.ops import COMPUTE_NAME, Op
from ds_ext.pipe_schedules.simulation import Simulation, simulate

UNIT_US = 10_000.0  # per unit of simulated time
SEND_US = 10.0
BYTES = 1 << 20
GAP_US = 5_000.0  # between two steps
PRICED = simulate(generate("bitpipe", 4, 8), Costs(1, 1.2, 0.8, 0.05))


def offset_us(rank: int) -> float:
    """Return how far rank 0's clock is ahead of that of ``rank``."""
    return 12_345.678 * rank


def write_traces(
    folder: Path,
    simulation: Simulation,
    steps: int = 2,
    *,
    run: str = "20260101-000000-abcd",
    hosts: Sequence[str] = (),
    load_share: float = 0.0,
    **values: Any,
) -> None:
    """Write a trace per device, with every op at its time, the messages around it, and a reduction at the end.

    The span of a receive lasts from the end of the previous op to the start of the next. The overhead of an op follows
    its span. The first ``load_share`` of a forward at stage 0 loads its data.

    Args:
        hosts: host of every rank.
        values: further values of the description of the run.
    """
    timetable = simulation.timetable
    world = timetable.placement.num_devices
    for rank in range(world):
        run_values: dict[str, Any] = {
            "run": run, "world_size": world, "device": rank, "data_parallel_rank": 0, "tensor_parallel_rank": 0,
            "data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": world,
            "schedule": timetable.schedule, "micro_batches": timetable.micro_batches, **values,
        }  # fmt: skip
        if hosts:
            run_values["host"] = hosts[rank]
        file = TraceFile(folder, rank, run_values)
        if rank == 0:
            write_timetable(folder, timetable, first=True)
        for number in range(2 if rank else 0):
            clock = {"at_us": 1e7 * number, "offset_us": offset_us(rank), "error_us": 20.0}
            file.append([metadata(CLOCK, rank, clock)])
        for step in range(1, steps + 1):
            file.append(_step(simulation, rank, step, load_share))
        file.close()


def _step(simulation: Simulation, rank: int, step: int, load_share: float) -> list[str]:
    text = EventText(rank, lambda device: (device,), eager=True)
    zero = (step - 1) * (simulation.makespan * UNIT_US + GAP_US) - offset_us(rank)
    lines, free = [], 0.0
    for op, start, whole_end in simulation.spans[rank]:
        end = whole_end - simulation.costs.overhead
        for need, owner in simulation.timetable.dependencies.needs(op):
            if owner != rank:
                lines.append(
                    _received(
                        text, simulation, op, need, owner, (zero, free * UNIT_US, start * UNIT_US), step
                    )
                )
        compute = Instruction(
            COMPUTE_NAME[op.kind], op.micro_batch, op.stage, simulation.timetable.pipe(op.micro_batch)
        )
        begin = start
        if load_share and op.kind == "F" and op.stage == 0:
            begin += load_share * (end - start)
            load = Instruction("LoadMicroBatch", op.micro_batch, op.stage)
            lines.append(text.instruction(load, zero + start * UNIT_US, zero + begin * UNIT_US, 0, step))
        lines.append(text.instruction(compute, zero + begin * UNIT_US, zero + end * UNIT_US, 0, step))
        lines += _sent(text, simulation, op, rank, zero + end * UNIT_US, step)
        free = end
    last = zero + simulation.makespan * UNIT_US
    lines.append(text.instruction(Instruction("ReduceGrads"), last, last + 100, 0, step))
    lines.append(text.instruction(Instruction("OptimizerStep"), last + 100, last + 300, 0, step))
    lines.append(text.step(step, zero, last + 400, simulation.timetable.micro_batches))
    stages = sorted({op.stage for op, _, _ in simulation.spans[rank]})
    reductions = [(step, stage, BYTES, last - 2000, last + 50) for stage in stages]
    return lines + collective_lanes(rank, "reduce", reductions)


def _received(
    text: EventText,
    simulation: Simulation,
    op: Op,
    need: Op,
    owner: int,
    times: tuple[float, float, float],
    step: int,
) -> str:
    zero, begin, end = times
    name = "RecvActivation" if op.kind in "FR" else "RecvGrad"
    pipe = simulation.timetable.pipe(op.micro_batch)
    received = Instruction(name, op.micro_batch, op.stage, pipe, peer=owner, other_stage=need.stage)
    return text.instruction(received, zero + min(begin, end - 1), zero + end, BYTES, step)


def _sent(text: EventText, simulation: Simulation, op: Op, rank: int, at: float, step: int) -> list[str]:
    """Return a send for every op on another device that depends on this one."""
    lines = []
    for device, spans in enumerate(simulation.spans):
        for other, _, _ in spans:
            if device != rank and (op, rank) in simulation.timetable.dependencies.needs(other):
                name = "SendActivation" if other.kind in "FR" else "SendGrad"
                pipe = simulation.timetable.pipe(op.micro_batch)
                sent = Instruction(name, op.micro_batch, op.stage, pipe, peer=device, other_stage=other.stage)
                lines.append(text.instruction(sent, at, at + SEND_US, BYTES, step))
    return lines
