"""An error of one rank's disk that ends all ranks is reported once, by that rank."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.launch.jobs import LAUNCHERS, Job, command
from tests.selection import extensive

SCRIPT = str(Path(__file__).with_name("disk.py"))
MOUNT = "mount -t tmpfs -o size=16k none {0} && head -c 12k /dev/zero > {0}/fill"


@extensive
@pytest.mark.parametrize(("launcher", "what"), product(LAUNCHERS, ["save", "trace"]))
def test_full_disk_is_reported_once(
    tmp_path: Path, free_port: Callable[[], int], launcher: str, what: str
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = MOUNT.format(folder)
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces")
    started = " ".join(command(launcher, 4, free_port(), SCRIPT, what, str(folder)))
    with Job(["unshare", "--mount", "sh", "-c", f"{mount} && exec {started}"], tmp_path) as job:
        job.seconds_until_gone(240)
        assert job.wait(5) != 0
        ours = job.lines[
            : job.first("Killing subprocess", "closing signal", "failed (exitcode", "exits with return")
        ]
        reports = [line for line in ours if "No space left on device" in line]
        assert len(reports) == 1, job.text
        assert not re.search(
            r"^rank \d failed too|^rank \d stopped|^Traceback", "\n".join(ours), re.MULTILINE
        )
        reporting = re.findall(r"^rank (\d)(?: failed\.|: error:)|^(error):", "\n".join(ours), re.MULTILINE)
        named = re.search(r"rank (\d)", reports[0])
        assert len(reporting) == 1, job.text
        rank = "0" if reporting[0][1] else reporting[0][0]
        assert named is not None and named[1] == rank, reports
