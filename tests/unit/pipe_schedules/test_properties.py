"""Properties of all schedules: random requests, and random changes of timetables and programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Op, Program, Schedule, Timetable, get_schedule
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.files import dump, read_dump
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.pipe_schedules.text import dumps, loads
from ds_ext.planner.memory import memory
from ds_ext.planner.training_sizes import TrainingSizes
from tests.selection import EVERYTHING
from tests.timetables import assert_keeps_time, with_order
from tests.unit.pipe_schedules.dump_checker import DumpChecker

T = TypeVar("T")
EXAMPLES = 600 if EVERYTHING else 120
WITH_SLICES = sorted(name for name, schedule in SCHEDULES.items() if schedule.has_slices)

TIMES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0])
COSTS = st.builds(
    Costs,
    forward=TIMES,
    backward_input=TIMES,
    backward_weight=TIMES,
    comm=TIMES,
    jitter=st.sampled_from([0.0, 0.0, 0.2]),
    seed=st.integers(0, 9),
)


def options_of(schedule: Schedule) -> st.SearchStrategy[dict[str, object]]:
    """Generate some options with values of the right type, some of them out of range."""
    values = {
        name: st.sampled_from(option.choices)
        if option.choices
        else st.floats(0, 6)
        if isinstance(option.default, float)
        else st.integers(0, 4)
        for name, option in schedule.options.items()
        if option.choices or not isinstance(option.default, str)
    }
    return st.fixed_dictionaries({}, optional=values)


@cache
def made_for(
    name: str, ranks: int, micro_batches: int, slices: int, divides_head: bool = False
) -> Timetable | None:
    """Return a timetable, or None if the schedule does not support the sizes."""
    options = {"mode": "greedy"} if name == "bitpipe" and slices > 1 else {}
    try:
        schedule = get_schedule(name).dividing_head(divides_head)
        return schedule.timetable(ranks, micro_batches, options, slices=slices)
    except ScheduleError:
        return None


def timetables(
    names: Sequence[str],
    ranks: range,
    micro_batches: range,
    slices: range,
    divides_head: tuple[bool, ...] = (False,),
) -> st.SearchStrategy[Timetable]:
    sizes = (ranks, micro_batches, slices, divides_head)
    made = st.builds(made_for, st.sampled_from(names), *map(st.sampled_from, sizes))
    return made.filter(lambda made: made is not None)  # pyright: ignore[reportReturnType]


TIMETABLES = timetables(sorted(SCHEDULES), range(2, 5), range(2, 9), range(1, 2), (False, True)) | timetables(
    WITH_SLICES, range(2, 5), range(1, 5), range(2, 4), (False, True)
)


# --- random requests ---


@settings(max_examples=EXAMPLES)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(-1, 9),
    n=st.integers(-1, 20),
    slices=st.sampled_from([1, 1, 2, 3, 4, 0]),
    costs=COSTS,
    divides_head=st.booleans(),
)
def test_a_request_is_a_sound_timetable_or_an_error_with_a_number(
    data: st.DataObject, name: str, ranks: int, n: int, slices: int, costs: Costs, divides_head: bool
) -> None:
    schedule = get_schedule(name).dividing_head(divides_head)
    options = data.draw(options_of(schedule))
    try:
        made = schedule.timetable(ranks, n, options, costs, slices)
    except ScheduleError as error:
        assert any(c.isdigit() for c in str(error))
        return
    assert_sound(made, costs)
    assert_sound(forward_timetable(made.placement, n, slices=slices), costs)


def assert_sound(made: Timetable, costs: Costs) -> None:
    """The check accepts it with the reported link credits and not with fewer; the simulation fits the costs."""
    program = lower(made)
    report = check(program)
    assert check(program, link_credits=max(report.link_credits, 1)) == report
    if report.link_credits > 1:
        with pytest.raises(ScheduleError, match=rf"deadlock .*{report.link_credits - 1}"):
            check(program, link_credits=report.link_credits - 1)
    simulation = simulate(made, costs)
    assert simulation.messages == report.messages
    assert_keeps_time(made, costs)
    placement = made.placement
    # A buffer holds one activation.
    for buffers, peak in zip(report.num_buffers, simulation.peak_activations, strict=True):
        assert buffers >= round(peak * placement.stages * made.slices / placement.devices_per_pipe)
    sizes = TrainingSizes(
        num_layers=placement.stages, hidden_size=8, num_attention_heads=2, vocab_size=10, seq_length=4
    )
    keeps = [rank.activations > 0 for rank in memory(simulation.timetable, sizes)]
    assert keeps == [any(op.kind != "F" for op in order) for order in made.orders]


@settings(max_examples=EXAMPLES, deadline=None)
@given(made=timetables(WITH_SLICES, range(1, 7), range(1, 9), range(1, 6)))
def test_every_slice_runs_once_and_in_order(made: Timetable) -> None:
    assert_slices(made)
    assert_slices(forward_timetable(made.placement, made.micro_batches, made.schedule, made.slices))


def assert_slices(made: Timetable) -> None:
    """All ops exist, in the order of the slices at every stage; the program runs, and files contain it."""
    slices = [*range(made.slices)]
    ops: dict[tuple[str, int, int], list[int]] = {}
    for op in (op for order in made.orders for op in order):
        ops.setdefault((op.kind, op.micro_batch, op.stage), []).append(op.slice)
    kinds = {op.kind for order in made.orders for op in order}
    assert kinds in ({"F", "B"}, {"F", "I", "W"}) if made.trains else kinds == {"F"}
    assert len(ops) == len(kinds) * made.micro_batches * made.placement.stages
    for (kind, _, _), order in ops.items():
        if kind != "W":
            assert order == (slices if kind == "F" else slices[::-1])
        assert sorted(order) == slices
    program = lower(made)
    check(program)
    run(program)
    assert loads(dumps(made)) == made
    dumped = json.dumps(dump(program))
    assert read_dump(dumped, "dump") == made
    DumpChecker(json.loads(dumped)).check()


@settings(max_examples=EXAMPLES)
@given(data=st.data(), made=timetables(["gpipe"], range(1, 4), range(1, 4), range(2, 5)))
def test_a_slice_that_comes_too_early_has_an_arrow(data: st.DataObject, made: Timetable) -> None:
    """With the order of gpipe every device gets to the wrong op; in other orders a deadlock may come first."""
    device = data.draw(st.sampled_from(range(len(made.orders))))
    order = list(made.orders[device])
    early = data.draw(st.sampled_from([op for op in order if follows(op, made.slices) is not None]))
    before = follows(early, made.slices)
    assert before is not None
    order.remove(early)
    order.insert(order.index(before), early)
    with pytest.raises(ScheduleError, match=rf"device {device} .*{early} .*{before}\.") as caught:
        check(lower(with_order(made, device, order)))
    lines = str(caught.value).splitlines()
    (arrow,) = (at for at, line in enumerate(lines) if line.strip() and not line.strip("^ "))
    assert lines[arrow - 1].startswith(f"device {device} ") and lines[arrow - 1].endswith("ERROR HERE")
    assert lines[arrow - 1][lines[arrow].index("^") :].split()[0] == str(early)


def follows(op: Op, slices: int) -> Op | None:
    """Return the op of a neighboring slice that must precede ``op`` on its device."""
    j = op.slice + {"F": -1, "B": 1, "I": 1, "W": slices}[op.kind]
    return op._replace(slice=j) if 0 <= j < slices else None


def mutate(data: st.DataObject, given: Sequence[T], among: int, what: str) -> list[T]:
    """Return the list with one of its first ``among`` items swapped with another, dropped or doubled."""
    changed = list(given)
    i, j = (data.draw(st.integers(0, among - 1)) for _ in range(2))
    if what == "swap":
        changed[i], changed[j] = changed[j], changed[i]
    elif what == "drop":
        del changed[i]
    else:
        changed.insert(j, changed[i])
    return changed


# --- random changes ---


@settings(max_examples=EXAMPLES)
@given(data=st.data(), made=TIMETABLES, what=st.sampled_from(["swap", "drop", "double", "move"]))
def test_a_changed_timetable_is_rejected_or_runs(data: st.DataObject, made: Timetable, what: str) -> None:
    device = data.draw(st.sampled_from([d for d, order in enumerate(made.orders) if order]))
    order = made.orders[device]
    if what == "move":
        to = (device + 1) % len(made.orders)
        changed = with_order(with_order(made, device, [*order[1:]]), to, [*made.orders[to], order[0]])
    else:
        changed = with_order(made, device, mutate(data, order, len(order), what))
    try:
        program = lower(changed)
        check(program)
    except ScheduleError as error:
        assert_explains(error)
        assert what != "swap" or not possible(changed)
        return
    assert what == "swap" and possible(changed)
    assert simulate(changed).ideal == pytest.approx(simulate(made).ideal)
    if (
        made.schedule not in ("dualpipev", "fbd") and not made.placement.head_parts
    ):  # DumpChecker does not support these
        DumpChecker(json.loads(json.dumps(dump(program)))).check()


@settings(max_examples=EXAMPLES)
@given(data=st.data(), made=TIMETABLES, what=st.sampled_from(["swap", "drop", "double"]))
def test_a_changed_program_is_rejected_or_runs(data: st.DataObject, made: Timetable, what: str) -> None:
    program = lower(made)
    device = data.draw(st.sampled_from([d for d, order in enumerate(made.orders) if order]))
    instructions = program.instructions[device]
    # The check does not cover reductions and the optimizer step, which have no micro-batch.
    covered = sum(i.micro_batch is not None for i in instructions)
    changed = mutate(data, instructions, covered, what)
    rows = (*program.instructions[:device], tuple(changed), *program.instructions[device + 1 :])
    mutated = dataclasses.replace(program, instructions=rows)
    try:
        check(mutated)
    except ScheduleError as error:
        assert_explains(error)
        return
    assert what == "swap"
    run(mutated)


def assert_explains(error: ScheduleError) -> None:
    sentence, _, grid = str(error).partition("\n")
    assert any(c.isdigit() for c in sentence) and "ERROR HERE" in grid


def possible(made: Timetable) -> bool:
    """Return True if the simulator, which has no messages and buffers, gets to the end."""
    try:
        simulate(made)
    except ScheduleError:
        return False
    return True


def run(program: Program) -> None:
    """Execute the instructions with values instead of tensors, with buffers and links.

    Attention adds keys and values per (stage, micro-batch): the forward of a slice reads those of exactly the slices
    before it, and its backward reads the gradients that exactly the slices after it left.
    """

    def received(what: str, stage: int | None, source: int | None) -> str:
        """Return the name of a received value; the loss of head parts gets one from each."""
        return f"{what}{source}" if what == "x" and parts and stage == loss else what

    links: dict[tuple[int, int], list[object]] = {}
    buffers = [[dict[str, object]() for _ in range(slots)] for slots in program.num_buffers]
    timetable = program.timetable
    last, at = timetable.placement.stages - 1, [0] * len(program.instructions)
    parts, loss = timetable.placement.head_parts, timetable.placement.loss_stage
    keys: dict[tuple[int, int, int], list[int]] = {}
    gradients: dict[tuple[int, int, int], list[int]] = {}
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(program.instructions):
            while at[rank] < len(instructions):
                name, m, stage, _, _, peer, slot, to_buffer, j, far = instructions[at[rank]]
                if slot is not None:
                    assert m is not None and stage is not None
                    here, other = buffers[rank][slot], (rank, peer if peer is not None else rank)
                    if name.startswith("Recv"):
                        queue = links.get((other[1], rank))
                        if not queue:
                            break
                        here[received("x" if name == "RecvActivation" else "dy", stage, far)] = queue.pop(0)
                    elif name == "LoadMicroBatch":
                        here["x" if stage == 0 else "labels"] = (m, j, -1) if stage == 0 else (m, j)
                    elif name == "ForwardPass" and last < stage == loss:
                        assert [here.pop(f"x{last + 1 + i}") for i in range(parts)] == [
                            (m, j, last + 1 + i) for i in range(parts)
                        ]
                        here["dx"] = (m, j, loss)
                    elif name == "ForwardPass" and stage > last:
                        assert here["x"] == (m, j, last)
                        here["y"] = (m, j, stage)
                    elif name == "BackwardWeight" and stage > last:
                        assert (here.pop("y"), here.pop("dy")) == ((m, j, stage), (m, j, loss))
                    elif name in ("ForwardPass", "RecomputeForward"):
                        assert here["x"] == (m, j, stage - 1) and (
                            stage != last or stage == 0 or here["labels"] == (m, j)
                        )
                        here["y"] = (m, j, stage)
                        assert keys.setdefault((rank, stage, m), []) == [*range(j)]
                        keys[rank, stage, m].append(j)
                    elif name in ("BackwardPass", "BackwardInput"):
                        assert here.pop("y") == (m, j, stage)
                        after = loss if stage == last else stage + 1
                        assert stage == loss or here.pop("dy") == (m, j, after)
                        here["dx"] = (m, j, stage)
                        later = [*range(j + 1, timetable.slices)]
                        assert gradients.setdefault((rank, stage, m), []) == later[::-1]
                        gradients[rank, stage, m].append(j)
                        if j == 0:
                            del keys[rank, stage, m], gradients[rank, stage, m]
                    elif name == "BackwardWeight":
                        assert here.pop("for W") == (m, j, stage)
                    elif name in ("SendActivation", "SendGrad"):
                        links.setdefault(other, []).append(here["y" if name == "SendActivation" else "dx"])
                    elif name == "CopyActivation":
                        assert to_buffer is not None
                        target = stage + 1 if far is None else far
                        buffers[rank][to_buffer][received("x", target, stage)] = here["y"]
                    elif name == "CopyGrad":
                        assert to_buffer is not None
                        buffers[rank][to_buffer]["dy"] = here["dx"]
                    if name == "BackwardInput":
                        here["for W"] = here["dx"]
                at[rank] += 1
                moved = True

    assert at == [len(instructions) for instructions in program.instructions]
    assert not any(links.values())
    no_backwards = timetable.placement.forward_devices if timetable.trains else range(len(at))
    assert not gradients and {rank for rank, _, _ in keys} <= {*no_backwards}
