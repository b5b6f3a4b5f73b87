"""Step times over slowed links, predicted and measured: `python -m tests.hosts.step_times`. Needs root; see cluster.py.

Eight ranks on 2 or 4 hosts train with the real engine, transport and reductions. Their layers wait instead of computing
(benchmarks.emulated), so two cores suffice. An op is long compared with the engine's own work, which is not modeled:
about 1 ms per op for eight ranks on two cores. The delay of a link is half of a round trip of one byte, measured before
the steps. Nothing is fitted to the step times.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ds_ext.parallel.crossing import Traffic
from ds_ext.parallel.hosts import Hosts
from ds_ext.parallel.layout import ParallelLayout
from ds_ext.parallel.network import GLOO, HOST_PORTS, Link, Network
from ds_ext.parallel.rank_order import parse_rank_order
from ds_ext.pipe_schedules import Timetable, get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.reductions import eager_reductions
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.step_time import NetworkStep

RANKS = 8
_WIDTH_BYTES = 4 * 32 * 32  # weight of an emulated layer
_WARM_UP = 1
_HEADER_BYTES = 200  # of a message
ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        devices: D; the data-parallel size is RANKS / D.
        delay_ms, rate_mbit: of every link between hosts.
        ballast: fp32 parameters added to every layer, to make reductions long.
        message_kb: size of a message.
        overlap: value of "overlap_across_steps" in a job with ZeRO stage 1, whose steps follow each other; None: no
            ZeRO, and all ranks start a step together.
    """

    schedule: str
    devices: int
    micro_batches: int
    forward_ms: float
    delay_ms: float
    rate_mbit: float = 0.0
    ballast: int = 0
    rank_order: str = "tp-dp-pp"
    overlap: bool | None = None
    message_kb: float = 4.0

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return RANKS // self.devices

    @property
    def costs(self) -> Costs:
        """Costs in milliseconds."""
        return Costs(self.forward_ms, self.forward_ms, self.forward_ms)

    def timetable(self) -> Timetable:
        """Return the timetable that the engine plans."""
        return get_schedule(self.schedule).timetable(self.devices, self.micro_batches)

    def predict_ms(self, hosts: int, delay_s: float, inside_s: float) -> float:
        """Return the step time in milliseconds.

        Args:
            delay_s, inside_s: latency of a link between hosts and inside a host.
        """
        timetable = self.timetable()
        layout = ParallelLayout(timetable.placement, 1, self.data, parse_rank_order(self.rank_order))
        rate = self.rate_mbit * 1e6 / 8 if self.rate_mbit else 300e6
        network = Network(
            Hosts((RANKS // hosts,) * hosts), Link(1e9, inside_s), Link(rate, delay_s), HOST_PORTS, GLOO
        )
        gradient = _WIDTH_BYTES + 4.0 * self.ballast
        stages = (gradient,) * timetable.placement.stages
        per_device = gradient * timetable.placement.stages * timetable.placement.replicas / self.devices
        volumes = Traffic(
            1024 * self.message_kb + _HEADER_BYTES,
            (),
            (per_device,) * self.devices,
            zero_stage=int(self.overlap is not None),
            overlaps=bool(self.overlap),
            stages=stages,
        )
        reductions = eager_reductions(simulate(timetable))
        return (
            1000 * NetworkStep(timetable, self.costs, network, volumes, 1e-3, reductions).time(layout).step_s
        )


SCHEDULES = ("1f1b", "bitpipe", "bitpipe_zb")


def cases() -> list[Case]:
    """Return the rows of the table for one number of hosts, grouped by engine."""
    rows = []
    for devices, micro_batches in ((8, 16), (4, 8)):
        for schedule in SCHEDULES:
            rows += [Case(schedule, devices, micro_batches, 80.0, delay_ms) for delay_ms in (0.0, 15.0, 50.0)]
        rows += [
            Case(schedule, devices, micro_batches, 60.0, 5.0, 100.0, message_kb=size)
            for schedule in SCHEDULES
            for size in (250.0, 500.0)
        ]
    slow = 60.0, 15.0, 100.0, 750_000, "tp-pp-dp"
    rows += [
        Case(schedule, 4, 8, *slow, overlap) for schedule in SCHEDULES for overlap in (None, False, True)
    ]
    return rows


# --- on a rank ---


def run_rank(folder: Path, rows: list[Case], steps: int) -> None:
    """Measure every row in this rank. The caller sets the links when the ranks ask for them."""
    import torch
    import torch.distributed as dist

    from benchmarks.emulated import set_exact_timers, sleep_until
    from ds_ext.engine import init_distributed

    set_exact_timers()
    torch.set_num_threads(1)
    init_distributed(120)
    rank = dist.get_rank()
    results: list[list[float]] = []
    for number, row in enumerate(rows):
        engine, device, step = _engine(row)
        finish = [0.0]
        if engine.update.reduction is not None:
            engine.update.reduction.finish = _timed(engine.update.reduction.finish, finish)
        if rank == 0:
            (folder / f"ready{number}").touch()
            deadline = time.monotonic() + 60
            while not (folder / f"set{number}").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        times = []
        for _ in range(_WARM_UP + steps):
            device.start_step()
            if times and row.overlap is not None:
                step()
                times.append(1000 * time.perf_counter())
                continue
            start = torch.tensor([time.perf_counter() + 0.5 + 0.02 * row.delay_ms], dtype=torch.float64)
            dist.barrier()
            dist.broadcast(start, 0)
            # Hosts on one machine share the clock.
            begin = float(start)
            late = time.perf_counter() > begin
            sleep_until(begin)
            step()
            if row.overlap is not None:
                times.append(1000 * time.perf_counter())
                continue
            times.append(-1.0 if late else 1000 * (max(device.last_end, finish[0]) - begin))
        engine.wait_for_weights()
        results.append(times if row.overlap is not None else times[_WARM_UP:])
        dist.barrier()
        engine.transport.close()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()


def _timed(function: Any, end: list[float]) -> Any:
    def call() -> None:
        function()
        end[0] = time.perf_counter()

    return call


def _engine(row: Case) -> tuple[Any, Any, Any]:
    """Return the engine, the clock of its layers and its step."""
    import torch
    import torch.nn.functional as F
    from deepspeed.pipe import LayerSpec

    from benchmarks.emulated import EmulatedDevice, EmulatedLayer, make_batches, rows_of
    from benchmarks.rivals import SameBatches
    from ds_ext.engine import PipelineModule, initialize

    class Layer(EmulatedLayer):
        """Emulated layer with more parameters, whose gradients are zero."""

        def __init__(self, stage: int, device: Any) -> None:
            super().__init__(stage, device)
            if row.ballast:
                self.ballast = torch.nn.Parameter(torch.zeros(row.ballast))

    timetable = row.timetable()
    device = EmulatedDevice(row.costs, timetable.placement)
    device.split_backwards = timetable.split_backwards
    batches = make_batches(row.micro_batches * row.data, rows_of(row.message_kb))
    config = {
        "train_batch_size": len(batches[0][0]) * row.micro_batches * row.data,
        "train_micro_batch_size_per_gpu": len(batches[0][0]),
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "steps_per_print": 10**9,
        **({} if row.overlap is None else ZERO),
        "ds_ext": {
            "schedule": row.schedule,
            "overlap_across_steps": bool(row.overlap),
            "pipeline_parallel_size": row.devices,
            "rank_order": row.rank_order,
            "transport_options": {"timeout_s": 120},
        },
    }
    layers = [LayerSpec(Layer, stage, device) for stage in range(timetable.placement.stages)]
    model = PipelineModule(layers, config, loss_fn=F.mse_loss, clock=device, partition_method="uniform")
    engine, *_ = initialize(model=model, config=config)
    source = SameBatches(batches)
    return engine, device, lambda: engine.train_batch(source)


# --- on the caller ---


def measure(hosts: int, rows: list[Case], steps: int) -> list[dict[str, Any]]:
    """Return one result per row: the case, predicted and measured milliseconds, and the error."""
    from tests.hosts.cluster import cluster
    from tests.hosts.delay_line import Link as SlowLink

    found = []
    with tempfile.TemporaryDirectory() as name, cluster(hosts) as network:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps([asdict(row) for row in rows]))
        jobs = [_launch(network, host, hosts, folder, steps) for host in range(hosts)]
        try:
            delays = []
            for number, row in enumerate(rows):
                _wait_for(folder / f"ready{number}", jobs, folder)
                network.slow(SlowLink(row.delay_ms, row.rate_mbit))
                delays.append((echo_s(network, 0, 1), echo_s(network, 0, 0)))
                (folder / f"set{number}").touch()
                print(f"{hosts} hosts, {row.schedule}, D {row.devices}, {row.delay_ms:g} ms", file=sys.stderr)
            for rank in range(RANKS):
                _wait_for(folder / f"rank{rank}.json", jobs, folder)
        finally:
            for job in jobs:
                job.terminate()
                job.wait(30)
        times = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
        for number, row in enumerate(rows):
            ends = [max(ranks) for ranks in zip(*(t[number] for t in times), strict=True) if min(ranks) > 0]
            if row.overlap is not None:  # moments; work moves between steps that follow each other
                ends = [b - a for a, b in pairwise(ends)]
            measured = statistics.median(ends) if row.overlap is None else statistics.fmean(ends)
            predicted = row.predict_ms(hosts, *delays[number])
            found.append(
                asdict(row)
                | {"hosts": hosts, "link_ms": 1000 * delays[number][0], "predicted_ms": predicted}
                | {"measured_ms": measured, "best_ms": min(ends), "error": predicted / measured - 1}
            )
    return found


def _launch(network: Any, host: int, hosts: int, folder: Path, steps: int) -> Any:
    """Start torchrun with the ranks of a host."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts), "--node_rank", str(host)]
    words += ["--nproc_per_node", str(RANKS // hosts), "--master_addr", network[0].address]
    words += ["--master_port", "29700", __file__, "--rank", str(folder), "--steps", str(steps)]
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with open(folder / f"log{host}", "w") as log:
        return network[host].start(words, folder, env, stdout=log, stderr=log)


def _wait_for(path: Path, jobs: list[Any], folder: Path, limit_s: float = 300.0) -> None:
    """Wait until the ranks have written a file. Raises RuntimeError if they have ended, or after the limit."""
    deadline = time.monotonic() + limit_s
    while not path.exists():
        if all(job.poll() is not None for job in jobs) or time.monotonic() > deadline:
            logs = "\n".join((folder / f"log{host}").read_text()[-3000:] for host in range(len(jobs)))
            raise RuntimeError(f"{path.name}: the ranks have not written it.\n{logs}")
        time.sleep(0.05)


def echo_s(network: Any, a: int, b: int) -> float:
    """Return half of the median round trip of a byte between two hosts, in seconds."""
    from tests.hosts.network import inside

    with inside(network[b].network_file):
        server = socket.create_server((network[b].address, 0))
    with inside(network[a].network_file):
        ours = socket.create_connection(server.getsockname(), 5)
    with server, ours, server.accept()[0] as theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(15):
            started = time.perf_counter()
            ours.send(b"x")
            theirs.send(theirs.recv(1))
            ours.recv(1)
            times.append(time.perf_counter() - started)
    return statistics.median(times) / 2


def table(results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| hosts | schedule | D x DP | N | forward | link | rate | message | predicted | measured | best | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        rate = f"{r['rate_mbit']:g} Mbit/s" if r["rate_mbit"] else "-"
        lines.append(
            f"| {r['hosts']} | {r['schedule']} | {r['devices']} x {RANKS // r['devices']} | {r['micro_batches']} "
            f"| {r['forward_ms']:g} ms | {r['link_ms']:.1f} ms | {rate} | {r['message_kb']:g} KB "
            f"| {r['predicted_ms']:.0f} ms | {r['measured_ms']:.0f} ms | {r['best_ms']:.0f} ms | {r['error']:+.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run as a rank, or print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.step_times", description=__doc__)
    parser.add_argument("--hosts", default="2,4", help="numbers of hosts (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps per row, after one warm-up (%(default)s)")
    parser.add_argument("--only", default="", help="rows of this schedule")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rows = [Case(**row) for row in json.loads((Path(args.rank) / "cases.json").read_text())]
        run_rank(Path(args.rank), rows, args.steps)
        os._exit(0)
    chosen = [row for row in cases() if args.only in ("", row.schedule)]
    results = [
        result for hosts in map(int, args.hosts.split(",")) for result in measure(hosts, chosen, args.steps)
    ]
    print(json.dumps(results, indent=1) if args.json else table(results))


if __name__ == "__main__":
    main()
