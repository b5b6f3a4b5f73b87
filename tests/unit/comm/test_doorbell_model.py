"""Model check of the sleep and wake protocol in kernels/transport/doorbell.hpp, over all interleavings of two ranks.

Stores wait in a store buffer, as on x86, and a fence drains it. The steps are parsed from the source, so a change of
their order there is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = (Path(__file__).parents[3] / "kernels" / "transport" / "doorbell.hpp").read_text()
STEPS = {
    "fence": r"atomic_thread_fence\(std::memory_order_seq_cst\)",
    "if awake": r"page_->asleep\.load\(.*\) == 0\) return",
    "ring": r"page_->rings\.fetch_add\(1",
    "wake": r"FUTEX_WAKE,",
    "see rings": r"seen = page_->rings\.load",
    "asleep": r"page_->asleep\.store\(1",
    "look": r"if \(!arrived\(\)",
    "sleep": r"FUTEX_WAIT,",
    "awake": r"page_->asleep\.store\(0",
}


def steps(function: str) -> tuple[str, ...]:
    """Return the steps of a function in the order of the source; for wait(), the steps after the spin."""
    body = SOURCE[re.search(rf"\b(void|bool) {function}\(", SOURCE).start() :]  # pyright: ignore[reportOptionalMemberAccess]
    body = body[: body.index("\n    }\n")]
    body = body[max(body.find("const std::uint32_t seen"), 0) :]
    found = [(match.start(), name) for name, text in STEPS.items() for match in re.finditer(text, body)]
    return tuple(name for _, name in sorted(found))


RING, WAIT = steps("ring"), steps("wait")
MESSAGES = 3  # stored by the ringer in sequence


class State(NamedTuple):
    """State of the shared memory and of both ranks."""

    stored: int = 0  # messages
    asleep: int = 0
    rings: int = 0
    ringer: int = 0  # next step of the ringer, for message ringer // (steps + 1)
    ringer_buffer: tuple[int, ...] = ()  # store buffer: values of `stored`
    waiter: int = 0
    waiter_buffer: tuple[int, ...] = ()  # store buffer: values of `asleep`
    taken: int = 0
    seen: int = 0
    sleeping: bool = False


def next_states(s: State, ring: tuple[str, ...], wait: tuple[str, ...]) -> Iterator[State]:
    """Yield all next states: a step of either rank, or the oldest store of a buffer becomes visible."""
    if s.ringer_buffer:
        yield s._replace(stored=s.ringer_buffer[0], ringer_buffer=s.ringer_buffer[1:])
    if s.waiter_buffer:
        yield s._replace(asleep=s.waiter_buffer[0], waiter_buffer=s.waiter_buffer[1:])
    yield from _ringer(s, ring)
    if not s.sleeping:
        yield from _waiter(s, wait)


def _ringer(s: State, ring: tuple[str, ...]) -> Iterator[State]:
    message, position = divmod(s.ringer, len(ring) + 1)
    if message == MESSAGES:
        return
    after = s._replace(ringer=s.ringer + 1)
    step = "store" if position == 0 else ring[position - 1]
    if step == "store":
        yield after._replace(ringer_buffer=(*s.ringer_buffer, message + 1))
    elif step == "if awake":
        over = s._replace(ringer=(message + 1) * (len(ring) + 1))
        yield over if s.asleep == 0 else after
    elif step == "wake":
        yield after._replace(sleeping=False)
    elif not s.ringer_buffer:  # a fence or an atomic addition drains the buffer first
        yield after._replace(rings=s.rings + 1) if step == "ring" else after


def _waiter(s: State, wait: tuple[str, ...]) -> Iterator[State]:
    if s.taken == MESSAGES:
        return
    step = wait[s.waiter] if s.waiter < len(wait) else "again"
    after = s._replace(waiter=s.waiter + 1)
    if step == "again":  # take the stored messages and wait for the next one
        yield s._replace(waiter=0, taken=s.stored)
    elif step == "see rings":
        yield after._replace(seen=s.rings)
    elif step in ("asleep", "awake"):
        yield after._replace(waiter_buffer=(*s.waiter_buffer, int(step == "asleep")))
    elif step == "look":
        yield after._replace(waiter=wait.index("awake")) if s.stored != s.taken else after
    elif step == "sleep":
        # The kernel compares and sleeps atomically.
        yield after._replace(sleeping=s.rings == s.seen)
    elif not s.waiter_buffer:
        yield after


def lost_wake_up(ring: tuple[str, ...], wait: tuple[str, ...]) -> tuple[int, State | None]:
    """Return the number of states, and a state without a next one in which a message was not taken."""
    first = State()
    known, left = {first}, [first]
    while left:
        state = left.pop()
        following = list(next_states(state, ring, wait))
        if not following and state.taken < MESSAGES:
            return len(known), state
        for other in following:
            if other not in known:
                known.add(other)
                left.append(other)
    return len(known), None


def test_steps_of_the_source() -> None:
    assert RING == ("fence", "if awake", "ring", "wake")
    assert WAIT == ("see rings", "asleep", "fence", "look", "sleep", "awake")


def test_no_order_of_steps_loses_a_wake_up() -> None:
    count, lost = lost_wake_up(RING, WAIT)
    assert lost is None and count > 300


def without(words: tuple[str, ...], word: str) -> tuple[str, ...]:
    return tuple(other for other in words if other != word)


@pytest.mark.parametrize(
    ("ring", "wait"),
    [
        (without(RING, "fence"), WAIT),
        (RING, without(WAIT, "fence")),
        (without(RING, "ring"), WAIT),  # a ring before the sleep would be lost
        (without(RING, "wake"), WAIT),
        (RING, ("asleep", "fence", "look", "see rings", "sleep", "awake")),
        (RING, ("see rings", "look", "asleep", "fence", "sleep", "awake")),
    ],
)
def test_every_step_is_necessary(ring: tuple[str, ...], wait: tuple[str, ...]) -> None:
    lost = lost_wake_up(ring, wait)[1]
    assert lost is not None and lost.sleeping and lost.stored > lost.taken
