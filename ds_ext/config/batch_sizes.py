"""DeepSpeed's three batch keys, completed as DeepSpeed does, with replicas of a placement as data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class BatchSizes:
    """DeepSpeed's batch arithmetic, with replicas of a placement counted as data-parallel ranks.

    ``train_batch_size = micro_batch_size * gradient_accumulation_steps * replicas * data_parallel_size``.
    """

    micro_batch_size: int
    gradient_accumulation_steps: int
    replicas: int
    data_parallel_size: int

    @property
    def micro_batches(self) -> int:
        """N: micro-batches per pipeline group and step."""
        return self.gradient_accumulation_steps * self.replicas

    @property
    def train_batch_size(self) -> int:
        """Samples per step, all pipeline groups together."""
        return self.micro_batch_size * self.micro_batches * self.data_parallel_size


def counted(number: int, noun: str) -> str:
    """``counted(1, "stage")`` is "1 stage", ``counted(2, "micro-batch")`` "2 micro-batches"."""
    plural = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def batch_sizes(
    config: Mapping[str, Any], replicas: int, data_parallel_size: int, flags: Mapping[str, str] | None = None
) -> BatchSizes:
    """Complete DeepSpeed's three batch keys as DeepSpeed does. Raises ConfigError when they contradict.

    Args:
        flags: which keys a flag filled in, as :attr:`.config.JobConfig.flags`; errors then name the flag.
    """
    ranks = replicas * data_parallel_size
    train, micro, gas = (_batch_size(config, key, flags or {}) for key in _BATCH_KEYS)
    if train is None:
        if micro is None:
            raise ConfigError(
                'Give "train_micro_batch_size_per_gpu" and "gradient_accumulation_steps", or "train_batch_size" and '
                "one of them."
            )
        return BatchSizes(micro, gas or 1, replicas, data_parallel_size)
    if micro is None and gas is None:
        gas = 1
    known = ranks * (micro or 1) * (gas or 1)
    if train % known or (micro and gas and train != known):
        raise ConfigError(_batch_mismatch(train, micro, gas, replicas, data_parallel_size, flags or {}))
    return BatchSizes(micro or train // known, gas or train // known, replicas, data_parallel_size)


def _batch_mismatch(
    train: int, micro: int | None, gas: int | None, replicas: int, data: int, flags: Mapping[str, str]
) -> str:
    """The numbers, by the names that the user gave them, and every way out."""
    ranks = replicas * data
    known = ranks * (micro or 1) * (gas or 1)
    names = [flags.get(key, "").partition(" ")[0] or key for key in _BATCH_KEYS]
    said = ", ".join(f"{n} {v or 'unset'}" for n, v in zip(names, (train, micro, gas), strict=True))
    said += f" and {counted(ranks, 'data-parallel rank')} ({counted(replicas, 'replica')} x {data})"
    if micro is None or gas is None:
        ways = " or ".join(str(n) for n in (train // known * known, (train // known + 1) * known) if n)
        return f"{said} do not fit: {train} is not a multiple of {known}. Use {names[0]} {ways}."
    ways = f"Leave {names[0]} out or set it to {known}"
    if train % (micro * ranks) == 0:
        steps = train // (micro * ranks)
        ways += f", or set {names[2]} to {steps} ({train} = {micro} x {steps} x {ranks})"
    return f"{said} contradict each other: {micro} x {gas} x {ranks} = {known}. {ways}."


def _batch_size(config: Mapping[str, Any], key: str, flags: Mapping[str, str]) -> int | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        name = flags.get(key, "").partition(" ")[0] or f'"{key}"'
        raise ConfigError(f"{name} must be a positive integer; got {value!r}.")
    return value
