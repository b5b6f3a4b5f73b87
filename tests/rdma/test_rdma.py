"""RDMA over software RoCE: between two processes in one emulated guest, and between two guests (`make test-rdma`).

The scenarios are in scenarios.py, faults.py and training.py. All tests are skipped if no guest can be built or started.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests.rdma.table import ONE_GUEST, TWO_GUESTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GUEST = HERE / "guest.sh"
CACHE = Path(
    os.environ.get("DS_EXT_GUEST_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_ext/rdma_guest"
)
LIMIT_S = int(os.environ.get("DS_EXT_GUEST_LIMIT_S", "240"))  # an idle host needs a quarter
TRAINING_LIMIT_S, TRAINING_MB = 2 * LIMIT_S, 3072

TRAINED = "trained"

pytestmark = pytest.mark.skipif(
    os.environ.get("DS_EXT_TEST_RDMA") != "1",
    reason="starts emulated guests for over a minute: `make test-rdma`",
)


@functools.cache
def missing() -> str | None:
    """Build the guest if necessary. Returns why this is not possible, else None."""
    done = subprocess.run([GUEST, "build"], capture_output=True, text=True, timeout=500)
    assert done.returncode in (0, 3), done.stderr
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def guest() -> None:
    """Skip the test if no guest can be built."""
    if reason := missing():
        pytest.skip(reason)


def boot(role: str, *machine: str) -> subprocess.Popen[str]:
    """Start a guest that runs the scenarios of a role: one, 0, 1 or train."""
    variables = {"role": role, "python": sys.executable, "root": str(ROOT)}
    for name in ("SCENARIOS", "SCENARIO_LIMIT_S"):
        if name in os.environ:
            variables[name] = os.environ[name]
    env = {**os.environ, "DS_EXT_GUEST_LIMIT_S": str(LIMIT_S)}
    if role == "train":
        env |= {"DS_EXT_GUEST_LIMIT_S": str(TRAINING_LIMIT_S), "DS_EXT_GUEST_MB": str(TRAINING_MB)}
    env["DS_EXT_GUEST_ENV"] = " ".join(f"{name}={value}" for name, value in variables.items())
    return subprocess.Popen(
        [GUEST, "run", HERE / "in_guest.sh", *machine],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


@functools.cache
def outputs() -> dict[str, str]:
    """Return role -> output of the guest. All guests with selected scenarios run at the same time."""
    guest()
    with tempfile.TemporaryDirectory() as folder:
        cable = f"addr.type=unix,addr.path={folder}/cable"
        chosen = os.environ.get("SCENARIOS", TRAINED).split(",")
        started = {"train": boot("train")} if TRAINED in chosen else {}
        if "SCENARIOS" in os.environ and chosen == [TRAINED]:
            return {"train": started["train"].communicate()[0]}
        started["one"] = boot("one")
        for role, serves in (("0", "on"), ("1", "off")):
            card = f"virtio-net-pci,netdev=n0,mac=52:54:00:00:01:0{role},host_mtu=9000,romfile="
            network = f"stream,id=n0,server={serves},{cable}"
            started[role] = boot(role, "-netdev", network, "-device", card)
            if serves == "on":
                _await(Path(folder) / "cable")
        return {role: process.communicate()[0] for role, process in started.items()}


def _await(path: Path) -> None:
    """Wait for the first guest's socket, to which the second one connects."""
    subprocess.run(
        ["sh", "-c", f'for i in $(seq 300); do [ -S "{path}" ] && exit; sleep 0.1; done'], check=True
    )


def check(role: str, name: str) -> None:
    """Check that a scenario has passed in a guest; skip it if it was not selected."""
    chosen = os.environ.get("SCENARIOS")
    if chosen and name not in chosen.split(","):
        pytest.skip(f"not in SCENARIOS={chosen}")
    text = outputs()[role]
    if "GUEST STARTED" not in text:
        pytest.skip(f"the guest does not start; its output: {text.strip()[-200:] or 'none'}")
    found = re.search(rf"^SCENARIO {name} (\w+).*$", text, re.MULTILINE)
    assert found is not None and found[1] == "passed", f"guest {role}:\n{text[-6000:]}"
    print(found[0])


@pytest.mark.parametrize("name", [each.__name__ for each in ONE_GUEST])
def test_in_one_guest(name: str) -> None:
    check("one", name)


@pytest.mark.parametrize("name", [each.__name__ for each in TWO_GUESTS])
def test_between_two_guests(name: str) -> None:
    check("0", name)
    check("1", name)


def test_training_in_one_guest() -> None:
    check("train", TRAINED)


def test_declarations_match_the_header() -> None:
    """verbs.hpp is written by hand, so that the build needs no header. Compare it with the one of rdma-core."""
    guest()
    compiler = shutil.which("g++") or sysconfig.get_config_var("CXX")
    include = [f"-I{CACHE}/userland/usr/include", f"-I{ROOT}/kernels/transport"]
    command = [
        compiler,
        "-std=c++17",
        "-fsyntax-only",
        "-Wno-invalid-offsetof",
        *include,
        HERE / "abi_check.cpp",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
