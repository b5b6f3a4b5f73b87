"""Parsing of ``--data-path``, one dataset or a blend with weights and a fixed sample order, and of ``--split``."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np

from ...errors import ConfigError
from ...model.data_layout import DATA_NAME

DEFAULT_SPLIT = "969,30,1"


def parse_data_path(data_path: str | Sequence[str]) -> tuple[list[Fraction], list[Path]]:
    """Return the weights (on any scale) and file prefixes in "a", "0.3 a 0.7 b", or a list of these words."""
    words = [data_path] if isinstance(data_path, str) else list(data_path)
    if not words:
        return [], []
    if len(words) == 1 and not _is_path(words[0]):
        words = words[0].split()
    if len(words) == 1:
        return [Fraction(1)], [_prefix(words[0])]
    weights = [weight for weight in map(_weight, words[::2]) if weight is not None]
    paths = words[1::2]
    if not words or not len(weights) == len(paths) == len(words) / 2:
        raise ConfigError(
            f"--data-path: expected one path, or pairs of a positive weight and a path (got {data_path!r}). "
            "Write for example 0.3 a 0.7 b."
        )
    return weights, [_prefix(path) for path in paths]


class BlendTable:
    """Sample order of a blend: the dataset of every sample, and the sample's index in that dataset.

    After any n samples, a dataset with share w (of 1) has contributed w*n samples, with an error below one sample.
    This is the chairman assignment of Tijdeman (1980), computed in integers so that every machine gets the same order.
    The order repeats once all w*n are whole (for 0.3 and 0.7 after ten samples), so only one period is stored.
    ``counts`` is the number of samples from each dataset.
    """

    def __init__(self, weights: Sequence[Fraction], num_samples: int) -> None:
        scale = math.lcm(*(weight.denominator for weight in weights))
        integers = [int(weight * scale) for weight in weights]
        divisor = math.gcd(*integers)
        self._shares = [weight // divisor for weight in integers]
        self._period = sum(self._shares)
        length = min(self._period, max(num_samples, 1))
        self._sources = np.array(_chairman_assignment(self._shares, length), dtype=np.int32)
        self._indices = np.empty(length, dtype=np.int64)
        for source in range(len(weights)):
            from_source = self._sources == source
            self._indices[from_source] = np.arange(np.count_nonzero(from_source))
        self.counts = self._counts(num_samples)

    def locate(self, index: int) -> tuple[int, int]:
        """Return (dataset, index in the dataset) of sample ``index`` of the blend."""
        periods, offset = divmod(index, self._period)
        source = int(self._sources[offset])
        return source, periods * self._shares[source] + int(self._indices[offset])

    def _counts(self, num_samples: int) -> list[int]:
        periods, offset = divmod(num_samples, self._period)
        partial_counts = np.bincount(self._sources[:offset], minlength=len(self._shares))
        counts = zip(self._shares, partial_counts, strict=True)
        return [periods * share + int(partial_count) for share, partial_count in counts]


def _chairman_assignment(shares: Sequence[int], length: int) -> list[int]:
    """Return the dataset of each of the first ``length`` samples.

    Every step picks the dataset with the earliest deadline among those with a large enough deficit. All quantities
    are Tijdeman's times period * (2k - 2) for k datasets, which makes them integers.
    """
    num_datasets, period = len(shares), sum(shares)
    if num_datasets == 1:
        return [0] * length
    scale = 2 * num_datasets - 2
    deficits = [0] * num_datasets
    order = []
    for _ in range(length):
        deficits = [deficit + scale * share for deficit, share in zip(deficits, shares, strict=True)]
        eligible = [source for source in range(num_datasets) if deficits[source] >= period]
        source = min(
            eligible, key=lambda source: (scale * period - period - deficits[source]) / shares[source]
        )
        deficits[source] -= scale * period
        order.append(source)
    return order


def _prefix(path: str) -> Path:
    """Return the prefix of a ``.bin/.idx`` pair, given as a prefix, one of the two files, or a prepared folder."""
    prefix = Path(path)
    if prefix.suffix in (".bin", ".idx"):
        return prefix.with_suffix("")
    prepared = prefix / DATA_NAME
    if prepared.with_suffix(".idx").exists():
        return prepared
    # Megatron's preprocess_data.py ends prefixes with _document. Errors report any other missing path as a folder.
    is_prefix = Path(f"{path}.idx").exists() or prefix.name.endswith("_document")
    return prefix if is_prefix else prepared


def _is_path(word: str) -> bool:
    """Return whether ``word`` is an existing path, which may contain spaces."""
    return bool(word) and (Path(word).exists() or Path(f"{word}.idx").exists())


def _weight(word: str) -> Fraction | None:
    try:
        weight = Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None
    return weight if weight > 0 else None


def parse_split(split: str) -> tuple[float, float, float]:
    """Return the shares of train, valid and test, which sum to 1. Quotes around them are ignored, as in Megatron."""
    try:
        shares = [float(word) for word in split.strip("'\"").replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ConfigError(
            f"--split: expected one to three shares of train, valid and test (got {split!r}). Write for example "
            f"{DEFAULT_SPLIT}."
        )
    shares += [0.0] * (3 - len(shares))
    train, valid, test = (share / sum(shares) for share in shares)
    return train, valid, test


def split_documents(documents: int, shares: tuple[float, float, float]) -> list[range]:
    """Return the consecutive documents of each split, with boundaries rounded to whole documents."""
    borders = np.rint(np.cumsum([0.0, *shares]) * documents).astype(int).tolist()
    return [range(start, stop) for start, stop in pairwise(borders)]
