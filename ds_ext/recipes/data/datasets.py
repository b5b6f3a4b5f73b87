"""Train, valid and test datasets: splits of the documents, and blends of several files."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ...errors import ConfigError
from .blend import BlendTable, parse_data_path, parse_split, split_documents
from .indexed import IndexedTokens

SPLIT_NAMES = ("train", "valid", "test")
EPOCHS_KEPT = 2

Sample_co = TypeVar("Sample_co", covariant=True)


class SizedDataset(Dataset[Sample_co], ABC):
    """Samples 0 to ``num_samples`` - 1."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample_co:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        return self._sample(index)

    @abstractmethod
    def _sample(self, index: int) -> Sample_co: ...


class BlendedDataset(SizedDataset[Sample_co]):
    """Samples of one split, interleaved from one or several files in the fixed order of ``BlendTable``."""

    def __init__(self, parts: Sequence[Dataset[Sample_co]], table: BlendTable, num_samples: int) -> None:
        """Combine one dataset per file; each has at least the samples in ``table.counts``."""
        super().__init__(num_samples)
        self.parts = parts
        self._table = table

    def _sample(self, index: int) -> Sample_co:
        source, part_index = self._table.locate(index)
        return self.parts[source][part_index]


class Epoch(NamedTuple):
    """Order of one pass over the documents of a split.

    Attributes:
        documents: document numbers in the order of this epoch.
        borders: offset of every document, in tokens, or of every packed sample in ``documents``; and their end.
        samples: number of the sample that each index takes.
    """

    documents: NDArray[np.int64]
    borders: NDArray[np.int64]
    samples: NDArray[np.int64]


class EpochDataset(SizedDataset[Sample_co]):
    """Samples of one split of one file, in a new order in each epoch."""

    def __init__(self, seq_length: int, num_samples: int, seed: int, name: str) -> None:
        if seq_length < 1 or seed < 0:
            raise ConfigError(
                f"seq_length and seed: must be at least 1 and 0 (got {seq_length} and {seed}). Use for "
                "example 128 and 1234."
            )
        super().__init__(num_samples)
        self.seq_length = seq_length
        self._entropy = (seed, *name.encode())
        self._epochs: dict[int, Epoch] = {}

    def _epoch(self, number: int) -> Epoch:
        if number not in self._epochs:
            self._epochs[number] = self._shuffled(np.random.default_rng((number, *self._entropy)))
            if len(self._epochs) > EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
        return self._epochs[number]

    @abstractmethod
    def _shuffled(self, generator: np.random.Generator) -> Epoch: ...


def build_datasets(
    data_path: str | Sequence[str],
    split: str,
    num_samples: tuple[int, int, int],
    build_part: Callable[[IndexedTokens, range, str, int], Dataset[Sample_co]],
) -> tuple[BlendedDataset[Sample_co], BlendedDataset[Sample_co], BlendedDataset[Sample_co]]:
    """Build train, valid and test datasets with ``num_samples`` samples each.

    ``build_part`` builds the dataset of one split of one file, from (file, documents, split name, number of
    samples).
    """
    weights, prefixes = parse_data_path(data_path)
    shares = parse_split(split)
    sources = [IndexedTokens(prefix) for prefix in prefixes]
    ranges_by_file = [split_documents(source.num_documents, shares) for source in sources]

    def build(split_index: int) -> BlendedDataset[Sample_co]:
        table = BlendTable(weights, num_samples[split_index])
        parts = [
            build_part(source, ranges[split_index], SPLIT_NAMES[split_index], count)
            for source, ranges, count in zip(sources, ranges_by_file, table.counts, strict=True)
        ]
        return BlendedDataset(parts, table, num_samples[split_index])

    return build(0), build(1), build(2)
