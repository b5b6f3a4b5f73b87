"""Flags of ``show``, ``simulate`` and ``plan`` for hosts and the links between them."""

from __future__ import annotations

import argparse
import re

from ..errors import ScheduleError
from ..parallel.hosts import parse_hosts
from ..parallel.network import GLOO, HOST_PORTS, NCCL, RANK_PORTS, Link, Network
from ..planner.parallel_sizes import default_hosts
from ..planner.text import format_bytes, parse_bytes

_INSIDE, _BETWEEN = "300GB,2us", "25GB,10us"
TFLOPS = 150.0
RATE = (
    f"10^12 operations per second of a device in its ops, without bubbles and communication ({TFLOPS:g}). Rates that "
    "others report count both: they are lower"
)
_ONLY_WITH_HOSTS = ("inside", "between", "ports", "collectives", "rank_order", "tflops", "memory_bandwidth")
_TFLOPS_RANGE = 1e-3, 1e6
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def add_network_flags(verb: argparse.ArgumentParser, *, for_plan: bool = False) -> None:
    """Add the flags; with ``for_plan`` without the rank order, which ``plan`` chooses, and its own flag of the rate."""
    group = verb.add_argument_group("hosts, for the step time with reductions")
    hosts = "hosts x ranks per host; or slots, such as 8,8,4; or a hostfile"
    default = " (8 devices per host)" if for_plan else ""
    group.add_argument("--hosts", metavar="4x8", help=f"{hosts}{default}")
    link = "bytes per second and latency of a link"
    group.add_argument("--inside", metavar=_INSIDE, help=f"{link} inside a host ({_INSIDE})")
    group.add_argument("--between", metavar=_BETWEEN, help=f"{link} between hosts ({_BETWEEN})")
    ports = "network ports: one per rank, or one per host, shared by its ranks (rank)"
    group.add_argument("--ports", choices=[RANK_PORTS, HOST_PORTS], help=ports)
    memory = "bytes per second of a device's memory; then --tflops is the rate of matrix products alone"
    group.add_argument("--memory-bandwidth", metavar="1.6TB", help=memory)
    text = "algorithms of the collectives (nccl)" + ("; gloo: the devices are CPUs" if for_plan else "")
    group.add_argument("--collectives", choices=[NCCL, GLOO], help=text)
    if not for_plan:
        group.add_argument("--tflops", type=float, metavar="T", help=RATE)
        group.add_argument(
            "--rank-order", metavar="tp-dp-pp", help="same as a job's rank_order key (tp-dp-pp)"
        )


def network_of(args: argparse.Namespace, devices: int = 0) -> Network | None:
    """Return the network of the flags. Without ``--hosts``: hosts of 8 for ``devices``; None for 0 devices."""
    if args.hosts is None and not devices:
        _refuse_flags_without_hosts(args)
        return None
    inside = _parse_link("--inside", _INSIDE if args.inside is None else args.inside)
    between = _parse_link("--between", _BETWEEN if args.between is None else args.between)
    hosts = default_hosts(devices) if args.hosts is None else parse_hosts(args.hosts)
    memory = args.memory_bandwidth and parse_bytes(args.memory_bandwidth, "--memory-bandwidth", "1.6TB")
    return Network(hosts, inside, between, args.ports or RANK_PORTS, args.collectives or NCCL, memory)


def _refuse_flags_without_hosts(args: argparse.Namespace) -> None:
    for dest in _ONLY_WITH_HOSTS:
        if (value := getattr(args, dest)) is not None:
            flag = "--" + dest.replace("_", "-")
            raise ScheduleError(f"{flag}: needs --hosts (got {value!r} without hosts). Add --hosts 4x8.")


def flops_of(args: argparse.Namespace) -> float:
    rate = TFLOPS if args.tflops is None else args.tflops
    least, most = _TFLOPS_RANGE
    if not least <= rate <= most:
        raise ScheduleError(f"--tflops: must be from {least:g} to {most:,.0f} (got {rate:g}).")
    return 1e12 * rate


def describe_network(network: Network) -> list[str]:
    port = "port per rank" if network.ports == RANK_PORTS else "port per host"
    inside, between = (
        f"{format_bytes(link.bandwidth)}/s, {1e6 * link.latency:g} us"
        for link in (network.inside, network.between)
    )
    return [f"{network.hosts}", f"inside {inside}; between {between}, one {port}; {network.backend}"]


def _parse_link(flag: str, text: str) -> Link:
    rate, _, latency = text.partition(",")
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(ns|us|ms|s)\s*", latency)
    if match is None:
        raise ScheduleError(
            f"{flag}: must be bytes per second and a latency (got {text!r}). Example: {_BETWEEN}, where "
            "25GB is 200 Gbit/s."
        )
    return Link(parse_bytes(rate, flag, "300GB,2us or 25GB,10us"), float(match[1]) * _SECONDS[match[2]])
