"""Sources of micro-batches, and checks of their format.

A rank fetches a micro-batch by its global id when its schedule needs it. With a dataset (:class:`MicroBatches`), step t
takes samples t*G .. t*G+G-1 in the order of the dataset or a shuffled one. Micro-batch j of the step holds the
consecutive samples j*b .. j*b+b-1 of the step. G is the global batch size, b the micro-batch size. A user's iterator
yields the micro-batches of one data-parallel rank (:class:`IteratorBatches`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import ConfigError
from ..tensor_parallel import mix_key
from .types import Batch, Pair, Record, Sample, Saved, Source

_MAX_SHOWN = 6  # keys or types in an error
_LABELS = (
    "labels",
    "label",
    "label_ids",
    "target",
    "targets",
    "target_ids",
    "y",
)  # keys of a sample, in any case


@runtime_checkable
class Batches(Protocol):
    """Micro-batches of a step, addressed by global id (0..N*DP-1 over all pipeline groups)."""

    def get(self, micro_batch: int) -> Batch:
        """Return (inputs, labels) of a micro-batch of the current step."""
        ...

    def advance(self, micro_batches: int) -> None:
        """End the current step, which had this number of micro-batches over all pipeline groups."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """Batches whose position is part of the engine's checkpoints.

    The state is the same on all ranks, because micro-batches have global ids. It consists of numbers, strings, tensors,
    lists and dictionaries.
    """

    def state_dict(self) -> Record: ...

    def load_state_dict(self, state: Saved, /) -> None:
        """Continue at a saved position. The job that saved it may have used a different batch size."""
        ...


class EndOfData(ConfigError):
    """An iterator ended within a step, which takes ``count`` micro-batches of this rank, after ``got``."""

    def __init__(self, got: int, count: int) -> None:
        super().__init__(f"data_iter: ended within a step, which takes {count} micro-batches (got {got}).")
        self.got, self.count = got, count


class IteratorBatches:
    """Batches from a user's iterator over the micro-batches of this data-parallel rank.

    As in DeepSpeed, a step takes ``gradient_accumulation_steps`` micro-batches, and the two pipes of a bidirectional
    schedule are two data-parallel ranks. A schedule may need micro-batches in a different order, so those pulled early
    are kept. Only ranks that hold a first or a last stage pull.

    Args:
        iterator: yields (inputs, labels) in order.
        data_parallel_rank: DeepSpeed's data-parallel rank, replicas included.
        count: micro-batches of this data-parallel rank per step.
    """

    def __init__(self, iterator: Iterator[Batch], data_parallel_rank: int, count: int) -> None:
        self.iterator, self.rank, self.count = iterator, data_parallel_rank, count
        self._micro_batches: list[Batch] = []  # of the current step, so far

    def get(self, micro_batch: int) -> Batch:
        owner, index = divmod(micro_batch, self.count)
        if owner != self.rank:
            raise ConfigError(
                f"data_iter: this schedule needs micro-batches from several data-parallel ranks on one rank: inputs "
                f"of one pipe and labels of the other (got rank {owner}, data_iter yields those of rank "
                f"{self.rank}). Pass training_data to initialize(), or pass train_batch() an object with "
                f"get(micro_batch) and advance(micro_batches)."
            )
        while len(self._micro_batches) <= index:
            try:
                # The iterator may reuse its memory. DeepSpeed clones inputs for the same reason.
                self._micro_batches.append(tree_map_only(Tensor, _clone_pageable, next(self.iterator)))
            except StopIteration:
                raise EndOfData(len(self._micro_batches), self.count) from None
        return self._micro_batches[index]

    def advance(self, micro_batches: int) -> None:
        self._micro_batches.clear()


class NoBatches:
    """Batches of a rank without a data iterator. Only ranks with a first or last stage ask for them.

    A batch ``may_be_none`` if the script's ``batch_fn`` gets it from another rank.
    """

    def __init__(self, may_be_none: bool) -> None:
        self._may_be_none = may_be_none

    def get(self, micro_batch: int) -> None:
        """Return None. Raises ConfigError if ``batch_fn`` does not get the data from another rank."""
        if not self._may_be_none:
            raise ConfigError(
                "data_iter: no data on a rank with the first or last stage (got None). Pass training_data to "
                "initialize(), call engine.set_dataloader(), or pass train_batch() a data_iter."
            )

    def advance(self, micro_batches: int) -> None:
        pass


def _clone_pageable(tensor: Tensor) -> Tensor:
    """Copy a tensor if it is in pageable CPU memory. Loaders do not reuse other memory."""
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.clone()


# --- from a dataset ---


class MapDataset(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


def stack_samples(samples: Sequence[Sample]) -> Batch:
    """Stack tensors, including those in tuples, lists and dictionaries, along a new first dimension.

    Numbers become tensors, and other values lists.
    """
    first = samples[0]
    if isinstance(first, torch.Tensor):
        shapes = sorted({tuple(sample.shape) for sample in samples})
        if len(shapes) > 1:
            raise ConfigError(
                f"training_data: the samples of a micro-batch must have the same shape (got "
                f"{' and '.join(map(str, shapes))}). Pass initialize() a collate_fn that pads them and returns "
                f"(inputs, labels)."
            )
        return torch.stack(list(samples))
    if isinstance(first, Mapping):
        return {key: stack_samples([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        stacked = [stack_samples(parts) for parts in zip(*samples, strict=True)]
        return stacked if isinstance(first, list) else tuple(stacked)
    try:
        return torch.as_tensor(samples)
    except (TypeError, ValueError, RuntimeError):
        return list(samples)


class MicroBatches:
    """Micro-batches of a dataset.

    Args:
        consumed_samples: number of samples in all completed steps.
        repeat: continue at sample 0 after the last sample instead of raising an error.
        whole: the last micro-batch may be smaller, for an evaluation of all samples. Micro-batches behind it have the
            last sample, and the weight 0.

    A sample that draws from torch's default generator draws the same numbers on every rank, because the generator is
    seeded with ``seed`` and the number of the sample in training; likewise ``collate``. The generator is then restored.

    Attributes:
        seed: seed of the samples' random numbers; the engine sets it to its ``random_seed``. None: the samples draw as
            they are read.
        shuffle_seed: function that returns the seed from which the order of every pass over the dataset is drawn; None:
            the order of the dataset.
    """

    def __init__(
        self,
        dataset: MapDataset,
        micro_batch_size: int,
        consumed_samples: int = 0,
        collate: Callable[[Sequence[Sample]], Batch] | None = None,
        repeat: bool = False,
        whole: bool = False,
    ) -> None:
        if micro_batch_size < 1 or consumed_samples < 0:
            raise ConfigError(
                f"micro_batch_size and consumed_samples: must be at least 1 and 0 (got {micro_batch_size} and "
                f"{consumed_samples})."
            )
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.consumed_samples = consumed_samples
        self.repeat, self._whole = repeat, whole
        self.seed: int | None = None
        self.shuffle_seed: Callable[[], int] | None = None
        self._collate = collate or stack_samples

    def require(self, micro_batches: int, trains: bool) -> None:
        needed = micro_batches * self.micro_batch_size
        available = max(len(self.dataset) - self.consumed_samples, 0)
        if available < needed and not (self.repeat or self._whole):
            step, smaller = ("training step", "batch") if trains else ("evaluation", "num_micro_batches")
            left = f" of {len(self.dataset)}, after {self.consumed_samples} consumed samples"
            raise ConfigError(
                f"dataset: the next {step} needs {needed} samples, {micro_batches} micro-batches of "
                f"{self.micro_batch_size} (got {available}{left if self.consumed_samples else ''}). Use more data, "
                f"or a smaller {smaller}."
            ).of_all_ranks()

    def get(self, micro_batch: int) -> Batch:
        first = self.consumed_samples + micro_batch * self.micro_batch_size
        indices = range(first, first + self.micro_batch_size)
        length = len(self.dataset)
        if self._whole:
            indices = range(min(first, length - 1), min(indices.stop, length))
        if (not self.repeat and indices.stop > length) or length == 0:
            raise ConfigError(
                f"dataset: micro-batch {micro_batch} of this step needs samples {first} to {indices[-1]}, after "
                f"{self.consumed_samples} consumed samples (got {length} samples). Train fewer steps, use a smaller "
                f"batch, or use more data."
            )
        if self.seed is None:
            return self._collate([self.dataset[self._index(number)] for number in indices])
        return self._read_seeded(indices, self.seed)

    def weight(self, micro_batch: int) -> float:
        """Return the weight in the mean of a step: the micro-batch's samples if their number differs."""
        if not self._whole:
            return 1.0
        rest = len(self.dataset) - self.consumed_samples - micro_batch * self.micro_batch_size
        return min(max(rest, 0), self.micro_batch_size)

    def _index(self, number: int) -> int:
        """Return a sample's index in the dataset. The numbers of samples continue in the next pass."""
        epoch, index = divmod(number, len(self.dataset))
        if self.shuffle_seed is None:
            return index
        return int(_shuffled(self.shuffle_seed(), epoch, len(self.dataset))[index])

    def _read_seeded(self, indices: range, seed: int) -> Batch:
        samples = []
        generator = torch.default_generator
        state = generator.get_state()
        try:
            for index in indices:
                generator.manual_seed(mix_key("sample", seed, index))
                samples.append(self.dataset[self._index(index)])
            generator.manual_seed(mix_key("collate", seed, indices.start))
            return self._collate(samples)
        finally:
            generator.set_state(state)

    def advance(self, micro_batches: int) -> None:
        self.consumed_samples += micro_batches * self.micro_batch_size

    def state_dict(self) -> dict[str, int]:
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        consumed_samples = state["consumed_samples"]
        if consumed_samples < 0:
            raise ConfigError(
                f"consumed_samples: must be at least 0 in a saved state (got {consumed_samples})."
            )
        self.consumed_samples = consumed_samples


