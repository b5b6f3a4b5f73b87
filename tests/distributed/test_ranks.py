"""The pool of ranks itself: results, failures, time limits and no orphans."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.rank_pool import RankFailure, RankTimeout
from ds_ext.errors import ConfigError
from tests.ranks import CALLS_PER_START, RankPool, Ranks
from tests.selection import extensive


def sum_of_ranks(rank: int, offset: int) -> torch.Tensor:
    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return value


def environment(rank: int) -> tuple[int, int, str, int, int]:
    return os.getpid(), torch.get_num_threads(), os.environ["DS_ACCELERATOR"], int(os.environ["RANK"]), rank


def fail_on(rank: int, failing: int) -> None:
    if rank == failing:
        print("about to fail")
        raise ConfigError("7 layers do not divide")
    dist.barrier()


def die_on(rank: int, failing: int) -> None:
    if rank == failing:
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(9)
    dist.barrier()


def wait_for_nobody(rank: int) -> None:
    if rank == 0:
        dist.barrier()


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def test_results_come_back_by_rank(ranks4: RankPool) -> None:
    assert ranks4.run(sum_of_ranks, 10) == [torch.tensor(46.0)] * 4


def test_ranks_are_reused_and_set_up_alike() -> None:
    with contextlib.closing(RankPool(2)) as pool:
        first = pool.run(environment)
        assert pool.run(environment) == first
        assert [entry[1:] for entry in first] == [(1, "cpu", 0, 0), (1, "cpu", 1, 1)]
        assert len({entry[0] for entry in first} | {os.getpid()}) == 3


def test_ranks_start_anew_after_some_calls() -> None:
    with contextlib.closing(RankPool(1)) as pool:
        processes = [pool.run(environment)[0][0] for _ in range(CALLS_PER_START + 1)]
        assert len(set(processes[:-1])) == 1 and processes[-1] != processes[0]


def test_a_world_size_has_one_pool(ranks: Ranks) -> None:
    assert ranks(2) is ranks(2) and ranks(2) is not ranks(4)


def test_exception_is_raised_here_with_the_ranks_traceback_and_output(ranks2: RankPool) -> None:
    with pytest.raises(ConfigError, match="7 layers do not divide") as caught:
        ranks2.run(fail_on, 1)
    assert "failed first on rank 1 of 2" in notes(caught.value)
    assert "in fail_on" in notes(caught.value) and "about to fail" in notes(caught.value)
    assert ranks2.run(sum_of_ranks, 0) == [torch.tensor(1.0)] * 2


def test_death_of_a_rank_shows_its_stderr(ranks2: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks2.run(die_on, 0)
    assert re.fullmatch("rank 0: .* 9: out of memory", str(caught.value))
    assert "rank 0's output:\nout of memory\n" in notes(caught.value)


def test_time_limit_shows_the_stack_of_a_silent_rank(ranks2: RankPool) -> None:
    with pytest.raises(RankTimeout, match=r"^rank 0: .* \d+ s") as caught:
        ranks2.run(wait_for_nobody, timeout_s=1.0)
    assert "in wait_for_nobody" in notes(caught.value) and len(caught.value.__notes__) == 1


def test_local_function_is_refused(ranks2: RankPool) -> None:
    with pytest.raises(TypeError, match="module level"):
        ranks2.run(lambda rank: rank)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize(
    "then",
    [
        "pool.run(wait_for_nobody, timeout_s=600)",
        pytest.param("time.sleep(600)", marks=extensive),
    ],
    ids=["busy", "idle"],
)
def test_no_rank_outlives_the_test_process(then: str) -> None:
    script = (
        "import time\n"
        "from tests.ranks import RankPool\n"
        "from tests.distributed.test_ranks import wait_for_nobody, environment\n"
        "pool = RankPool(2)\n"
        "pool.run(environment)\n"
        "print(*pool.pids, flush=True)\n"
        f"{then}\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        time.sleep(0.2)
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
