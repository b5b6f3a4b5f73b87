"""Train, valid and test datasets: splits of the documents, and blends of several files."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from torch.utils.data import Dataset

from ...errors import ConfigError
from .blend import BlendTable, parse_data_path
from .indexed import IndexedTokens

SPLIT_NAMES = ("train", "valid", "test")

Sample_co = TypeVar("Sample_co", covariant=True)


class BlendedDataset(Dataset[Sample_co]):
    """Samples of one split, interleaved from one or several files in the fixed order of ``BlendTable``.

    Attributes:
        parts: dataset of every file.
    """

    def __init__(self, parts: Sequence[Dataset[Sample_co]], table: BlendTable, num_samples: int) -> None:
        """Combine one dataset per file; each has at least the samples in ``table.counts``."""
        self.parts = parts
        self._table = table
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample_co:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        source, part_index = self._table.locate(index)
        return self.parts[source][part_index]


def build_datasets(
    data_path: str | Sequence[str],
    split: str,
    num_samples: tuple[int, int, int],
    build_part: Callable[[IndexedTokens, range, str, int], Dataset[Sample_co]],
) -> tuple[BlendedDataset[Sample_co], BlendedDataset[Sample_co], BlendedDataset[Sample_co]]:
    """Build train, valid and test datasets with ``num_samples`` samples each.

    Args:
        data_path: value of ``--data-path``.
        split: value of ``--split``.
        num_samples: number of samples of each split.
        build_part: function that builds the dataset of one split of one file, from (file, documents, split name,
            number of samples).

    Raises:
        ConfigError: a file is missing or damaged, or a weight or share is invalid.
    """
    weights, prefixes = parse_data_path(data_path)
    shares = parse_split(split)
    sources = [IndexedTokens(prefix) for prefix in prefixes]
    ranges_by_file = [_split_documents(source, shares) for source in sources]

    def build(split_index: int) -> BlendedDataset[Sample_co]:
        table = BlendTable(weights, num_samples[split_index])
        parts = [
            build_part(source, ranges[split_index], SPLIT_NAMES[split_index], count)
            for source, ranges, count in zip(sources, ranges_by_file, table.counts, strict=True)
        ]
        return BlendedDataset(parts, table, num_samples[split_index])

    return build(0), build(1), build(2)


def parse_split(split: str) -> tuple[float, float, float]:
    """Return the shares of train, valid and test, which sum to 1. Quotes around them are ignored, as in Megatron.

    Raises ConfigError for an invalid ``split``.
    """
    try:
        shares = [float(word) for word in split.strip("'\"").replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ConfigError(
            f"--split: expected one to three shares of train, valid and test (got {split!r}). Write for example "
            "969,30,1."
        )
    shares += [0.0] * (3 - len(shares))
    train, valid, test = (share / sum(shares) for share in shares)
    return train, valid, test


def _split_documents(indexed: IndexedTokens, shares: tuple[float, float, float]) -> list[range]:
    """Return the consecutive documents of each split, with boundaries rounded to whole documents."""
    borders = np.rint(np.cumsum([0.0, *shares]) * indexed.num_documents).astype(int).tolist()
    return [range(start, stop) for start, stop in pairwise(borders)]
