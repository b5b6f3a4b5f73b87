"""The check of timetables and programs: reports of valid ones, errors of broken ones."""

from __future__ import annotations

import dataclasses

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import Instruction, Op, Program, Timetable, get_schedule, timetable
from ds_ext.pipe_schedules.checks.program import Report, check
from ds_ext.pipe_schedules.checks.timetable import check_timetable
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.placement import linear
from tests.timetables import with_order

ARROW = "<-- ERROR HERE"


def with_instructions(program: Program, device: int, instructions: list[Instruction]) -> Program:
    rows = (*program.instructions[:device], tuple(instructions), *program.instructions[device + 1 :])
    return dataclasses.replace(program, instructions=rows)


@pytest.mark.parametrize("devices", [2, 4, 6, 8])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_bitpipe_needs_one_credit_per_link(devices: int, units: int) -> None:
    report = check(lower(timetable("bitpipe", devices, units * devices)), link_credits=1)
    assert report.link_credits == 1
    assert report.loss_devices == (0, devices - 1)
    # One buffer per live chunk.
    expected = tuple(3 * devices // 2 + 1 + min(d, devices - 1 - d) for d in range(devices))
    assert report.num_buffers == expected


def test_the_report() -> None:
    assert check(lower(timetable("1f1b", 4, 8))) == Report((4, 3, 2, 1), 1, (3,), 48)
    assert check(lower(timetable("gpipe", 1, 3))) == Report((3,), 0, (0,), 0)


def test_too_few_link_credits_deadlock() -> None:
    program = lower(timetable("interleaved", 2, 4))
    with pytest.raises(ScheduleError, match=r"deadlock .*1 .*SendActivation 3@0 .*SendActivation 2@1"):
        check(program, link_credits=1)
    assert check(program, link_credits=2).link_credits == check(program).link_credits == 2


def test_many_devices_that_wait_for_messages_are_not_all_listed() -> None:
    *orders, last = timetable("1f1b", 80, 1).orders
    program = lower(Timetable("mine", linear(80), 1, (*(order[::-1] for order in orders), last)))
    with pytest.raises(ScheduleError, match=r"device 63 [^;]*; 16 more\)"):
        check(program)


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ((("F00", "B00"), ("B10", "F10")), r"device 1 .*B0@1.*F0@1"),
        ((("B00", "F00"), ("F10", "B10")), r"deadlock .*RecvGrad 0@0.*RecvActivation 0@1"),
        ((("F00", "B00"), ("F10",)), r"0 at stage 1 \(device 1\).*\(got F\)"),
        ((("F00",), ()), r"0 at stage 1 \(device 1\).*\(got none\)"),
        ((("F00", "B00"), ("F10", "B10", "I10", "W10")), r"\(got F, B, I, W\)"),
        ((("F00", "B00", "B00"), ("F10", "B10")), r"device 0 .*B0@0"),
        ((("F00", "B00", "F10"), ("B10",)), r"device 0 .*F0@1.*device 1"),
        ((("F00", "B00", "F02"), ("F10", "B10")), r"device 0 .*F2@0.*2 stages.*1 micro"),
        ((("F00", "B00", "X00"), ("F10", "B10")), r"device 0 .*X0@0.*F, B, I, W"),
        ((("F00", "B00"),), r"2 .*\(got 1\)"),
        ((("F00", "W00", "I00"), ("F10", "I10", "W10")), r"device 0 .*W0@0.*I0@0"),
    ],
)
def test_broken_timetables(orders: tuple[tuple[str, ...], ...], expected: str) -> None:
    """The error names the device and the op."""
    rows = tuple(tuple(Op(kind, int(m), int(s)) for kind, s, m in order) for order in orders)
    with pytest.raises(ScheduleError, match=expected):
        check(lower(Timetable("mine", linear(2), 1, rows)))


def with_swapped_receives(program: Program, device: int, name: str) -> Program:
    """Swap the first two receives of that kind."""
    order = list(program.instructions[device])
    i, j = [at for at, x in enumerate(order) if x.name == name][:2]
    order[i], order[j] = order[j], order[i]
    return with_instructions(program, device, order)


def test_messages_received_in_another_order_than_sent() -> None:
    order = list(timetable("gpipe", 2, 2).orders[1])
    order[0], order[1] = order[1], order[0]
    program = lower(with_order(timetable("gpipe", 2, 2), 1, order))
    assert [str(i) for i in program.instructions[1]][:4] == [
        "LoadMicroBatch 1@1",
        "RecvActivation 0@1 from device 0",
        "RecvActivation 1@1 from device 0",
        "F1@1",
    ]
    check(program)
    with pytest.raises(ScheduleError) as caught:
        check(with_swapped_receives(program, 1, "RecvActivation"))
    assert str(caught.value).splitlines()[1:] == [
        "step      0     1     2     3",
        "device 0  F0@0  F1@0  B0@0  B1@0",
        "device 1  F1@1  F0@1  B0@1  B1@1   <-- ERROR HERE",
        "          ^^^^",
    ]


