"""Process of a rank: logging, exit codes, signals, and exit when the launcher is gone.

A rank that is blocked in a collective runs no Python signal handler. A thread therefore ends the process on a signal
and when the launcher exits.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from ..environment import (
    children_of,
    find_launcher,
    group_of,
    is_running,
    local_world_size,
    parent_of,
    rank,
    variables_of,
    words_of,
    world_size,
)
from ..errors import ConfigError
from . import slurm, stop
from .failure import Ending, report, report_loss_at_once, say
from .launcher import DEEPSPEED, NODE_LAUNCHER

__all__ = [
    "EXIT_CONFIG",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "before_failed_exit",
    "has_logging",
    "print_stacks_on_signal",
    "rank",
    "run",
    "set_up_logging",
    "world_size",
]

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130
# What a rank does before it exits, except after Ctrl-C or SIGHUP.
before_failed_exit: list[Callable[[], None]] = []
_TO_ALL = (signal.SIGINT, signal.SIGHUP)  # from a terminal, to every rank
# DeepSpeed passes --node_rank among the first arguments of the node launcher. Later ones may be those of the script.
_FIRST_ARGUMENTS = 4

_LAUNCHER_CHECK_S = 0.5
_SAME_CAUSE_S = 0.2
_LAST_RANK_S = 5.0

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Messages of DeepSpeed and torch that appear in every run and need no action.
_EXPECTED_LOGS = (
    "Attempting to get learning rate from scheduler before it has started",
    "Setting accelerator to CPU",
)
_EXPECTED_WARNINGS = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"


class _ExpectedFilter(logging.Filter):
    """Filter of DeepSpeed's logger that hides records below ``level`` and messages that need no action."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self.level and not record.getMessage().startswith(_EXPECTED_LOGS)


def set_up_logging(level: str | None = None) -> None:
    """Log to standard error, without the messages that DeepSpeed and torch print in every run.

    Call this after importing DeepSpeed. The levels "info" and "debug" hide no messages and also apply to DeepSpeed.
    Python's ``-W`` and ``PYTHONWARNINGS`` override the filter of warnings.

    Args:
        level: debug, info, warning or error; None: DS_EXT_LOG_LEVEL in the environment, else warning.

    Raises:
        ConfigError: if the level is unknown.
    """
    name = (level or os.environ.get("DS_EXT_LOG_LEVEL") or "warning").lower()
    if name not in _LEVELS:
        key = "level" if level else "DS_EXT_LOG_LEVEL"
        raise ConfigError(f"{key}: must be one of {', '.join(_LEVELS)} (got {name!r}).")
    number = _LEVELS[name]
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"rank {rank()} | %(levelname)s | %(name)s | %(message)s"))
    logger, deepspeed_logger = logging.getLogger("ds_ext"), logging.getLogger("DeepSpeed")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(number)
    deepspeed_logger.filters = [f for f in deepspeed_logger.filters if not isinstance(f, _ExpectedFilter)]
    if number < logging.WARNING:
        for target in (deepspeed_logger, *deepspeed_logger.handlers):
            target.setLevel(number)
        return
    deepspeed_logger.addFilter(_ExpectedFilter(number))
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", message=_EXPECTED_WARNINGS, category=FutureWarning)


