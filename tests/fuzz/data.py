"""Samples of a job, by index, and the micro-batches made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Generator
from torch.utils.data import DataLoader

from ds_ext.tensor_parallel import keyed_rng, mix_key

from .actions import Evaluate
from .job import Job, Layout
from .zoo import ENDS, STARTS

EVALUATION = 6 * 10**5  # first sample of evaluations, a multiple of every micro-batch size
OTHER_EVALUATION = 7 * 10**5  # first sample of evaluations with sizes of their own
OTHER_SAMPLES = 18 * 10**4  # first one of samples with the same lengths as those from 0 on


def sample(job: Job, index: int, length: int | None = None) -> tuple[Any, Any]:
    """Return the (inputs, labels) of a sample; ``length``: its tokens, None: those of its micro-batch in training."""
    length = length or job.lengths[index // job.micro_batch_size % len(job.lengths)]
    generator = Generator().manual_seed(index)
    start, end = STARTS[job.start], ENDS[job.end]
    inputs = start.sample(length, generator)
    return _cast(start.dtype or job.dtype, inputs), _cast(job.dtype, end.sample(length, generator))


def drawn_sample(job: Job, first: int, index: int) -> tuple[Any, Any]:
    """Return a sample drawn with torch's generator, for an index of a dataset that begins with sample ``first``."""
    period = 18 * job.micro_batch_size  # of the lengths
    return sample(job, first + index + period * 1000 * int(torch.randint(9, ())))


def _cast(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(dtype, part) for part in value)
    return value.to(dtype) if value.is_floating_point() else value


def _stack(values: Sequence[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(_stack(parts) for parts in zip(*values, strict=True))
    return torch.stack(list(values))


def of_samples(job: Job, indices: Sequence[int]) -> tuple[Any, Any]:
    """Return a new micro-batch of these samples."""
    return _stack([sample(job, index) for index in indices])


def ordered_batch(
    job: Job, step: int, number: int, first: int = 0, seed: int | None = None
) -> tuple[Any, Any]:
    """Return a micro-batch in the order of the samples, by its global number in a step.

    Args:
        first: sample with which step 0 begins.
        seed: of samples that draw; None: that of the step.
    """
    seed = job.seed_of(step) if seed is None else seed
    begin = (job.position(step) + number) * job.micro_batch_size
    indices = range(begin, begin + job.micro_batch_size)
    if job.data != "random_dataset":
        return of_samples(job, [first + index for index in indices])
    samples = []
    for index in indices:
        with keyed_rng(mix_key("sample", seed, index), torch.device("cpu")):
            samples.append(drawn_sample(job, first, index))
    return _stack(samples)


class Samples:
    """Dataset of a job's samples."""

    def __init__(self, job: Job, first: int = 0) -> None:
        self.job, self.first = job, first

    def __len__(self) -> int:
        return sum(map(self.job.micro_batches_at, range(self.job.steps))) * self.job.micro_batch_size

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self.job.data == "random_dataset":
            return drawn_sample(self.job, self.first, index)
        return sample(self.job, self.first + index)


class EvaluationBatches:
    """Micro-batches of an evaluation with other sizes."""

    def __init__(self, job: Job, micro_batch_size: int) -> None:
        self.job, self.micro_batch_size = job, micro_batch_size

    def get(self, micro_batch: int) -> tuple[Any, Any]:
        """Return a micro-batch by its global number."""
        lengths, size = self.job.lengths, self.micro_batch_size
        first = OTHER_EVALUATION + micro_batch * size
        length = lengths[micro_batch % len(lengths)]
        return _stack([sample(self.job, index, length) for index in range(first, first + size)])

    def advance(self, micro_batches: int) -> None:
        """End the evaluation."""


class WholeDataset:
    """Dataset of an evaluation of all samples."""

    def __init__(self, job: Job, samples: int) -> None:
        self.job, self.samples = job, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return sample(self.job, OTHER_EVALUATION + index, self.job.length)


class StepBatches:
    """Micro-batches by their global number in a step."""

    def __init__(self, job: Job, first: int = 0, step: int = 0) -> None:
        self.job, self.first, self.step = job, first, step

    def get(self, micro_batch: int) -> tuple[Any, Any]:
        """Return a micro-batch of the current step."""
        return ordered_batch(self.job, self.step, micro_batch, self.first)

    def advance(self, micro_batches: int) -> None:
        """End the step."""
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position."""
        self.step = state["step"]


def evaluation_batches(job: Job, sizes: Evaluate, micro_batches: int, pipes: int) -> list[tuple[Any, Any]]:
    """Return all micro-batches of an evaluation with other sizes.

    Args:
        sizes: the sizes.
        micro_batches: number in a step, over all data-parallel ranks.
        pipes: number of data-parallel ranks, replicas included.
    """
    if sizes.samples:
        dataset, size = WholeDataset(job, sizes.samples), job.micro_batch_size
        starts = range(0, sizes.samples, size)
        return [_stack([dataset[i] for i in range(s, min(s + size, sizes.samples))]) for s in starts]
    batches = EvaluationBatches(job, sizes.micro_batch_size or job.micro_batch_size)
    return [batches.get(number) for number in range(sizes.micro_batches * pipes or micro_batches)]


def rank_batches(
    job: Job, numbers: Callable[[int], slice], step: int, reads_first: bool
) -> Iterator[tuple[Any, Any]]:
    """Yield the micro-batches that a rank's iterator must have, from a step on.

    Args:
        numbers: function of the step that returns the numbers of these micro-batches in it.
        reads_first: the rank holds the first stage of a pipe.
    """
    for later in range(step, job.steps):
        if job.data == "unequal" and not reads_first:
            others = range(job.micro_batches_at(later))[numbers(later)]
            yield from (ordered_batch(job, later, number, OTHER_SAMPLES) for number in others)
        else:
            yield from step_batches(job, later)[numbers(later)]


def shuffled(job: Job, layout: Layout, pipe: int) -> list[list[int]]:
    """Return the samples of each micro-batch of a data-parallel rank, shuffled by a DataLoader."""
    own = range(pipe, len(Samples(job)), layout.pipes)
    generator = Generator().manual_seed(job.seed + pipe)
    loader: DataLoader[Any] = DataLoader(
        own,  # pyright: ignore[reportArgumentType]
        batch_size=job.micro_batch_size,
        shuffle=True,
        generator=generator,
        collate_fn=list,
    )
    return list(loader)


def step_batches(job: Job, step: int) -> list[tuple[Any, Any]]:
    """Return all micro-batches of a step in the order of their global numbers."""
    if job.data != "loader":
        return [ordered_batch(job, step, number) for number in range(job.micro_batches_at(step))]
    layout = job.layouts[job.part_of(step)]
    step = job.engine_step(step)
    count = job.micro_batches // layout.pipes
    order = [shuffled(job, layout, pipe) for pipe in range(layout.pipes)]
    return [of_samples(job, each[step * count + number]) for each in order for number in range(count)]
