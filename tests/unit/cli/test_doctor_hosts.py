"""Parts of ``doctor --hostfile`` that need no other hosts: agents, probes, flags."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from ds_ext.__main__ import main
from ds_ext.cli.hosts import probe, ssh
from ds_ext.cli.hosts.pairs import round_robin
from ds_ext.errors import DsExtError

LOCAL = ["sh", "-c", 'eval "$1"']  # in place of ssh: the name of the host, and the command


@pytest.fixture
def agent() -> Iterator[ssh.RemoteAgent]:
    started = ssh.RemoteAgent("here", LOCAL, ssh.agent_command())
    started.start()
    yield started
    started.close()


@pytest.mark.parametrize("port", [None, 2222])
def test_a_name_from_a_hostfile_is_no_option(tmp_path: Path, port: int | None) -> None:
    """ssh itself reads the name: with -o, it would run a command here."""
    ran = tmp_path / "ran"
    words = [*ssh.ssh_words(port), f"-oProxyCommand=touch {ran}", "true"]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 255
    assert words[-3] == "--" and not ran.exists()


def test_requests_and_answers(agent: ssh.RemoteAgent, tmp_path: Path) -> None:
    token = probe.new_token()
    port = agent.ask("listen", address="127.0.0.1", port=0, token=token)
    agent.ask("reach", address="127.0.0.1", port=port, token=token)
    speed = agent.ask("measure", address="127.0.0.1", port=port, token=token)
    assert speed["round_trip_us"] > 0 and speed["gbit_s"] > 0
    with pytest.raises(DsExtError):  # another token
        agent.ask("reach", address="127.0.0.1", port=port, token=probe.new_token())
    with pytest.raises(DsExtError):
        agent.ask("listen", address="203.0.113.9", port=0, token=token)
    agent.ask("create", name=str(tmp_path / "file"))
    assert agent.ask("exists", path=str(tmp_path / "file")) is True
    agent.ask("remove", path=str(tmp_path / "file"))
    assert agent.ask("exists", path=str(tmp_path / "file")) is False
    with pytest.raises(DsExtError):
        agent.ask("remove", path=str(tmp_path / "file"))
    assert abs(agent.ask("clock") - time.time()) < 60
    assert agent.ask("path", name=str(tmp_path))["is"] == "folder"
    assert agent.ask("resolve", names=["localhost", "no such host"])["no such host"] == []
    agent.close()
    with pytest.raises(ssh.HostError):
        agent.ask("clock")


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("echo 'ssh: Could not resolve hostname here' >&2; exit 255", "hostfile"),
        ("echo 'Host key verification failed.' >&2; exit 255", "ssh-keyscan here"),
        ("echo 'root@here: Permission denied (publickey).' >&2; exit 255", "ssh-copy-id here"),
        ("exit 97", "same path"),
        ("/no/python -m ds_ext", sys.executable),
        (f"{sys.executable} -m no_such_module", "install ds_ext"),
        ("echo a banner; exit 3", "doctor"),
    ],
)
def test_failed_starts_have_a_remedy(command: str, part: str) -> None:
    failing = ssh.RemoteAgent("here", LOCAL, command)
    with pytest.raises(ssh.HostError) as caught:
        failing.start()
    failing.close()
    assert part in caught.value.remedy


def test_agent_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_START_S", 0.2)
    hanging = ssh.RemoteAgent("here", LOCAL, "exec sleep 60")
    with pytest.raises(ssh.HostError):
        hanging.start()
    hanging.close()


def test_exported_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth1\nEMPTY=\n\n")
    environ = {"PYTHONPATH": "/a", "NCCL_DEBUG": "INFO", "SECRET": "x", "GLOO_SOCKET_IFNAME": "eth0"}
    expected = {"PYTHONPATH": "/a", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth1", "EMPTY": ""}
    assert ssh.exported(environ) == expected


@pytest.mark.parametrize("count", range(8))
def test_rounds_contain_every_pair_once(count: int) -> None:
    found = list(round_robin(list(range(count))))
    assert sorted(tuple(sorted(pair)) for turn in found for pair in turn) == list(
        combinations(range(count), 2)
    )
    for turn in found:
        assert max(Counter(item for pair in turn for item in pair).values(), default=0) <= 1


@pytest.mark.parametrize(
    "words",
    [
        ["--hostfile", "none"],
        ["--hosts", "a,a"],
        ["--hosts", "a,,b"],
        ["--hosts", "a,b", "--node-ips", "10.0.0.1"],
        ["--hosts", "a,b", "--node-ips", "10.0.0.1,1.2.3"],
        ["--hosts", "a,b", "--ssh-port", "0"],
        ["--hosts", "a,b", "--master-port", "99999"],
        ["--hosts", "2x4"],
        ["--hosts", "4,4"],
        ["--master-port", "29500"],
        ["--node-ips", "10.0.0.1"],
        ["--path", "."],
    ],
)
def test_wrong_flags(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *words]) == 2
