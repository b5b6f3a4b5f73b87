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
from ds_ext.pipe_schedules import SCHEDULES, Program, Schedule, Timetable, get_schedule
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.lowering import dump, lower
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.memory import memory
from ds_ext.planner.training_sizes import TrainingSizes
from tests.selection import EVERYTHING
from tests.timetables import assert_keeps_time, with_order
from tests.unit.pipe_schedules.dump_checker import DumpChecker

T = TypeVar("T")
EXAMPLES = 600 if EVERYTHING else 120

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
def made_for(name: str, ranks: int, micro_batches: int) -> Timetable | None:
    """Return a timetable, or None if the schedule does not support the sizes."""
    try:
        return get_schedule(name).timetable(ranks, micro_batches)
    except ScheduleError:
        return None


TIMETABLES = st.builds(
    made_for, st.sampled_from(sorted(SCHEDULES)), st.integers(2, 4), st.integers(2, 8)
).filter(lambda made: made is not None)


# --- random requests ---


@settings(max_examples=EXAMPLES)
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
        assert buffers >= round(peak * placement.stages / placement.devices_per_pipe)
    sizes = TrainingSizes(
        num_layers=placement.stages, hidden_size=8, num_attention_heads=2, vocab_size=10, seq_length=4
    )
    keeps = [rank.activations > 0 for rank in memory(simulation.timetable, sizes)]
    assert keeps == [any(op.kind != "F" for op in order) for order in made.orders]


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
    if made.schedule not in ("dualpipev", "fbd"):  # DumpChecker does not support these
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
    """Execute the instructions with values instead of tensors, with buffers and links."""
    links: dict[tuple[int, int], list[object]] = {}
    buffers = [[dict[str, object]() for _ in range(slots)] for slots in program.num_buffers]
    last, at = program.timetable.placement.stages - 1, [0] * len(program.instructions)
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(program.instructions):
            while at[rank] < len(instructions):
                name, m, stage, _, _, peer, slot, to_buffer, _ = instructions[at[rank]]
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
