"""Requests to stop in a process with two engines: a subprocess, because they change its signals and streams."""

from __future__ import annotations

import subprocess
import sys

from tests.launch.jobs import environment

CODE = """if True:
    import os, signal
    from ds_ext.launch.stop import CALL, StopRequests

    one, two, silent = StopRequests(), StopRequests(), StopRequests()
    for _ in range(2000):
        one.listen()
        two.listen()
    called = StopRequests()
    called.listen()
    called.request(CALL)
    print(one.cause, two.cause, called.cause, flush=True)
    if os.fork() == 0:
        print("child", flush=True)
        os._exit(0)
    os.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    print(one.cause, two.cause, called.cause, silent.cause, flush=True)
"""


def test_a_signal_reaches_every_engine_of_a_process() -> None:
    words = [sys.executable, "-c", CODE]
    result = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == ["0 0 102", "child", "15 15 102 0"]
