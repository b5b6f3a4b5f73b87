"""Which rank failed first, and who says so.

When a rank fails, the others lose their connections and fail too, often all at once. The ranks agree through
the rendezvous store (torchrun keeps it in its agent, DeepSpeed in rank 0) on what came first; that is told in
full, the rest in one line at most.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..comm.host_watch import end_connections, silent_hosts, store_is_silent
from ..errors import ConfigError, DsExtError, TransportError
from .roll_call import FAILED, FIRST_FAILURE, REFUSED, spans_hosts, stop_other_hosts

logger = logging.getLogger(__name__)

RANK_0_FIRST_S = (
    8.0  # an error that every rank has is rank 0's to tell; until then the launcher ends the others
)
CAUSE_S = 3.0  # how long a rank that lost another one looks for the cause
STORE_S = 2.0  # how long the store may take: it is silent when it lives in the rank that is gone
CLAIM_DELAY_S = 0.5
LINGER_S = 2.0
REPORTED_S = 3.0  # how long a rank stays whose error another rank reports
TOLD_S = 1.0  # how long those that failed too let the first speak

_FIRST, _TOLD, _LOST = FIRST_FAILURE, "ds_ext/first_failure_told", "ds_ext/lost_peer_of_rank_"
_LOST_SIGNS = ("connection", "broken pipe", "timed out", "timeout", "got 0 bytes", "remote process exited")
_LOST_SIGNS += ("no route to host", "unreachable", "host is down")
_TIME_SIGNS = ("timed out", "timeout", "nothing moved")
_TORCH_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
_GLOO_SOURCE = re.compile(r"\[\S*\.cc:\d+\] ?")  # where in gloo it was found
_GLOO_ADVICE = re.compile(r"\W*(This is typically|GLHF).*")
_NO_ANSWER: Any = object()


@dataclass
class Ending:
    """How this rank would end if it were ended now: what it would still say, and its exit code.

    ``text`` is called when it is said: the later, the more is known. ``neighbours`` are the process ids of this
    node's ranks, as far as they are known, and ``gone`` what :meth:`lost` has found.
    """

    text: Callable[[], str] | None = None
    code: int | None = None
    neighbours: dict[int, int] = field(default_factory=dict)
    gone: str = ""

    def lost(self) -> str:
        """Which neighbours have ended or are stopped, and which hosts do not answer; empty when none.

        Asked early and often: those that were found first stay the answer, as the launcher ends the others too.
        """
        self.gone = self.gone or hosts_lost() or ended_or_stopped(self.neighbours)
        return self.gone


def rank() -> int:
    """This process' rank as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of ranks as the launcher set it; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def report(error: BaseException, ending: Ending) -> None:
    """Say why this rank fails, unless another rank says it or is the cause; ``ending`` is kept up to date."""
    logger.debug("rank %d ends", rank(), exc_info=error)
    if getattr(error, "reported_by", None) not in (None, rank()):
        _let_reporter_speak()
    elif isinstance(error, ConfigError):
        _report_refusal(error)
    elif lost_peer(error):
        _report_lost_peer(error, ending)
    else:
        _report_own(error)


def say(text: str) -> None:
    """Write to standard error in one piece, so that lines of several ranks do not mix."""
    with contextlib.suppress(OSError):
        os.write(2, (text + "\n").encode(errors="replace"))


def _report_refusal(error: ConfigError) -> None:
    """Report a job that is refused: every rank found the error, or rank 0 reports it for a rank of another host."""
    text = f"error: {error}" if rank() == 0 else f"rank {rank()}: error: {error}"
    if _alone_before_joining(error):
        if rank() == 0:
            _say_cause(text)
        if not stop_other_hosts(rank(), world_size(), str(error), REFUSED) and rank() != 0:
            _say_cause(text)
        return
    if error.reported_by is None:
        _claim(f"rank {rank()} failed: {_headline(error)}")
        if not getattr(error, "__notes__", None):  # with notes it is of one rank's instruction
            _let_rank_0_speak()
    _say_cause(text)


