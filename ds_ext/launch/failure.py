"""Failure reports: the first failure in full, and all others in at most one line.

When a rank fails, the others lose their connections and fail too, often at the same time. The ranks agree on the first
failure through the rendezvous store, which runs in torchrun's agent or, with DeepSpeed's launcher, in rank 0.
"""

from __future__ import annotations

import contextlib
import errno
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
from typing import Any

from ..comm.host_watch import end_connections, silent_hosts, store_is_silent
from ..environment import (
    error_file,
    local_rank,
    local_world_size,
    master_port,
    max_restarts,
    process_state,
    rank,
    restart_count,
    spans_hosts,
    store_address,
    world_size,
)
from ..errors import ConfigError, DsExtError, TransportError, TransportTimeout
from .roll_call import FAILED, FIRST_FAILURE, RANK_0_S, REFUSED, stop_other_hosts

logger = logging.getLogger(__name__)

CAUSE_S = 3.0  # wait for the first failure to appear after losing a peer
STORE_S = 2.0  # time limit for the store, which does not answer if it ran in the lost rank
CLAIM_DELAY_S = 0.5  # head start for a rank that waited for the silent rank itself
LINGER_S = 2.0  # rank 0 keeps serving the store
REPORTER_S = 3.0  # wait for another rank to report this rank's error
FIRST_REPORT_S = 1.0  # wait for the first failed rank to report before other failed ranks do

FIRST, _REPORTED, LOST = FIRST_FAILURE, "ds_ext/first_failure_reported", "ds_ext/lost_peer_of_rank_"
_ACTIVITY = "ds_ext/activity_of_rank_"
_LOST_SIGNS = ("connection", "broken pipe", "timed out", "timeout", "got 0 bytes", "remote process exited")
_LOST_SIGNS += ("no route to host", "unreachable", "host is down")
_TIMEOUT_SIGNS = ("timed out", "timeout", "no progress")
_TORCH_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
_GLOO_SOURCE = re.compile(r"\[\S*\.cc:\d+\] ?")  # source position in gloo
_GLOO_ADVICE = re.compile(r"\W*(This is typically|GLHF).*")
_NO_ANSWER: Any = object()
advice: Callable[[], str] | None = None  # lines after the cause of a failure: how to continue
_failed_s: float | None = None  # reading of time.time() at the failure of this rank


