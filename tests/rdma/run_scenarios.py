"""Run scenarios in the guest: `one` forks both ranks; `two NUMBER` forks one rank, and another guest has the other.

Prints a line per scenario, which test_rdma.py parses.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - needed after setuid, when it cannot be found
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.rdma.peer import Context, Line, Pool
from tests.rdma.table import ONE_GUEST, TWO_GUESTS

HERE = "10.8.0.1"
BETWEEN = ("10.9.0.1", "10.9.0.2")
MEETING_PORT = 4747
MOST_S = int(os.environ.get("SCENARIO_LIMIT_S", "60"))


def main() -> int:
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    pool = Pool()
    wanted = os.environ.get("SCENARIOS")
    table = ONE_GUEST if sys.argv[1] == "one" else TWO_GUESTS
    chosen = [each for each in table if not wanted or each.__name__ in wanted.split(",")]
    failed = 0
    print(flush=True)  # the firmware leaves the console in the middle of a line
    for scenario in chosen:
        began = time.monotonic()
        if sys.argv[1] == "one":
            lines = socket.socketpair()
            children = [
                _start(scenario, Context(rank, Line(lines[rank]), [HERE, HERE], pool)) for rank in (0, 1)
            ]
            for line in lines:
                line.close()
        else:
            rank = int(sys.argv[2])
            line = Line(_other_guest(rank))
            children = [_start(scenario, Context(rank, line, BETWEEN, pool))]
            line.connection.close()
        fine = {0, -signal.SIGKILL} if "killed" in scenario.__name__ else {0}
        ends = [_end(child) for child in children]
        word = "passed" if set(ends) <= fine and 0 in ends + [0] * (len(ends) == 1) else f"FAILED {ends}"
        failed += word != "passed"
        print(f"SCENARIO {scenario.__name__} {word} {time.monotonic() - began:.1f} s", flush=True)
    return 1 if failed else 0


def _start(scenario: Callable[[Context], object], context: Context) -> int:
    child = os.fork()
    if child:
        return child
    signal.alarm(MOST_S)
    status = 1
    try:
        scenario(context)
        status = 0
    except BaseException:
        text = traceback.format_exc()
        print("".join(f"rank {context.rank}| {line}\n" for line in text.splitlines()), flush=True, end="")
    os._exit(status)


def _end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _other_guest(rank: int) -> socket.socket:
    deadline = time.monotonic() + 60
    if rank == 0:
        with socket.create_server((BETWEEN[0], MEETING_PORT)) as listener:
            listener.settimeout(60)
            return listener.accept()[0]
    while True:
        try:
            return socket.create_connection((BETWEEN[0], MEETING_PORT), 5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
