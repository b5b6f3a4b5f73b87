"""What holds between the ranks: every message is taken, and no ranks wait for each other in a cycle.

Only sends and receives are followed, as what is computed between them waits for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...errors import ScheduleError
from ..ops import Instruction
from ..timetables import Program
from .device import ACTIVATION, GRADIENT, Item, Traffic, made_by
from .timetable import fail

_NEVER = 1 << 60


class Links:
    """The directed links of a program, each by its number, and what crosses them.

    ``sent[link]`` and ``taken[link]`` are the messages in the order of the sends and of the receives. The k-th
    receive can take its message when ``due[link][k]`` messages have been sent: k+1 if links deliver in order; if
    receives ask by tag, as many as include their own.

    Args:
        traffic: the sends and receives of every rank.
        tagged: whether a receive may take any message of the link, by its tag (stage, micro-batch, kind).
    """

    def __init__(self, program: Program, traffic: Sequence[Traffic], tagged: bool) -> None:
        self.program, self.traffic, self.tagged = program, traffic, tagged
        self.ends: list[tuple[int, int]] = []  # link -> its sender and receiver
        self.sent: list[list[Item]] = []
        self.taken: list[list[Item]] = []
        self._number: dict[tuple[int, int], int] = {}
        # Per rank its sends and receives in order: the link of a send, and -1 - the link of a receive.
        self.events = [self._add(rank, one.instructions) for rank, one in enumerate(traffic)]
        self.due = [self._due(sent, taken) for sent, taken in zip(self.sent, self.taken, strict=True)]
        self.messages = sum(map(len, self.sent))

    def _add(self, rank: int, instructions: list[Instruction]) -> list[int]:
        events = []
        for name, m, stage, _, _, peer, _, _ in instructions:
            assert m is not None and stage is not None and peer is not None, "RankCheck comes before"
            if name == "SendActivation" or name == "SendGrad":
                link = self._link(rank, peer)
                forward = name == "SendActivation"
                item = Item(ACTIVATION, stage + 1, m) if forward else Item(GRADIENT, stage - 1, m)
                self.sent[link].append(item)
                events.append(link)
            else:
                link = self._link(peer, rank)
                self.taken[link].append(Item(ACTIVATION if name == "RecvActivation" else GRADIENT, stage, m))
                events.append(-1 - link)
        return events

    def _link(self, sender: int, receiver: int) -> int:
        link = self._number.get((sender, receiver))
        if link is None:
            link = self._number[sender, receiver] = len(self.ends)
            self.ends.append((sender, receiver))
            self.sent.append([])
            self.taken.append([])
        return link

    def _due(self, sent: list[Item], taken: list[Item]) -> Sequence[int]:
        if not self.tagged:
            return range(1, len(taken) + 1)
        place = {item: k + 1 for k, item in enumerate(sent)}
        return [place.get(item, _NEVER) for item in taken]

    def run(self, room: int | None) -> _Run:
        """Let every rank go as far as it gets when a link holds ``room`` messages; None for any number."""
        run = _Run(self, _NEVER if room is None else room)
        run.advance()
        return run

    def fewest_slots(self) -> int:
        """The least room on every link with which the program still ends; more room never makes it stop."""
        if not self.messages:
            return 0
        most = 1
        while not self.run(most).ended:
            most *= 2
        least = most // 2 + 1
        while least < most:
            middle = (least + most) // 2
            least, most = (least, middle) if self.run(middle).ended else (middle + 1, most)
        return most

    # --- what can be wrong ---

    def refuse(self, run: _Run, room: int | None) -> None:
        """Raise what is wrong with a run: the first mistake that it met, else that it stands still."""
        self._refuse_other_order(run)
        for rank, one in enumerate(self.traffic):
            if one.fault is not None and run.at[rank] == len(one.instructions):
                raise one.fault
        if not run.ended:
            raise self._standstill(run, room)
        self._refuse_leftovers()

    def _refuse_other_order(self, run: _Run) -> None:
        """A link that delivers in order must deliver what is expected."""
        if self.tagged:
            return
        for link, (sender, receiver) in enumerate(self.ends):
            pairs = zip(self.sent[link], self.taken[link], strict=False)
            for k, (sent, taken) in enumerate(pairs):
                if sent != taken and k < run.took[link]:
                    sentence = (
                        f"rank {receiver} expects the {taken} from rank {sender}, but the next message on that link "
                        f"is the {sent}."
                    )
                    raise fail(self.program.timetable, sentence, receiver, made_by(self.program, taken))

    def _standstill(self, run: _Run, room: int | None) -> ScheduleError:
        """The sentence that says which rank waits for what."""
        stuck = [
            (rank, one.instructions[run.at[rank]])
            for rank, one in enumerate(self.traffic)
            if run.at[rank] < len(one.instructions)
        ]
        place = "" if room is None else f" when a link holds {room} of its messages"
        waits = ", ".join(f"rank {rank}: {instruction}" for rank, instruction in stuck)
        rank, first = stuck[0]
        assert first.stage is not None and first.micro_batch is not None, "only messages wait"
        what = GRADIENT if first.name in ("SendGrad", "RecvGrad") else ACTIVATION
        op = made_by(self.program, Item(what, first.stage, first.micro_batch))
        return fail(self.program.timetable, f"no rank can move{place}; waiting: {waits}.", rank, op)

    def _refuse_leftovers(self) -> None:
        """Raise if a message is still on its way after the end."""
        for link, (sender, receiver) in enumerate(self.ends):
            if len(self.sent[link]) == len(self.taken[link]):
                continue
            item = next(iter(Counter(self.sent[link]) - Counter(self.taken[link])))
            giver = item._replace(stage=item.stage + (-1 if item.what == ACTIVATION else 1))
            sentence = f"the {item}, which rank {sender} sends to rank {receiver}, is never received."
            raise fail(self.program.timetable, sentence, sender, made_by(self.program, giver))


class _Run:
    """Every rank sends and receives in its order, as far as it gets.

    ``at[rank]`` counts what a rank has done, ``gave[link]`` and ``took[link]`` the messages sent and received.
    """

    def __init__(self, links: Links, room: int) -> None:
        self.links, self.room = links, room
        self.at = [0] * len(links.events)
        self.gave = [0] * len(links.ends)
        self.took = [0] * len(links.ends)

    @property
    def ended(self) -> bool:
        """Whether all ranks reached their end, which a rank with a fault does not."""
        ways = zip(self.at, self.links.events, self.links.traffic, strict=True)
        return all(at == len(events) and one.fault is None for at, events, one in ways)

    def advance(self) -> None:
        """Let the ranks go on. A rank that must wait goes on when the other end of the link has moved."""
        gave, took, due, room = self.gave, self.took, self.links.due, self.room
        waits: set[int] = set()  # events, as a link has one sender and one receiver
        runnable = list(range(len(self.at)))
        while runnable:
            rank = runnable.pop()
            events, at = self.links.events[rank], self.at[rank]
            while at < len(events):
                event = events[at]
                sends = event >= 0
                link = event if sends else -1 - event
                if gave[link] - took[link] >= room if sends else gave[link] < due[link][took[link]]:
                    waits.add(event)
                    break
                (gave if sends else took)[link] += 1
                at += 1
                if -1 - event in waits:
                    waits.remove(-1 - event)
                    sender, receiver = self.links.ends[link]
                    runnable.append(receiver if sends else sender)
            self.at[rank] = at
