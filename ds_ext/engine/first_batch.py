"""Check of the first micro-batch of training and of evaluation: present, of the right form, and different by rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..launch.job_facts import checksum
from .batches import Batches, IteratorBatches, MicroBatches, require_tensors
from .step_data import StepData, dense_parts
from .types import Batch

logger = logging.getLogger(__name__)

# Problem, data-parallel rank and checksum of its first samples.
_Answer = tuple[str | None, tuple[int, str] | None]


def check_first_batch(
    data: StepData, trains: bool, micro_batches: int, abort: Callable[[Exception], None]
) -> None:
    """Fetch and check the first micro-batch for every stage of this rank. All ranks must call this together.

    Logs a warning if the iterators of two data-parallel ranks begin with the same samples. ``micro_batches`` counts
    those of all pipeline groups. ``abort`` reports an exception of the dataset to the peers.
    """
    loads: dict[int, int] = {}
    for stage, micro_batch in data.loads:
        loads.setdefault(stage, micro_batch)
    answer: _Answer = None, None
    failure: Exception | None = None
    try:
        if loads and isinstance(data.source, MicroBatches):
            data.source.require(micro_batches, trains)
        for stage, micro_batch in loads.items():
            inputs, labels = data.get(micro_batch)
            if stage == 0:
                require_tensors(inputs, "inputs", data.source)
                answer = None, _first_samples(data.source, inputs, labels)
            if stage == data.last_stage and labels is not None:
                require_tensors(labels, "labels", data.source)
    except ConfigError as error:
        answer = str(error), None
    except Exception as error:  # from the dataset; this rank prints the traceback
        failure = error
    answers: list[_Answer] = [answer] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    if failure is not None:
        abort(failure)
        raise failure
    for problem, _ in answers:
        if problem is not None:
            raise ConfigError(problem).of_all_ranks()
    _warn_of_equal_inputs([samples for _, samples in answers if samples is not None], trains)


def _first_samples(source: Batches, inputs: Batch, labels: Batch) -> tuple[int, str] | None:
    """Return the data-parallel rank of an iterator and a checksum of its first samples.

    None for other sources, and for inputs whose elements are all equal, such as zeros for a benchmark.
    """
    if not isinstance(source, IteratorBatches):
        return None
    dense = dense_parts(inputs)
    if all(bool((part == part[:1]).all()) for part in dense):
        return None
    parts = [*dense, *dense_parts(labels)]
    return source.rank, checksum(part.view(torch.uint8).numpy().tobytes() for part in parts)


def _warn_of_equal_inputs(first_samples: Sequence[tuple[int, str]], trains: bool) -> None:
    method = "train_batch" if trains else "eval_batch"
    first_ranks: dict[str, int] = {}
    for rank, inputs in first_samples:
        first_rank = first_ranks.setdefault(inputs, rank)
        if first_rank != rank and dist.get_rank() == 0:
            logger.warning(
                "data_iter of %s: data-parallel ranks %d and %d begin with the same samples. Select each rank's "
                "samples by engine.grid.get_data_parallel_rank(). The two pipes of bitpipe are two data-parallel "
                "ranks.",
                method,
                first_rank,
                rank,
            )
            return
