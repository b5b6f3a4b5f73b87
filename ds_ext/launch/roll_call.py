"""Roll call: ranks compare their jobs, and all raise the same error if jobs differ or a rank failed.

Answers go through the rendezvous store, which exists before the process group. A rank that fails early, for example
because its data is missing, thus still stops the others. Rank 0 compares the answers and publishes a verdict.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any, NoReturn

from ..comm.host_watch import require_hosts, store_is_silent
from ..environment import agent_serves_store, store_address
from ..errors import ConfigError, TransportError

REFUSED, FAILED = "refused", "failed"  # verdicts: all ranks raise ConfigError or TransportError
_SAME = "same"
FIRST_FAILURE = "ds_ext/first_failure"  # key of the report of the first rank that failed after joining
_ARRIVED, _VERDICT, _REPORTED, _READ = "arrived", "verdict", "reported", "read"
_POLL_S = 0.02
_READERS_S = 5.0  # rank 0, which may serve the store, waits for all ranks to read an error verdict
RANK_0_S = 15.0  # a failed rank waits for rank 0 to report an error that both have
_MARGIN_S = 5.0  # rank 0 times out earlier, because it can name the missing ranks
_MAX_SHOWN = 12
_NOT_SET = "(not set)"

Facts = Mapping[str, str]


class RollCall:
    """Comparison of the jobs of all ranks. ``store`` is a torch.distributed store that all ranks can reach."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

        self.store = store
        self.rank, self.world_size = rank, world_size
        # All ranks make the same roll calls in the same order, so that the n-th calls belong together.
        number = store.add(f"ds_ext/roll_calls/{rank}", 1)
        self._store = PrefixStore(f"ds_ext/roll_call/{number}", store)

    def require_same(self, facts: Facts, timeout_s: float, replica_facts: Facts | None = None) -> None:
        """Publish this rank's facts and return when all ranks have published the same ones.

        Args:
            facts: key -> value, compared over all ranks; a missing key is a difference.
            timeout_s: time limit for the other ranks, in seconds.
            replica_facts: key -> value, compared only among the ranks that have the key.
        """
        self._publish_answer(facts, replica_facts or {})
        if self.rank == 0:
            self._decide(timeout_s)
        self._await(_VERDICT, timeout_s + _MARGIN_S)
        verdict = json.loads(self._store.get(_VERDICT))
        self._store.add(_READ, 1)
        if verdict["kind"] != _SAME:
            self._raise_verdict(verdict)

    def fail(self, text: str, kind: str, timeout_s: float) -> bool:
        """Stop all ranks with the error ``text``, unless another rank's error is already published.

        Return whether rank 0 reports an error; it may be that of another rank.

        Args:
            kind: REFUSED or FAILED.
            timeout_s: time limit for rank 0 to report (on rank 0: for the others to read), in seconds.
        """
        origin = f"rank {self.rank} (host {socket.gethostname()}): " if self.rank else ""
        verdict = {"kind": kind, "text": f"{origin}{text}"}
        self._publish_verdict(verdict)  # first: rank 0 compares the answers when all have arrived
        self._publish_answer({}, {})
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

    def _publish_answer(self, facts: Facts, replica_facts: Facts) -> None:
        answer = {"host": socket.gethostname(), "facts": {**facts}, "of_replicas": {**replica_facts}}
        self._store.set(f"answer/{self.rank}", json.dumps(answer))
        self._store.add(_ARRIVED, 1)

    def _decide(self, timeout_s: float) -> None:
        """Publish the verdict, unless a failed rank has published one."""
        deadline = time.monotonic() + timeout_s
        names = [f"answer/{rank}" for rank in range(self.world_size)]
        while not self._store.check([_VERDICT]):
            if self.store.check([FIRST_FAILURE]):
                self._publish_verdict({"kind": FAILED, "text": self.store.get(FIRST_FAILURE).decode()})
            elif self._store.add(_ARRIVED, 0) >= self.world_size:
                answers = [json.loads(text) for text in self._store.multi_get(names)]
                self._publish_verdict(_verdict(answers))
            elif time.monotonic() > deadline:
                missing = [rank for rank, name in enumerate(names) if not self._store.check([name])]
                self._publish_verdict({"kind": FAILED, "text": _no_answer(missing, timeout_s)})
            else:
                time.sleep(_POLL_S)

    def _publish_verdict(self, verdict: Mapping[str, Any]) -> None:
        self._store.compare_set(_VERDICT, "", json.dumps(verdict))

    def _await(self, key: str, timeout_s: float) -> None:
        """Wait until rank 0 sets a key. Raises PeerGone for a silent host, and TransportError after ``timeout_s``."""
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError:
            require_hosts()
            raise TransportError(
                f"start: rank 0 did not answer within {timeout_s:g} s. Look for the first error in its output."
            ) from None

    def _raise_verdict(self, verdict: Mapping[str, Any]) -> NoReturn:
        """Raise the error that all ranks raise. Rank 0 first waits up to 5 s until the others have read it."""
        if self.rank == 0:
            self._store.set(_REPORTED, "1")
            self._wait_for_readers(_READERS_S)
        kind = ConfigError if verdict["kind"] == REFUSED else TransportError
        raise kind(verdict["text"]).of_all_ranks()

    def _wait_for_readers(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._store.add(_READ, 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def make_early_roll_call(rank: int, world_size: int, timeout_s: float) -> RollCall | None:
    """Return a roll call before the process group exists; None without other ranks or without a launcher.

    Rank 0 may serve the store. Keep the result until the process group exists.
    """
    address = store_address()
    if world_size == 1 or address is None:
        return None
    store = _connect_store(*address, rank, world_size, timeout_s)
    if agent_serves_store():
        store = _store_of_this_start(store, rank, world_size, timeout_s)
    return RollCall(store, rank, world_size)


def _connect_store(host: str, port: int, rank: int, world_size: int, timeout_s: float) -> Any:
    from torch.distributed import (
        DistNetworkError,
        DistStoreError,
        TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    )

    # torchrun's agent may serve the store. Otherwise rank 0 does, and torch's rendezvous uses the same store.
    serves = rank == 0 and not agent_serves_store()
    limit = timedelta(seconds=timeout_s)
    no_connection = TransportError(
        f"start: no connection to rank 0 at {host}:{port} within {timeout_s:g} s. Look for the first error in "
        "its output, and check that this host can connect to that port."
    )
    if not serves and not _await_server(host, port, timeout_s):
        raise no_connection
    try:
        return TCPStore(host, port, world_size, serves, limit, wait_for_workers=False, multi_tenant=True)
    except (DistNetworkError, DistStoreError):
        if serves:
            raise
        raise no_connection from None


def _await_server(host: str, port: int, timeout_s: float) -> bool:
    """Return whether a port accepts connections within ``timeout_s``.

    torch's store tries again after its limit: it waits up to twice as long or more, and prints a stack each time.
    """
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=left_s):
            return True
        time.sleep(min(_POLL_S, max(left_s, 0)))
    return False


def _store_of_this_start(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return the store of torchrun's agent with keys that no earlier start of the ranks has used.

    Rank 0 chooses the prefix of the keys and invites the other ranks. The key of an invitation contains a number that
    the invited process has just chosen, and the answer one that rank 0 has just chosen. So neither is from an earlier
    start. (torchrun's own count of restarts differs between hosts if it has replaced one.)
    """
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    if rank:
        return PrefixStore(_accept_invitation(store, rank, timeout_s), store)
    return PrefixStore(_invite_ranks(store, range(1, world_size), timeout_s), store)


def _accept_invitation(store: Any, rank: int, timeout_s: float) -> str:
    number = secrets.token_hex(8)
    invitation = f"ds_ext/invitation/{rank}/{number}"
    store.set(f"ds_ext/started/{rank}", number)
    try:
        store.wait([invitation], timedelta(seconds=timeout_s + _MARGIN_S))
    except RuntimeError:
        require_hosts()
        raise TransportError(_no_answer([0], timeout_s)) from None
    prefix = f"ds_ext/start/{store.get(invitation).decode()}"
    store.set(f"{prefix}/here/{rank}", "1")
    return prefix


def _invite_ranks(store: Any, ranks: Sequence[int], timeout_s: float) -> str:
    """Invite the latest process of every rank until all have accepted, and return the prefix."""
    token = secrets.token_hex(8)
    prefix = f"ds_ext/start/{token}"
    deadline = time.monotonic() + timeout_s
    missing = list(ranks)
    invited: dict[int, bytes] = {}  # rank -> number of its process
    while missing:
        for rank in missing:
            key = f"ds_ext/started/{rank}"
            number = store.get(key) if store.check([key]) else b""
            if number and invited.get(rank) != number:
                store.set(f"ds_ext/invitation/{rank}/{number.decode()}", token)
                invited[rank] = number
        missing = [rank for rank in missing if not store.check([f"{prefix}/here/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise TransportError(_no_answer(missing, timeout_s))
        time.sleep(_POLL_S if missing else 0)
    return prefix


def compare(facts: Facts, replica_facts: Facts | None = None) -> None:
    """Compare facts over the process group, as :meth:`RollCall.require_same` does.

    The time limit is that of the process group, because other ranks may still read data or build layers.
    """
    call, limit_s = _group_roll_call()
    if call is not None:
        call.require_same(facts, limit_s, replica_facts)


@contextlib.contextmanager
def one_refusal() -> Iterator[None]:
    """Context in which a ConfigError on one rank stops all ranks.

    All ranks have a process group and run the same code. Ranks without the error raise it at the next :func:`compare`.
    """
    try:
        yield
    except ConfigError as error:
        call, _ = _group_roll_call()
        if call is not None and call.fail(str(error), REFUSED, RANK_0_S):
            error.of_all_ranks()
        raise


def _group_roll_call() -> tuple[RollCall | None, float]:
    """Return the next roll call of the process group (None for a single rank), and its time limit in seconds."""
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return None, 0.0
    store = dist.distributed_c10d._get_default_store()
    limit = store.timeout  # pyright: ignore[reportAttributeAccessIssue]
    return RollCall(store, dist.get_rank(), dist.get_world_size()), limit.total_seconds()


def stop_other_hosts(rank: int, world_size: int, text: str, kind: str) -> bool:
    """Stop the ranks on other hosts because of an error that this rank raised before it joined them.

    Return whether rank 0 reports the error: False if it cannot be reached within 15 s, or if its host is silent.
    """
    if store_is_silent():
        return False
    with contextlib.suppress(RuntimeError, OSError):
        call = make_early_roll_call(rank, world_size, RANK_0_S)
        return call is not None and call.fail(text, kind, RANK_0_S)
    return False


def differences(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return ``"key: value on ranks, value on ranks"`` for every key whose values differ.

    ``answers`` has for every rank ``host``, ``facts`` and ``of_replicas``.
    """
    hosts = [answer["host"] for answer in answers]
    lines = []
    for part in ("facts", "of_replicas"):
        for key in dict.fromkeys(key for answer in answers for key in answer[part]):
            ranks_by_value = _ranks_by_value(answers, part, key)
            if len(ranks_by_value) > 1:
                values = [f"{v} on {_ranks_and_hosts(ranks, hosts)}" for v, ranks in ranks_by_value.items()]
                lines.append(f"{key}: {', '.join(values)}")
    return lines


def _ranks_by_value(answers: Sequence[Mapping[str, Any]], part: str, key: str) -> dict[str, list[int]]:
    """Return the ranks for every value of a key. Only "facts" must be set on all ranks."""
    ranks_by_value: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        if part == "facts" or key in answer[part]:
            ranks_by_value.setdefault(answer[part].get(key, _NOT_SET), []).append(rank)
    return ranks_by_value


def _verdict(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the verdict for the answers of all ranks: ``kind``, and the ``text`` of the error if they differ."""
    lines = differences(answers)
    if not lines:
        return {"kind": _SAME}
    more = [f"and {len(lines) - _MAX_SHOWN} more keys"] if len(lines) > _MAX_SHOWN else []
    start = f"job: ranks differ in {len(lines)} key{'s' * (len(lines) > 1)}."
    text = "\n  ".join([start, *lines[:_MAX_SHOWN], *more])
    return {"kind": REFUSED, "text": f"{text}\nUse the same JSON, flags, data and code on every rank."}


def _no_answer(ranks: Sequence[int], timeout_s: float) -> str:
    return (
        f"start: {_ranks(ranks)} did not answer within {timeout_s:g} s. Look for the first error in the output of "
        f"rank {ranks[0]}. If the rank is only slow, raise transport_options.timeout_s, or the timeout_s of "
        "init_distributed() in your script."
    )


def _ranks_and_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return ranks with their hosts, such as ``ranks 2-3 (host b)``; without hosts if the job has only one."""
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    suffix = f" (host{'s' * (len(names) > 1)} {', '.join(names[:_MAX_SHOWN])})" if len(set(hosts)) > 1 else ""
    return f"{_ranks(ranks)}{suffix}"


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as ``ranks 0-2, 5``."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}"