@dataclass
class Ending:
    """Report and exit code of this rank if a signal ends it now.

    Attributes:
        text: function that returns the report; None: no report is pending.
        code: exit code; None: the rank has not failed.
        launcher: process ID of the launcher on this host.
        neighbours: rank -> process ID, for the ranks found on this host so far.
        election: socket by which this rank is elected on this host; None: not elected.
        reporting: held by the thread that reports the loss of a peer.
    """

    text: Callable[[], str] | None = None
    code: int | None = None
    launcher: int = 0
    neighbours: dict[int, int] = field(default_factory=dict)
    lost: str = ""
    election: socket.socket | None = None
    reporting: threading.Lock = field(default_factory=threading.Lock)
    reported: bool = False

    def find_lost(self) -> str:
        """Return a report of lost hosts or neighbors; empty if none are lost.

        Call this early and often. The first result is kept, because the launcher soon ends other ranks too.
        """
        self.lost = self.lost or hosts_lost() or describe_lost_neighbours(self.neighbours)
        return self.lost

    def elect(self) -> None:
        """Elect this rank to report for its host, unless another rank of the job is elected."""
        if self.election is not None:
            return
        election = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # Abstract address (unix(7)): it needs no file, and ends with the process.
            election.bind(f"\0ds_ext/{master_port()}/{self.launcher}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                election.close()
                return
            # No election is possible here: this rank reports too, because two reports are better than none.
        self.election = election

    def reports_alone(self) -> bool:
        """Return whether this rank reports if the store does not answer.

        One rank per host is enough if it can name the lost rank or host; without a name, every report may help.
        """
        return self.election is not None or not self.find_lost()


def report(error: BaseException, ending: Ending) -> None:
    """Report why this rank failed, unless another rank reports it. Keep ``ending`` up to date."""
    logger.debug("rank %d ends", rank(), exc_info=error)
    reporter = getattr(error, "reported_by", None)
    if reporter not in (None, rank()):
        _wait_for_report(REPORTER_S)
    elif lost_peer(error):
        _report_lost_peer(error, ending)
    elif reporter is None and not _joined() and spans_hosts():
        _report_before_joining(error)
    else:
        _report_own(error, of_all=reporter is not None)


def say(text: str) -> None:
    """Write to standard error with a single call, so that lines of several ranks do not mix."""
    with contextlib.suppress(OSError):
        os.write(2, (text + "\n").encode(errors="replace"))


def _report_before_joining(error: BaseException) -> None:
    """Report an error, and stop the ranks on other hosts, which may be waiting for this one.

    Ranks on a host usually have the same error: the first one reports it, and the launcher ends the others.
    """
    if not isinstance(error, ConfigError):
        stop_other_hosts(rank(), world_size(), _headline(error), FAILED)
        if local_rank() != 0:
            time.sleep(REPORTER_S)
        _report_cause(_own_text(error))
        return
    if rank() == 0:
        _report_cause(_own_text(error))
    reported = stop_other_hosts(rank(), world_size(), str(error), REFUSED)
    if rank() != 0 and reported:
        _wait_for_report(REPORTER_S)
    elif rank() != 0:
        _report_cause(_own_text(error))


def _report_own(error: BaseException, of_all: bool) -> None:
    """Report an error of this rank: in full if it is the first failure of the job, else in one line.

    A ConfigError is always reported in full. All ranks have it, unless its notes name an instruction of one rank.
    """
    refused, headline = isinstance(error, ConfigError), _headline(error)
    if refused and not of_all:
        claim(f"rank {rank()} failed: {headline}")
    is_shared = not getattr(error, "__notes__", None) if refused else not _joined()
    if is_shared and not of_all and rank() != 0:
        # Rank 0 reports the same error, and the launcher ends this rank.
        time.sleep(RANK_0_S + (0 if local_rank() == 0 else 3))
    if refused:
        _report_cause(_own_text(error))
    elif claim(f"rank {rank()} failed: {headline}"):
        _wait_for_report()
        say(f"rank {rank()} failed too: {headline}")
    else:
        _report_cause(_own_text(error))
        _serve_store()


def _own_text(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return f"error: {error}" if rank() == 0 else f"rank {rank()}: error: {error}"
    return f"rank {rank()} failed.\n{_text(error)}"


def _report_lost_peer(error: BaseException, ending: Ending) -> None:
    """Report a silent or lost rank, unless the first failure appears in the meantime.

    Ranks that wait for each other all reach their time limit. The silent rank is the one that does not report this.
    """
    peer: int | None = getattr(error, "peer", None)
    headline = _headline(error).replace(f"TransportError: rank {rank()}: ", "TransportError: ")
    if peer is None:
        headline = f"TransportError: in a collective of several ranks: {headline}"

    def text() -> str:
        return f"rank {rank()} stopped: {ending.find_lost()}{headline}"

    # A connection is lost before its process exits, and the launcher may end this rank at any time from now on.
    ending.text = text
    ending.elect()
    ending.find_lost()
    ask_store(lambda store: store.set(f"{LOST}{rank()}", "" if peer is None else str(peer)))
    first = _wait_for_cause(ending)
    line = text()
    if first is None:
        silent = [] if ending.find_lost() else silent_ranks()
        if silent and peer not in silent:
            time.sleep(CLAIM_DELAY_S)
        if silent:
            line = f"rank {rank()} stopped: {_silence(silent, error, headline)}. {headline}"
        first = claim(line)
    _report_loss(line, getattr(error, "__notes__", []), first, ending)
    ending.text = None
    _serve_store()


def _silence(ranks: list[int], error: BaseException, headline: str) -> str:
    """Return a report of silent ranks, such as ``ranks 1, 2 are gone``, and their activity outside of steps."""
    many = len(ranks) > 1
    is_timeout = isinstance(error, TransportTimeout) or any(
        sign in headline.lower() for sign in _TIMEOUT_SIGNS
    )
    problem = "did not answer" if is_timeout else "are gone" if many else "is gone"
    activities = _values_of_ranks(_ACTIVITY)
    waits = (f"; rank {number} waits in: {activities[number]}" for number in ranks if activities.get(number))
    return f"rank{'s' * many} {', '.join(map(str, ranks))} {problem}{''.join(waits)}"


def _values_of_ranks(prefix: str) -> dict[int, str]:
    """Return rank -> value of its key; without ranks that have not set it, and empty if the store does not answer."""
    keys = {number: f"{prefix}{number}" for number in range(world_size())}
    values = ask_store(lambda s: {r: s.get(key).decode() for r, key in keys.items() if s.check([key])})
    return {} if values is _NO_ANSWER else values


def note_failure() -> None:
    """Note the time of this rank's failure, before its peers learn of it."""
    global _failed_s
    _failed_s = _failed_s or time.time()


def publish_activity(name: str) -> None:
    """Publish the activity of this rank outside of steps ("": none), for the reports of ranks that wait for it."""
    ask_store(lambda store: store.set(f"{_ACTIVITY}{rank()}", name))


def report_loss_at_once(ending: Ending, lost: str) -> None:
    """Report the loss of a peer when the launcher ends this rank, so that other hosts get the cause."""
    if ending.text is not None:
        line = ending.text()
    else:
        # Before ranks join, one that fails reports its own error, and the launcher names one that was killed.
        if ending.code is not None or not _joined():
            return
        ending.elect()
        if ending.election is None:
            return
        line = f"rank {rank()} stopped: {lost}Then it received SIGTERM."
    _report_loss(line, [], claim(line), ending)
    if spans_hosts():
        _serve_store()


def _report_loss(line: str, notes: list[str], first: str | None, ending: Ending) -> None:
    """Print ``line`` if it is the first failure of the job, else refer to the first failure once per host.

    On SIGTERM the watch thread reports while the main thread may be about to: the first one of them does. ``first`` is
    the result of :func:`claim`.
    """
    with ending.reporting:
        if ending.reported:
            return
        ending.reported = True
        if first == "" or (first is None and ending.reports_alone()):
            _report_cause("\n".join([line, *notes]))
        elif first and local_rank() == 0 and not (_wait_for_report() and _is_of_this_host(first)):
            say(f"rank {rank()} stopped, because {first}")


def _is_of_this_host(report: str) -> bool:
    writer = re.match(r"rank (\d+)", report)
    return writer is not None and 0 <= int(writer[1]) - rank() < local_world_size()


def _serve_store() -> None:
    """Keep rank 0 alive for a while, because it may serve the store that other ranks ask for the first failure."""
    if _joined() and rank() == 0:
        # Ranks that wait for this one must notice its end before the store stops.
        with contextlib.suppress(OSError):
            end_connections(master_port())
        time.sleep(LINGER_S)


def hosts_lost() -> str:
    return "".join(f"{host.silence()}. " for host in silent_hosts())


def describe_lost_neighbours(neighbours: dict[int, int]) -> str:
    reports = []
    for neighbour, process in sorted(neighbours.items()):
        if neighbour == rank():  # its entry is its wrapper, if it has one
            continue
        state = process_state(process)[0]
        if state in ("Z", "X", ""):
            reports.append(f"rank {neighbour} exited")
        elif state in ("T", "t"):
            problem = "has been stopped by a signal" if state == "T" else "is stopped by a debugger"
            reports.append(f"rank {neighbour} did not answer: its process {process} {problem}")
    return "; ".join(reports) + ". " if reports else ""


def _wait_for_cause(ending: Ending) -> str | None:
    """Return the report of the first failure; None if none appears in time, or if the store does not answer."""
    deadline = time.monotonic() + CAUSE_S
    while time.monotonic() < deadline:
        ending.find_lost()
        first = ask_store(lambda store: store.get(FIRST).decode() if store.check([FIRST]) else "")
        if first is _NO_ANSWER:
            # Give the launcher time to end this rank before it reports a mere consequence.
            while time.monotonic() < deadline:
                ending.find_lost()
                time.sleep(0.1)
            return None
        if first:
            return first
        time.sleep(0.1)
    return None


def silent_ranks() -> list[int]:
    """Return the ranks that others wait for and that report no lost peer themselves; empty if unknown."""
    peers = _values_of_ranks(LOST)  # rank that reports a lost peer -> the peer; empty in a collective
    awaited = {int(peer) for peer in peers.values() if peer} - set(peers)
    return sorted(awaited or set(range(world_size())) - set(peers)) if peers else []


def claim(text: str) -> str | None:
    """Publish ``text`` as the job's first failure, unless there is one.

    Return the text of an earlier failure, "" if this one is the first, None if the store does not answer.
    """
    first = ask_store(lambda store: store.compare_set(FIRST, "", text).decode())
    return None if first is _NO_ANSWER else "" if first == text else first


def ask_store(question: Callable[[Any], Any]) -> Any:
    """Return ``question(store)``; _NO_ANSWER before ranks join, for a silent host, after an error or after 2 s.

    A thread asks, because a store in a lost rank may block without a time limit.
    """
    address = store_address()
    if address is None or not _joined() or store_is_silent():
        return _NO_ANSWER
    from torch.distributed import distributed_c10d

    answers: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            # Test the connection first: torch prints pages of C++ frames if the store is gone.
            socket.create_connection(address, timeout=STORE_S).close()
            answers.append(question(distributed_c10d._get_default_store()))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(STORE_S)
    return answers[0] if answers else _NO_ANSWER


def _joined() -> bool:
    """Return whether this rank is in a process group with others."""
    # Missing in a torch without torch.distributed, and while another thread imports torch.
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return world_size() > 1 and is_initialized is not None and is_initialized()


def _wait_for_report(limit_s: float = FIRST_REPORT_S) -> bool:
    """Wait until the first failure has been reported, or until a time limit. Return whether it has been.

    The launcher ends all ranks after the first exit.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        reported = _joined() and ask_store(lambda store: store.check([_REPORTED]))
        if reported is not False:
            return reported is True
        time.sleep(0.05)
    return False


def lost_peer(error: BaseException) -> bool:
    """Return whether the error only reports that another rank is silent or gone."""
    if isinstance(error, TransportError):
        return error.peer is not None
    text = str(error).lower()
    is_torch_error = type(error).__name__ in _TORCH_ERRORS or (
        isinstance(error, RuntimeError) and "gloo" in text
    )
    return is_torch_error and _joined() and any(sign in text for sign in _LOST_SIGNS)


def first_line(error: BaseException) -> str:
    return _GLOO_ADVICE.sub("", (str(error).splitlines() or [""])[0])


def _headline(error: BaseException) -> str:
    return _GLOO_SOURCE.sub("", f"{_kind(error)}: {first_line(error)}")


def _kind(error: BaseException) -> str:
    return TransportError.__name__ if isinstance(error, TransportError) else type(error).__name__


def _text(error: BaseException) -> str:
    if isinstance(error, DsExtError):
        return "\n".join([f"{_kind(error)}: {error}", *getattr(error, "__notes__", [])])
    return "".join(traceback.format_exception(error)).rstrip()


def _report_cause(text: str) -> None:
    """Print the cause of the failure, and write it for torchrun's final report."""
    say(text)
    ask_store(lambda store: store.set(_REPORTED, "1"))
    path = error_file()
    if path is not None:
        # torchrun treats the earliest second as the root cause: use one before the failures that this one causes.
        details = {"py_callstack": text, "timestamp": str(int(_failed_s or time.time()) - 1)}
        with contextlib.suppress(OSError):
            path.write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
    if advice is not None and restart_count() >= (max_restarts() or 0) and (lines := advice()):
        say(lines)
