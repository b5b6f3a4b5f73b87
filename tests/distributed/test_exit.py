"""A process with collectives still running on torch's threads exits without aborting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.selection import extensive

SCRIPT = """
import sys, torch, torch.distributed as dist
from ds_ext.comm.groups import wait_for_threads_at_exit
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
wait_for_threads_at_exit()
for _ in range(2000):
    dist.all_reduce(torch.ones(1 << 12), async_op=True)
"""


@extensive
def test_threads_of_collectives_end_first(tmp_path: Path) -> None:
    for number in range(3):  # without the wait, more than half of the runs abort
        done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / f"store{number}")], timeout=60)
        assert done.returncode == 0