def has_logging() -> bool:
    """Return whether the script has set up logging itself, here or with ``logging.basicConfig()``."""
    return logging.getLogger("ds_ext").hasHandlers()


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` as the main function of a rank and exit: 0 for success, 2 for a ConfigError, 1 for a failure.

    SIGINT, SIGTERM and SIGHUP end the rank immediately, even in a blocked collective, unless ``main`` installs other
    handlers or takes them as requests to stop (``launch/stop.py``). SIGUSR1 prints the stacks of all threads, unless
    the script handles it. Under Slurm's ``srun``, the rank comes from Slurm (``launch/slurm.py``). Call this function
    in the main thread.
    """
    # Stop torch from printing pages of C++ frames for a lost connection. Our report names the lost rank.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    print_stacks_on_signal()
    ending = Ending()
    _watch(ending)
    try:
        slurm.set_rank()
        code = main() or 0
    except SystemExit as stop:
        code = _report_exit(stop)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BaseException as error:
        code = ending.code = EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
        report(error, ending)
    _leave(code)


def print_stacks_on_signal() -> None:
    if hasattr(faulthandler, "register") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def _report_exit(stop: SystemExit) -> int:
    """Print the message of ``sys.exit(message)`` as Python does, and return the exit code."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    say(str(stop.code))
    return EXIT_FAILED


def _leave(code: int) -> NoReturn:
    """Exit without running destructors, because those of process groups would wait for dead peers."""
    if code == 0:  # after a failure, exit functions could wait for dead peers too
        atexit._run_exitfuncs()
    else:
        _prepare_failed_exit()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _prepare_failed_exit() -> None:
    for function in before_failed_exit:
        with contextlib.suppress(Exception):  # another thread may be doing the same
            function()


def _watch(ending: Ending) -> None:
    """Start the thread that ends this process on SIGINT, SIGTERM or SIGHUP, or when the launcher exits."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # Python runs handlers between bytecodes of the main thread. The C-level handler writes a byte immediately.
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    stop.replaceable.append(_handled_by_thread)
    for number in (*_TO_ALL, signal.SIGTERM):
        # A shell starts background jobs with SIGINT ignored, so that Ctrl-C does not stop them; nohup ignores SIGHUP.
        if signal.getsignal(number) not in (signal.SIG_IGN, stop.handle):
            signal.signal(number, _handled_by_thread)
    os.register_at_fork(after_in_child=_unwatch)
    launchers = _launchers()
    if not launchers:
        _end_orphan(ending)
    ending.launcher = launchers[0][1]

    def watch() -> None:
        with writer:  # keep the socket open
            _run_watch(ending, reader, launchers)

    threading.Thread(target=watch, name="ds_ext-watch", daemon=True).start()


def _run_watch(ending: Ending, reader: socket.socket, launchers: list[tuple[int, int]]) -> NoReturn:
    """End this process on a signal or after its launcher; until then, record the other ranks of this host.

    The order matters. Lost ranks are found first, because a launcher that sends SIGTERM soon ends the others. A second
    read finds the signal that ended the launcher. A launcher may end a wrapper first, which looks like its own end.
    If the script takes signals as requests to stop and no rank is lost, the main thread ends the run instead.
    """
    if stop.listening is not None:
        _acknowledge(stop.listening, stop.listening.signals & {stop.listening.cause})
    while True:
        received = _signals(reader, _LAUNCHER_CHECK_S)
        lost = ending.find_lost() if signal.SIGTERM in received else ""
        if signal.SIGTERM in received or _is_orphaned(launchers):
            received |= _signals(reader, _SAME_CAUSE_S)
        requests = stop.listening
        if requests is not None and _ends_between_steps(requests, received, _is_orphaned(launchers), ending):
            received, launchers = received - requests.signals, []
        for number in received.intersection(_TO_ALL):
            # Other ranks would report the first to exit as lost.
            if rank() == 0:
                say(f"stopped by {signal.Signals(number).name}.")
            os._exit(128 + number)
        launcher_runs = all(is_running(parent) for _, parent in launchers)
        if _is_orphaned(launchers) and not (signal.SIGTERM in received and launcher_runs):
            _end_orphan(ending, launcher_runs)
        if signal.SIGTERM in received:
            _end_by_sigterm(ending, lost)
        if len(ending.neighbours) < local_world_size():
            ending.neighbours.update(_neighbours(ending.launcher))


def _ends_between_steps(
    requests: stop.StopRequests, received: set[int], is_orphan: bool, ending: Ending
) -> bool:
    """Return whether the main thread ends the run after its step, because of a signal or the end of the launcher."""
    causes = received & requests.signals
    if not (causes or is_orphan) or (requests.agreed is None and ending.find_lost()):
        return False
    if not requests.gathered:
        # A launcher also ends the ranks after one that has exited, perhaps before this rank knew it.
        neighbours = _neighbours(ending.launcher)
        if is_orphan or (signal.SIGTERM in causes and 0 < len(neighbours) < local_world_size()):
            return False
    _acknowledge(requests, causes)
    for cause in (*causes, stop.LAUNCHER_EXITED):
        requests.request(cause)
    return True


def _acknowledge(requests: stop.StopRequests, causes: Iterable[int]) -> None:
    """Print the signals that this rank has received, because a step may take minutes to end."""
    if requests.agreed is None:
        when = "after this step" if requests.gathered else "before its first step"
        for cause in causes:
            say(f"rank {rank()} received {signal.Signals(cause).name}: the run stops {when}.")


def _is_orphaned(launchers: list[tuple[int, int]]) -> bool:
    return any(parent_of(child) != parent for child, parent in launchers)


def _signals(reader: socket.socket, timeout_s: float) -> set[int]:
    """Return the signals received within ``timeout_s`` that the script does not handle itself."""
    readable, _, _ = select.select([reader], [], [], timeout_s)
    received = set(reader.recv(64)) if readable else set()
    return {n for n in received if signal.getsignal(n) in (_handled_by_thread, stop.handle)}


def _end_orphan(ending: Ending, launcher_runs: bool = False) -> NoReturn:
    """Exit because the launcher, or a wrapper between it and this rank, has exited."""
    text = f"stopped: {'the program that started this rank' if launcher_runs else 'the launcher'} exited."
    # A launcher that has lost rank 0 ends the wrappers of the others, but not them.
    if rank() == 0 or (0 in ending.neighbours and not is_running(ending.neighbours[0])):
        say(text)
    if rank() == 0:
        # The others would take a rank 0 that has exited for one that could not report.
        ending.reported = True
        deadline = time.monotonic() + _LAST_RANK_S
        others = [process for number, process in ending.neighbours.items() if number != 0]
        while any(map(is_running, others)) and time.monotonic() < deadline:
            time.sleep(0.01)
    _prepare_failed_exit()
    os._exit(EXIT_FAILED)


def _end_by_sigterm(ending: Ending, lost: str) -> NoReturn:
    """Exit on SIGTERM; ``lost`` reports the ranks that were lost earlier."""
    # Do not flush streams: the main thread may hold their locks.
    if ending.text is not None or lost:
        report_loss_at_once(ending, lost)
    elif ending.code is None and rank() == 0:
        say("stopped by SIGTERM.")
    _prepare_failed_exit()
    os._exit(ending.code or 128 + signal.SIGTERM)


def _handled_by_thread(number: int, frame: Any) -> None:
    """Ignore a signal in the main thread, because the watch thread handles it."""


def _unwatch() -> None:
    """Restore the default signal handlers in a forked child, such as a worker of a data loader."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _handled_by_thread:
            signal.signal(number, signal.SIG_DFL)


def _launchers() -> list[tuple[int, int]]:
    """Return pairs (process, parent) up to the launcher; a pair changes when its parent exits. Empty if it has exited.

    The ``deepspeed`` command starts a node launcher, which starts the ranks. The node launcher survives the command, so
    both are watched.
    """
    pair = find_launcher()
    if pair is None:
        return []
    launcher = pair[1]
    words = words_of(launcher)
    if NODE_LAUNCHER not in words:
        return [pair]
    command = parent_of(launcher)
    # Perhaps after its interpreter and one option.
    if any(Path(word).name in DEEPSPEED for word in words_of(command)[:3]):
        return [pair, (launcher, command)]
    arguments = words[words.index(NODE_LAUNCHER) + 1 :]
    if any(word.startswith("--node_rank") for word in arguments[:_FIRST_ARGUMENTS]):
        return [pair]  # usually started over ssh by a command on another host
    # On one host, either the command has exited or a script started the node launcher. The command usually led the
    # process group that the node launcher inherits, which then has no running leader. A waiting script is running.
    return [pair] if is_running(group_of(launcher)) else []


def _neighbours(launcher: int) -> dict[int, int]:
    """Return rank -> process ID for the ranks that a launcher started on this host; empty without /proc."""
    neighbours, name = {}, "SLURM_PROCID=" if slurm.launched_by() else "RANK="
    for process in children_of(launcher):
        ranks = [word.removeprefix(name) for word in variables_of(process) if word.startswith(name)]
        if ranks and ranks[0].isdecimal():
            neighbours[int(ranks[0])] = process
    return neighbours
