"""Exit codes, signals and reports of a rank under ds_ext.launch.process, in child processes."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ds_ext.errors import ConfigError, TransportError
from ds_ext.launch import failure, process, stop
from ds_ext.launch.failure import Ending, _headline, _text, lost_peer
from ds_ext.launch.launcher import launch_again
from ds_ext.launch.process import set_up_logging

ROOT = Path(__file__).parents[3]
HEAD = """\
import os, sys, signal, threading, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
from ds_ext.errors import ConfigError
from ds_ext.launch import process
"""


def script(body: str) -> str:
    """Return a script whose ``main`` is ``body``."""
    return f"{HEAD}def main():\n{textwrap.indent(textwrap.dedent(body), '    ')}\nprocess.run(main)\n"


def start(body: str, interrupt: signal.Handlers = signal.SIG_DFL, /, **env: str) -> subprocess.Popen[str]:
    """Start a process that runs ``script(body)``; it inherits ``interrupt`` as its handler of SIGINT."""
    launcher_keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    inherited = {key: value for key, value in os.environ.items() if key not in launcher_keys}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", script(body)],
        env=inherited | {"PYTHONPATH": str(ROOT)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, interrupt),
    )


def outcome(body: str, **env: str) -> tuple[int, str, str]:
    """Return (exit code, standard output, standard error) of a script."""
    process = start(body, **env)
    out, err = process.communicate(timeout=900)
    return process.returncode, out, err


def until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("pass", (0, "", "")),
        ("return 3", (3, "", "")),
        ("sys.exit()", (0, "", "")),
        ("sys.exit(4)", (4, "", "")),
        ("sys.exit('no')", (1, "", "no\n")),
        ("raise ConfigError('N is 3. Use 4.')", (2, "", "error: N is 3. Use 4.\n")),
        ("import atexit; atexit.register(print, 'bye')", (0, "bye\n", "")),
        ("sys.stdout = open(1, 'w', closefd=False); sys.stdout.write('kept')", (0, "kept", "")),
    ],
)
def test_exit_code_and_output(body: str, expected: tuple[int, str, str]) -> None:
    assert outcome(body) == expected


def test_exception_keeps_its_traceback() -> None:
    code, _, err = outcome("{}['key']")
    assert code == 1
    assert err.startswith("rank 0 failed.\nTraceback") and err.endswith("KeyError: 'key'\n")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_end_a_rank_with_a_blocked_main_thread(number: signal.Signals, code: int) -> None:
    # The lock is still awaited after Python's handler ran, as in a collective.
    with start("print('ready'); lock = threading.Lock(); lock.acquire(); lock.acquire()") as process:
        until_ready(process)
        process.send_signal(number)
        _, err = process.communicate(timeout=900)
        assert process.returncode == code
        assert number.name in err and err.count("\n") == 1


def test_a_later_level_replaces_an_earlier_one() -> None:
    body = """
        import logging
        logger = logging.getLogger("DeepSpeed")
        logger.addHandler(logging.StreamHandler(sys.stdout))
        for level in ("warning", "info", "error", "info", "warning"):
            process.set_up_logging(level)
            logger.info(level)
            logger.warning(level)
    """
    assert outcome(body) == (0, "warning\ninfo\ninfo\ninfo\ninfo\nwarning\n", "")


def test_an_unknown_level_is_attributed_to_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^level: .*'loud'"):
        set_up_logging("loud")
    monkeypatch.setenv("DS_EXT_LOG_LEVEL", "shrill")
    with pytest.raises(ConfigError, match=r"^DS_EXT_LOG_LEVEL: .*'shrill'"):
        set_up_logging()


def test_handlers_of_the_script_stay_active() -> None:
    body = """
        came = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: came.set())
        print('ready')
        while not came.is_set():
            time.sleep(0.05)
        time.sleep(1)
        print('saved')
    """
    with start(body) as process:
        until_ready(process)
        process.terminate()
        out, err = process.communicate(timeout=900)
        assert (process.returncode, out, err) == (0, "saved\n", "")


@pytest.mark.parametrize(
    ("flags", "number", "code"),
    [
        (["--exit-signal-handler"], signal.SIGUSR1, 0),
        (["--save", "folder", "--exit-signal-handler"], signal.SIGTERM, 0),
        (["--exit-signal", "SIGUSR2"], signal.SIGUSR2, 0),
        (["--exit-signal=SIGINT"], signal.SIGINT, 0),
        (["--exit-signal", "SIGUSR2", "--exit-signal-handler"], signal.SIGTERM, -signal.SIGTERM),
        (["--exit-signal-handler", "--dry-run"], signal.SIGTERM, -signal.SIGTERM),
        ([], signal.SIGUSR1, -signal.SIGUSR1),
    ],
)
@pytest.mark.parametrize("in_main", [False, True])
def test_signals_of_the_flags_are_requests_from_the_start(
    flags: list[str], number: signal.Signals, code: int, in_main: bool
) -> None:
    if in_main and code:
        pytest.skip("process.run() has its own handlers")
    early, late = (0, int(number)) if in_main else (int(number), 0)
    text = f"""
import signal
from ds_ext.launch import stop
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests in the background
stop.listen_early({flags})
os.kill(os.getpid(), {early})
def main():
    os.kill(os.getpid(), {late})
    for _ in range(600):
        if stop.listening.cause:
            break
        time.sleep(0.1)
    time.sleep(1)  # the watch thread reads the signal too
    print(stop.listening.cause)