def _alone_before_joining(error: BaseException) -> bool:
    """Return whether ranks of other hosts may wait for this one, which has never joined them."""
    return getattr(error, "reported_by", None) is None and not _joined() and spans_hosts(world_size())


def _report_own(error: BaseException) -> None:
    if _alone_before_joining(error):
        # Ranks of a host have mostly the same error: the first of them speaks, and the launcher ends the others.
        stop_other_hosts(rank(), world_size(), _headline(error), FAILED)
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(REPORTED_S)
        _say_cause(f"rank {rank()} failed.\n{_text(error)}")
        return
    if not _joined() and getattr(error, "reported_by", None) is None:
        _let_rank_0_speak()
    first = _claim(f"rank {rank()} failed: {_headline(error)}")
    if first:
        _let_first_speak()
        say(f"rank {rank()} failed too: {_headline(error)}")
    else:
        _say_cause(f"rank {rank()} failed.\n{_text(error)}")
        _serve_store()


def _report_lost_peer(error: BaseException, ending: Ending) -> None:
    """Say which rank is silent or gone, unless the first cause turns up in the meantime.

    Ranks that wait for each other all run into their time limit; the silent one is that which does not say so.
    """
    peer: int | None = getattr(error, "peer", None)
    where = getattr(error, "__notes__", [])
    own = _headline(error).replace(f"TransportError: rank {rank()}: ", "TransportError: ")
    if peer is None:
        own = f"TransportError: in a collective of several ranks: {own}"

    def text() -> str:
        return f"rank {rank()} stopped: {ending.lost()}{own}"

    # A connection is lost before its process is gone, and the launcher may end this rank at any moment from here on.
    ending.text = text
    ending.lost()
    _ask_store(lambda store: store.set(f"{_LOST}{rank()}", "" if peer is None else str(peer)))
    first = _wait_for_cause(ending)
    said = text()
    if first is None:
        silent = [] if ending.lost() else _silent_ranks()
        if silent and peer not in silent:
            time.sleep(CLAIM_DELAY_S)  # one that waited for the silent rank itself has more to say
        if silent:
            verb = "did not answer" if any(sign in own.lower() for sign in _TIME_SIGNS) else "is gone"
            said = f"rank {rank()} stopped: rank {', '.join(map(str, silent))} {verb}. {own}"
        first = _claim(said)
    if not first:
        # Without a store all ranks say it: where they were, two of a node are enough to show.
        alone = first == "" or os.environ.get("LOCAL_RANK", "0") in ("0", "1")
        _say_cause("\n".join([said, *where] if alone else [said]))
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        _let_first_speak()
        say(f"rank {rank()} stopped, because {first}")
    ending.text = None
    _serve_store()


def _serve_store() -> None:
    """Stay a while on rank 0: it may keep the store, which the others ask for the first failure."""
    if _joined() and rank() == 0:
        with contextlib.suppress(OSError, KeyError, ValueError):
            end_connections(
                int(os.environ["MASTER_PORT"])
            )  # ranks that wait for this one must ask in that time
        time.sleep(LINGER_S)


def hosts_lost() -> str:
    """Return the other hosts that do not answer, with their ranks; empty when all do."""
    return "".join(f"{host.silence()}. " for host in silent_hosts())


def ended_or_stopped(neighbours: dict[int, int]) -> str:
    """What the process table says about the other ranks of this node; empty when all of them are running."""
    found = []
    for other, process in sorted(neighbours.items()):
        state = process_state(process)[0]
        if state in ("Z", "X", ""):
            found.append(f"rank {other} has ended")
        elif state in ("T", "t"):
            found.append(f"rank {other} did not answer: its process {process} is stopped by a signal")
    return "; ".join(found) + ". " if found else ""


