"""Roll call: every rank states its job, and one error stops all ranks when jobs differ or a rank has failed.

The answers go through the rendezvous store, which works before a process group exists: a rank whose data are missing
still stops the others. Rank 0 compares the answers and publishes one verdict, which every rank raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any, NoReturn

from ..errors import ConfigError, TransportError

REFUSED, FAILED = "refused", "failed"  # kinds of verdicts: every rank raises ConfigError, or TransportError
_SAME = "same"
FIRST_FAILURE = "ds_ext/first_failure"  # text of the first rank that failed after it joined the others
_ARRIVED, _VERDICT, _REPORTED, _READ = "arrived", "verdict", "reported", "read"
_POLL_S = 0.02
_READERS_S = 5.0  # how long rank 0, which may serve the store, waits until all ranks have read a bad verdict
_RANK_0_S = 15.0  # how long a failed rank waits for rank 0 before it reports its error itself
_MARGIN_S = 5.0  # by which rank 0 gives up first: it knows which ranks are missing
_SHOWN = 12
_NOT_SET = "(not set)"

Facts = Mapping[str, str]


class RollCall:
    """One comparison of all ranks.

    Args:
        store: a torch.distributed store that all ranks reach.
        rank, world_size: of this process.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

        self.rank, self.world_size = rank, world_size
        # Ranks call the roll in the same order: the n-th call of each belongs together. A torchrun that restarts them
        # may keep its store; several count their restarts each on its own, and make a new store.
        restarts = "0" if spans_hosts(world_size) else os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        attempt, self._shared = f"ds_ext/{restarts}", store
        number = store.add(f"{attempt}/roll_calls/{rank}", 1)
        self._store = PrefixStore(f"{attempt}/roll_call/{number}", store)

    def answer(self, facts: Facts, timeout_s: float, of_replicas: Facts | None = None) -> None:
        """State this rank's job and return when all ranks state the same.

        Args:
            facts: value by key; a key that a rank lacks is a difference.
            timeout_s: how long to wait for the other ranks, in seconds.
            of_replicas: facts that are compared among the ranks that state them.

        Raises:
            ConfigError: jobs differ, or another rank has failed. The same error on every rank.
            TransportError: a rank did not answer within ``timeout_s``.
        """
        self._arrive({"facts": dict(facts), "of_replicas": dict(of_replicas or {})})
        if self.rank == 0:
            self._decide(timeout_s)
        self._await(_VERDICT, timeout_s + _MARGIN_S)
        verdict = json.loads(self._store.get(_VERDICT))
        self._store.add(_READ, 1)
        if verdict["kind"] != _SAME:
            self._refuse(verdict)

    def fail(self, text: str, kind: str, timeout_s: float) -> bool:
        """Stop all ranks with ``text``, this rank's error. Returns whether rank 0 reports it."""
        place = f"rank {self.rank} (host {socket.gethostname()}): " if self.rank else ""
        verdict = {"kind": kind, "text": f"{place}{text}"}
        self._arrive({"facts": {}, "of_replicas": {}})
        self._store.compare_set(_VERDICT, "", json.dumps(verdict))
        self._store.add(_READ, 1)
        if self.rank == 0:
            self._store.set(_REPORTED, "1")
            self._wait_for_readers(timeout_s)
            return True
        try:
            self._await(_REPORTED, timeout_s)
        except TransportError:
            return False
        return True

    def _arrive(self, answer: Mapping[str, Any]) -> None:
        self._store.set(f"answer/{self.rank}", json.dumps({"host": socket.gethostname(), **answer}))
        self._store.add(_ARRIVED, 1)

    def _decide(self, timeout_s: float) -> None:
        """Publish the verdict, unless a failed rank has published its own."""
        deadline = time.monotonic() + timeout_s
        names = [f"answer/{rank}" for rank in range(self.world_size)]
        while not self._store.check([_VERDICT]):
            if self._shared.check([FIRST_FAILURE]):
                self._publish({"kind": FAILED, "text": self._shared.get(FIRST_FAILURE).decode()})
            elif self._store.add(_ARRIVED, 0) >= self.world_size:
                answers = [json.loads(text) for text in self._store.multi_get(names)]
                self._publish(_compared(answers))
            elif time.monotonic() > deadline:
                missing = [rank for rank, name in enumerate(names) if not self._store.check([name])]
                self._publish({"kind": FAILED, "text": _missing(missing, timeout_s)})
            else:
                time.sleep(_POLL_S)

    def _publish(self, verdict: Mapping[str, Any]) -> None:
        self._store.compare_set(_VERDICT, "", json.dumps(verdict))

    def _await(self, key: str, timeout_s: float) -> None:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError:
            raise TransportError(
                f"start: rank 0 did not answer within {timeout_s:g} s. Look for the first error in the output of "
                f"rank 0."
            ) from None

    def _refuse(self, verdict: Mapping[str, Any]) -> NoReturn:
        if self.rank == 0:
            self._store.set(_REPORTED, "1")
            self._wait_for_readers(_READERS_S)
        error = (ConfigError if verdict["kind"] == REFUSED else TransportError)(verdict["text"])
        error.reported_by = 0
        raise error

    def _wait_for_readers(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._store.add(_READ, 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def meet(rank: int, world_size: int, timeout_s: float) -> RollCall | None:
    """Return the roll call of a job that has no process group yet; None without other ranks or a launcher.

    It holds the store that rank 0 may serve: keep it until the process group exists.

    Raises:
        TransportError: rank 0 could not be reached within ``timeout_s``.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if world_size == 1 or not address or not port:
        return None
    from torch.distributed import (
        DistNetworkError,
        DistStoreError,
        TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    )

    # torchrun serves the store in its agent; otherwise rank 0 does, and torch's own rendezvous shares it.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(
            address,
            int(port),
            world_size,
            serves,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (DistNetworkError, DistStoreError):
        if serves:
            raise
        raise TransportError(
            f"start: rank 0 at {address}:{port} was not reached within {timeout_s:g} s. "
            f"Look for the first error in the output of rank 0, and check that this host may connect to that port."
        ) from None
    return RollCall(store, rank, world_size)


def compare(facts: Facts, of_replicas: Facts | None = None) -> None:
    """Call the roll of a job that has its process group; see :meth:`RollCall.answer`.

    Ranks wait for each other as long as they did to make the group: they may be reading data or building layers.
    """
    call, limit_s = _of_the_group()
    if call is not None:
        call.answer(facts, limit_s, of_replicas)


@contextlib.contextmanager
def one_refusal() -> Iterator[None]:
    """Stop all ranks with the ConfigError that one of them has before the next :func:`compare`.

    All ranks have a process group and run the same code. Those without an error find it at the roll call.
    """
    try:
        yield
    except ConfigError as error:
        call, _ = _of_the_group()
        if call is not None and call.fail(str(error), REFUSED, _RANK_0_S):
            error.reported_by = 0
        raise


def _of_the_group() -> tuple[RollCall | None, float]:
    """The next roll call of the process group and its time limit; None for a single rank."""
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return None, 0.0
    store = dist.distributed_c10d._get_default_store()
    limit = store.timeout  # pyright: ignore[reportAttributeAccessIssue]
    return RollCall(store, dist.get_rank(), dist.get_world_size()), limit.total_seconds()


def stop_other_hosts(rank: int, world_size: int, text: str, kind: str) -> bool:
    """End the ranks of other hosts with the error that this rank has before it joined them.

    Returns whether rank 0 reports the error; False when it was not reached in 15 s.
    """
    with contextlib.suppress(RuntimeError, OSError):
        call = meet(rank, world_size, _RANK_0_S)
        return call is not None and call.fail(text, kind, _RANK_0_S)
    return False


def spans_hosts(world_size: int) -> bool:
    """Return whether the launcher started ranks on other hosts too."""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size
    return int(local) < world_size


def differences(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return ``"key: value on ranks, value on ranks"`` for every key whose values differ.

    Args:
        answers: by rank, with ``host``, ``facts`` and ``of_replicas``.
    """
    hosts, found = [one["host"] for one in answers], []
    for part, needed in (("facts", True), ("of_replicas", False)):
        for key in dict.fromkeys(key for one in answers for key in one[part]):
            ranks: dict[str, list[int]] = {}
            for rank, one in enumerate(answers):
                if needed or key in one[part]:
                    ranks.setdefault(one[part].get(key, _NOT_SET), []).append(rank)
            if len(ranks) > 1:
                values = [f"{value} on {_named(where, hosts)}" for value, where in ranks.items()]
                found.append(f"{key}: {', '.join(values)}")
    return found


def _compared(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    lines = differences(answers)
    if not lines:
        return {"kind": _SAME}
    more = [f"and {len(lines) - _SHOWN} more keys"] if len(lines) > _SHOWN else []
    start = f"job: ranks differ in {len(lines)} key{'s' * (len(lines) > 1)}."
    text = "\n  ".join([start, *lines[:_SHOWN], *more])
    return {"kind": REFUSED, "text": f"{text}\nGive every rank the same JSON, flags, data and code."}


def _missing(ranks: Sequence[int], timeout_s: float) -> str:
    return (
        f"start: {_numbered(ranks)} did not answer within {timeout_s:g} s. Look for the first error in the output of "
        f"rank {ranks[0]}. If it is only slow, raise transport_options.timeout_s, or in own scripts the timeout_s of "
        f"init_distributed()."
    )


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """``ranks 2-3 (host b)``; without the host where the job has only one."""
    mine = list(dict.fromkeys(hosts[rank] for rank in ranks))
    where = f" (host{'s' * (len(mine) > 1)} {', '.join(mine[:_SHOWN])})" if len(set(hosts)) > 1 else ""
    return f"{_numbered(ranks)}{where}"


def _numbered(ranks: Sequence[int]) -> str:
    """``ranks 0-2, 5``."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"
