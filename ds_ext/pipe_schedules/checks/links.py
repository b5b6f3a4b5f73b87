"""Check the messages between devices: each is received in order, and no devices wait for each other in a cycle.

Only sends and receives are simulated, because computations do not wait for other devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...errors import ScheduleError
from ..ops import Instruction
from ..timetables import Program
from .device import SEND, TRANSFERS, DeviceMessages, Item, error_op, moved_item
from .timetable import deadlock_at, error_at

_UNLIMITED = 1 << 60


class Links:
    """Numbered directed links of a program, with their messages.

    ``sent[link]`` and ``received[link]`` list the messages in the order of the sends and of the receives.
    """

    def __init__(self, program: Program, traffic: Sequence[DeviceMessages]) -> None:
        self.program = program
        self.traffic = traffic
        self.devices: list[tuple[int, int]] = []  # sender and receiver of every link
        self.sent: list[list[Item]] = []
        self.received: list[list[Item]] = []
        self._number: dict[tuple[int, int], int] = {}
        # Sends and receives of every device in order: the link of a send, and -1 - the link of a receive.
        self.events = [
            self._add_messages(device, messages.instructions) for device, messages in enumerate(traffic)
        ]
        self.messages = sum(map(len, self.sent))

    def _add_messages(self, device: int, instructions: list[Instruction]) -> list[int]:
        """Add the messages of a device to their links, and return its sends and receives as in ``events``."""
        events = []
        for instruction in instructions:
            peer = instruction.peer
            assert peer is not None, "DeviceCheck runs first"
            item = moved_item(instruction)
            if TRANSFERS[instruction.name].direction == SEND:
                link = self._link(device, peer)
                self.sent[link].append(item)
                events.append(link)
            else:
                link = self._link(peer, device)
                self.received[link].append(item)
                events.append(-1 - link)
        return events

    def _link(self, sender: int, receiver: int) -> int:
        link = self._number.get((sender, receiver))
        if link is None:
            link = self._number[sender, receiver] = len(self.devices)
            self.devices.append((sender, receiver))
            self.sent.append([])
            self.received.append([])
        return link

    def run(self, link_credits: int | None) -> _Run:
        """Run the sends and receives with this number of credits per link; None: no limit."""
        run = _Run(self, _UNLIMITED if link_credits is None else link_credits)
        run.advance()
        return run

    def fewest_credits(self) -> int:
        """Return the smallest number of credits per link without a deadlock. More credits never cause one."""
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

    def check_run(self, run: _Run, link_credits: int | None) -> None:
        """Raise ScheduleError for the first error of a run with these credits; errors of the order come first."""
        self._check_message_order(run)
        for device, messages in enumerate(self.traffic):
            if messages.error is not None and run.num_done[device] == len(messages.instructions):
                raise messages.error
        if not run.ended:
            raise self._deadlock(run, link_credits)
        self._check_all_received()

    def _check_message_order(self, run: _Run) -> None:
        for link, (sender, receiver) in enumerate(self.devices):
            for sent, expected in zip(
                self.sent[link], self.received[link][: run.num_received[link]], strict=False
            ):
                if sent != expected:
                    sentence = (
                        f"device {receiver} expects the {expected} from device {sender}, but the next message on "
                        f"this link is the {sent}."
                    )
                    op = error_op(self.program, expected)
                    raise error_at(self.program.timetable, sentence, receiver, op)

    def _deadlock(self, run: _Run, link_credits: int | None) -> ScheduleError:
        stuck = [
            (device, messages.instructions[run.num_done[device]])
            for device, messages in enumerate(self.traffic)
            if run.num_done[device] < len(messages.instructions)
        ]
        condition = "" if link_credits is None else f" with link_credits {link_credits}"
        waits = [f"device {device} waits in {instruction}" for device, instruction in stuck]
        device, first = stuck[0]
        assert first.stage is not None and first.micro_batch is not None, "only messages wait"
        content = TRANSFERS[first.name].content
        op = error_op(self.program, Item(content, first.stage, first.micro_batch, first.slice))
        return deadlock_at(self.program.timetable, waits, device, op, condition)

    def _check_all_received(self) -> None:
        for link, (sender, receiver) in enumerate(self.devices):
            if len(self.sent[link]) == len(self.received[link]):
                continue
            item = next(iter(Counter(self.sent[link]) - Counter(self.received[link])))
            assert item.source is not None, "every message has two stages"
            source = item._replace(stage=item.source)
            sentence = f"device {sender} sends the {item} to device {receiver}, which never receives it."
            raise error_at(self.program.timetable, sentence, sender, error_op(self.program, source))


class _Run:
    """Run of the sends and receives of all devices.

    ``num_done[device]`` counts sends and receives; ``num_sent[link]`` and ``num_received[link]`` count messages.
    """

    def __init__(self, links: Links, link_credits: int) -> None:
        self.links = links
        self.link_credits = link_credits
        self.num_done = [0] * len(links.events)
        self.num_sent = [0] * len(links.devices)
        self.num_received = [0] * len(links.devices)

    @property
    def ended(self) -> bool:
        """True if all devices have finished. A device with an error never does."""
        rows = zip(self.num_done, self.links.events, self.links.traffic, strict=True)
        return all(done == len(events) and messages.error is None for done, events, messages in rows)

    def advance(self) -> None:
        """Run all devices as far as possible. A waiting device resumes when its peer has advanced."""
        num_sent, num_received, link_credits = self.num_sent, self.num_received, self.link_credits
        # Events; each identifies a device, because a link has one sender and one receiver.
        waiting: set[int] = set()
        runnable = list(range(len(self.num_done)))
        while runnable:
            device = runnable.pop()
            events = self.links.events[device]
            done = self.num_done[device]
            while done < len(events):
                event = events[done]
                sends = event >= 0
                link = event if sends else -1 - event
                in_flight = num_sent[link] - num_received[link]
                if sends and in_flight < link_credits:
                    num_sent[link] += 1
                elif not sends and in_flight:
                    num_received[link] += 1
                else:
                    waiting.add(event)
                    break
                done += 1
                # The same link's event at its other end.
                if -1 - event in waiting:
                    waiting.remove(-1 - event)
                    sender, receiver = self.links.devices[link]
                    runnable.append(receiver if sends else sender)
            self.num_done[device] = done
