"""Requests to end a run between two steps: a signal, the end of the launcher, a deadline, or a call.

A request is a number that a rank adds to those that all ranks gather in every step and evaluation. All ranks thus get
the same answer from ``engine.should_stop()``, without another message. The training scripts also gather the requests
before their first step and after a save. This module imports only the standard library, so that a script can call
:func:`listen_early` before its other imports.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_NO_REQUEST = 0
# Causes besides numbers of signals, which are below 65.
LAUNCHER_EXITED, DEADLINE, CALL = 100, 101, 102
_TEXTS = {
    LAUNCHER_EXITED: "lost its launcher",
    DEADLINE: "passed the deadline",
    CALL: "called request_stop()",
}
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Stop:
    """First request to end a run.

    Attributes:
        rank: rank that made it; the lowest one of several.
        cause: number of a signal, LAUNCHER_EXITED, DEADLINE or CALL.
    """

    rank: int
    cause: int

    def __str__(self) -> str:
        return f"rank {self.rank} {_TEXTS.get(self.cause) or f'received {signal.Signals(self.cause).name}'}"


class StopRequests:
    """Requests of this rank.

    Attributes:
        deadline: reading of :func:`time.monotonic` from which on this rank requests the end; None: no deadline.
        signals: signals that are requests.
        agreed: request that all ranks have received; None: none yet.
        is_reported: whether the log has ``agreed``.
        gathered: whether an engine gathers the requests. Until then, the end of the launcher ends this process.
    """

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.signals: frozenset[int] = frozenset()
        self.agreed: Stop | None = None
        self.is_reported = False
        self.gathered = False
        self._cause = _NO_REQUEST
        self._followers: list[StopRequests] = []  # of other engines in this process
        self._before_fork = threading.local()

    @property
    def cause(self) -> int:
        """Number to gather: the cause of the first request; 0 without one."""
        if self._cause == _NO_REQUEST and self.deadline is not None and time.monotonic() >= self.deadline:
            self._cause = DEADLINE
        return self._cause

    def request(self, cause: int) -> None:
        """Request the end of the run, unless this rank has requested it before. Any thread may call this.

        Signals and the end of the launcher are requests for all listening engines of this process.
        """
        for requests in (self,) if cause == CALL else (self, *self._followers):
            requests._cause = requests._cause or cause

    def agree_on_stop(self, causes: Sequence[float]) -> None:
        """Record the first of the causes of all ranks, in their order, after a step or an evaluation."""
        stops = (Stop(rank, int(cause)) for rank, cause in enumerate(causes) if cause)
        self.agreed = self.agreed or next(stops, None)

    def listen(self, signals: Iterable[int] = DEFAULT_SIGNALS, *, gathered: bool = True) -> None:
        """Take signals as requests from now on; the first call of a process decides, and must be in the main thread.

        Signals that the script handles itself are not taken. SIGUSR1 no longer prints stacks. The exit of the reader of
        the output, such as pdsh, is a request too, and no error.
        """
        global listening
        self.gathered = gathered
        if listening is not None:
            if self is not listening and self not in listening._followers:
                self.signals = listening.signals
                listening._followers.append(self)
            return
        unhandled = {number for number in signals if signal.getsignal(number) in [*replaceable, handle]}
        if signal.SIGUSR1 in unhandled:
            faulthandler.unregister(signal.SIGUSR1)
        listening, self.signals = self, frozenset(unhandled)
        for number in unhandled:
            signal.signal(number, handle)
        sys.stdout, sys.stderr = _LastingStream(sys.stdout), _LastingStream(sys.stderr)
        # Blocked during the fork, so that no signal reaches the child before it is guarded.
        os.register_at_fork(
            before=self._block, after_in_parent=self._unblock, after_in_child=self._guard_child
        )

    def _block(self) -> None:
        self._before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before_fork.mask)

    def _guard_child(self) -> None:
        """Make a forked child, such as a data loader's worker, ignore ``signals`` of processes other than its parent.

        DeepSpeed's launcher sends SIGTERM to all descendants, and a rank whose workers are gone cannot finish its step.
        """
        for number in self.signals:
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=_end_with_parent, args=(self.signals, os.getppid()), daemon=True).start()


class _LastingStream:
    """Output stream whose reader may exit."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._until_reader_exits(lambda: self._stream.write(text)) or 0

    def flush(self) -> None:
        self._until_reader_exits(self._stream.flush)

    def _until_reader_exits(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except BrokenPipeError:
            handle(LAUNCHER_EXITED, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


listening: StopRequests | None = None  # that signals of this process go to
# Handlers that are not the script's own.
replaceable: list[Any] = [signal.SIG_DFL, signal.default_int_handler]


def listen_early(arguments: Sequence[str]) -> None:
    """Take the signals that the flags of a training script choose as requests, before its first step."""
    words = [part for word in arguments for part in word.split("=", 1)]
    name = words[words.index("--exit-signal") + 1 :][:1] if "--exit-signal" in words else []
    signals = [number for number in signal.Signals if number.name in name]
    if "--exit-signal-handler" in words and not name:
        signals = list(DEFAULT_SIGNALS)
    if signals and "--dry-run" not in words:
        StopRequests().listen(signals, gathered=False)


def handle(number: int, frame: Any) -> None:
    """Take a signal as a request: the handler of :meth:`StopRequests.listen`."""
    if listening is not None:
        listening.request(number)


def _end_with_parent(signals: frozenset[int], parent: int) -> None:
    """Wait for a signal from the parent process, then end this process by it."""
    while (received := signal.sigwaitinfo(signals)).si_pid != parent:
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    os.kill(os.getpid(), received.si_signo)