def process_state(process: int) -> tuple[str, int]:
    """(state letter, parent) of a process as Linux shows them; ("", 0) when it is gone or there is no /proc."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return words[0], int(words[1])
    except (OSError, ValueError, IndexError):
        return "", 0


def _wait_for_cause(ending: Ending) -> str | None:
    """What failed first; None when nobody says so in time, or the store is gone."""
    deadline = time.monotonic() + CAUSE_S
    while time.monotonic() < deadline:
        ending.lost()
        first = _ask_store(lambda store: store.get(_FIRST).decode() if store.check([_FIRST]) else "")
        if first is _NO_ANSWER:
            # The launcher has these seconds to end this rank before it tells what it only suffers from.
            while time.monotonic() < deadline:
                ending.lost()
                time.sleep(0.1)
            return None
        if first:
            return first
        time.sleep(0.1)
    return None


def _silent_ranks() -> list[int]:
    """Ranks that others wait for and that do not report a lost peer themselves; empty when not known."""
    keys = {other: f"{_LOST}{other}" for other in range(world_size())}
    found = _ask_store(lambda s: {r: s.get(key).decode() for r, key in keys.items() if s.check([key])})
    if found is _NO_ANSWER:
        return []
    named = {int(peer) for peer in found.values() if peer} - set(found)
    return sorted(named or set(keys) - set(found))


def _claim(text: str) -> str | None:
    """Put ``text`` down as the job's first failure.

    Returns the text of another rank that came first, "" when this one is first, None when that is not known.
    """
    first = _ask_store(lambda store: store.compare_set(_FIRST, "", text).decode())
    return None if first is _NO_ANSWER else "" if first == text else first


def _ask_store(question: Callable[[Any], Any]) -> Any:
    if not _joined() or store_is_silent():
        return _NO_ANSWER
    from torch.distributed import distributed_c10d

    answers: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            # A question to a store that is gone would make torch print a page of C++ frames.
            socket.create_connection(_store_address(), timeout=STORE_S).close()
            answers.append(question(distributed_c10d._get_default_store()))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(STORE_S)
    return answers[0] if answers else _NO_ANSWER


def _store_address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _joined() -> bool:
    """Whether this rank is in a process group with others."""
    if world_size() == 1 or "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _let_rank_0_speak() -> None:
    """Wait for the end that comes when rank 0 has the same error; return after a while when it does not."""
    if rank() != 0:
        time.sleep(RANK_0_FIRST_S + (0 if os.environ.get("LOCAL_RANK") == "0" else 3))


def _let_first_speak(limit_s: float = TOLD_S) -> None:
    """Wait until the rank whose failure came first has reported it, for a while."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and _ask_store(lambda store: store.check([_TOLD])) is False:
        time.sleep(0.05)


def _let_reporter_speak() -> None:
    """Stay until another rank has reported this rank's error: the launcher ends all ranks with the first."""
    if _joined():
        _let_first_speak(REPORTED_S)
    else:
        time.sleep(REPORTED_S)


def lost_peer(error: BaseException) -> bool:
    """Whether the error only tells that another rank is silent or gone."""
    if isinstance(error, TransportError):
        return error.peer is not None
    text = str(error).lower()
    of_torch = type(error).__name__ in _TORCH_ERRORS or (isinstance(error, RuntimeError) and "gloo" in text)
    return of_torch and _joined() and any(sign in text for sign in _LOST_SIGNS)


def first_line(error: BaseException) -> str:
    """Of its text, without gloo's advice."""
    return _GLOO_ADVICE.sub("", (str(error).splitlines() or [""])[0])


def _headline(error: BaseException) -> str:
    return _GLOO_SOURCE.sub("", f"{_kind(error)}: {first_line(error)}")


def _kind(error: BaseException) -> str:
    """The name that users read: which kind of transport error it is, its words tell better."""
    return TransportError.__name__ if isinstance(error, TransportError) else type(error).__name__


def _text(error: BaseException) -> str:
    """Our own errors say enough by themselves; others need their traceback."""
    if isinstance(error, DsExtError):
        return "\n".join([f"{_kind(error)}: {error}", *getattr(error, "__notes__", [])])
    return "".join(traceback.format_exception(error)).rstrip()


def _say_cause(text: str) -> None:
    """Say what the job failed of, here and in the report with which torchrun ends."""
    say(text)
    _ask_store(lambda store: store.set(_TOLD, "1"))
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # torchrun takes the earliest whole second for the root cause: one before those that fail because of this.
        details = {"py_callstack": text, "timestamp": str(int(time.time()) - 1)}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
