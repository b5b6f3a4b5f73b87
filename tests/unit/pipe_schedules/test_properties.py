"""What holds for every registered schedule, whatever is asked of it, and for whatever is done to its timetables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Program, Schedule, Timetable, get_schedule
from ds_ext.pipe_schedules.check.program import check
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.lower import lower
from ds_ext.pipe_schedules.simulate import simulate
from ds_ext.planner.memory import ModelSizes, memory
from tests.timetables import assert_keeps_time, with_order

T = TypeVar("T")

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
    """Some of its options, with values of the right kind, also some that are out of range."""
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
def made_for(name: str, ranks: int, micro_batches: int) -> Timetable | None:
    """A timetable to break, or None if the schedule has none for these sizes."""
    try:
        return get_schedule(name).timetable(ranks, micro_batches)
    except ScheduleError:
        return None


TIMETABLES = st.builds(
    made_for, st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.integers(2, 8)
).filter(lambda made: made is not None)


# --- every request --------------------------------------------------------------------------------------------------


@settings(max_examples=600)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(-1, 9),
    n=st.integers(-1, 20),
    costs=COSTS,
)
def test_a_request_is_a_sound_timetable_or_an_error_with_a_number(
    data: st.DataObject, name: str, ranks: int, n: int, costs: Costs
) -> None:
    schedule = get_schedule(name)
    options = data.draw(options_of(schedule))
    try:
        made = schedule.timetable(ranks, n, options, costs)
    except ScheduleError as error:
        assert any(c.isdigit() for c in str(error))
        return
    assert_sound(made, costs)
    assert_sound(forward_timetable(made.placement, n), costs)


def assert_sound(made: Timetable, costs: Costs) -> None:
    """It is proven, also with as little room on the links as the proof says, and priced as the costs say."""
    program = lower(made)
    report = check(program)
    assert check(program, link_slots=max(report.link_slots, 1)) == report
    if report.link_slots > 1:
        with pytest.raises(
            ScheduleError, match=rf"when a link holds {report.link_slots - 1} of its messages"
        ):
            check(program, link_slots=report.link_slots - 1)
    assert check(program, order="tagged").messages == report.messages
    simulation = simulate(made, costs)
    assert simulation.messages == report.messages
    assert_keeps_time(made, costs)
    placement = made.placement
    # A buffer holds one activation, and nothing is received long before it is needed.
    for slots, peak in zip(report.num_buffers, simulation.peak_activations, strict=True):
        assert slots >= round(peak * placement.stages / placement.devices_per_pipe)
    sizes = ModelSizes(layers=placement.stages, hidden=8, heads=2, vocab=10, seq=4)
    keeps = [rank.activations > 0 for rank in memory(simulation.timetable, sizes)]
    assert keeps == [any(op.kind != "F" for op in order) for order in made.orders]


def mutate(data: st.DataObject, given: Sequence[T], among: int, what: str) -> list[T]:
    """The list with one of its first ``among`` items swapped with another, dropped or doubled."""
    changed = list(given)
    i, j = (data.draw(st.integers(0, among - 1)) for _ in range(2))
    if what == "swap":
        changed[i], changed[j] = changed[j], changed[i]
    elif what == "drop":
        del changed[i]
    else:
        changed.insert(j, changed[i])
    return changed


# --- broken timetables ----------------------------------------------------------------------------------------------


@settings(max_examples=400)
@given(data=st.data(), made=TIMETABLES, what=st.sampled_from(["swap", "drop", "double"]))
def test_a_mutation_is_found_or_harmless(data: st.DataObject, made: Timetable, what: str) -> None:
    rank = data.draw(st.sampled_from([rank for rank, order in enumerate(made.orders) if order]))
    order = made.orders[rank]
    mutated = with_order(made, rank, mutate(data, order, len(order), what))
    try:
        check(lower(mutated))
    except ScheduleError as error:
        assert "ERROR HERE" in str(error)
        assert what != "swap" or not possible(mutated)
        return
    assert what == "swap" and possible(mutated)
    assert simulate(mutated).ideal == pytest.approx(simulate(made).ideal)


@settings(max_examples=400)
@given(data=st.data(), made=TIMETABLES, what=st.sampled_from(["swap", "drop", "double"]))
def test_a_mutated_program_is_found_or_runs(data: st.DataObject, made: Timetable, what: str) -> None:
    program = lower(made)
    rank = data.draw(st.sampled_from([rank for rank, order in enumerate(made.orders) if order]))
    instructions = program.instructions[rank]
    # The last ones, reductions and step, are of no micro-batch and not looked at.
    looked_at = sum(i.micro_batch is not None for i in instructions)
    changed = mutate(data, instructions, looked_at, what)
    ranks = (*program.instructions[:rank], tuple(changed), *program.instructions[rank + 1 :])
    mutated = dataclasses.replace(program, instructions=ranks)
    try:
        check(mutated)
    except ScheduleError as error:
        assert "ERROR HERE" in str(error)
        return
    assert what == "swap"
    run(mutated)


def possible(made: Timetable) -> bool:
    """Whether the simulator, which knows no messages and buffers, gets to the end."""
    try:
        simulate(made)
    except ScheduleError:
        return False
    return True


def run(program: Program) -> None:
    """Execute the instructions with values instead of tensors, every rank as far as it gets, with buffers and links."""
    links: dict[tuple[int, int], list[object]] = {}
    buffers = [[dict[str, object]() for _ in range(slots)] for slots in program.num_buffers]
    last, at = program.timetable.placement.stages - 1, [0] * len(program.instructions)
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(program.instructions):
            while at[rank] < len(instructions):
                name, m, stage, _, _, peer, slot, to_buffer = instructions[at[rank]]
                if slot is not None:
                    assert m is not None and stage is not None
                    here, other = buffers[rank][slot], (rank, peer if peer is not None else rank)
                    if name.startswith("Recv"):
                        queue = links.get((other[1], rank))
                        if not queue:
                            break
                        here["x" if name == "RecvActivation" else "dy"] = queue.pop(0)
                    elif name == "LoadMicroBatch":
                        here["x" if stage == 0 else "labels"] = (m, -1) if stage == 0 else m
                    elif name in ("ForwardPass", "RecomputeForward"):
                        assert here["x"] == (m, stage - 1) and (
                            stage != last or stage == 0 or here["labels"] == m
                        )
                        here["y"] = (m, stage)
                    elif name in ("BackwardPass", "BackwardInput"):
                        assert here.pop("y") == (m, stage)
                        assert stage == last or here.pop("dy") == (m, stage + 1)
                        here["dx"] = (m, stage)
                    elif name == "BackwardWeight":
                        assert here.pop("for W") == (m, stage)
                    elif name in ("SendActivation", "SendGrad"):
                        links.setdefault(other, []).append(here["y" if name == "SendActivation" else "dx"])
                    elif name == "CopyActivation":
                        assert to_buffer is not None
                        buffers[rank][to_buffer]["x"] = here["y"]
                    elif name == "CopyGrad":
                        assert to_buffer is not None
                        buffers[rank][to_buffer]["dy"] = here["dx"]
                    if name == "BackwardInput":
                        here["for W"] = here["dx"]
                at[rank] += 1
                moved = True
    assert at == [len(instructions) for instructions in program.instructions]
    assert not any(links.values())
