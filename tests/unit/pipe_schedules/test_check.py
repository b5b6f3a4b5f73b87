"""The checker: broken timetables and programs are refused with a sentence and an arrow, whatever was done to them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import Instruction, Op, Program, Timetable, timetable
from ds_ext.pipe_schedules.check.program import Report, check, check_timetable
from ds_ext.pipe_schedules.lower import dump, lower
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.simulate import simulate
from tests.timetables import with_order
from tests.unit.pipe_schedules.dump_checker import DumpChecker

ARROW = "<-- ERROR HERE"
MADE = [
    timetable("bitpipe", 2, 4),
    timetable("bitpipe", 4, 4),
    timetable("interleaved", 2, 4),
    timetable("1f1b", 3, 4),
    timetable("gpipe", 2, 3),
    timetable("chimera", 4, 4),
    timetable("zb_h1", 3, 4),
    timetable("bitpipe_zb", 2, 4),
]
MESSAGES = (
    "SendActivation",
    "RecvActivation",
    "SendGrad",
    "RecvGrad",
    "CopyActivation",
    "CopyGrad",
    "LoadMicroBatch",
)
ORDERS = st.sampled_from(MADE)
PROGRAMS = st.sampled_from([lower(made) for made in MADE])


def refused(program: Program) -> bool:
    """Whether check refuses it, and then as it should; what it accepts must satisfy the second opinion too."""
    try:
        check(program)
    except ScheduleError as error:
        assert_explains(error)
        return True
    DumpChecker(json.loads(json.dumps(dump(program)))).check()
    return False


def assert_explains(error: ScheduleError) -> None:
    sentence, _, grid = str(error).partition("\n")
    assert sentence.endswith(".") and any(c.isdigit() for c in sentence)
    assert ARROW in grid


def with_instructions(program: Program, rank: int, instructions: list[Instruction]) -> Program:
    ranks = (*program.instructions[:rank], tuple(instructions), *program.instructions[rank + 1 :])
    return dataclasses.replace(program, instructions=ranks)


def pick(data: st.DataObject, items: Any) -> int:
    return data.draw(st.integers(0, len(items) - 1))


# --- what holds for sound timetables --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_bitpipe_needs_one_message_a_link(ranks: int, units: int) -> None:
    report = check(lower(timetable("bitpipe", ranks, units * ranks)), link_slots=1)
    assert report.link_slots == 1
    assert report.loss_ranks == (0, ranks - 1)
    # A buffer per live chunk, none more.
    assert report.num_buffers == tuple(3 * ranks // 2 + 1 + min(r, ranks - 1 - r) for r in range(ranks))


def test_the_report() -> None:
    assert check(lower(timetable("1f1b", 4, 8))) == Report((4, 3, 2, 1), 1, (3,), 48)
    assert check(lower(timetable("gpipe", 1, 3))) == Report((3,), 0, (0,), 0)
    assert check(lower(timetable("interleaved", 2, 4))).link_slots == 2


def test_too_little_room_on_the_links() -> None:
    program = lower(timetable("interleaved", 2, 4))
    with pytest.raises(
        ScheduleError, match="no rank can move when a link holds 1 of its messages; waiting: rank 0"
    ):
        check(program, link_slots=1)
    assert check(program, link_slots=2).link_slots == 2


# --- broken timetables ----------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(data=st.data(), made=ORDERS)
def test_swapped_ops(data: st.DataObject, made: Timetable) -> None:
    """Swaps may be harmless: then the simulator runs to the end, and the second opinion agrees."""
    rank = pick(data, made.orders)
    order = list(made.orders[rank])
    i, j = pick(data, order), pick(data, order)
    order[i], order[j] = order[j], order[i]
    swapped = with_order(made, rank, order)
    if not refused(lower(swapped)):
        assert simulate(swapped).ideal == pytest.approx(simulate(made).ideal)


@settings(max_examples=100)
@given(data=st.data(), made=ORDERS, what=st.sampled_from(["drop", "double", "move"]))
def test_dropped_doubled_and_moved_ops(data: st.DataObject, made: Timetable, what: str) -> None:
    rank = pick(data, made.orders)
    order = list(made.orders[rank])
    at = pick(data, order)
    op = order[at]
    if what == "double":
        order.insert(pick(data, order), op)
    else:
        del order[at]
    broken = with_order(made, rank, order)
    if what == "move":
        to = (rank + 1) % len(made.orders)
        broken = with_order(broken, to, [*made.orders[to], op])
    with pytest.raises(ScheduleError) as caught:
        check(lower(broken))
    assert_explains(caught.value)


@pytest.mark.parametrize(
    ("orders", "sentence"),
    [
        ((("F00", "B00"), ("B10", "F10")), r"rank 1 runs B0@1 before F0@1"),
        (
            (("B00", "F00"), ("F10", "B10")),
            r"no rank can move; waiting: rank 0: RecvGrad 0@0 from rank 1, rank 1: Recv",
        ),
        (
            (("F00", "B00"), ("F10",)),
            r"micro-batch 0 at stage 1 \(rank 1\) has F; it needs F and either B or both I and W",
        ),
        ((("F00",), ()), r"micro-batch 0 at stage 1 \(rank 1\) has nothing; it needs F\."),
        ((("F00", "B00"), ("F10", "B10", "I10", "W10")), r"has F, B, I, W; it needs"),
        ((("F00", "B00", "B00"), ("F10", "B10")), r"rank 0 runs B0@0 twice"),
        ((("F00", "B00", "F10"), ("B10",)), r"rank 0 runs F0@1, but stage 1 of pipe 0 lives on rank 1"),
        (
            (("F00", "B00", "F02"), ("F10", "B10")),
            r"rank 0 runs F2@0, but there are 2 stages and 1 micro-batches",
        ),
        ((("F00", "B00", "X00"), ("F10", "B10")), r"rank 0 runs X0@0, but 'X' is none of F, B, I, W"),
        ((("F00", "B00"),), r"there are 1 orders for 2 devices"),
        ((("F00", "W00", "I00"), ("F10", "I10", "W10")), r"rank 0 runs W0@0 before I0@0"),
    ],
)
def test_sentences(orders: tuple[tuple[str, ...], ...], sentence: str) -> None:
    ranks = tuple(tuple(Op(kind, int(m), int(s)) for kind, s, m in order) for order in orders)
    with pytest.raises(ScheduleError, match=sentence):
        check(lower(Timetable("mine", linear(2), 1, ranks)))


def in_another_order(program: Program, rank: int, name: str) -> Program:
    """The program in which ``rank`` takes its first two messages of that kind in the other order."""
    order = list(program.instructions[rank])
    i, j = [at for at, x in enumerate(order) if x.name == name][:2]
    order[i], order[j] = order[j], order[i]
    return with_instructions(program, rank, order)


def test_messages_that_come_in_another_order_than_they_are_taken() -> None:
    order = list(timetable("gpipe", 2, 2).orders[1])
    order[0], order[1] = order[1], order[0]
    program = lower(with_order(timetable("gpipe", 2, 2), 1, order))
    assert [str(i) for i in program.instructions[1]][:4] == [
        "LoadMicroBatch 1@1",
        "RecvActivation 0@1 from rank 0",
        "RecvActivation 1@1 from rank 0",
        "F1@1",
    ]
    check(program)
    with pytest.raises(ScheduleError) as caught:
        check(in_another_order(program, 1, "RecvActivation"))
    assert str(caught.value).splitlines() == [
        "gpipe: rank 1 expects the activation of micro-batch 1 for stage 1 from rank 0, but the next message on that "
        "link is the activation of micro-batch 0 for stage 1.",
        "step    0     1     2     3",
        "rank 0  F0@0  F1@0  B0@0  B1@0",
        "rank 1  F1@1  F0@1  B0@1  B1@1   <-- ERROR HERE",
        "        ^^^^",
    ]


def test_the_arrow_points_at_the_backward_when_a_gradient_is_wrong() -> None:
    made = timetable("gpipe", 2, 2)
    order = list(made.orders[0])
    order[2], order[3] = order[3], order[2]
    broken = in_another_order(lower(with_order(made, 0, order)), 0, "RecvGrad")
    with pytest.raises(ScheduleError, match="rank 0 expects the gradient of micro-batch 1") as caught:
        check(broken)
    *_, row, arrow, _ = str(caught.value).splitlines()
    assert row.endswith(ARROW) and row[arrow.index("^") :].startswith("B1@0")


# --- messages by tag ------------------------------------------------------------------------------------------------


def test_a_receive_by_tag_may_take_any_message_of_the_link() -> None:
    order = list(timetable("gpipe", 2, 2).orders[1])
    order[0], order[1] = order[1], order[0]
    program = in_another_order(lower(with_order(timetable("gpipe", 2, 2), 1, order)), 1, "RecvActivation")
    # Rank 1 waits for the second message with the first still on the link.
    assert check(program, order="tagged") == Report((2, 2), 2, (1,), 4)
    check(program, order="tagged", link_slots=2)
    with pytest.raises(ScheduleError, match="no rank can move when a link holds 1 of its messages"):
        check(program, order="tagged", link_slots=1)
    with pytest.raises(ScheduleError, match="order is one of the 2 fifo, tagged; got 'lifo'"):
        check(program, order="lifo")


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.schedule)
def test_what_is_right_in_order_is_right_by_tag(made: Timetable) -> None:
    assert check(lower(made), order="tagged") == check(lower(made))


@settings(max_examples=100)
@given(data=st.data(), program=PROGRAMS, what=st.sampled_from(["drop", "double"]))
def test_dropped_and_doubled_messages_by_tag(data: st.DataObject, program: Program, what: str) -> None:
    rank = pick(data, program.instructions)
    instructions = list(program.instructions[rank])
    at = data.draw(st.sampled_from([i for i, x in enumerate(instructions) if x.name in MESSAGES]))
    instructions[at : at + 1] = [] if what == "drop" else [instructions[at]] * 2
    with pytest.raises(ScheduleError) as caught:
        check(with_instructions(program, rank, instructions), order="tagged")
    assert_explains(caught.value)


# --- broken programs ------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(data=st.data(), program=PROGRAMS, what=st.sampled_from(["drop", "double"]))
def test_dropped_and_doubled_messages(data: st.DataObject, program: Program, what: str) -> None:
    rank = pick(data, program.instructions)
    instructions = list(program.instructions[rank])
    at = data.draw(st.sampled_from([i for i, x in enumerate(instructions) if x.name in MESSAGES]))
    instructions[at : at + 1] = [] if what == "drop" else [instructions[at]] * 2
    assert refused(with_instructions(program, rank, instructions))


@settings(max_examples=150)
@given(data=st.data(), program=PROGRAMS)
def test_swapped_receives(data: st.DataObject, program: Program) -> None:
    rank = pick(data, program.instructions)
    instructions = list(program.instructions[rank])
    receives = [i for i, x in enumerate(instructions) if x.name.startswith("Recv")]
    i, j = data.draw(st.sampled_from(receives)), data.draw(st.sampled_from(receives))
    instructions[i], instructions[j] = instructions[j], instructions[i]
    broken = with_instructions(program, rank, instructions)
    if instructions[i].peer == instructions[j].peer and i != j:
        # One link delivers in order, so this cannot be harmless.
        assert refused(broken)
    else:
        refused(broken)


def test_a_computation_that_the_timetable_does_not_have() -> None:
    program = lower(timetable("1f1b", 2, 2))
    first = list(program.instructions[0])
    forwards = [i for i, x in enumerate(first) if x.name == "ForwardPass"]
    del first[forwards[1]]
    with pytest.raises(ScheduleError, match="rank 0 computes B0@0 where the timetable has F1@0"):
        check(with_instructions(program, 0, first))
    again = [*program.instructions[0], program.instructions[0][forwards[0]]]
    with pytest.raises(ScheduleError, match="rank 0 computes F0@0 after the end of its timetable"):
        check(with_instructions(program, 0, again))


def test_buffers_that_two_pairs_share() -> None:
    program = lower(timetable("gpipe", 2, 2))
    shared = [i._replace(buffer=None if i.buffer is None else 0) for i in program.instructions[0]]
    with pytest.raises(
        ScheduleError, match="micro-batch 1 of stage 0 into buffer 0, which micro-batch 0 of stage 0 still"
    ):
        check(with_instructions(program, 0, shared))
    with pytest.raises(ScheduleError, match="rank 0 has 1 buffers and uses number 1"):
        check(dataclasses.replace(program, num_buffers=(1, 2)))


def test_a_pair_that_moves_to_another_buffer() -> None:
    program = lower(timetable("gpipe", 2, 2))
    moved = [i._replace(buffer=1) if i.name == "BackwardPass" else i for i in program.instructions[1]]
    with pytest.raises(
        ScheduleError, match="rank 1 looks for micro-batch 0 of stage 1 in buffer 1, but it is in 0"
    ):
        check(with_instructions(program, 1, moved))


def test_instructions_that_do_not_exist() -> None:
    program = lower(timetable("gpipe", 2, 2))
    wrong = [*program.instructions[1], Instruction("RecvGrad", 0, 7, 0, peer=0)]
    with pytest.raises(
        ScheduleError, match="rank 1 has RecvGrad 0@7 from rank 0; there are 2 stages and 2 micro"
    ):
        check(with_instructions(program, 1, wrong))
    with pytest.raises(ScheduleError, match="rank 1 has Jump 0@1; there are 2 stages"):
        check(with_instructions(program, 1, [*program.instructions[1], Instruction("Jump", 0, 1)]))
    lonely = [i._replace(peer=None) if i.name == "SendGrad" else i for i in program.instructions[1]]
    with pytest.raises(ScheduleError, match="rank 1 has SendGrad 0@1 and no peer"):
        check(with_instructions(program, 1, lonely))
    with pytest.raises(ScheduleError, match="1 programs and 2 numbers of buffers for 2 devices"):
        check(dataclasses.replace(program, instructions=program.instructions[:1]))


def test_the_mistake_that_stops_a_rank_is_told_before_those_that_wait_for_it() -> None:
    """Rank 0 computes without its input, so all others stand still."""
    program = lower(timetable("1f1b", 4, 4))
    with pytest.raises(ScheduleError, match="rank 0 runs F0@0 without its activation"):
        check(with_instructions(program, 0, list(program.instructions[0][1:])))


def test_what_is_missing_is_shown_at_what_it_follows() -> None:
    ranks = ((Op("F", 0, 0), Op("I", 0, 0)), (Op("F", 0, 1), Op("I", 0, 1), Op("W", 0, 1)))
    with pytest.raises(
        ScheduleError, match=r"micro-batch 0 at stage 0 \(rank 0\) has F, I; it needs"
    ) as caught:
        check_timetable(Timetable("mine", linear(2), 1, ranks))
    _, _, grid, arrow, _ = str(caught.value).splitlines()
    assert arrow.index("^") == grid.index("I0@0")
