"""Micro-batches of one step: fetched once for all stages of a rank, and compared between ranks."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError
from ..pipe_schedules.bridge import TimetableSchedule
from .batches import Batches, EndOfData, IteratorBatches, MicroBatches, Pair, require_pair
from .types import Batch

_NOT_ENDED = -1, -1
_NOT_READ = -1.0  # instead of a checksum, if a rank does not read this part of a micro-batch
_MAX_COMPARED = 1 << 16  # elements of a tensor in a checksum


class StepData:
    """Micro-batches of a pipeline group in one step. Each is fetched once, and dropped when its last stage has it.

    Args:
        source: source of the micro-batches of all pipeline groups.
        first_id: id of this group's first micro-batch in ``source``.
        steps_done: steps before this one. It selects one micro-batch of every pipe, whose samples the ranks compare.
        batch_fn: function of a batch that returns (inputs, labels), as in DeepSpeed's ``set_batch_fn``; None: identity.
        uses_labels: whether a loss uses the labels; otherwise they are None, whatever the batch has.
        last_of_mode: last micro-batch of an iterator, in training (True) and in evaluations (False); changed in place.

    Attributes:
        ended: micro-batches that an iterator yielded in this step before it ended, and those that a step takes; or
            (-1, -1). The step continues with the last one again, so that no other rank waits, and
            :func:`require_data` ends it.
    """

    def __init__(
        self,
        source: Batches,
        first_id: int,
        schedule: TimetableSchedule,
        steps_done: int,
        batch_fn: Callable[[Batch], Batch] | None = None,
        uses_labels: bool = True,
        last_of_mode: dict[bool, Pair] | None = None,
    ) -> None:
        self.source, self.first_id, self._batch_fn = source, first_id, batch_fn
        self.steps_done, self.trains = steps_done, schedule.trains
        self.ended = _NOT_ENDED
        self._last_of_mode = {} if last_of_mode is None else last_of_mode
        self._uses_labels = uses_labels
        self.loads, timetable = schedule.loads, schedule.program.timetable
        self.last_stage = timetable.placement.stages - 1
        self._uses = Counter(micro_batch for _, micro_batch in self.loads)
        self._batches: dict[int, Pair] = {}  # fetched, and still needed by a stage
        compared = (ids[steps_done % len(ids)] for ids in timetable.micro_batches_by_pipe)
        self._checksums: dict[int, tuple[float, float]] = dict.fromkeys(compared, (_NOT_READ, _NOT_READ))

    def get(self, micro_batch: int) -> Pair:
        if micro_batch not in self._batches:
            inputs, labels = self._batches[micro_batch] = self._read(micro_batch)
            if micro_batch in self._checksums:  # now: layers may change the inputs in place
                self._checksums[micro_batch] = _tensor_checksum(inputs), _tensor_checksum(labels)
        return self._batches[micro_batch]

    def _read(self, micro_batch: int) -> Pair:
        try:
            batch = self.source.get(self.first_id + micro_batch)
            if self._batch_fn is not None:
                batch = self._batch_fn(batch)
            inputs, labels = require_pair(batch, self.source)
            if isinstance(self.source, IteratorBatches):
                self._last_of_mode[self.trains] = inputs, labels
        except EndOfData as end:
            self.ended = end.got, end.count
            if self.trains not in self._last_of_mode:
                raise end_of_data(self, {torch.distributed.get_rank(): self.ended}) from None
            inputs, labels = self._last_of_mode[self.trains]
        return inputs, labels if self._uses_labels else None

    def take(self, micro_batch: int) -> Pair:
        """Return (inputs, labels) for one stage. The last call drops the micro-batch."""
        batch = self.get(micro_batch)
        self._uses[micro_batch] -= 1
        if self._uses[micro_batch] == 0:
            del self._batches[micro_batch]
        return batch

    def weight(self, micro_batch: int) -> float:
        if isinstance(self.source, MicroBatches):
            return self.source.weight(self.first_id + micro_batch)
        return 1.0

    def labels(self) -> Iterator[Batch]:
        """Yield the labels of all micro-batches whose loss this rank computes, as the loss function gets them."""
        for stage, micro_batch in dict.fromkeys(self.loads):  # slices load it several times
            if stage == self.last_stage:
                _, labels = self.get(micro_batch)
                yield tuple(labels) if isinstance(labels, list) else labels

    def checksums(self) -> list[float]:
        """Return global number, checksum of the inputs and checksum of the labels of every compared micro-batch."""
        return [
            number
            for micro_batch, checksums in self._checksums.items()
            for number in (float(self.first_id + micro_batch), *checksums)
        ]


def require_data(data: StepData, ended_by_rank: Sequence[Sequence[float]]) -> None:
    """Raise ConfigError on all ranks if an iterator ended within the step.

    ``ended_by_rank``: :attr:`StepData.ended` of every rank, gathered as floats.
    """
    ended = {rank: (int(got), int(count)) for rank, (got, count) in enumerate(ended_by_rank) if got >= 0}
    if ended:
        raise end_of_data(data, ended).of_all_ranks()


def end_of_data(data: StepData, ended: Mapping[int, tuple[int, int]]) -> ConfigError:
    """Return the error of iterators that ended; ``ended``: rank -> its micro-batches, and those that a step takes."""
    activity = (
        f"step {data.steps_done + 1}" if data.trains else f"the evaluation after step {data.steps_done}"
    )
    numbers = ", ".join(f"{got} on rank {rank}" for rank, (got, _) in ended.items())
    return ConfigError(
        f"data_iter: ended within {activity}, which takes {max(count for _, count in ended.values())} micro-batches "
        f"per data-parallel rank (got {numbers}). Wrap it in deepspeed.utils.RepeatingLoader, give every rank as many "
        f"micro-batches, or take one step fewer."
    )


def require_same_samples(checksums: Sequence[Sequence[float]]) -> None:
    """Raise ConfigError if ranks read different samples, from the :meth:`StepData.checksums` of every rank."""
    first: dict[tuple[float, str], tuple[int, float]] = {}
    for rank, row in enumerate(checksums):
        for number, *parts in zip(row[::3], row[1::3], row[2::3], strict=True):
            for name, value in zip(("inputs", "labels"), parts, strict=True):
                if value == _NOT_READ:
                    continue
                peer, expected = first.setdefault((number, name), (rank, value))
                if value != expected:
                    raise ConfigError(
                        f"data: ranks {peer} and {rank} read different {name} for micro-batch {number:.0f} of this "
                        f"step (got the checksums {int(expected):08x} and {int(value):08x}), so inputs would meet the "
                        f"labels of other samples. Seed shuffles and random numbers of the dataset equally on all "
                        f"ranks of a data-parallel rank, or return None for a part that another rank reads."
                    ).of_all_ranks()


def _tensor_checksum(value: Batch) -> float:
    """Return a checksum of at most ``_MAX_COMPARED`` elements of every dense tensor; ``_NOT_READ`` without any."""
    parts = dense_parts(value, _MAX_COMPARED)
    if not parts:
        return _NOT_READ
    crc = 0
    for part in parts:
        crc = zlib.crc32(part.view(torch.uint8).numpy().data, crc)
    return float(crc)


def dense_parts(value: Batch, limit: int | None = None) -> list[Tensor]:
    """Return the dense tensors of inputs or labels, flattened and in CPU memory, with at most ``limit`` elements."""
    parts = value if isinstance(value, tuple | list) else (value,)
    dense = [
        part.detach().reshape(-1)
        for part in parts
        if isinstance(part, Tensor) and part.layout == torch.strided
    ]
    steps = [1 if limit is None else max(1, -(-len(part) // limit)) for part in dense]
    return [part[::step].cpu().contiguous() for part, step in zip(dense, steps, strict=True)]
