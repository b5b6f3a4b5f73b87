"""``python -m ds_ext doctor``: findings on this host and on hosts with a defect."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from ds_ext.__main__ import main
from ds_ext.cli import doctor
from ds_ext.comm.rdma import devices as rdma_devices

SUBJECTS = {"cores", "native code", "shared memory", "/dev/shm", "locked memory", "addresses", "RDMA", "CUDA"}


def test_every_warning_has_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {finding["subject"] for finding in findings} >= SUBJECTS
    for finding in findings:
        assert finding["state"] in ("ok", "warn") and finding["found"]
        assert bool(finding["remedy"]) == (finding["state"] == "warn"), finding
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if re.match(r"(ok  |warn)  \S", line)]) == len(findings)
    assert len([line for line in lines if " -> " in line]) == sum(f["state"] == "warn" for f in findings)


def test_addresses_are_those_of_the_interfaces() -> None:
    found = doctor.addresses()
    assert ("lo", "127.0.0.1") in [(name, str(address)) for name, address in found]
    assert {name for name, _ in found} <= set(os.listdir("/sys/class/net"))


def of(subject: str) -> doctor.Finding:
    return next(finding for finding in doctor.examine() if finding.subject == subject)


def test_a_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    space = namedtuple("space", "f_blocks f_frsize f_bavail")
    monkeypatch.setattr(os, "statvfs", lambda _: space(16384, 4096, 100))
    finding = of("/dev/shm")
    assert (finding.state, finding.found) == ("warn", "64 MiB, 0 MiB free")
    assert "--shm-size" in finding.remedy


def test_memfd_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    finding = of("shared memory")
    assert (
        finding.state == "warn" and "Operation not permitted" in finding.found and "seccomp" in finding.remedy
    )


def test_an_rdma_port_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    port = rdma_devices.DevicePort("mlx5_0", 1, "DOWN", rdma_devices.ETHERNET, 0, ())
    monkeypatch.setattr(rdma_devices, "device_ports", lambda: [port])
    monkeypatch.setattr(rdma_devices, "lockable_bytes", lambda: 8.0 * (1 << 20))
    finding = of("mlx5_0 port 1")
    assert finding.state == "warn" and "DOWN" in finding.found and "cable" in finding.remedy
    assert all(word in of("RDMA").found for word in ("mlx5_0 port 1", "DOWN"))
    assert of("locked memory").state == "warn" and "ulimit -l unlimited" in of("locked memory").remedy


def test_stale_files_of_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed_allreduce_buffer_0_127.0.0.1_29500_0").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(doctor, "SHARED_FILES", tmp_path)
    finding = of("stale files")
    assert finding.state == "warn" and re.findall(r"\d+", finding.found) == ["1", "3"]


def test_doctor_works_without_native_code(tmp_path: Path) -> None:
    """Sources before a build, without compiled files."""
    for file in Path(doctor.__file__).parents[1].rglob("*.py"):
        copy = tmp_path / "ds_ext" / file.relative_to(Path(doctor.__file__).parents[1])
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "ds_ext", "doctor"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^warn  native code .*\n .*-> build it: `pip install -e", done.stdout, re.MULTILINE), (
        done.stdout
    )
