"""Calls of a job that a GPU restricts, tested on the CPU: operations, order, time limits. See tests/gpu/."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.schedule import OptimizerStep
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ext.comm import groups, torch_split, wire
from ds_ext.comm.channels import SPLIT_HEADERS
from ds_ext.comm.gloo_cuda import needs_copy
from ds_ext.comm.groups import first_step_limit_s, limit_waits, new_pair_groups, watchdog_s
from ds_ext.comm.torch_split import SplitTransport
from ds_ext.comm.transport import make_tag
from ds_ext.engine.executor import Observer
from ds_ext.errors import TransportError, TransportTimeout
from tests.engine_runs import MODEL, Job, StepBatches, batches_of, build, train
from tests.ranks import RankPool

CPU = torch.device("cpu")
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}}
ZERO = {**ADAM, "zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}


class Operations(TorchDispatchMode):
    """Records the operations of torch.distributed by their names in torch.ops.c10d."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.add(func._schema.name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))


def operations(rank: int, job: Job, folder: str) -> set[str]:
    """The operations of a whole job: construction, two steps, an evaluation, a checkpoint and its loading."""
    with Operations() as recorded:
        engine, _ = build(job)
        batches = StepBatches(batches_of(job))
        for _ in range(2):
            engine.train_batch(batches)
        engine.eval_batch(StepBatches(batches_of(job)))
        engine.save_checkpoint(folder, tag="saved")
        engine.load_checkpoint(folder, tag="saved")
        engine.transport.close()
    return recorded.names


@pytest.mark.parametrize(
    ("sizes", "schedule", "deepspeed"),
    [
        ((2, 1, 2), "1f1b", ZERO),
        ((4, 1, 1), "bitpipe", {**ZERO, **BF16}),
        ((2, 2, 1), "1f1b", {}),
        ((2, 1, 2), "1f1b", {**ADAM, **BF16}),
    ],
    ids=["ZeRO-1", "bf16", "tensor parallel", "bf16 without ZeRO"],
)
def test_gloo_can_send_every_tensor_of_a_gpu(
    ranks4: RankPool, tmp_path: Path, sizes: tuple[int, int, int], schedule: str, deepspeed: dict[str, Any]
) -> None:
    """DeepSpeed's constructor sent its loss to the next stage, whose address on a GPU gloo cannot read."""
    job = Job(schedule, *sizes, micro_batches=8, model=MODEL, steps=2, deepspeed=deepspeed, transport="shm")
    found = set().union(*ranks4.run(operations, job, str(tmp_path), timeout_s=120))
    assert "allreduce_" in found
    assert {name for name in found if needs_copy("gloo", "cuda", name)} == set()


# --- order ---


def calls_before_communication(rank: int, job: Job) -> list[str]:
    """The first calls that select a device or communicate, while an engine is built."""
    calls: list[str] = []
    accelerator = get_accelerator()
    with Operations() as recorded, pytest.MonkeyPatch.context() as patch:
        gather = dist.all_gather_object
        patch.setattr(accelerator, "set_device", lambda index: calls.append(f"device {index}"))
        patch.setattr(dist, "all_gather_object", lambda *a, **k: (calls.append("gather"), gather(*a, **k))[1])
        engine, _ = build(job)
    assert recorded.names
    engine.transport.close()
    return calls


def test_the_device_is_selected_before_the_first_collective(ranks2: RankPool) -> None:
    """NCCL rejects object gathers of ranks that are all on device 0."""
    for rank, calls in enumerate(ranks2.run(calls_before_communication, Job("1f1b", 2, 1, 1, 4, MODEL))):
        assert calls[0] == f"device {rank}" and "gather" in calls


# --- communicators ---


def make_pair_groups(rank: int) -> tuple[int, object]:
    world = dist.distributed_c10d._get_default_group()
    before, world.bound_device_id = world.bound_device_id, torch.device("cuda", 0)  # as DeepSpeed does
    try:
        found = new_pair_groups([(0, 1), (3, 2)], "gloo", 20)
        bound = world.bound_device_id
    finally:
        world.bound_device_id = before
    (group,) = found.values()
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=group)
    return int(total), bound


def test_pairs_connect_without_the_world(ranks4: RankPool) -> None:
    """With a bound device, torch would split the communicator of the world for each of these groups."""
    device = torch.device("cuda", 0)
    assert ranks4.run(make_pair_groups) == [(1, device), (1, device), (5, device), (5, device)]


# --- time limits ---


def lost_contents(
    rank: int, how: str
) -> tuple[type[TransportError], int | None, str | None, int | None, float] | None:
    """Rank 0 sends the descriptors of a message without its contents, as a rank whose GPU is stuck."""
    transport = SplitTransport.create(20, CPU, [(0, 1), (1, 0)], backend="gloo")
    tag, found = make_tag(3, 5), None
    if rank == 0:
        descriptors = wire.describe([torch.ones(9)], tag=tag, seq=0, link_seq=0, acknowledged=0)
        transport._headers.send([wire.pack_all(descriptors)], 1, make_tag(SPLIT_HEADERS, 0))
    else:
        transport.timeout_s = 0.5
        begin = time.monotonic()
        ticket = transport.recv(0, tag)
        while not transport.transfers._unfinished:
            transport.take_headers(0)
        with pytest.raises(TransportError) as caught:
            transport.settle() if how == "settle" else ticket.wait()
        error = caught.value
        found = caught.type, error.peer, error.op, error.tag, time.monotonic() - begin
    dist.barrier()
    transport.close()
    return found


