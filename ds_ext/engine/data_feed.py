"""Micro-batches of a rank, step by step: from the source that its script gives to the data of one step."""

from __future__ import annotations

from typing import Literal

from ..errors import ConfigError
from ..pipe_schedules.bridge import TimetableSchedule
from .batches import Batches, MicroBatches, NoBatches, as_batches
from .engine_state import EngineState
from .first_batch import check_first_batch
from .step_data import StepData
from .types import Pair, Source


class DataFeed:
    """Feed of the steps and evaluations of one engine, whose ``batches`` is the current source."""

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        self._checked: set[bool] = set()  # modes with checked batches: training (True), evaluation (False)
        self._last: dict[bool, Pair] = {}  # last micro-batch of an iterator, by the same modes

    def has_started(self, trains: bool) -> bool:
        return trains in self._checked

    def as_batches(self, source: Source, micro_batches: int) -> Batches | None:
        """Return a source whose steps take ``micro_batches`` of every pipeline."""
        engine = self._engine
        return as_batches(source, engine.mpu.get_data_parallel_rank(), micro_batches * engine.role.pipelines)

    def to_evaluate(self, data: Source, micro_batches: int | Literal["all"] | None) -> tuple[Source, int]:
        """Return the source of an evaluation, and its micro-batches per data-parallel rank."""
        engine, whole = self._engine, micro_batches == "all"
        if all(hasattr(type(data), name) for name in ("__len__", "__getitem__")):
            data = MicroBatches(data, engine.micro_batch_size, collate=engine.collate_fn, whole=whole)
        elif whole:
            raise ConfigError(
                f'num_micro_batches: "all" needs a dataset with __len__ and __getitem__ (got {type(data).__name__}). '
                f"Pass the dataset, or a number."
            )
        if micro_batches == "all":
            per_row = engine.micro_batch_size * engine.dp_world_size * engine.role.pipelines
            return data, -(-len(data.dataset) // per_row)
        return data, engine.micro_batches if micro_batches is None else micro_batches

    def start_step(self, schedule: TimetableSchedule, computes_loss: bool) -> StepData:
        """Return the micro-batches of a step or an evaluation. All ranks check the first one of each."""
        engine, trains = self._engine, schedule.trains
        batches = NoBatches(engine.batch_fn is not None) if engine.batches is None else engine.batches
        if isinstance(batches, MicroBatches) and engine.plan.settings.keyed_random:
            batches.seed = engine.module.random_seed
        data = StepData(
            batches,
            engine.module.data_index * schedule.micro_batches,
            schedule,
            steps_done=engine.global_steps,
            batch_fn=engine.batch_fn,
            uses_labels=computes_loss and engine.module.loss_fn is not None,
            last_of_mode=self._last,
        )
        total = schedule.micro_batches * engine.layout.data_parallel_size
        if not self.has_started(trains):
            check_first_batch(data, trains, total, engine.activity.abort)
            self._checked.add(trains)
        elif isinstance(batches, MicroBatches):
            batches.require(total, trains)
        return data
