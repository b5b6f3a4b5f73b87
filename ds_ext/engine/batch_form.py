"""Form of a micro-batch: a pair (inputs, labels), each a tensor or a tuple of tensors; labels may be None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from .batches import IteratorBatches
from .micro_batches import MicroBatches

_SHOWN = 6  # keys of a dictionary in an error


def require_pair(batch: Any, source: Any) -> tuple[Any, Any]:
    """Return a micro-batch as (inputs, labels).

    Args:
        batch: what ``source`` gave.
        source: the Batches, for the error.

    Raises:
        ConfigError: it is not a tuple or list of two.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ConfigError(
        f"{_name(source)}: a micro-batch must be a pair (inputs, labels) (got {describe(batch)}). {_fix(source, batch)}"
    )


def _require_tensors(value: Any, part: str, source: Any) -> None:
    parts = value if isinstance(value, tuple | list) else (value,)
    if not parts or not all(torch.is_tensor(one) for one in parts):
        raise ConfigError(
            f"{_name(source)}: the {part} of a micro-batch must be a tensor or a tuple of tensors (got "
            f"{describe(value)}). {_fix(source, value)}"
        )


def check_first_batch(engine: Any, schedule: Any) -> None:
    """Fetch and check what this rank loads first, and raise one error on all ranks; a collective call of all ranks.

    What is fetched stays in ``engine._fetched`` for the step.

    Raises:
        ConfigError: data that is missing or has another form. On every rank.
    """
    loads: dict[int, int] = {}
    for instruction in schedule.program.ranks[schedule.stage_id]:
        if instruction.name == "LoadMicroBatch":
            loads.setdefault(instruction.stage, instruction.micro_batch)
    problem, failure = None, None
    try:
        for stage, micro_batch in loads.items():
            inputs, labels = engine._fetch(micro_batch)
            if stage == 0:
                _require_tensors(inputs, "inputs", engine.batches)
            if stage == engine.last_stage and labels is not None:
                _require_tensors(labels, "labels", engine.batches)
    except ConfigError as error:
        problem = str(error)
    except Exception as error:  # of the data set itself: this rank shows its traceback
        failure = error
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    first = next((problem for problem in problems if problem is not None), None)
    if failure is not None:
        engine.transport.abort(f"{type(failure).__name__}: {failure}")
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


def _name(source: Any) -> str:
    if isinstance(source, MicroBatches):
        return "training_data"
    return "data_iter" if isinstance(source, IteratorBatches) else f"{type(source).__name__}.get()"


def _fix(source: Any, batch: Any) -> str:
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