@functools.lru_cache(2)  # a micro-batch may have samples of two passes
def _shuffled(seed: int, epoch: int, length: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(mix_key("order", seed, epoch)))


# --- format: a pair (inputs, labels), each a tensor or a tuple of tensors; labels may be None ---


def require_pair(batch: Batch, source: Batches) -> Pair:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"{_name(source)}: a micro-batch must be a pair (inputs, labels) (got {describe(batch)}). {_fix(source, batch)}"
    )


def require_tensors(value: object, part: str, source: Batches) -> None:
    parts = value if isinstance(value, tuple | list) else (value,)
    if not parts or not all(map(torch.is_tensor, parts)):
        raise ConfigError(
            f"{_name(source)}: the {part} of a micro-batch must be a tensor or a tuple of tensors (got "
            f"{describe(value)}). {_fix(source)}"
        )


def as_batches(source: Source, data_parallel_rank: int, count: int) -> Batches | None:
    if source is None or isinstance(source, Batches):
        return source
    if not isinstance(source, Iterator):
        raise ConfigError(
            f"data_iter: must be an iterator, because a loader would restart in every step (got "
            f"{type(source).__name__}). Create one with iter(...) and pass it to every step."
        )
    return IteratorBatches(source, data_parallel_rank, count)


def describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {_join_names([repr(key) for key in value])}"
    if isinstance(value, tuple | list):
        types = _join_names([type(element).__name__ for element in value])
        return f"a {type(value).__name__} of {len(value)}{types and f': {types}'}"
    return f"a {type(value).__name__}"


def _join_names(names: Sequence[str]) -> str:
    return ", ".join([*names[:_MAX_SHOWN], *(["..."] if len(names) > _MAX_SHOWN else [])])


def _stack(keys: Sequence[object]) -> str:
    stacks = _join_names([f"stack of s[{key!r}]" for key in keys])
    return f"({stacks})" if len(keys) > 1 else stacks


def _name(source: Batches) -> str:
    if isinstance(source, MicroBatches):
        return "training_data"
    return "data_iter" if isinstance(source, IteratorBatches) else f"{type(source).__name__}.get()"


def _fix(source: Batches, batch: object = None) -> str:
    keys = list(batch) if isinstance(batch, Mapping) else []
    labels = [key for key in keys if str(key).lower() in _LABELS]
    inputs = [key for key in keys if key not in labels]
    pair = "(inputs, labels), each a tensor or a tuple of tensors"
    if inputs and labels:
        pair = f"({_stack(inputs)}, {_stack(labels)}) over the samples s"
    if isinstance(source, MicroBatches):
        return f"Pass initialize() a collate_fn that returns {pair}."
    if isinstance(source, IteratorBatches):
        return f"data_iter must yield pairs: pass its DataLoader a collate_fn that returns {pair}."
    return f"Return {pair}."