@pytest.mark.parametrize(
    ("device", "receive", "stage", "marked"),
    [(1, "RecvActivation", 1, "F0.1@1"), (0, "RecvGrad", 0, "B0@0")],
)
def test_messages_of_slices_received_in_another_order_than_sent(
    device: int, receive: str, stage: int, marked: str
) -> None:
    """Both receives precede the first op that needs one, so that only the order of the link is wrong."""
    program = lower(get_schedule("gpipe").timetable(2, 1, slices=2))
    order = list(program.instructions[device])
    first, second = (i for i in order if i.name == receive)
    order.remove(second)
    order.insert(order.index(first), second)
    with pytest.raises(ScheduleError, match=rf"device {device} .*0(\.1)? for stage {stage}") as caught:
        check(with_instructions(program, device, order))
    *_, row, arrow = (line for line in str(caught.value).splitlines() if ARROW in line or "^" in line)
    assert row[arrow.index("^") :].split()[0] == marked


def test_the_arrow_points_at_the_backward_of_a_wrong_gradient() -> None:
    made = timetable("gpipe", 2, 2)
    order = list(made.orders[0])
    order[2], order[3] = order[3], order[2]
    broken = with_swapped_receives(lower(with_order(made, 0, order)), 0, "RecvGrad")
    with pytest.raises(ScheduleError, match=r"device 0 .*gradient of micro-batch 1") as caught:
        check(broken)
    *_, row, arrow, _ = str(caught.value).splitlines()
    assert row.endswith(ARROW) and row[arrow.index("^") :].startswith("B1@0")


def test_ops_that_differ_from_the_timetable() -> None:
    program = lower(timetable("1f1b", 2, 2))
    first = list(program.instructions[0])
    forwards = [i for i, x in enumerate(first) if x.name == "ForwardPass"]
    del first[forwards[1]]
    with pytest.raises(ScheduleError, match=r"device 0 .*B0@0 .*F1@0"):
        check(with_instructions(program, 0, first))
    again = [*program.instructions[0], program.instructions[0][forwards[0]]]
    with pytest.raises(ScheduleError, match=r"device 0 .*F0@0 after"):
        check(with_instructions(program, 0, again))


def test_wrong_buffers() -> None:
    """Shared by two live pairs; more than the program has; changed during the life of a pair."""
    program = lower(timetable("gpipe", 2, 2))
    shared = [i._replace(buffer=None if i.buffer is None else 0) for i in program.instructions[0]]
    with pytest.raises(ScheduleError, match=r"buffer 0 .*1 of stage 0.*0 of stage 0"):
        check(with_instructions(program, 0, shared))
    with pytest.raises(ScheduleError, match=r"device 0 .*buffer 1.* 1 buffers"):
        check(dataclasses.replace(program, num_buffers=(1, 2)))
    moved = [i._replace(buffer=1) if i.name == "BackwardPass" else i for i in program.instructions[1]]
    with pytest.raises(ScheduleError, match=r"device 1 .*0 of stage 1 in buffer 1; .* 0"):
        check(with_instructions(program, 1, moved))


def test_unknown_instructions() -> None:
    program = lower(timetable("gpipe", 2, 2))
    wrong = [*program.instructions[1], Instruction("RecvGrad", 0, 7, 0, peer=0)]
    with pytest.raises(ScheduleError, match=r"device 1 .*RecvGrad 0@7 .*2 stages, 2 micro"):
        check(with_instructions(program, 1, wrong))
    with pytest.raises(ScheduleError, match=r"device 1 .*Jump 0@1"):
        check(with_instructions(program, 1, [*program.instructions[1], Instruction("Jump", 0, 1)]))
    no_peer = [i._replace(peer=None) if i.name == "SendGrad" else i for i in program.instructions[1]]
    with pytest.raises(ScheduleError, match=r"device 1 .*SendGrad 0@1 .*peer"):
        check(with_instructions(program, 1, no_peer))
    with pytest.raises(ScheduleError, match=r"2 devices \(got 1 and 2\)"):
        check(dataclasses.replace(program, instructions=program.instructions[:1]))


def test_a_missing_input_is_reported_before_the_deadlock_that_it_causes() -> None:
    program = lower(timetable("1f1b", 4, 4))
    with pytest.raises(ScheduleError, match=r"device 0 .*F0@0 .*activation"):
        check(with_instructions(program, 0, list(program.instructions[0][1:])))


@pytest.mark.parametrize(("kind", "device"), [("F", 0), ("R", 1), ("B", 1)])
def test_an_op_that_is_missing_is_reported_on_its_device(kind: str, device: int) -> None:
    """The devices of a stage differ with forward devices: device 0 computes F, device 1 the others."""
    made = timetable("fbd", 2, 2)
    order = [op for op in made.orders[device] if op != Op(kind, 1, 0)]
    with pytest.raises(ScheduleError, match=rf"1 at stage 0 \(device {device}\)") as caught:
        check_timetable(with_order(made, device, order))
    marked = [line for line in str(caught.value).splitlines() if line.endswith(ARROW)]
    assert [line.split()[:2] for line in marked] == [["device", str(device)]]


def test_the_arrow_of_a_missing_op_is_at_the_previous_one() -> None:
    orders = ((Op("F", 0, 0), Op("I", 0, 0)), (Op("F", 0, 1), Op("I", 0, 1), Op("W", 0, 1)))
    with pytest.raises(ScheduleError, match=r"\(got F, I\)") as caught:
        check_timetable(Timetable("mine", linear(2), 1, orders))
    _, _, grid, arrow, _ = str(caught.value).splitlines()
    assert arrow.index("^") == grid.index("I0@0")
