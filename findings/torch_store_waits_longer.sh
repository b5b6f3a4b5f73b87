#!/usr/bin/env bash
# torch 2.13.0: a client of torch.distributed.TCPStore waits longer than its time limit for a server, by up to twice the limit
# and more. After the limit it pauses for a random time and tries again, with a C++ stack in the log for each attempt. The
# exception names the limit as the time that it waited. So a rank whose rank 0 never starts ends long after its limit.
#
# Output seen (seconds until the exception; no server listens at the port; other pauses give other times):
#   limit 3 s: DistNetworkError after 5.9, 6.8, 4.9 s, and the exception says 3000ms
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 numpy
cat > "$folder/run.py" <<'PYTHON'
import re
import socket
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, TCPStore

LIMIT_S, RUNS = 3, 3


def wait():
    """Return the seconds until a client gives up, and the milliseconds that its exception names."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    begin = time.monotonic()
    try:
        TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=LIMIT_S), wait_for_workers=False)
    except DistNetworkError as error:
        return time.monotonic() - begin, int(re.findall(r"(\d+)ms", str(error))[0])


seconds, named = zip(*(wait() for _ in range(RUNS)))
times = ", ".join(f"{s:.1f}" for s in seconds)
print(f"limit {LIMIT_S} s: DistNetworkError after {times} s, and the exception says {named[0]}ms")
assert min(seconds) > LIMIT_S and max(seconds) > 1.2 * LIMIT_S and set(named) == {1000 * LIMIT_S}, (seconds, named)
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2> "$folder/log" || (cat "$folder/log"; false)
