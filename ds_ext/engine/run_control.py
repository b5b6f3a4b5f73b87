"""Methods of the engine for the life of a run that DeepSpeed's engine does not have: end, saves, recovery."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ..launch.stop import CALL, StopRequests
from .activity import Activity
from .batches import Batches
from .checkpoint.background import BackgroundSave
from .checkpoint.events import CheckpointEvents
from .checkpoint.save import finish_save
from .checkpoint.trial import try_folder
from .deepspeed_api.base import AdaptedEngine
from .recovery.recovery import Recovered, Recovery
from .role import Role

logger = logging.getLogger(__name__)


class RunControl(AdaptedEngine):
    """Part of :class:`.engine.PipelineEngine`, whose constructor sets the attributes."""

    activity: Activity
    checkpoint_events: CheckpointEvents
    recovery: Recovery | None
    role: Role
    saving: BackgroundSave | None
    stops: StopRequests
    _recovered_from: int | None
    _stop_reported = False

    def should_stop(self) -> bool:
        """Return whether the run should end now: the same answer on all ranks, after every step and evaluation.

        True after a rank received SIGTERM or SIGUSR1, lost its launcher, or called :meth:`request_stop`. The first call
        takes these signals, unless the script handles them. Save a checkpoint then, and exit with 0. Rank 0 logs step,
        rank and cause at the first True.
        """
        self.stops.listen()
        stop = self.stops.agreed
        if stop is not None and self.global_rank == 0 and not self._stop_reported:
            self._stop_reported = True
            logger.warning("step %d: stopped, because %s.", self.global_steps, stop)
        return stop is not None

    def request_stop(self) -> None:
        """Request the end of the run. After the next step or evaluation, :meth:`should_stop` is True on all ranks."""
        self.stops.request(CALL)

    def try_checkpoint_folder(
        self, save_dir: str | os.PathLike[str], tags: Sequence[str] | None = None
    ) -> None:
        """Check that checkpoints can be saved to ``save_dir``. All ranks must call this together.

        Every rank writes a small file. Rank 0 reads the files and compares the free space with a checkpoint's size.
        From now on, no other job can save to the folder. A warning names checkpoints that another run has left there.

        Args:
            tags: names of this run's checkpoints, to warn only of those that it will replace; None: any name.
        """
        with self.activity.during(f"checking the folder {save_dir}"):
            try_folder(self, Path(save_dir), tags)

    def wait_for_weights(self) -> None:
        """Wait until this rank has the weights of the last step, before the script reads or sets a parameter.

        With ``overlap_across_steps``, they may still be gathered when :meth:`train_batch` returns.
        """
        self.update.wait_for_weights()

    def wait_for_save(self) -> None:
        """Wait until the last save in the background is complete. All ranks must call this together.

        The next save and the next load do so first, and the exit of a rank waits for its files.
        """
        save, self.saving = self.saving, None
        if save is not None:
            with (
                self.checkpoint_events.finishing(save),
                self.activity.during(f"saving the checkpoint {save.path.name}"),
                self.activity.longer_limit(),
            ):
                finish_save(save)

    def recover(
        self, data_iter: Batches | None = None, save_dir: str | os.PathLike[str] | None = None
    ) -> Recovered | None:
        """Continue from the newest snapshots in host memory after the launcher has restarted the ranks.

        Call it before the first step, on all ranks; then train from ``engine.global_steps``. Returns None without the
        section "recovery", at the first start, if a snapshot of some rank was lost, and if the snapshots are older than
        the loaded step or the last checkpoint of this run in ``save_dir``, which the script can load then.

        Args:
            data_iter: source of the micro-batches; None: ``training_data``.
            save_dir: folder of this run's checkpoints; None: snapshots are compared with the loaded step only.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        if self.recovery is None:
            return None
        self.wait_for_save()
        with self.activity.during("loading snapshots"), self.activity.longer_limit():
            self.update.masters.take_changes()
            recovered = self.recovery.recover(None if save_dir is None else Path(save_dir))
            if recovered is not None:
                self._recovered_from = recovered.step
                self.trained.take_changes()
                self.trained.agree()
                self.update.resize()
                self.role.weights_loaded()
                self.checkpoint_events.recovered(recovered)
        return recovered
