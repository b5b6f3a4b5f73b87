"""Hosts in the plan of a job: which groups cross hosts, and the rank order that sends fewer bytes between them."""

from __future__ import annotations

import argparse

from ...environment import local_world_size, num_hosts, world_size
from ...errors import ConfigError
from ...parallel.crossing import Crossing, GroupTraffic, Traffic, ranked_orders, traffic_between_hosts
from ...parallel.fbd import DisaggregatedLayout, place_by_hosts
from ...parallel.hosts import Hosts, parse_hosts
from ...parallel.layout import ParallelLayout
from ...planner.text import aligned, format_bytes

_COLUMNS = ("group", "size", "groups", "cross hosts", "bytes between hosts")
_SHARE = 0.99  # of the bytes of the current rank order: a better order sends fewer


def hosts_of_flags(args: argparse.Namespace) -> Hosts | None:
    """Return the hosts of a dry run: those of --hosts, or else of the launcher; None: one host, or no launcher.

    A dry run has no other ranks, so the launcher's hosts are assumed to be equal.
    """
    world = world_size()
    if args.hosts is not None:
        hosts = parse_hosts(args.hosts)
        if not args.dry_run:
            raise ConfigError(
                f"--hosts: needs --dry-run, because a run has the hosts of its launcher (got {args.hosts}). Remove one."
            )
        if world > 1 and hosts.world_size != world:
            raise ConfigError(
                f"--hosts: must have the {world} slots of the launcher's ranks (got {args.hosts}, {hosts.world_size} "
                "slots). Change the hosts, or start the dry run without a launcher."
            )
        return hosts
    local, count = local_world_size(), num_hosts()
    return Hosts((local,) * count) if count > 1 and local * count == world else None


def layout_on(layout: ParallelLayout, hosts: Hosts, forward_hosts: list[str] | None) -> ParallelLayout:
    """Return the layout with the forward ranks of `fbd` on their hosts. Raises ConfigError if they do not fit."""
    if forward_hosts is None or not isinstance(layout, DisaggregatedLayout):
        return layout
    names = [hosts.names[hosts.host(rank)] for rank in range(hosts.world_size)]
    return place_by_hosts(layout, names, forward_hosts)


def describe_hosts(
    layout: ParallelLayout, hosts: Hosts | None, traffic: Traffic, micro_batches: int, verbose: bool
) -> list[str]:
    """Return the bytes between hosts, the groups that cross hosts, and a better rank order; empty for one host.

    ``micro_batches`` is N per pipeline group. ``verbose`` adds the table of the groups.
    """
    if hosts is None or len(hosts.slots) == 1:
        return []
    here = traffic_between_hosts(layout, hosts, traffic, micro_batches)
    rows = [_row(kind, here) for kind in here.kinds]
    total = ("total", "", "", "", f"{format_bytes(here.bytes)} per step")
    sent = "" if verbose else f"; {format_bytes(here.bytes)} between hosts per step"
    lines = [f"hosts     {hosts}, ranks numbered {layout.rank_order} (innermost first){sent}"]
    if verbose:
        lines += [f"  {line}" for line in aligned([_COLUMNS, *rows, total], left=(0,))]
    tensor = here.kind("tensor")
    if tensor is not None and tensor.crossing:
        lines.append(
            f"warning: tensor_parallel_size: {tensor.crossing} of {tensor.groups} tensor-parallel groups cross hosts "
            f"(got {tensor.size} with slots {hosts}). Use hosts whose slots are multiples of {tensor.size}."
        )
    best = ranked_orders(layout, hosts, traffic, micro_batches)[0]
    if best.bytes < _SHARE * here.bytes:
        lines.append(
            f'note: ds_ext.rank_order: "{best.rank_order}" sends {format_bytes(best.bytes)} between hosts per step, '
            f'"{layout.rank_order}" {format_bytes(here.bytes)}; '
            "fewer bytes may take more time, which `plan` compares"
        )
    return lines


def _row(kind: GroupTraffic, here: Crossing) -> tuple[str, ...]:
    """Return the cells of a kind of group. Mirror and data groups that average together share their bytes."""
    shared = kind.name in ("mirror", "data") and here.kind("gradients") is not None
    size = "" if shared else format_bytes(kind.bytes)
    return kind.name, str(kind.size), str(kind.groups), str(kind.crossing), size
