"""Micro-batches of a step: where they come from and what form they have.

A rank asks for a micro-batch by its global id whenever its schedule needs it; nothing calls next() at compute time.
From a data set (:class:`MicroBatches`) step t takes the samples t*G .. t*G+G-1 of the data set's own (seeded, shuffled)
order, and micro-batch j of the step holds the consecutive samples j*b .. j*b+b-1 of them. G is the global batch, b the
micro-batch size. A user's iterator yields the micro-batches of one data-parallel rank (:class:`IteratorBatches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import ConfigError
from ..pipe_schedules import Program

_SHOWN = 6  # keys of a dictionary in an error


@runtime_checkable
class Batches(Protocol):
    """Micro-batches of a step, addressed by global id (0..N*DP-1 over all pipeline groups)."""

    def get(self, micro_batch: int) -> Any:
        """Return (inputs, labels) of a micro-batch of the current step."""
        ...

    def advance(self, micro_batches: int) -> None:
        """End the current step; it had that many micro-batches over all pipeline groups."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """Batches whose position the engine's checkpoints keep.

    Micro-batches have global ids, so the state is the same on all ranks: numbers, texts, tensors, lists, dictionaries.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the position between two steps."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Continue at a position, also in a job with another batch size."""
        ...


class IteratorBatches:
    """Batches of a user's iterator, which yields the micro-batches of this data-parallel rank in order.

    A step takes ``gradient_accumulation_steps`` of them, as in DeepSpeed; the two pipes of a bidirectional schedule
    are two data-parallel ranks. Ranks ask in the order of their schedule, so what is pulled early is kept until
    its turn. Only ranks that hold a first or a last stage pull at all.

    Args:
        iterator: yields (inputs, labels).
        data_parallel_rank: DeepSpeed's, replicas included.
        count: micro-batches of this data-parallel rank per step.
    """

    def __init__(self, iterator: Iterator[Any], data_parallel_rank: int, count: int) -> None:
        self.iterator, self.rank, self.count = iterator, data_parallel_rank, count
        self._pulled: list[Any] = []

    def get(self, micro_batch: int) -> Any:
        """Pull up to ``micro_batch``. Raises ConfigError when the data ends early or belongs to another rank."""
        owner, index = divmod(micro_batch, self.count)
        if owner != self.rank:
            raise ConfigError(
                f"data_iter yields the micro-batches of data-parallel rank {self.rank}, and this schedule needs one "
                f"of rank {owner} here too (inputs of one pipe, labels of the other). Give training_data to "
                f"initialize(), or train_batch() an object with get(micro_batch) and advance(micro_batches)."
            )
        while len(self._pulled) <= index:
            try:
                # As DeepSpeed does with inputs: the iterator may fill the same memory again.
                self._pulled.append(tree_map_only(Tensor, _own, next(self.iterator)))
            except StopIteration:
                raise ConfigError(
                    f"data_iter ended after {len(self._pulled)} micro-batches of this step; a step takes {self.count} "
                    f"(gradient_accumulation_steps) per data-parallel rank. Wrap it in "
                    f"deepspeed.utils.RepeatingLoader, or stop one step earlier."
                ) from None
        return self._pulled[index]

    def advance(self, micro_batches: int) -> None:
        """Drop this step's micro-batches."""
        self._pulled.clear()


