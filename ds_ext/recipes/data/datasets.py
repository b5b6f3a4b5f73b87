"""Train, valid and test datasets: splits of the documents, and blends of several files."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.utils.data import Dataset

from .blend import BlendTable, parse_data_path, parse_split, split_documents
from .indexed import IndexedTokens

SPLIT_NAMES = ("train", "valid", "test")

Sample_co = TypeVar("Sample_co", covariant=True)


class BlendedDataset(Dataset[Sample_co]):
    """Samples of one split, interleaved from one or several files in the fixed order of ``BlendTable``."""

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
