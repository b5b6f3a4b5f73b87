"""DeepSpeed's two verbs for checkpoints, on checkpoints that fit any schedule and sizes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .checkpoint.folder import has_checkpoint
from .checkpoint.load import load_checkpoint
from .checkpoint.save import save_checkpoint
from .checkpoint.together import by_rank_0
from .checkpoint.trial import try_folder
from .telling import TellsWhatItDid

logger = logging.getLogger(__name__)


class CheckpointMethods(TellsWhatItDid):
    """What an engine can do with checkpoints; before DeepSpeed's engine among its parents."""

    global_steps: int
    in_checkpoints = True  # False of a rank whose weights are another's
    first_in_checkpoints = 0  # the rank that writes what is the same on all

    def weights_loaded(self) -> None:
        """Called on all ranks after a checkpoint is loaded."""

    def try_checkpoint_folder(self, save_dir: str | os.PathLike[str]) -> None:
        """Find out before the first step whether checkpoints can be saved to ``save_dir``; a call of all ranks.

        Every rank writes a small file, and rank 0 reads them and compares the free room with one checkpoint's size.
        Raises ConfigError, the same on every rank.
        """
        with self._during(f"trying the folder {save_dir}"):
            try_folder(self, Path(save_dir))

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write ``save_dir/tag`` (by default ``global_step<N>``); arguments and result are DeepSpeed's.

        The checkpoint gets its name when all of it is on the disk: a run that is killed leaves the last one whole.
        Raises what :func:`.checkpoint.save.save_checkpoint` does.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        with self._during(f"saving the checkpoint {tag}"):
            save_checkpoint(
                self, Path(save_dir), tag, client_state or {}, save_latest, not exclude_frozen_parameters
            )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load ``load_dir/tag`` (by default the current one), whatever schedule and sizes it was written under.

        Arguments and result are DeepSpeed's: (path, client state); (None, None) when there is no checkpoint and no tag
        is given. Raises what :func:`.checkpoint.load.load_checkpoint` does, and ConfigError for a ``custom_load_fn``.
        """
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn must be None: weights are read from the layers' files.")
        with self._during(f"loading a checkpoint from {load_dir}"):
            if tag is None and not by_rank_0(lambda: has_checkpoint(Path(load_dir))):
                logger.warning("there is no checkpoint in %s", load_dir)
                return None, None
            path, client_state = load_checkpoint(
                self,
                Path(load_dir),
                None if tag is None else str(tag),
                strict=load_module_strict,
                with_optimizer=load_optimizer_states and not load_module_only,
                with_scheduler=load_lr_scheduler_states and not load_module_only,
                with_counters=not load_module_only,
            )
            self.weights_loaded()
        return str(path), client_state
