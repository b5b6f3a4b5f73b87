"""GPT samples: windows of seq_length + 1 tokens over shuffled, concatenated documents.

Shapes: S tokens of a sample; a sample is (tokens_S, labels_S) with labels the tokens one further.
Everything follows from (seed, seq_length, split, files): every rank, and every run that resumes, sees the
same.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ds_ext.data.blend import BlendTable, parse_data_path
from ds_ext.data.indexed import IndexedTokens
from ds_ext.data.meta import check_tokenizer, check_vocab_size, read_meta
from ds_ext.errors import ConfigError

__all__ = [
    "BlendedGPTDataset",
    "GPTDataset",
    "GPTSamples",
    "build_gpt_datasets",
    "check_tokenizer",
    "check_vocab_size",
    "read_meta",
]

SPLIT_NAMES = ("train", "valid", "test")
EPOCHS_KEPT = 2

Sample = tuple[torch.Tensor, torch.Tensor]


class _Epoch(NamedTuple):
    """One pass over the documents of a split.

    `documents` are the document numbers in this epoch's order, `starts` (one longer) their offsets in the
    concatenation, `windows` the order in which its windows are samples.
    """

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    windows: NDArray[np.int64]


class GPTDataset(Dataset[Sample]):
    """Samples of one split of one indexed file.

    Each epoch concatenates the split's documents in an order of its own (they carry their end-of-document
    token in the file), cuts the result into windows that overlap by one token, and shuffles the windows. So
    each token is a label at most once an epoch, and sample i does not depend on `num_samples`: a longer run
    begins like a shorter one.
    """

    def __init__(
        self,
        indexed: IndexedTokens,
        documents: range,
        seq_length: int,
        num_samples: int,
        seed: int,
        name: str = "train",
    ) -> None:
        """`documents` are the consecutive documents of the split; `num_samples` may be more than an epoch.

        Raises:
            ConfigError: the split has too few tokens for one sample.
        """
        if seq_length < 1 or seed < 0:
            raise ConfigError(
                f"seq_length must be at least 1 and seed at least 0; got {seq_length} and {seed}"
            )
        self._indexed = indexed
        self._documents = np.arange(documents.start, documents.stop, dtype=np.int64)
        self._lengths = np.diff(indexed.document_starts[documents.start : documents.stop + 1])
        self._entropy = (seed, *name.encode())
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._num_samples = num_samples
        self.seq_length = seq_length
        self.num_tokens = int(self._lengths.sum())
        self.samples_per_epoch = max(0, self.num_tokens - 1) // seq_length
        if num_samples > 0 and self.samples_per_epoch == 0:
            raise ConfigError(
                f"the {name} split of {indexed.prefix} has {self.num_tokens} tokens in {len(documents)} "
                f"documents; one sample needs {seq_length + 1} (seq_length + 1). Give the split a larger "
                "share with --split, prepare more text, or ask for no samples of it."
            )

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """(tokens_S, labels_S), int64, of sample `index` < `num_samples`."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        epoch_number, position = divmod(index, self.samples_per_epoch)
        epoch = self._epoch(epoch_number)
        start = int(epoch.windows[position]) * self.seq_length
        window = torch.from_numpy(self._tokens(epoch, start, start + self.seq_length + 1))
        return window[:-1], window[1:]

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            generator = np.random.default_rng((number, *self._entropy))
            order = generator.permutation(len(self._documents))
            starts = np.concatenate(([0], np.cumsum(self._lengths[order])))
            windows = generator.permutation(self.samples_per_epoch)
            self._epochs[number] = _Epoch(self._documents[order], starts, windows)
            while len(self._epochs) > EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return self._epochs[number]

    def _tokens(self, epoch: _Epoch, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens start .. stop of the epoch's concatenation."""
        first = int(np.searchsorted(epoch.starts, start, side="right")) - 1
        last = int(np.searchsorted(epoch.starts, stop, side="left"))
        pieces = []
        for place in range(first, last):
            offset = int(epoch.starts[place])
            document = self._indexed.document(int(epoch.documents[place]))
            pieces.append(document[max(0, start - offset) : stop - offset])
        return np.concatenate(pieces, dtype=np.int64)


class BlendedGPTDataset(Dataset[Sample]):
    """Several datasets interleaved by weight, in the fixed order of `BlendTable`."""

    def __init__(self, datasets: Sequence[GPTDataset], table: BlendTable, num_samples: int) -> None:
        """`datasets` are long enough for their share of `num_samples` (`BlendTable.counts`)."""
        self._datasets = datasets
        self._table = table
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """(tokens_S, labels_S), int64, of sample `index` < `num_samples`."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        source, place = self._table.locate(index)
        return self._datasets[source][place]


GPTSamples = GPTDataset | BlendedGPTDataset


def build_gpt_datasets(
    data_path: str | Sequence[str],
    split: str,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
) -> tuple[GPTSamples, GPTSamples, GPTSamples]:
    """Train, valid and test datasets with `num_samples` samples each.

    Args:
        data_path: a folder made by `python -m ds_ext prepare`, a prefix of `.bin/.idx` files, or a blend of
            those: "0.3 a 0.7 b", also as a list of its words.
        split: shares of the documents in file order, e.g. "969,30,1"; missing ones are 0.
        seq_length: S.
        num_samples: samples wanted of each split; 0 gives an empty dataset.
        seed: of the order of documents and samples.

    Raises:
        ConfigError: a file is missing or damaged, a weight or share is wrong, or a split has not one sample.
    """
    weights, prefixes = parse_data_path(data_path)
    shares = parse_split(split)
    sources = [IndexedTokens(prefix) for prefix in prefixes]
    built = []
    for place, name in enumerate(SPLIT_NAMES):
        wanted = num_samples[place]
        table = BlendTable(weights, wanted)
        parts = [
            GPTDataset(source, split_documents(source, shares)[place], seq_length, count, seed, name)
            for source, count in zip(sources, table.counts, strict=True)
        ]
        built.append(parts[0] if len(parts) == 1 else BlendedGPTDataset(parts, table, wanted))
    return built[0], built[1], built[2]


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of train, valid, test, adding up to 1."""
    try:
        shares = [float(word) for word in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ConfigError(
            f"--split needs one to three shares such as 969,30,1 (train,valid,test); got {split!r}"
        )
    shares += [0.0] * (3 - len(shares))
    train, valid, test = (share / sum(shares) for share in shares)
    return train, valid, test


def split_documents(indexed: IndexedTokens, shares: tuple[float, float, float]) -> list[range]:
    """Consecutive documents for each split, borders rounded to whole documents."""
    borders = np.rint(np.cumsum([0.0, *shares]) * indexed.num_documents).astype(int).tolist()
    return [range(start, stop) for start, stop in pairwise(borders)]
