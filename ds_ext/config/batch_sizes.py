"""DeepSpeed's batch keys. Replicas of a placement count as data-parallel ranks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

Supports = Callable[[int], bool]
_RESEMBLES = 0.9
_NEAR = 256  # numbers of micro-batches that an error tries
NOT_REPLACED = 'Write the value: only transformers and accelerate replace "auto".'
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class BatchSizes:
    """``train_batch_size = micro_batch_size * gradient_accumulation_steps * replicas * data_parallel_size``."""

    micro_batch_size: int
    gradient_accumulation_steps: int
    replicas: int
    data_parallel_size: int

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches N per pipeline group and step."""
        return self.gradient_accumulation_steps * self.replicas

    @property
    def train_batch_size(self) -> int:
        """Samples per step over all pipeline groups."""
        return self.micro_batch_size * self.micro_batches * self.data_parallel_size


def counted(number: int, noun: str) -> str:
    """Return a count with its noun, such as "1 stage" or "2 micro-batches"."""
    plural = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def batch_sizes(
    config: Mapping[str, Any],
    replicas: int,
    data_parallel_size: int,
    flags: Mapping[str, str] | None = None,
    supports: Supports | None = None,
    *,
    one_pipe: float | None = None,
) -> BatchSizes:
    """Complete DeepSpeed's three batch keys as DeepSpeed does.

    A JSON has the same samples per step with every schedule: without ``train_batch_size``, a schedule with another
    number of data-parallel ranks than 1f1b is refused.

    Args:
        replicas: replicas of every stage in one pipeline group.
        data_parallel_size: number of pipeline groups.
        flags: JSON key -> the flag that set it, as :attr:`.job.JobConfig.flags`; errors then name the flag.
        supports: function that returns whether the schedule supports a number of micro-batches, for the values that an
            error proposes; None: any.
        one_pipe: data-parallel ranks that a schedule of one pipe has on the same ranks, a fraction if it does not fit
            them; None: ``data_parallel_size``.
    """
    for key, value in config.items():
        near = difflib.get_close_matches(key.lower(), BATCH_KEYS, n=1, cutoff=_RESEMBLES)
        if near and key not in BATCH_KEYS:
            raise ConfigError(f"{key}: unknown key (got {value!r}). Did you mean {near[0]}?")
    ranks = replicas * data_parallel_size
    names = [(flags or {}).get(key, "").partition(" ")[0] or key for key in BATCH_KEYS]
    train, micro, gas = (_batch_size(config, key, name) for key, name in zip(BATCH_KEYS, names, strict=True))
    if train is None:
        if micro is None:
            raise ConfigError(
                "train_batch_size: no batch size is set. Set train_micro_batch_size_per_gpu and "
                "gradient_accumulation_steps, or train_batch_size and one of them."
            )
        sizes = BatchSizes(micro, gas or 1, replicas, data_parallel_size)
        if ranks != (one_pipe := data_parallel_size if one_pipe is None else one_pipe):
            raise ConfigError(_ambiguous_batch(names, sizes, gas, one_pipe, supports))
        return sizes
    if micro is None and gas is None:
        gas = 1
    divisor = ranks * (micro or 1) * (gas or 1)
    if train % divisor or (micro and gas and train != divisor):
        raise ConfigError(_batch_mismatch(names, train, micro, gas, replicas, data_parallel_size, supports))
    return BatchSizes(micro or train // divisor, gas or train // divisor, replicas, data_parallel_size)


def _ambiguous_batch(
    names: Sequence[str], sizes: BatchSizes, gas: int | None, one_pipe: float, supports: Supports | None
) -> str:
    """Return the error for a batch that depends on the schedule, with the values that may be meant."""
    steps, ranks = sizes.gradient_accumulation_steps, sizes.replicas * sizes.data_parallel_size
    unit = sizes.micro_batch_size * sizes.data_parallel_size
    meanings = {
        sizes.micro_batch_size * steps * one_pipe: "as with 1f1b",
        sizes.train_batch_size: f"{counted(steps, 'micro-batch')} per data-parallel rank",
    }
    fitting = [
        f"{int(train)} ({meaning})"
        for train, meaning in meanings.items()
        if train % unit == 0 and (supports is None or supports(int(train / unit)))
    ]
    if supports and not fitting:
        fitting = [str(train) for train in nearest_train_sizes(sizes.train_batch_size, unit, supports)]
    got = f"{names[2]} {gas}" if gas else f"only {names[1]} {sizes.micro_batch_size}"
    return (
        f"{names[0]}: missing, and a step has other samples than with 1f1b, because the schedule has "
        f"{counted(ranks, 'data-parallel rank')} instead of {one_pipe:g} (got {got}). Set {names[0]} to "
        f"{' or '.join(fitting)}, and omit {names[2]}."
    )


def _batch_mismatch(
    names: Sequence[str],
    train: int,
    micro: int | None,
    gas: int | None,
    replicas: int,
    data: int,
    supports: Supports | None,
) -> str:
    ranks = replicas * data
    divisor = ranks * (micro or 1) * (gas or 1)
    factors = [f"{value} ({name})" for name, value in zip(names[1:], (micro, gas), strict=True) if value]
    factors.append(f"{ranks} (data-parallel ranks: {counted(replicas, 'replica')} x {data})")
    multiple = "" if micro and gas else "a multiple of "
    problem = f"{names[0]}: must be {multiple}{divisor} = {' x '.join(factors)} (got {train})"
    if not micro or not gas:
        fitting = [n * divisor for n in (train // divisor, train // divisor + 1) if n]
        if micro and supports:
            fitting = nearest_train_sizes(train, micro * data, supports) or fitting
        return f"{problem}. Use {' or '.join(map(str, fitting))}."
    fix = f"Set {names[0]} to {divisor}"
    if train % (micro * ranks) == 0:
        fix += f", or set {names[2]} to {train // (micro * ranks)}"
    return f"{problem}. {fix}."


def nearest_train_sizes(train: int, per_micro_batch: int, supports: Supports) -> list[int]:
    """Return the next smaller and the next larger train_batch_size that the schedule supports.

    ``per_micro_batch`` are the samples of a step for each micro-batch of a pipeline group.
    """
    around = train // per_micro_batch
    below = next(filter(supports, range(around, max(0, around - _NEAR), -1)), None)
    above = next(filter(supports, range(around + 1, around + 1 + _NEAR)), None)
    return [count * per_micro_batch for count in (below, above) if count is not None]


def _batch_size(config: Mapping[str, Any], key: str, name: str) -> int | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        fix = f" {NOT_REPLACED}" if value == "auto" else ""
        raise ConfigError(f"{name}: must be a positive integer (got {value!r}).{fix}")
    return value
