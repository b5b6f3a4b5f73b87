"""Activity of a rank: its name in errors, the time limit of its waits, and the failure that ends its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deepspeed.runtime.pipe import schedule as ds

from ..comm.groups import first_step_limit_s, limit_waits
from ..comm.host_watch import require_hosts
from ..comm.transport import Transport
from ..launch.failure import first_line, lost_peer, note_failure, publish_activity


class Activity:
    """Activity of this rank.

    Args:
        describe_ranks: function of the first line of an error; returns the roles of the ranks that it names, or "".
        where: function of an instruction and a verb; returns the position in the timetable.

    Attributes:
        name: for example ``step 4``; a failed instruction adds its label.
        transport: transport whose waits are limited; its owner sets it.
    """

    transport: Transport

    def __init__(
        self,
        limit_s: float,
        describe_ranks: Callable[[str], str],
        where: Callable[[ds.PipeInstruction, str], str],
    ) -> None:
        self.name = "setting up"
        self._began = False  # whether the current step has begun
        self._limit_s, self._describe_ranks, self._where = limit_s, describe_ranks, where
        self._failure: str | None = None  # the first one of a step that had begun

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Context that adds the activity ``name`` to the first line of an error about a lost or silent rank."""
        self.name = name
        try:
            require_hosts()
            yield
        except Exception as error:
            if lost_peer(error):
                first, other_lines = first_line(error), str(error).splitlines()[1:]
                context = "; ".join(filter(None, [self.name, self._describe_ranks(first)]))
                error.args = ("\n".join([f"{first} ({context})", *other_lines]),)
            raise

    @contextmanager
    def longer_limit(self, applies: bool = True) -> Iterator[None]:
        """Context with a longer limit on waits, because the time of compilations and disks differs between ranks.

        Ranks that do something else reach their limit first, so they can report what this rank does.
        """
        if not applies:
            yield
            return
        self._limit_waits(first_step_limit_s(self._limit_s))
        publish_activity(self.name)
        try:
            yield
        finally:
            self._limit_waits(self._limit_s)
            publish_activity("")

    def _limit_waits(self, limit_s: float) -> None:
        self.transport.timeout_s = limit_s
        limit_waits(limit_s)

    @contextmanager
    def whole_step(self, on_failure: Callable[[], None]) -> Iterator[None]:
        """Context of a step or an evaluation. If it fails after it began, no other one can follow."""
        if self._failure is not None:
            raise RuntimeError(
                f"engine: cannot continue after a failure within a step (got {self._failure}). Start the ranks again, "
                f"and load a checkpoint."
            )
        self._began = False
        try:
            yield
        except BaseException as error:
            on_failure()
            if self._began:
                self._failure = f"{self.name}: {type(error).__name__}: {first_line(error)}"
            raise

    def begin(self) -> None:
        """Note that the current step has begun, so that it cannot be repeated."""
        self._began = True

    def abort(self, error: Exception) -> None:
        """Send an error of this rank to its peers. The current step cannot be repeated."""
        self._began = True
        note_failure()
        self.transport.abort(f"{type(error).__name__}: {error}")

    @contextmanager
    def reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.abort(error)
            raise

    def report_failure(self, instruction: ds.PipeInstruction, error: Exception) -> None:
        self.name = f"{instruction.label}, {self.name}"
        error.add_note(self._where(instruction, "stopped" if lost_peer(error) else "failed"))
        self.abort(error)
