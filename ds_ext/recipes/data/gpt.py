"""GPT samples: windows of seq_length + 1 tokens over shuffled, concatenated documents.

A sample is (tokens_S, labels_S) with S = seq_length; labels_S are the tokens shifted by one. With the start of every
token's document it is ((tokens_S, starts_S), labels_S). Samples depend only on (seed, seq_length, split, files), so all
ranks and all resumed runs get the same ones. Chat data has samples of whole conversations; see chat/dataset.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ConfigError
from .chat.dataset import ChatDataset
from .datasets import BlendedDataset, Epoch, EpochDataset, build_datasets
from .indexed import IndexedTokens, require_windows
from .meta import loss_mask_prefix
from .packing import DocumentOptions, Sample

WINDOWS_ONLY = DocumentOptions()


class GPTDataset(EpochDataset[Sample]):
    """Samples of one split of one indexed file.

    Each epoch concatenates the documents of the split in a new order, cuts the result into windows that overlap by one
    token, and shuffles the windows. The documents contain their end-of-document tokens. A token is a label at most
    once per epoch. Sample i does not depend on ``num_samples``: a longer run starts with the samples of a shorter one.
    """

    def __init__(
        self,
        indexed: IndexedTokens,
        documents: range,
        seq_length: int,
        num_samples: int,
        seed: int,
        name: str = "train",
        options: DocumentOptions = WINDOWS_ONLY,
    ) -> None:
        """Use consecutive ``documents`` of a file as the split ``name``; ``num_samples`` may exceed one epoch."""
        super().__init__(seq_length, num_samples, seed, name)
        options.check(indexed, documents)
        self._options = options
        self._indexed = indexed
        self._documents = np.arange(documents.start, documents.stop, dtype=np.int64)
        self._lengths = np.diff(indexed.document_starts[documents.start : documents.stop + 1])
        self.mean_tokens = seq_length
        self.num_tokens = int(self._lengths.sum())
        self.samples_per_epoch = max(0, self.num_tokens - 1) // seq_length
        if num_samples > 0:
            require_windows(name, indexed, documents, seq_length)

    def _sample(self, index: int) -> Sample:
        """Return (tokens_S, labels_S) or ((tokens_S, starts_S), labels_S), int64."""
        epoch_number, position = divmod(index, self.samples_per_epoch)
        epoch = self._epoch(epoch_number)
        start = int(epoch.samples[position]) * self.seq_length
        window = torch.from_numpy(self._tokens(epoch, start, start + self.seq_length + 1))
        return self._options.sample(window[:-1], window[1:])

    def summary(self) -> str:
        return (
            f"{len(self._documents):,} documents, {self.num_tokens:,} tokens in {self.samples_per_epoch:,} samples of "
            f"{self.seq_length}; {len(self) / self.samples_per_epoch:.2f} epochs in {len(self)} samples"
        )

    def _shuffled(self, generator: np.random.Generator) -> Epoch:
        order = generator.permutation(len(self._documents))
        starts = np.concatenate(([0], np.cumsum(self._lengths[order])))
        return Epoch(self._documents[order], starts, generator.permutation(self.samples_per_epoch))

    def _tokens(self, epoch: Epoch, start: int, stop: int) -> NDArray[np.int64]:
        first = int(np.searchsorted(epoch.borders, start, side="right")) - 1
        last = int(np.searchsorted(epoch.borders, stop, side="left"))
        pieces = []
        for position in range(first, last):
            offset = int(epoch.borders[position])
            document = self._indexed.document(int(epoch.documents[position]))
            pieces.append(document[max(0, start - offset) : stop - offset])
        return np.concatenate(pieces, dtype=np.int64)


def build_gpt_datasets(
    data_path: str | Sequence[str],
    split: str,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    options: DocumentOptions = WINDOWS_ONLY,
) -> tuple[BlendedDataset[Sample], BlendedDataset[Sample], BlendedDataset[Sample]]:
    """Build train, valid and test datasets with ``num_samples`` samples each; 0 gives an empty dataset.

    Args:
        data_path: folder from ``python -m ds_ext prepare``, prefix of ``.bin/.idx`` files, or a blend such as
            "0.3 a 0.7 b". A list of these words is accepted too.
        split: shares of the documents in file order, e.g. "969,30,1"; missing shares are 0.
        seq_length: tokens per sample.
        seed: seed of the order of documents and samples.
        options: treatment of samples with several documents; chat data needs ``starts``.
    """

    def build_part(
        indexed: IndexedTokens, documents: range, name: str, num_samples: int
    ) -> GPTDataset | ChatDataset:
        mask = loss_mask_prefix(indexed.prefix)
        if mask is None:
            return GPTDataset(indexed, documents, seq_length, num_samples, seed, name, options)
        if options.packs and not options.starts:
            raise ConfigError(
                f"--data-path: chat data packs several conversations into a sample (got {indexed.prefix} without the "
                "starts of conversations). Build the datasets with DocumentOptions(starts=True)."
            )
        chat = IndexedTokens(mask), documents, seq_length, num_samples, seed, name, options.packs
        return ChatDataset(indexed, *chat)

    return build_datasets(data_path, split, num_samples, build_part)


def describe_data(dataset: object) -> list[str]:
    parts = dataset.parts if isinstance(dataset, BlendedDataset) else ()
    return [
        f"{'chat' if isinstance(part, ChatDataset) else 'data'}      {part.summary()}"
        for part in parts
        if isinstance(part, ChatDataset | GPTDataset) and len(part)
    ]


def mean_tokens(dataset: object) -> float:
    """Return the mean tokens of the samples; 0 for another dataset."""
    parts: Any = dataset.parts if isinstance(dataset, BlendedDataset) else ()
    return sum(part.mean_tokens * len(part) for part in parts) / max(1, sum(map(len, parts)))


def samples_per_epoch(dataset: object) -> int | None:
    """Return None for a blend, whose parts have different epochs."""
    parts = dataset.parts if isinstance(dataset, BlendedDataset) else ()
    if len(parts) != 1 or not isinstance(parts[0], ChatDataset | GPTDataset):
        return None
    return parts[0].samples_per_epoch
