"""Cluster on one machine: `python -m tests.hosts 3` opens a shell on node0; `-- command` runs a command there.

Needs root, openssh-server, pdsh and iproute2. `ssh node1` works from every host; see tests/hosts/cluster.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from tests.hosts.cluster import address, cluster
from tests.hosts.delay_line import Link
from tests.hosts.network import NoHosts


def main() -> int:
    """Return the exit code of the shell or command."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("hosts", type=int, help="number of hosts")
    parser.add_argument("--networks", type=int, default=1, help="networks that join all hosts (default 1)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="delay of every packet (default 0)")
    parser.add_argument("--rate-mbit", type=float, default=0.0, help="megabits per second of every link")
    parser.add_argument(
        "--loss", type=float, default=0.0, help="fraction of packets that are lost (default 0)"
    )
    parser.add_argument("command", nargs="*", help="command to run on node0, after --; without it: a shell")
    args = parser.parse_args()
    binaries = str(Path(sys.executable).parent)
    env = {"PATH": f"{binaries}:{os.environ['PATH']}", "PS1": r"root@\h:\w# "}
    try:
        with cluster(args.hosts, args.networks) as hosts:
            hosts.slow(Link(args.delay_ms, args.rate_mbit, args.loss))
            if not args.command:
                names = ", ".join(f"{host.name} {address(host.number)}" for host in hosts.hosts)
                print(f"Hosts: {names}. They end with this shell.", flush=True)
            # Ctrl-C is for the shell.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            words = args.command or ["bash", "--norc"]
            reset = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
            return hosts[0].start(words, os.getcwd(), env, preexec_fn=reset).wait()
    except NoHosts as error:
        print(f"error: hosts: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
