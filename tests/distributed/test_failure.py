"""What ranks learn about a rank that is silent, over a real store and real groups."""

from __future__ import annotations

import importlib.util
import time

import pytest
import torch
import torch.distributed as dist

from ds_ext.comm.groups import limit_waits
from ds_ext.errors import ConfigError
from ds_ext.launch import failure
from tests.engine_runs import MODEL, Job, build
from tests.ranks import RankPool, Ranks

pytestmark = pytest.mark.quick

# What is tested is the answer, and not whether a busy machine gives it in time.
STORE_S = 30.0


def silent_ranks(rank: int, waits_for: dict[int, int | None]) -> list[int]:
    """What a rank finds when the ranks in ``waits_for`` have reported that they lost those peers."""
    failure.STORE_S = STORE_S
    key = f"{failure.LOST}{rank}"
    if rank in waits_for:
        peer = waits_for[rank]
        failure.ask_store(lambda store: store.set(key, "" if peer is None else str(peer)))
        # The store does not acknowledge set(): only an answer on the same connection shows that it was done.
        failure.ask_store(lambda store: store.get(key))
    dist.barrier()
    found = failure.silent_ranks()
    dist.barrier()
    failure.ask_store(lambda store: store.delete_key(key))
    return found


@pytest.mark.parametrize(
    ("waits_for", "silent"),
    [
        ({0: 1, 1: 2, 3: 0}, [2]),  # the end of a chain of waiting ranks
        ({0: None, 1: None, 2: None}, [3]),  # in a collective nobody knows whom it waits for
        ({0: 2, 1: 3}, [2, 3]),
        ({0: 1, 1: 2, 2: 3, 3: 0}, []),
    ],
)
def test_silent_is_who_is_waited_for_and_does_not_wait(
    ranks4: RankPool, waits_for: dict[int, int | None], silent: list[int]
) -> None:
    assert ranks4.run(silent_ranks, waits_for) == [silent] * 4


def claims(rank: int) -> str | None:
    failure.STORE_S = STORE_S
    answer = failure.claim(f"rank {rank} failed: ValueError: x")
    dist.barrier()
    failure.ask_store(lambda store: store.delete_key(failure.FIRST))
    return answer


def test_one_rank_is_the_first_to_fail_and_all_others_know(ranks4: RankPool) -> None:
    answers = ranks4.run(claims)
    first = answers.index("")
    assert [answer for answer in answers if answer] == [f"rank {first} failed: ValueError: x"] * 3


def without_tensorboard(rank: int, job: Job) -> tuple[str, int | None]:
    """The error and the rank that reports it when rank 0's host lacks a monitor's package."""
    installed = importlib.util.find_spec
    if rank == 0:
        importlib.util.find_spec = lambda name, *more: (
            None if name == "tensorboard" else installed(name, *more)
        )
    try:
        with pytest.raises(ConfigError) as raised:
            build(job)
    finally:
        importlib.util.find_spec = installed
    return str(raised.value), raised.value.reported_by


def test_own_script_learns_of_a_missing_monitor_on_every_rank(ranks: Ranks) -> None:
    job = Job("1f1b", 2, 1, 1, micro_batches=2, model=MODEL, deepspeed={"tensorboard": {"enabled": True}})
    found = ranks(2).run(without_tensorboard, job)
    assert found[0] == found[1] and found[0][1] == 0
    assert found[0][0].startswith("tensorboard: ") and "pip install tensorboard" in found[0][0]


def refusal(rank: int, job: Job) -> str:
    with pytest.raises(ConfigError) as raised:
        build(job)
    return str(raised.value)


def test_own_script_with_a_key_that_deepspeed_removed(ranks: Ranks) -> None:
    job = Job("1f1b", 2, 1, 1, micro_batches=2, model=MODEL, deepspeed={"elasticity": {"enabled": True}})
    assert all(error.startswith("elasticity: ") for error in ranks(2).run(refusal, job))


def wait_alone(rank: int) -> float:
    """Seconds until a collective of a group made without a time limit ends, when the other rank does not join.

    The limit of the group would be half an hour.
    """
    group = dist.new_group([0, 1])
    limit_waits(2.0)
    started = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1), group=group)
    return time.monotonic() - started


def test_every_group_gets_the_time_limit() -> None:
    pools = Ranks()
    try:
        assert pools(2).run(wait_alone, timeout_s=120)[0] > 1.5
    finally:
        pools.close()