process.run(main)
"""
    result = subprocess.run([sys.executable, "-c", HEAD + text], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout) == (code, "" if code else f"{int(number)}\n")
    assert result.stderr.count(number.name) == (code == 0)


def test_a_signal_of_a_launcher_that_has_lost_a_rank_is_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def taken(gathered: bool, neighbours: dict[int, int], is_orphan: bool = False) -> bool:
        requests = stop.StopRequests()
        requests.signals, requests.gathered = frozenset({signal.SIGTERM}), gathered
        monkeypatch.setattr(process, "_neighbours", lambda launcher: neighbours)
        taken = process._ends_between_steps(requests, {signal.SIGTERM}, is_orphan, Ending())
        assert requests.cause == (signal.SIGTERM if taken else 0)
        return taken

    own = os.getpid()
    assert taken(False, {0: own, 1: own}) and taken(False, {})
    assert not taken(False, {0: own})
    assert not taken(False, {0: own, 1: own}, is_orphan=True)
    assert taken(True, {0: own}) and taken(True, {0: own}, is_orphan=True)


@pytest.mark.parametrize(("restarts", "lines"), [(0, 1), (2, 2)])
def test_the_last_report_has_the_command_that_continues(
    restarts: int, lines: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    monkeypatch.setattr(failure, "advice", lambda: "next: command")
    failure._report_cause("rank 0 stopped")
    assert capfd.readouterr().err.splitlines() == ["rank 0 stopped", "next: command"][:lines]


@pytest.mark.parametrize(
    ("env", "command"),
    [
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}, "torchrun --nproc_per_node 2"),
        (
            {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29511"},
            "torchrun --nproc_per_node 2 --master_port 29511",
        ),
        ({"TORCHELASTIC_RUN_ID": "b6e1", "MASTER_PORT": "29511"}, "torchrun --nproc_per_node 2"),
        (
            {"CROSS_RANK": "0", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "0,1"},
            "deepspeed --num_gpus 2",
        ),
        (
            {"CROSS_RANK": "0", "MASTER_PORT": "29511", "CUDA_VISIBLE_DEVICES": "2,3"},
            "deepspeed --include localhost:2,3 --master_port 29511",
        ),
        ({"MASTER_PORT": "4711", "CUDA_VISIBLE_DEVICES": "1"}, "deepspeed --num_gpus 2"),
    ],
)
def test_the_command_that_starts_a_job_again(
    env: dict[str, str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "CROSS_RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **env}.items():
        monkeypatch.setenv(name, value)
    assert launch_again(["train.py", "--seed", "1"]) == (f"{command} train.py --seed 1", "")


def test_a_background_job_ignores_sigint() -> None:
    body = "print('ready'); time.sleep(1); print('done')"
    with start(body, signal.SIG_IGN) as process:
        until_ready(process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=900)
        assert (process.returncode, out, err) == (0, "done\n", "")


def test_forked_child_has_default_handlers() -> None:
    body = """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 has one for a fork beside threads
        child = os.fork()
        if child == 0:
            signal.pause()
        time.sleep(0.5)
        os.kill(child, signal.SIGTERM)
        print(os.waitpid(child, 0)[1])
        time.sleep(1)
    """
    assert outcome(body) == (0, f"{signal.SIGTERM.value}\n", "")


def test_rank_exits_with_its_parent() -> None:
    rank = script("print('ready', flush=True); time.sleep(600)")
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        until_ready(process)
        time.sleep(0.5)
        process.kill()
        # The rank holds the pipe open until it exits.
        process.communicate(timeout=120)


def test_an_error_reported_by_rank_0_is_not_repeated() -> None:
    body = "print('ready'); raise ConfigError('of all ranks')"
    with start(body, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1") as process:
        until_ready(process)
        time.sleep(0.5)
        process.terminate()
        _, err = process.communicate(timeout=900)
        assert (process.returncode, err) == (2, "")


def test_a_rank_that_has_not_joined_leaves_the_cause_to_others() -> None:
    """The launcher ends it because another rank exited, which has reported its error."""
    body = """
        find = process._neighbours

        def neighbours(*launcher):
            found = find(*launcher)
            if 0 in found:
                print('found', flush=True)
            return found

        process._neighbours = neighbours
        while True:
            signal.pause()
    """
    place = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    rank_0 = subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=os.environ | place | {"RANK": "0"})
    with start(body, RANK="1", LOCAL_RANK="1", **place) as process:
        assert until_ready(process) == "found\n"
        rank_0.communicate()
        process.terminate()
        _, err = process.communicate(timeout=900)
        assert (process.returncode, err) == (143, "")


def test_errors_of_lost_peers() -> None:
    assert lost_peer(TransportError("rank 0: recv from rank 1: no progress", peer=1))
    assert not lost_peer(TransportError("rank 0: two ranks use the channel in different orders"))
    assert not lost_peer(ConnectionError("Connection reset by peer"))
    assert not lost_peer(RuntimeError("the connection of layers 1 and 2 timed out"))
    assert not lost_peer(KeyError("peer"))


def test_errors_of_ds_ext_have_no_traceback() -> None:
    error = TransportError("rank 0: no room\nsecond line")
    error.add_note("in F0@1")
    assert _headline(error) == "TransportError: rank 0: no room"
    of_gloo = RuntimeError(
        "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:5544. GLHF! \N{BEACH WITH UMBRELLA}"
    )
    assert _headline(of_gloo) == "RuntimeError: Connection closed by peer [::1]:5544"
    assert _text(error) == "TransportError: rank 0: no room\nsecond line\nin F0@1"
    try:
        raise ValueError("of a user's layer")
    except ValueError as caught:
        assert "Traceback" in _text(caught)
    assert "Traceback" not in _text(ConfigError("x"))
