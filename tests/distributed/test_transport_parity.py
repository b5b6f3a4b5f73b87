"""Every schedule of the registry trains to the same bits whatever carries its messages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from ds_ext.comm import _native, native_transport
from ds_ext.comm.native_transport import NativeTransport, RecvTicket
from ds_ext.pipe_schedules import SCHEDULES
from tests.engine_runs import MODEL, Job, train
from tests.links import held
from tests.ranks import RankPool
from tests.selection import select

RANKS = 4
KEYS = ("losses", "norms", "digests")


def job_of(schedule: str) -> Job:
    """On four ranks, of which some only compute forwards where the schedule has such."""
    jobs = [Job(schedule, pp, 1, 1, 8, MODEL, steps=2) for pp in (4, 2)]
    return next(job for job in jobs if job.world_size == RANKS)


def train_over(rank: int, job: Job, kinds: list[str]) -> dict[str, tuple[dict[str, Any], int]]:
    """By kind what came out, and how many messages were used where they arrived at a time."""
    return {kind: train_in_place(rank, dataclasses.replace(job, transport=kind)) for kind in kinds}


def train_in_place(rank: int, job: Job) -> tuple[dict[str, Any], int]:
    """Train with messages, however small, that are used where they arrive; and how many were at most."""
    most, tensors, copied = 0, NativeTransport._tensors, native_transport.COPIED_BYTES

    def watched(self: NativeTransport, message: _native.Message, ticket: RecvTicket) -> tuple[Tensor, ...]:
        nonlocal most
        made = tensors(self, message, ticket)
        most = max(most, *held(self).values())
        return made

    NativeTransport._tensors, native_transport.COPIED_BYTES = watched, 0
    try:
        result = train(rank, job)
        return {key: result[key] for key in KEYS}, most
    finally:
        NativeTransport._tensors, native_transport.COPIED_BYTES = tensors, copied


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=pytest.mark.quick if name == "bitpipe" else ())
        for name in select(sorted(SCHEDULES), ["1f1b", "bitpipe", "dpp", "fbd", "zb_v"])
    ],
)
def test_trains_to_the_same_bits(ranks4: RankPool, schedule: str) -> None:
    kinds = ["shm", "tcp", *(() if SCHEDULES[schedule].dynamic else ("torch",))]
    for by_kind in ranks4.run(train_over, job_of(schedule), kinds, timeout_s=120):
        first = by_kind["shm"][0]
        assert all(found == first for found, _ in by_kind.values()), by_kind
        assert first["losses"][0] != first["losses"][1]
        assert all(by_kind[kind][1] > 0 for kind in ("shm", "tcp"))
