"""Programs as DeepSpeed schedules."""

from __future__ import annotations

import pytest
from deepspeed.runtime.pipe import schedule as ds

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import Instruction, timetable
from ds_ext.pipe_schedules.bridge import (
    BitPipeSchedule,
    ChimeraSchedule,
    CopyActivation,
    CopyGrad,
    EndOfStep,
    GPipeSchedule,
    InterleavedSchedule,
    NamedSchedule,
    OneFOneBSchedule,
    TimetableSchedule,
    to_pipe_instruction,
)
from ds_ext.pipe_schedules.lowering import lower


def flat(schedule: ds.PipeSchedule) -> list[ds.PipeInstruction]:
    return [instruction for step in schedule for instruction in step]


def test_bitpipe_under_deepspeeds_constructor() -> None:
    schedule = BitPipeSchedule(micro_batches=8, stages=4, stage_id=0)
    assert isinstance(schedule, ds.PipeSchedule)
    assert (schedule.micro_batches, schedule.stages, schedule.stage_id) == (8, 4, 0)
    assert schedule.num_pipe_buffers() == 7
    first, second, *_ = schedule.steps()
    assert [type(i) for i in first] == [ds.LoadMicroBatch, ds.ForwardPass, ds.SendActivation]
    assert first[0].kwargs == {"buffer_id": 0, "stage": 0, "micro_batch": 0}
    assert first[2].kwargs == {"buffer_id": 0, "stage": 0, "micro_batch": 0, "peer": 1, "other_stage": 1}
    turn = next(i for i in flat(BitPipeSchedule(4, 4, 0)) if type(i) is CopyActivation)
    assert turn.kwargs == {"buffer_id": 2, "to_buffer": 3, "stage": 3, "micro_batch": 2, "other_stage": 4}
    assert [i.label for i in second] == ["LoadMicroBatch 1@0", "F1@0", "SendActivation 1@0 to device 1"]


@pytest.mark.parametrize("name", ["bitpipe", "chimera", "gpipe", "1f1b", "interleaved"])
def test_every_instruction_is_deepspeeds_or_a_copy(name: str) -> None:
    program = lower(timetable(name, 2, 4))
    for rank in range(2):
        schedule = TimetableSchedule(program, rank)
        made = flat(schedule)
        assert [i.lowered for i in made] == list(program.instructions[rank])
        for instruction in made:
            own = type(instruction) in (CopyActivation, CopyGrad, EndOfStep)
            assert own or getattr(ds, type(instruction).__name__) is type(instruction)
            assert instruction.kwargs.get("buffer_id", 0) < schedule.num_pipe_buffers()
        assert schedule.num_pipe_buffers() == program.num_buffers[rank]
        assert [type(i) for i in made[-4:]] == [
            ds.ReduceTiedGrads,
            ds.ReduceGrads,
            ds.OptimizerStep,
            EndOfStep,
        ]


def test_a_schedule_can_be_run_again() -> None:
    schedule = BitPipeSchedule(micro_batches=4, stages=2, stage_id=1)
    assert flat(schedule) == flat(schedule) != []


def test_a_step_is_one_computation_with_its_messages() -> None:
    computations = (ds.ForwardPass, ds.BackwardPass)
    for step in BitPipeSchedule(micro_batches=8, stages=4, stage_id=1).steps():
        kinds = [type(i) for i in step]
        assert sum(kind in computations for kind in kinds) == 1
        at = next(i for i, kind in enumerate(kinds) if kind in computations)
        assert all(kind in (ds.LoadMicroBatch, ds.RecvActivation, ds.RecvGrad) for kind in kinds[:at])
        assert ds.LoadMicroBatch not in kinds[at:] and not {ds.RecvActivation, ds.RecvGrad} & set(kinds[at:])


def test_1f1b_computes_what_deepspeeds_own_schedule_computes() -> None:
    for stage in range(4):
        ours = OneFOneBSchedule(micro_batches=6, stages=4, stage_id=stage)
        theirs = ds.TrainSchedule(micro_batches=6, stages=4, stage_id=stage)
        kinds = (ds.ForwardPass, ds.BackwardPass)
        assert [type(i) for i in flat(ours) if type(i) in kinds] == [
            type(i) for i in flat(theirs) if type(i) in kinds
        ]


@pytest.mark.parametrize(
    ("cls", "stages", "options"),
    [
        (GPipeSchedule, 3, {}),
        (InterleavedSchedule, 2, {"chunks": 3}),
        (OneFOneBSchedule, 3, {}),
        (ChimeraSchedule, 2, {}),
    ],
)
def test_the_other_names(cls: type[NamedSchedule], stages: int, options: dict[str, int]) -> None:
    schedule = cls(micro_batches=6, stages=stages, stage_id=1, **options)
    expected = lower(timetable(cls.name, stages, 6, **options))
    assert [i.lowered for i in flat(schedule)] == list(expected.instructions[1])


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ScheduleError, match=r"got 3\)\. Use 2 or 4"):
        BitPipeSchedule(micro_batches=6, stages=3, stage_id=0)


def test_an_instruction_that_the_engine_does_not_have() -> None:
    with pytest.raises(
        ScheduleError,
        match=r"'Standstill'.*LoadMicroBatch, ",
    ):
        to_pipe_instruction(Instruction("Standstill", 0, 1, 0, 0, buffer=0))
