"""What holds for a timetable by itself: every computation exists once, on the device that holds its stage."""

from __future__ import annotations

from ...errors import ScheduleError
from ..draw.grid import order_grid
from ..ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KINDS, RECOMPUTE, Op, Timetable

_BIT = {FORWARD: 1, BACKWARD: 2, BACKWARD_INPUT: 4, BACKWARD_WEIGHT: 8}
_WHOLE, _SPLIT, _EVALUATION = 1 | 2, 1 | 4 | 8, 1
_REPEATED = 16


def check_timetable(timetable: Timetable) -> None:
    """Every computation exists once, on the device that holds its stage. Raises ScheduleError."""
    placement, pipes = timetable.placement, timetable.pipes
    stages, micro_batches = placement.stages, timetable.micro_batches
    if timetable.trains:
        placement.check_replicas(timetable.schedule)
    if len(timetable.ranks) != placement.ranks:
        raise ScheduleError(
            f"{timetable.schedule}: there are {len(timetable.ranks)} orders for {placement.ranks} devices."
        )
    bits = _BIT if placement.forward is None else {**_BIT, RECOMPUTE: _REPEATED}
    seen = bytearray(stages * micro_batches)  # which kinds (stage, m) has, at m * stages + stage
    for rank, order in enumerate(timetable.ranks):
        for op in order:
            kind, m, stage = op
            bit = bits.get(kind, 0)
            if not (bit and 0 <= stage < stages and 0 <= m < micro_batches):
                raise _no_such_op(timetable, rank, op)
            owners = placement.forward_pipes if kind == FORWARD else placement.pipes
            if owners[pipes[m]][stage] != rank:
                raise _elsewhere(timetable, rank, op)
            if seen[m * stages + stage] & bit:
                raise fail(timetable, f"rank {rank} runs {op} twice.", rank, op)
            seen[m * stages + stage] |= bit
    complete = {_WHOLE, _SPLIT} if timetable.trains else {_EVALUATION}
    if timetable.trains and placement.forward is not None:
        _check_repeated(timetable, seen)
        return
    if not complete.issuperset(seen):
        pair = next(pair for pair, have in enumerate(seen) if have not in complete)
        raise _incomplete(timetable, pair % stages, pair // stages, seen[pair])


def _check_repeated(timetable: Timetable, seen: bytearray) -> None:
    """Where forwards have devices of their own: all but the last stage's, and of every stage R with its backward."""
    stages = timetable.placement.stages
    for pair, have in enumerate(seen):
        forward = 0 if timetable.unused_forward(pair % stages) else 1
        if have not in (forward | _REPEATED | 2, forward | _REPEATED | 4 | 8):
            raise _incomplete(timetable, pair % stages, pair // stages, have)


def fail(timetable: Timetable, sentence: str, rank: int, op: Op | None) -> ScheduleError:
    """The error for ``op`` of ``rank``: the sentence, then the grid with the arrow."""
    order = timetable.ranks[rank]
    # The last one: of an op that is there twice, the second is wrong.
    step = max((i for i, other in enumerate(order) if other == op), default=None)
    return ScheduleError(f"{timetable.schedule}: {sentence}\n{order_grid(timetable, rank=rank, step=step)}")


def _no_such_op(timetable: Timetable, rank: int, op: Op) -> ScheduleError:
    if op.kind not in KINDS:
        return fail(
            timetable, f"rank {rank} runs {op}, but {op.kind!r} is none of {', '.join(KINDS)}.", rank, op
        )
    sizes = f"there are {timetable.placement.stages} stages and {timetable.micro_batches} micro-batches"
    return fail(timetable, f"rank {rank} runs {op}, but {sizes}, both counted from 0.", rank, op)


def _elsewhere(timetable: Timetable, rank: int, op: Op) -> ScheduleError:
    owner, pipe = timetable.rank(op.stage, op.micro_batch, op.kind), timetable.pipe(op.micro_batch)
    sentence = f"rank {rank} runs {op}, but stage {op.stage} of pipe {pipe} lives on rank {owner}."
    return fail(timetable, sentence, rank, op)


def _incomplete(timetable: Timetable, stage: int, m: int, seen: int) -> ScheduleError:
    have = ", ".join(kind for kind in KINDS if seen & _BIT[kind]) or "nothing"
    needed = "F and either B or both I and W" if timetable.trains else "F"
    if timetable.trains and timetable.placement.forward is not None:
        have = ", ".join(filter(None, (have, "R" if seen & _REPEATED else ""))).removeprefix("nothing, ")
        needed = f"{'no F' if timetable.unused_forward(stage) else 'F'}, R, and either B or both I and W"
    rank = timetable.rank(stage, m)
    # The last one that is there: what is missing comes after it.
    near = next(
        (op for op in reversed(timetable.ranks[rank]) if (op.stage, op.micro_batch) == (stage, m)), None
    )
    sentence = f"micro-batch {m} at stage {stage} (rank {rank}) has {have}; it needs {needed}."
    return fail(timetable, sentence, rank, near)
