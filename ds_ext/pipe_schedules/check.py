"""Proof, in milliseconds and before anything is launched, that a program runs to its end.

The lowered program is executed symbolically: a send puts a message on its directed link, a receive must find
exactly the message it expects. What is refused: a computation that is missing, doubled or on the wrong device;
an input that is not there; a message that nobody receives, or that comes in another order than it is taken;
ranks that wait for each other in a cycle, also when a link holds only ``link_slots`` messages; a buffer that two
live (stage, micro-batch) share.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ScheduleError
from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Instruction, Op, Program, Timetable
from .render import order_grid

_ACTIVATION, _GRADIENT, _LABELS = "activation", "gradient", "labels"
_OUTPUT, _INPUT_GRADIENT, _WEIGHT_GRADIENT = "output", "input gradient", "weight gradient"

Item = tuple[str, int, int]  # what, and the stage and micro-batch that it is for


@dataclass(frozen=True)
class Report:
    """What a valid program needs.

    ``num_slots[r]`` are the buffers of device r. ``link_slots`` is the fewest messages that every directed link
    must be able to hold for the program to end when senders wait for room; 0 if there are no messages.
    ``loss_ranks`` are the devices with a last stage, ``messages`` counts the tensors sent in one step.
    """

    num_slots: tuple[int, ...]
    link_slots: int
    loss_ranks: tuple[int, ...]
    messages: int


def check(program: Program, *, link_slots: int | None = None) -> Report:
    """Prove that ``program`` ends, or raise ScheduleError with a sentence and the grid with an arrow.

    Args:
        link_slots: messages a directed link holds before its sender must wait; None means any number.
    """
    check_timetable(program.timetable)
    _check_order(program)
    _check_slots(program)
    run = _Run(program, link_slots)
    run.advance()
    run.refuse_standstill()
    run.refuse_leftovers()
    loss_ranks = tuple(sorted({pipe[-1] for pipe in program.timetable.placement.pipes}))
    return Report(program.num_slots, _fewest_link_slots(program, run.messages), loss_ranks, run.messages)


def check_timetable(timetable: Timetable) -> None:
    """Every computation exists once, on the device that holds its stage. Raises ScheduleError."""
    placement = timetable.placement
    if timetable.trains:
        placement.check_replicas(timetable.schedule)
    if len(timetable.ranks) != placement.ranks:
        raise ScheduleError(
            f"{timetable.schedule}: there are {len(timetable.ranks)} orders for {placement.ranks} devices."
        )
    seen: Counter[Op] = Counter()
    for rank, order in enumerate(timetable.ranks):
        for op in order:
            seen[op] += 1
            _check_op(timetable, rank, op)
            if seen[op] > 1:
                raise fail(timetable, f"rank {rank} runs {op} twice.", rank, op)
    for m in range(timetable.micro_batches):
        for stage in range(placement.stages):
            _check_complete(timetable, stage, m, seen)


def fail(timetable: Timetable, sentence: str, rank: int, op: Op | None) -> ScheduleError:
    """The error for ``op`` of ``rank``: the sentence, then the grid with the arrow."""
    order = timetable.ranks[rank]
    # The last one: of an op that is there twice, the second is wrong.
    step = max((i for i, other in enumerate(order) if other == op), default=None)
    return ScheduleError(f"{timetable.schedule}: {sentence}\n{order_grid(timetable, rank=rank, step=step)}")


def _check_op(timetable: Timetable, rank: int, op: Op) -> None:
    stages, micro_batches = timetable.placement.stages, timetable.micro_batches
    if op.kind not in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
        raise fail(timetable, f"rank {rank} runs {op}, but {op.kind!r} is none of F, B, I, W.", rank, op)
    if not (0 <= op.stage < stages and 0 <= op.micro_batch < micro_batches):
        sizes = f"there are {stages} stages and {micro_batches} micro-batches"
        raise fail(timetable, f"rank {rank} runs {op}, but {sizes}, both counted from 0.", rank, op)
    owner, pipe = timetable.rank(op.stage, op.micro_batch), timetable.pipe(op.micro_batch)
    if owner != rank:
        sentence = f"rank {rank} runs {op}, but stage {op.stage} of pipe {pipe} lives on rank {owner}."
        raise fail(timetable, sentence, rank, op)


def _check_complete(timetable: Timetable, stage: int, m: int, seen: Counter[Op]) -> None:
    kinds = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    have = [kind for kind in kinds if seen[Op(kind, stage, m)]]
    training = ([FORWARD, BACKWARD], [FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT])
    if have in (training if timetable.trains else ([FORWARD],)):
        return
    rank = timetable.rank(stage, m)
    near = next((op for op in timetable.ranks[rank] if (op.stage, op.micro_batch) == (stage, m)), None)
    needed = "F and either B or both I and W" if timetable.trains else "F"
    raise fail(
        timetable,
        f"micro-batch {m} at stage {stage} (rank {rank}) has {', '.join(have) or 'nothing'}; it needs {needed}.",
        rank,
        near,
    )


def _check_order(program: Program) -> None:
    """The instructions compute what the timetable says, in its order."""
    for rank, (instructions, order) in enumerate(zip(program.ranks, program.timetable.ranks, strict=True)):
        computed = [i.op for i in instructions if i.op is not None]
        for step, op in enumerate(order):
            if step >= len(computed) or computed[step] != op:
                instead = computed[step] if step < len(computed) else "nothing"
                sentence = f"rank {rank} computes {instead} where the timetable has {op}."
                raise fail(program.timetable, sentence, rank, op)
        if len(computed) > len(order):
            sentence = f"rank {rank} computes {computed[len(order)]} after the end of its timetable."
            raise fail(program.timetable, sentence, rank, computed[len(order)])


def _check_slots(program: Program) -> None:
    """No buffer serves two (stage, micro-batch) at once."""
    for rank, instructions in enumerate(program.ranks):
        uses = list(_slot_uses(instructions))
        last_use = {pair: step for step, (pair, _) in enumerate(uses)}
        holder: dict[int, tuple[int, int]] = {}
        for step, ((stage, m), slot) in enumerate(uses):
            other = holder.get(slot, (stage, m))
            if other != (stage, m) and last_use[other] > step:
                sentence = (
                    f"rank {rank} puts micro-batch {m} of stage {stage} into buffer {slot}, which micro-batch "
                    f"{other[1]} of stage {other[0]} still needs."
                )
                raise fail(program.timetable, sentence, rank, Op(FORWARD, stage, m))
            holder[slot] = (stage, m)
        if any(not 0 <= slot < program.num_slots[rank] for slot in holder):
            sentence = f"rank {rank} has {program.num_slots[rank]} buffers and uses number {max(holder)}."
            raise fail(program.timetable, sentence, rank, None)


def _slot_uses(instructions: tuple[Instruction, ...]) -> Iterator[tuple[tuple[int, int], int]]:
    """((stage, micro-batch), buffer) in the order of use."""
    for i in instructions:
        if i.stage is None or i.micro_batch is None or i.slot is None:
            continue
        yield (i.stage, i.micro_batch), i.slot
        if i.to_slot is not None:
            yield (i.stage + (1 if i.name == "CopyActivation" else -1), i.micro_batch), i.to_slot


def _fewest_link_slots(program: Program, messages: int) -> int:
    """The least room on every link with which the program still ends; more room never makes it stop."""
    slots = 1
    while messages and not _Run(program, slots).advance():
        slots += 1
    return slots if messages else 0


class _Run:
    """Executes a program symbolically, one instruction of one rank at a time."""

    def __init__(self, program: Program, link_slots: int | None) -> None:
        self.program, self.timetable, self.link_slots = program, program.timetable, link_slots
        self.links: dict[tuple[int, int], deque[Item]] = {}
        self.have: list[set[Item]] = [set() for _ in program.ranks]
        self.at = [0] * len(program.ranks)
        self.messages = 0

    def advance(self) -> bool:
        """Run every rank as far as it gets; True if all reach their end."""
        moving = True
        while moving:
            moving = False
            for rank, instructions in enumerate(self.program.ranks):
                while self.at[rank] < len(instructions) and self._step(rank, instructions[self.at[rank]]):
                    self.at[rank] += 1
                    moving = True
        return not self._stuck()

    def refuse_standstill(self) -> None:
        """Raise the sentence that says which rank waits for what, if some did not reach their end."""
        stuck = self._stuck()
        if not stuck:
            return
        room = "" if self.link_slots is None else f" when a link holds {self.link_slots} of its messages"
        waits = ", ".join(f"rank {rank}: {instruction}" for rank, instruction in stuck)
        rank, first = stuck[0]
        assert first.stage is not None and first.micro_batch is not None, "only messages wait"
        op = self._made_by(
            _GRADIENT if first.name in ("SendGrad", "RecvGrad") else _OUTPUT, first.stage, first.micro_batch
        )
        raise fail(self.timetable, f"no rank can move{room}; waiting: {waits}.", rank, op)

    def refuse_leftovers(self) -> None:
        """Raise if a message is still on its way after the end."""
        for (source, target), queue in self.links.items():
            for what, stage, m in queue:
                sender = self._made_by(what, stage - 1 if what == _ACTIVATION else stage + 1, m)
                sentence = (
                    f"the {what} of micro-batch {m} for stage {stage}, which rank {source} sends to rank {target}, "
                    f"is never received."
                )
                raise fail(self.timetable, sentence, source, sender)

    def _stuck(self) -> list[tuple[int, Instruction]]:
        ranks = enumerate(self.program.ranks)
        return [(rank, todo[self.at[rank]]) for rank, todo in ranks if self.at[rank] < len(todo)]

    def _step(self, rank: int, instruction: Instruction) -> bool:
        """Execute one instruction; False when it must wait."""
        name, stage, m = instruction.name, instruction.stage, instruction.micro_batch
        if stage is None or m is None:
            return True
        if name == "LoadMicroBatch":
            self._put(rank, (_ACTIVATION if stage == 0 else _LABELS, stage, m))
        elif name in ("RecvActivation", "RecvGrad"):
            item = (_ACTIVATION if name == "RecvActivation" else _GRADIENT, stage, m)
            return self._receive(rank, instruction.peer, item)
        elif name in ("CopyActivation", "SendActivation"):
            return self._hand_over(rank, instruction.peer, (_OUTPUT, stage, m), (_ACTIVATION, stage + 1, m))
        elif name in ("CopyGrad", "SendGrad"):
            return self._hand_over(
                rank, instruction.peer, (_INPUT_GRADIENT, stage, m), (_GRADIENT, stage - 1, m)
            )
        elif instruction.op is not None:
            self._compute(rank, instruction.op)
        return True

    def _receive(self, rank: int, peer: int | None, item: Item) -> bool:
        assert peer is not None, "a receive has a peer"
        queue = self.links.get((peer, rank))
        if not queue:
            return False
        if queue[0] != item:
            (what, stage, m), (other, other_stage, other_m) = item, queue[0]
            sentence = (
                f"rank {rank} expects the {what} of micro-batch {m} for stage {stage} from rank {peer}, but the next "
                f"message on that link is the {other} of micro-batch {other_m} for stage {other_stage}."
            )
            raise fail(self.timetable, sentence, rank, self._made_by(what, stage, m))
        self._put(rank, queue.popleft())
        return True

    def _hand_over(self, rank: int, peer: int | None, made: Item, item: Item) -> bool:
        what, stage, m = made
        if made not in self.have[rank]:
            sentence = (
                f"rank {rank} hands on the {what} of micro-batch {m} at stage {stage} before it is computed."
            )
            raise fail(self.timetable, sentence, rank, self._made_by(what, stage, m))
        if peer is None:
            self._put(rank, item)
            return True
        queue = self.links.setdefault((rank, peer), deque())
        if self.link_slots is not None and len(queue) >= self.link_slots:
            return False
        queue.append(item)
        self.messages += 1
        return True

    def _compute(self, rank: int, op: Op) -> None:
        stage, last = op.stage, self.timetable.placement.stages - 1
        if op.kind == FORWARD:
            needs, makes = [_ACTIVATION] + [_LABELS] * (stage == last and stage > 0), _OUTPUT
        elif op.kind == BACKWARD_WEIGHT:
            needs, makes = [_INPUT_GRADIENT], _WEIGHT_GRADIENT
        else:
            needs, makes = [_OUTPUT] + [_GRADIENT] * (stage < last), _INPUT_GRADIENT
        for need in needs:
            if (need, stage, op.micro_batch) not in self.have[rank]:
                raise fail(self.timetable, f"rank {rank} runs {op} without its {need}.", rank, op)
        self._put(rank, (makes, stage, op.micro_batch))

    def _put(self, rank: int, item: Item) -> None:
        what, stage, m = item
        if item in self.have[rank]:
            sentence = f"rank {rank} gets the {what} of micro-batch {m} for stage {stage} twice."
            raise fail(self.timetable, sentence, rank, self._made_by(what, stage, m))
        self.have[rank].add(item)

    def _made_by(self, what: str, stage: int, m: int) -> Op:
        """The op of ``stage`` that an error about ``what`` points at."""
        gradient = what in (_GRADIENT, _INPUT_GRADIENT)
        return self.timetable.gradient_op(stage, m) if gradient else Op(FORWARD, stage, m)
