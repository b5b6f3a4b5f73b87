"""Snapshots of every step, and their loading when the launcher has restarted the ranks.

Each rank writes its snapshot of a step when the next one begins, and then the ranks wait for each other. Only then is
the step complete, so it includes what the script does after it: an evaluation, a checkpoint, a line in a log, a change
of the weights. A step that was not complete runs again with all of this, and a rank that dies in the optimizer step
never leaves ranks one step apart: they load the last complete step.

When a step is complete, the keepers copy its snapshots to other hosts (:mod:`ds_ext.parallel.hosts`), beside the next
step. No rank writes its next snapshot before all copies have arrived. So whenever a host is lost, there is a step of
which its copies exist and which no rank on the other hosts has overwritten: the last complete one or the one before.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from ...comm.tcp.address import own_address
from ...config.sections import RecoveryOptions
from ...environment import find_launcher, restart_count, started_s
from ...errors import CheckpointError, ConfigError
from ...parallel.hosts import copy_hosts
from ..all_ranks import from_rank_0, on_all_ranks
from ..batches import IteratorBatches
from ..checkpoint.save import describe_job
from ..engine_state import EngineState
from ..rank_state import RankState
from ..types import Json, Record
from .audit import tensor_checksum
from .keeper import Exits, Keeper, KeeperError, Snapshots
from .keeper_process import RUNS, Address
from .slots import Slots, pack_state, unpack_state

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_POLL_S = 0.002


@dataclass(frozen=True)
class Recovered:
    """Result of a recovery.

    Attributes:
        step: number of completed steps.
        restart: number of the restart, from 1.
        lost_steps: complete steps that will run again.
        moved: ranks whose snapshots came from another host.
        exited: ranks that exited first, and so caused the restart.
        noticed_s: seconds until the next rank exited; None if unknown, for example if a host was lost.
        down_s: seconds from the end of the last complete step to the start of this process.
        set_up_s: seconds from the start of this process to the recovery.
        load_s: seconds for finding and loading the snapshots.
    """

    step: int
    restart: int
    lost_steps: int
    moved: int
    exited: tuple[int, ...]
    noticed_s: float | None
    down_s: float
    set_up_s: float
    load_s: float

    def __str__(self) -> str:
        lost = f"{self.lost_steps} step{'s' * (self.lost_steps != 1)} lost"
        if self.moved:
            lost += f", {self.moved} rank{'s' * (self.moved != 1)} from another host"
        if self.exited:
            numbers = ", ".join(map(str, self.exited))
            lost += f"; rank{'s' * (len(self.exited) != 1)} {numbers} had exited"
        noticed = "" if self.noticed_s is None else f"noticed after {self.noticed_s:.1f} s, "
        parts = (
            f"{noticed}down {self.down_s:.1f} s, set-up {self.set_up_s:.1f} s, loading {self.load_s:.1f} s"
        )
        return f"recovered at step {self.step} from host memory (restart {self.restart}): {lost}; {parts}"


def agreed_restart_count() -> int:
    """Return how often the launcher has restarted the ranks. All ranks must call this together.

    The launcher of a new host has not restarted its ranks, so the largest number counts.
    """
    return max(on_all_ranks(restart_count))


class Recovery:
    """Snapshots of this rank. All methods must be called by all ranks together."""

    def __init__(self, engine: EngineState, options: RecoveryOptions) -> None:
        self._engine, self._options = engine, options
        self._rank = dist.get_rank()
        self._timeout_s = engine.plan.settings.transport_options.timeout_s
        self._stepped = False  # since the last snapshot
        self._recovered_step: int | None = None  # before the first step after a recovery
        self._waited_s = 0.0  # in this step, for the last copy of a rank
        self._copying: int | None = None  # step of the last copy that this process has started
        self._copy_failed = False
        # A restarted script has these again: large tables need not be in every snapshot.
        found = {key: buffers[name] for key, buffers, name in RankState(engine).transient()}
        self._constant = {
            key: tensor_checksum([buffer]) for key, buffer in found.items() if buffer is not None
        }
        self.restart = agreed_restart_count()
        self.pending = self.restart > 0
        keepers, stop_reasons = zip(*self._with_keepers(self._start), strict=True)
        if any(stop_reasons):
            raise ConfigError(
                f"ds_ext.recovery: an earlier start of the ranks ended this job (got "
                f"{next(filter(None, stop_reasons))})"
            )
        # Host of every rank, as the first rank on it.
        self._hosts = [keepers.index(keeper) for keeper in keepers]
        self._addresses = self._with_keepers(self._listen) if len(set(self._hosts)) > 1 else None
        targets = copy_hosts(engine.layout, self._hosts) if options.second_copy == "mirror" else None
        self._targets = targets or [None] * len(self._hosts)
        self._slots = self._with_keepers(lambda: Slots(self._keeper, self._rank), share=False)[self._rank]

    def _start(self) -> tuple[str, str]:
        """Start this host's keeper. Returns its id, and the reason for which :meth:`stop` ended the job, or ""."""
        launcher = find_launcher()
        if launcher is None:
            raise KeeperError("the launcher has exited")
        self._keeper = Keeper(launcher[1])
        return self._keeper.start(self._rank, self.restart)

    def _listen(self) -> Address:
        node_ips = self._engine.plan.settings.transport_options.node_ips
        return self._keeper.listen(own_address(self._rank, dist.get_world_size(), node_ips))

    def _with_keepers(self, function: Callable[[], _T], share: bool = True) -> list[_T]:
        """Return the results of ``function()`` on all ranks; without ``share`` only this rank's, None for the others.

        Use ``share=False`` for results that cannot be pickled.
        """
        result: Any = None

        def call() -> Any:
            nonlocal result
            try:
                result = function()
            except KeeperError as error:
                raise ConfigError(
                    f"ds_ext.recovery: the process that keeps the snapshots on host {socket.gethostname()} failed (got "
                    f"{error}). Remove the section to train without snapshots."
                ) from None
            return result if share else None

        results = on_all_ranks(call)
        results[self._rank] = result
        return results

    # --- snapshots ---

    def end_step(self) -> None:
        """Wait for the copies of the step before, and have the next :meth:`complete` record this one."""
        self._stepped, self._waited_s = True, 0.0
        if self._is_due(self._engine.global_steps) and any(target is not None for target in self._targets):
            self._waited_s = max(self._with_keepers(self._wait_for_copy))

    def snapshot_last_step(self) -> float | None:
        """Write this rank's snapshot of the last step, if it is due, and record that the step is complete.

        To be called when the next step begins, with all that the script has changed: the snapshot has what this step
        starts from. Returns the seconds taken, with the longest wait of a rank for its last copy; None without one.
        """
        if self.pending:
            raise ConfigError(
                "ds_ext.recovery: the launcher has restarted the ranks, and the script trains from the beginning (got "
                "no call of engine.recover()). Call it before the first step, and train from engine.global_steps."
            )
        stepped, self._stepped = self._stepped, False
        if not stepped:
            return None
        step = self._engine.global_steps
        seconds = self._snapshot(step) if self._is_due(step) else None
        self._slots.mark_complete(step)
        if seconds is not None:
            self._start_copy(step)
        return seconds

    def _snapshot(self, step: int) -> float:
        """Write the snapshot of a step. When this returns, all ranks have theirs. Returns the seconds taken."""
        keeper_is_gone = not self._keeper.is_running()

        def write_and_time() -> tuple[float, bool]:
            self._require_position()
            begin = time.perf_counter()
            try:
                if keeper_is_gone:
                    self._restart_keeper(step)
                self._write_slot(step)
            except KeeperError as error:
                raise ConfigError(
                    f"ds_ext.recovery: no snapshot of step {step} on host {socket.gethostname()} (got {error}). Use "
                    f"fewer ranks per host, or remove the section."
                ) from None
            return time.perf_counter() - begin, keeper_is_gone

        reports = on_all_ranks(write_and_time)
        if any(is_gone for _, is_gone in reports) and self._addresses is not None:
            self._addresses = self._with_keepers(self._listen)
        return self._waited_s + reports[self._rank][0]

    def _write_slot(self, step: int) -> None:
        state = RankState(self._engine)
        tensors, constant = state.tensors(), self._constant
        changed = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in constant or constant[name] != tensor_checksum([tensor])
        }
        values = {"job": describe_job(self._engine), **state.values()}
        self._slots.write(step, changed, pack_state(values))

    def _require_position(self) -> None:
        if isinstance(self._engine.batches, IteratorBatches):
            raise ConfigError(
                "ds_ext.recovery: the position in the data must be known (got an iterator). Pass training_data to "
                "initialize(), or train_batch() an object with get, advance, state_dict and load_state_dict."
            )

    def _require_same_job(self, job: Json) -> None:
        now = describe_job(self._engine)
        changed = sorted(key for key in now if now[key] != job.get(key))
        if changed:
            raise CheckpointError(
                f"snapshot: of a job with another {changed[0]} (got {job.get(changed[0])!r}, now "
                f"{now[changed[0]]!r})."
            )

    def _restart_keeper(self, step: int) -> None:
        """Start the keeper of this host after its end. The snapshots of earlier steps are lost with it."""
        if self._hosts.index(self._hosts[self._rank]) == self._rank:
            logger.warning(
                "recovery: the process that keeps the snapshots on host %s has exited, and is started again. Snapshots "
                "of steps before %d are lost.",
                *(socket.gethostname(), step),
            )
        self._keeper.start(self._rank, self.restart)
        self._slots = Slots(self._keeper, self._rank)

    def _is_due(self, step: int) -> bool:
        return step % self._options.every == 0

    def _address_of(self, host: int) -> Address:
        assert self._addresses is not None
        return self._addresses[self._hosts.index(host)]

    def _start_copy(self, step: int) -> None:
        target = self._targets[self._rank]
        if target is None:
            return
        try:
            self._keeper.copy(self._rank, step, self.restart, self._address_of(target))
            self._copying = step
        except KeeperError as error:
            self._report_copy(step, str(error))

    def _wait_for_copy(self) -> float:
        """Wait until the last copy that this process has started has ended. Returns the seconds waited."""
        step, self._copying = self._copying, None
        if step is None:
            return 0.0
        begin = time.monotonic()
        deadline = begin + self._timeout_s
        while (
            self._slots.last_ended_copy < step and time.monotonic() < deadline and self._keeper.is_running()
        ):
            time.sleep(_POLL_S)
        if self._slots.last_ended_copy < step:
            self._report_copy(step, f"no end within {self._timeout_s:g} s, or before the end of its sender")
        elif self._slots.last_failed_copy == step:
            self._report_copy(step, self._keeper.copy_error(self._rank))
        else:
            self._copy_failed = False
        return time.monotonic() - begin

    def _report_copy(self, step: int, reason: str) -> None:
        if not self._copy_failed:
            logger.warning(
                "recovery: the snapshot of step %d was not copied to another host (got %s). Training continues; if "
                "this host is lost, it continues from the last copy or checkpoint.",
                step,
                reason,
            )
        self._copy_failed = True

    def stop(self, reason: str) -> None:
        """Keep the ranks from continuing when the launcher restarts them, for example from corrupted weights."""
        with contextlib.suppress(KeeperError):
            self._keeper.stop(reason)

    # --- recovery ---

    def recover(self, save_dir: Path | None) -> Recovered | None:
        """Load the newest step of which all ranks have snapshots, and print it on rank 0.

        Returns None at the first start, or if all are older than the loaded step or this run's last checkpoint in
        ``save_dir`` (None: than the loaded step only).
        """
        self.pending = False
        if self.restart == 0:
            return None
        begin = time.time()
        run = self._engine.run
        checkpoint = self._engine.global_steps
        if save_dir is not None and run.continues:
            checkpoint = max(from_rank_0(lambda: run.saved_step(save_dir), CheckpointError), checkpoint)
        memory = _HostMemory.from_answers(
            self._with_keepers(lambda: (self._keeper.snapshots(), self._keeper.exits(self.restart)))
        )
        for step in memory.steps:
            if step >= checkpoint and (recovered := self._recover_from(step, memory, begin)) is not None:
                if self._rank == 0:
                    print(f"{recovered}\n", end="", flush=True)
                self._recovered_step = recovered.step
                return recovered
        self._begin(after=checkpoint)
        run.reached = max(run.reached, memory.complete)
        if self._rank == 0:
            self._report_loss(memory, checkpoint, run.reached)
        return None

    def take_recovered_step(self) -> int | None:
        """Return the step from which the job continued, in the first step after a recovery; else None."""
        step, self._recovered_step = self._recovered_step, None
        return step

    def _recover_from(self, step: int, memory: _HostMemory, begin: float) -> Recovered | None:
        """Load the snapshots of a step; None if one of them is damaged or of another job."""
        moved = self._move(step, memory)
        snapshot = self._read(step)
        if snapshot is None:
            return None
        RankState(self._engine).load(*snapshot)
        self._begin(after=step)
        self._engine.run.reached = step  # the result has the lost steps
        if not self._is_copied(step, memory):
            self._start_copy(step)
        exited, noticed_s = first_exits(memory.exits, len(self._hosts))
        return Recovered(
            step,
            self.restart,
            lost_steps=memory.complete - step,
            moved=moved,
            exited=exited,
            noticed_s=noticed_s,
            down_s=max(0.0, started_s() - memory.last_ns / 1e9),
            set_up_s=begin - started_s(),
            load_s=time.time() - begin,
        )

    def _report_loss(self, memory: _HostMemory, checkpoint: int, reached: int) -> None:
        every = self._options.every
        if memory.steps and memory.steps[0] < checkpoint:
            logger.warning(
                "recovery: restart %d continues from the checkpoint of step %d, which is newer than the snapshots of "
                "step %d",
                *(self.restart, checkpoint, memory.steps[0]),
            )
        elif checkpoint // every == max(checkpoint, reached) // every:
            logger.warning(
                "recovery: restart %d continues from step %d, because no newer snapshot was due before step %d",
                *(self.restart, checkpoint, (checkpoint // every + 1) * every),
            )
        else:
            lost = ", ".join(map(str, memory.ranks_without_snapshot))
            missing = f"ranks {lost}" if lost else "none, but they are of different steps or damaged"
            logger.warning(
                "recovery: restart %d found no snapshots of all ranks after %d complete steps (missing: %s)",
                *(self.restart, reached, missing),
            )

    def _begin(self, after: int) -> None:
        """Forget later steps on all hosts, before any rank writes one of the same number."""
        this_host = self._hosts[self._rank]
        ranks = [rank for rank, host in enumerate(self._hosts) if this_host in (host, self._targets[rank])]
        self._with_keepers(lambda: self._keeper.begin(self.restart, after, ranks))

    def _is_copied(self, step: int, memory: _HostMemory) -> bool:
        """Return whether this rank's other host already had the snapshot: it need not be a new, empty one."""
        target = self._targets[self._rank]
        return target is not None and self._hosts.index(target) in memory.holders(step, self._rank)

    def _move(self, step: int, memory: _HostMemory) -> int:
        """Copy the snapshots of ranks that have none on their host. Returns the number of these ranks."""
        senders: dict[
            int, int
        ] = {}  # rank without a snapshot on its host -> first rank with it on its own host
        for rank, host in enumerate(self._hosts):
            holders = memory.holders(step, rank)
            if host not in {self._hosts[holder] for holder in holders}:
                senders[rank] = holders[0]

        def move() -> None:
            for rank, sender in senders.items():
                if sender != self._rank:
                    continue
                address = self._address_of(self._hosts[rank])
                try:
                    self._keeper.move(rank, step, self.restart, address, self._timeout_s)
                except KeeperError as error:  # that rank will not find its snapshot
                    logger.warning(
                        "recovery: the snapshot of rank %d was not moved to its host (got %s)", rank, error
                    )

        if senders:
            on_all_ranks(move)
        return len(senders)

    def _read(self, step: int) -> tuple[dict[str, Tensor], Record] | None:
        """Return this rank's snapshot; None on all ranks if one of them is damaged or of another job."""
        snapshot: tuple[dict[str, Tensor], Record] = {}, {}

        def read() -> None:
            nonlocal snapshot
            tensors, state = self._slots.read(step)
            snapshot = tensors, unpack_state(state)
            self._require_same_job(snapshot[1]["job"])
            RankState(self._engine).require_groups(snapshot[1])

        try:
            on_all_ranks(read, CheckpointError)
        except CheckpointError as error:
            if self._rank == 0:
                logger.warning("%s An older snapshot is used, if there is one.", error)
            return None
        return snapshot


@dataclass(frozen=True)
class _HostMemory:
    """Contents of the keepers after a restart.

    Attributes:
        snapshots: for every rank, the snapshots in the memory of its host, by the rank that took them.
        exits: rank -> time of its exit in the last start, without the ranks whose host was lost.
        steps: steps of which some host has a snapshot of every rank, newest first.
        complete: last step that was complete on all ranks.
        last_ns: its end on rank 0, in nanoseconds since 1970.
    """

    snapshots: Sequence[dict[int, Snapshots]]
    exits: dict[int, int]
    steps: list[int]
    complete: int
    last_ns: int

    @classmethod
    def from_answers(cls, answers: Sequence[tuple[dict[int, Snapshots], Exits]]) -> _HostMemory:
        snapshots = [by_rank for by_rank, _ in answers]
        exits = last_exits([exits for _, exits in answers])
        progress: dict[
            int, tuple[int, int]
        ] = {}  # rank -> its last complete step, and the end of this step in ns
        steps: defaultdict[int, set[int]] = defaultdict(set)  # rank -> steps of its snapshots on any host
        for by_rank in snapshots:
            for rank, snapshot in by_rank.items():  # a copy may be older
                progress[rank] = max(snapshot.progress, progress.get(rank, (0, 0)))
                steps[rank].update(snapshot.steps)
        # The scripts of the ranks may be in different steps. Rank 0 decides: it evaluates, saves and logs.
        last, last_ns = progress.get(0, (0, 0))
        # If its host was lost, its records come from a copy and may be older.
        complete = last if 0 in exits else max((step for step, _ in progress.values()), default=0)
        common = set.intersection(*(steps[rank] for rank in range(len(snapshots))))
        loadable = sorted((step for step in common if step <= last), reverse=True)
        return cls(snapshots, exits, loadable, complete, last_ns)

    def holders(self, step: int, rank: int) -> list[int]:
        """Return the ranks on whose hosts there is a snapshot of ``rank``."""
        return [
            holder
            for holder, by_rank in enumerate(self.snapshots)
            if rank in by_rank and step in by_rank[rank].steps
        ]

    @property
    def ranks_without_snapshot(self) -> list[int]:
        holds_snapshot = {
            rank for by_rank in self.snapshots for rank, snapshots in by_rank.items() if snapshots.steps
        }
        return [rank for rank in range(len(self.snapshots)) if rank not in holds_snapshot]


def last_exits(answers: Sequence[Exits]) -> dict[int, int]:
    """Return rank -> time of its exit in the last start, without the ranks whose host was lost with its keeper."""
    last = max(exits.start for exits in answers)
    return {rank: at_ns for exits in answers if exits.start == last for rank, at_ns in exits.times.items()}


def first_exits(times: Mapping[int, int], ranks: int) -> tuple[tuple[int, ...], float | None]:
    """Return the ranks that exited first, and the seconds until the next one did; None if unknown.

    If a host was lost, these are its ranks.
    """
    if not times:
        return (), None
    lost = tuple(rank for rank in range(ranks) if rank not in times)
    exits = sorted((time_ns, rank) for rank, time_ns in times.items() if time_ns != RUNS)
    if lost or not exits:
        return lost, None
    first_ns, first_rank = exits[0]
    return (first_rank,), (exits[1][0] - first_ns) / 1e9 if len(exits) > 1 else None