def _own(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in pageable CPU memory; a loader does not reuse any other."""
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.clone()


# --- from a data set ---


class MapDataset(Protocol):
    """Data set with samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def stack_samples(samples: Sequence[Any]) -> Any:
    """Stack tensors in a new first dimension, in tuples, lists and dictionaries; numbers become tensors.

    Raises ConfigError for samples that differ in shape or are neither of these.
    """
    first = samples[0]
    if isinstance(first, torch.Tensor):
        shapes = sorted({tuple(sample.shape) for sample in samples})
        if len(shapes) > 1:
            raise ConfigError(
                f"training_data: the samples of a micro-batch must have one shape (got "
                f"{' and '.join(map(str, shapes))}). Give initialize() a collate_fn that pads them and returns "
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
        raise ConfigError(
            f"training_data: samples must hold tensors or numbers (got {type(first).__name__}). Give initialize() a "
            f"collate_fn that returns (inputs, labels) as tensors."
        ) from None


class MicroBatches:
    """Micro-batches of the current step by id, and the position that a checkpoint keeps.

    Args:
        dataset: samples by index, in the order in which they are to be seen.
        micro_batch_size: b, samples of one micro-batch.
        consumed_samples: samples of all steps that are done; the position.
        collate: list of samples to a batch; by default tensors are stacked in a new first dimension.
        repeat: begin again at sample 0 after the last one instead of refusing.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        dataset: MapDataset,
        micro_batch_size: int,
        consumed_samples: int = 0,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        repeat: bool = False,
    ) -> None:
        if micro_batch_size < 1 or consumed_samples < 0:
            raise ConfigError(
                "micro_batch_size must be at least 1, consumed_samples at least 0; got "
                f"{micro_batch_size} and {consumed_samples}."
            )
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.consumed_samples = consumed_samples
        self.repeat = repeat
        self._collate = collate or stack_samples

    def get(self, micro_batch: int) -> Any:
        """Return the collated micro-batch with that global id of the current step.

        For `GPTDataset` that is (inputs_BS, labels_BS), int64.

        Raises:
            ConfigError: the dataset ends before that micro-batch does.
        """
        first = self.consumed_samples + micro_batch * self.micro_batch_size
        indices = range(first, first + self.micro_batch_size)
        length = len(self.dataset)
        if (not self.repeat and indices.stop > length) or length == 0:
            raise ConfigError(
                f"the dataset has {length} samples, micro-batch {micro_batch} of this step needs samples {first} "
                f"to {indices[-1]} ({self.consumed_samples} are consumed). Train fewer steps, use a smaller batch, "
                f"or give more data."
            )
        return self._collate([self.dataset[index % length] for index in indices])

    def advance(self, micro_batches: int) -> None:
        """End the current step; it had that many micro-batches over the whole data-parallel world."""
        self.consumed_samples += micro_batches * self.micro_batch_size

    def state_dict(self) -> dict[str, int]:
        """Return the position between two steps."""
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a saved position; the batch sizes may differ from those of the saving run.

        Raises ConfigError for a negative position.
        """
        consumed_samples = state["consumed_samples"]
        if consumed_samples < 0:
            raise ConfigError(f"consumed_samples must be at least 0; the saved state has {consumed_samples}")
        self.consumed_samples = consumed_samples


# --- form: a pair (inputs, labels), each a tensor or a tuple of tensors; labels may be None ---


def require_pair(batch: Any, source: Batches) -> tuple[Any, Any]:
    """Return a micro-batch as (inputs, labels).

    Args:
        batch: result of ``source.get()``.
        source: named in the error.

    Raises:
        ConfigError: it is not a tuple or list of two.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"{_name(source)}: a micro-batch must be a pair (inputs, labels) (got {describe(batch)}). {_fix(source, batch)}"
    )


def _require_tensors(value: Any, part: str, source: Batches) -> None:
    parts = value if isinstance(value, tuple | list) else (value,)
    if not parts or not all(torch.is_tensor(one) for one in parts):
        raise ConfigError(
            f"{_name(source)}: the {part} of a micro-batch must be a tensor or a tuple of tensors (got "
            f"{describe(value)}). {_fix(source, value)}"
        )


class StepData:
    """Micro-batches of a pipeline group in one step; each is fetched once.

    Args:
        source: has the micro-batches of all pipeline groups.
        first_id: id of this group's first micro-batch in ``source``.
    """

    def __init__(self, source: Batches, first_id: int) -> None:
        self.source, self.first_id = source, first_id
        self._fetched: dict[int, tuple[Any, Any]] = {}

    def get(self, micro_batch: int) -> tuple[Any, Any]:
        """Return (inputs, labels); a rank that holds both ends of a pipe asks twice. Raises ConfigError."""
        if micro_batch not in self._fetched:
            batch = self.source.get(self.first_id + micro_batch)
            self._fetched[micro_batch] = require_pair(batch, self.source)
        return self._fetched[micro_batch]


def check_first_batch(data: StepData, program: Program, device: int, abort: Callable[[str], None]) -> None:
    """Fetch and check what ``device`` loads first, and raise one error on all ranks; a collective call of all ranks.

    Args:
        data: of the step that begins.
        program: of the step that begins.
        abort: reports an error of the data set itself to the peers.

    Raises:
        ConfigError: data that is missing or has another form. On every rank.
    """
    loads: dict[int, int] = {}
    for instruction in program.instructions[device]:
        if instruction.name == "LoadMicroBatch":
            assert instruction.stage is not None and instruction.micro_batch is not None
            loads.setdefault(instruction.stage, instruction.micro_batch)
    problem, failure = None, None
    last_stage = program.timetable.placement.stages - 1
    try:
        for stage, micro_batch in loads.items():
            inputs, labels = data.get(micro_batch)
            if stage == 0:
                _require_tensors(inputs, "inputs", data.source)
            if stage == last_stage and labels is not None:
                _require_tensors(labels, "labels", data.source)
    except ConfigError as error:
        problem = str(error)
    except Exception as error:  # of the data set itself: this rank shows its traceback
        failure = error
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    first = next((problem for problem in problems if problem is not None), None)
    if failure is not None:
        abort(f"{type(failure).__name__}: {failure}")
        raise failure
    if first is not None:
        error = ConfigError(first)
        error.reported_by = 0  # every rank has it
        raise error


def describe(value: Any) -> str:
    """Return the type of a batch and what is in it, in a few words."""
    if isinstance(value, Tensor):
        return f"one tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, list(value)[:_SHOWN])) + (", ..." if len(value) > _SHOWN else "")
        return f"a {type(value).__name__} with the keys {keys}"
    if isinstance(value, tuple | list):
        types = ", ".join(type(one).__name__ for one in value[:_SHOWN]) + (
            ", ..." if len(value) > _SHOWN else ""
        )
        return f"a {type(value).__name__} of {len(value)}: {types or 'nothing'}"
    return f"a {type(value).__name__}"


def _name(source: Batches) -> str:
    if isinstance(source, MicroBatches):
        return "training_data"
    return "data_iter" if isinstance(source, IteratorBatches) else f"{type(source).__name__}.get()"


def _fix(source: Batches, batch: Any) -> str:
    if isinstance(batch, Mapping) and len(batch) > 1:
        inputs, labels = list(batch)[:2]
        pair = f"(stack of s[{inputs!r}], stack of s[{labels!r}]) over the samples s"
    else:
        pair = "(inputs, labels)"
    if isinstance(source, MicroBatches):
        return f"Give initialize() a collate_fn that returns {pair}."
    if isinstance(source, IteratorBatches):
        return f"Let data_iter yield pairs: give its DataLoader a collate_fn that returns {pair}."
    return f"Return {pair}."
