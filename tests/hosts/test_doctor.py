"""`python -m ds_ext doctor` over several hosts: every pair, and every defect with its remedy."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hosts.cluster import Cluster, address
from tests.hosts.delay_line import Link
from tests.hosts.network import inside
from tests.launch.jobs import ROOT, environment

Start = Callable[..., Cluster]
LIMIT_S = 60


def doctor(hosts: Cluster, *words: str, cwd: Path = ROOT) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the report of a run on host 0."""
    command = [sys.executable, "-m", "ds_ext", "doctor", "--json", *words]
    done = hosts[0].run(command, cwd, environment(), timeout_s=LIMIT_S)
    assert done.stderr == "", done.stderr
    report = json.loads(done.stdout)
    findings = [finding for found in [*report["hosts"].values(), report["job"]] for finding in found]
    assert all(bool(finding["remedy"]) == (finding["state"] != "ok") for finding in findings)
    return done.returncode, report


def states(findings: list[dict[str, str]]) -> dict[str, str]:
    return {finding["subject"]: finding["state"] for finding in findings}


def bad(findings: list[dict[str, str]]) -> dict[str, str]:
    return {subject: state for subject, state in states(findings).items() if state != "ok"}


def test_hosts_without_defects(hosts: Start, tmp_path: Path) -> None:
    three = hosts(3, networks=2)
    three.slow(Link(delay_ms=10, rate_mbit=200))
    file = three.hostfile(tmp_path / "hostfile", 2, 1, 1)
    fast = [address(host, 1) for host in range(3)]
    code, report = doctor(
        three, "--hostfile", str(file), "--path", str(tmp_path), "--node-ips", ",".join(fast)
    )
    assert code == 0, report
    assert list(report["hosts"]) == ["node0", "node1", "node2"]
    assert {name: bad(found) for name, found in report["hosts"].items()} == {
        name: {} for name in report["hosts"]
    }
    found = states(report["job"])
    assert found == dict.fromkeys(
        ["versions", "clocks", f"path {ROOT}", f"path {tmp_path}", "rendezvous", "ports"], "ok"
    )
    assert [(pair["source"], pair["target"]) for pair in report["pairs"]] == [
        (f"node{a}", f"node{b}") for a in range(3) for b in range(3) if a != b
    ]
    for pair in report["pairs"]:
        assert pair["error"] == "" and pair["address"] == fast[int(pair["target"][-1])]
        assert pair["rdma"] == "" and pair["rdma_gbit_s"] is None
        if pair["source"] < pair["target"]:
            # No faster than the link; a busy machine may be slower.
            assert 20_000 < pair["round_trip_us"] < 2_000_000
            assert 0 < pair["tcp_gbit_s"] < 0.22
    assert list(tmp_path.iterdir()) == [file]
    deadline = time.monotonic() + 10
    while any(host.processes() for host in three.hosts) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [host.processes() for host in three.hosts] == [{}, {}, {}]


def test_defects_are_found(hosts: Start, tmp_path: Path) -> None:
    three = hosts(3, networks=2)
    (tmp_path / "shared").mkdir()
    (tmp_path / "own").mkdir()
    script = f"""
        echo '127.0.1.1 node1' > /run/hosts && mount --bind /run/hosts /etc/hosts
        mkdir /run/own && mount --bind /run/own {tmp_path}/own
    """
    for host, words in ((1, script), (2, f"ip route add prohibit {address(1)}/32")):
        assert three[host].run(["sh", "-ec", words]).returncode == 0
    with inside(three[0].network_file), socket.create_server((address(0), 29777)):
        paths = [word for name in ("shared", "own", "none") for word in ("--path", str(tmp_path / name))]
        names = "node0,node1,node2,nosuch"
        code, report = doctor(three, "--hosts", names, "--master-port", "29777", *paths)
    assert code == 1
    assert {name: bad(found) for name, found in report["hosts"].items()} == {
        "node0": {},
        "node1": {"own name": "fail", "names": "warn"},
        "node2": {},
        "nosuch": {"host": "fail"},
    }
    assert bad(report["job"]) == {
        "rendezvous": "warn",
        f"path {tmp_path}/own": "warn",
        f"path {tmp_path}/none": "fail",
    }
    broken = {(pair["source"], pair["target"]) for pair in report["pairs"] if pair["error"]}
    assert broken == {("node1", "node2"), ("node2", "node1")}


def test_hosts_that_do_not_answer(hosts: Start, tmp_path: Path) -> None:
    three = hosts(3)
    three.cut(2)
    assert three[1].run(["sh", "-ec", f"mkdir /run/own && mount --bind /run/own {tmp_path}"]).returncode == 0
    (tmp_path / "here").mkdir()
    code, report = doctor(three, "--hosts", "node0,node1,node2", cwd=tmp_path / "here")
    assert code == 1
    assert {name: bad(found) for name, found in report["hosts"].items()} == {
        "node0": {},
        "node1": {"host": "fail"},  # without the working directory
        "node2": {"host": "fail"},
    }
    assert report["pairs"] == []