@pytest.mark.parametrize("how", ["settle", "wait"])
def test_contents_that_never_arrive_end_within_the_limit(ranks2: RankPool, how: str) -> None:
    found = ranks2.run(lost_contents, how)[1]
    assert found[:4] == (TransportTimeout, 0, "recv from", make_tag(3, 5)) and 0.4 < found[4] < 5


@contextmanager
def recorded_limits(backend: str) -> Iterator[list[float]]:
    limits: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups.dist, "get_backend_config", lambda group: backend)
        patch.setattr(groups, "set_limit", lambda group, limit: limits.append(limit.total_seconds()))
        yield limits


def limits_of_groups(rank: int) -> list[set[float]]:
    found = []
    for backend in ("cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo"):
        with recorded_limits(backend) as limits:
            limit_waits(120)
        found.append(set(limits))
    return found


def test_the_watchdog_of_nccl_comes_last(ranks2: RankPool) -> None:
    """It ended the process after timeout_s, without our error."""
    assert ranks2.run(limits_of_groups) == [[{watchdog_s(120)}, {watchdog_s(120)}, {120.0}]] * 2


def limits_while_compiling(rank: int, compiled: bool) -> list[float]:
    """The transport's limit in the first two steps."""
    job = Job("1f1b", 2, 1, 1, 4, MODEL, steps=2)
    engine, _ = build(job)
    if compiled:
        engine.compile(backend="eager")
    limits: list[float] = []

    class Record(Observer):
        kinds = (OptimizerStep,)

        def before(self, instruction: Any) -> None:
            limits.append(engine.transport.timeout_s)

    engine.executor.observers.append(Record())
    batches = StepBatches(batches_of(job))
    for _ in range(2):
        engine.train_batch(batches)
    limits.append(engine.transport.timeout_s)
    engine.transport.close()
    return limits


@pytest.mark.parametrize("compiled", [True, False])
def test_the_first_step_has_time_to_compile(ranks2: RankPool, compiled: bool) -> None:
    first = first_step_limit_s(120) if compiled else 120
    assert ranks2.run(limits_while_compiling, compiled) == [[first, 120, 120]] * 2


def settle_before_the_peer_receives(rank: int) -> float:
    """Rank 0 sends, settles and joins a collective; rank 1 takes the message after it."""
    transport = SplitTransport.create(20, CPU, [(0, 1), (1, 0)], backend="gloo")
    begin = time.monotonic()
    if rank == 0:
        transport.send([torch.ones(1 << 20)], 1, 0)
    transport.settle()
    dist.barrier()
    if rank == 1:
        assert float(transport.recv(0, 0).wait()[0].sum()) == 1 << 20
    transport.settle()
    waited_s = time.monotonic() - begin
    transport.close()
    return waited_s


def test_settling_does_not_wait_for_calls_of_the_peer(ranks2: RankPool) -> None:
    """With fbd, forward ranks take new weights in the next step."""
    assert max(ranks2.run(settle_before_the_peer_receives)) < 10


def close_with_a_requested_message(rank: int) -> float:
    transport = SplitTransport.create(20, CPU, [(0, 1), (1, 0)], backend="gloo")
    begin = time.monotonic()
    for item in range(2):  # the descriptors of the first message take two transfers
        if rank == 0:
            transport.send([torch.ones(1 << 22)], 1, item)
        elif item == 0:
            transport.recv(0, item).wait()
        else:
            transport.recv(0, item)
    dist.barrier()
    time.sleep(0.1)
    transport.close()
    return time.monotonic() - begin


def test_close_receives_what_was_requested(ranks2: RankPool) -> None:
    assert max(ranks2.run(close_with_a_requested_message)) < 10


# --- the engine ---


def train_over_pairs(rank: int, job: Job) -> dict[str, Any]:
    """Train over the transport for nccl, with gloo in its place."""

    def create(timeout_s: float, device: torch.device, pairs: Any, node_ips: Any) -> SplitTransport:
        return SplitTransport.create(timeout_s, device, pairs, backend="gloo")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_split, "create", create)
        return train(rank, job, evaluate=True)


@pytest.mark.parametrize(("schedule", "devices"), [("bitpipe", 4), ("fbd", 2)])
def test_trains_bitwise_as_over_shared_memory(ranks4: RankPool, schedule: str, devices: int) -> None:
    job = Job(schedule, devices, 1, 1, 8, MODEL, steps=3, transport="shm")
    expected = ranks4.run(train, job, True, timeout_s=120)
    found = ranks4.run(train_over_pairs, replace(job, transport="torch"), timeout_s=120)
    for key in ("losses", "norms", "digests", "evaluated"):
        assert [one[key] for one in found] == [one[key] for one in expected]
