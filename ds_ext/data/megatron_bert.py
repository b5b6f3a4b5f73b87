"""The one place that touches megatron-core's BERT dataset: what it needs, what it gives, and our index of samples.

The library's own index depends on the number of samples asked for, so that a longer run would begin otherwise than a
shorter one; it needs a process group, and writes files beside the data. Ours is made epoch by epoch, by the library's
compiled helper. Importing the library takes seconds, so a rank does it when it wants its first sample, if ever.
"""

import importlib.metadata
import warnings
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_ext.data.wordpiece import CLS, MASK, PAD, SEP, WordPieceTokenizer
from ds_ext.errors import ConfigError

LIBRARY_VERSIONS = ("0.16",)
LONGEST_SENTENCE = 512  # tokens; documents with a longer one are left out by the library's helper
FRAME_TOKENS = 3  # [CLS] a [SEP] b [SEP]
MAX_NGRAM = 3
EPOCHS_KEPT = 2


@dataclass(frozen=True)
class BertOptions:
    """What is done to the text, under the names of Megatron's flags.

    Args:
        mask_prob: share of the tokens to be predicted; of them 80 % become [MASK], 10 % another word.
        short_seq_prob: share of the samples that are shorter than seq_length.
        binary_head: two segments, of which half are swapped; without it a sample is one.

    Raises:
        ConfigError: a probability is out of range.
    """

    mask_prob: float = 0.15
    short_seq_prob: float = 0.1
    binary_head: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob < 1:
            raise ConfigError(f"--mask-prob must be above 0 and below 1; got {self.mask_prob}.")
        if not 0 <= self.short_seq_prob <= 1:
            raise ConfigError(f"--short-seq-prob must be from 0 to 1; got {self.short_seq_prob}.")


@dataclass(frozen=True)
class SplitSentences:
    """The documents of one split in one file, and what to make of them.

    Args:
        prefix: the pair of files.
        lengths: tokens of each sentence of the file.
        borders: the sentence that each document of the split begins with, and the end.
        seq_length: tokens of a sample.
        seed, name: of the run and of the split; they decide everything random.
        tokenizer: the data's.
        options: what is done to the text.
    """

    prefix: Path
    lengths: NDArray[np.int32] = field(repr=False)
    borders: NDArray[np.int64] = field(repr=False)
    seq_length: int
    seed: int
    name: str
    tokenizer: WordPieceTokenizer
    options: BertOptions

    def derived_seed(self, *what: int | str) -> int:
        """A seed of 31 bits, the most that the library takes, of its own for every purpose."""
        words = [value for word in what for value in (word.encode() if isinstance(word, str) else [word])]
        return int(np.random.default_rng((self.seed, *self.name.encode(), *words)).integers(1, 2**31 - 1))


class EpochIndex:
    """Row i: first sentence, end, and wanted number of tokens of sample i, for as many epochs as are asked for.

    Each epoch goes through all documents once, draws anew which samples are short, and has an order of its own.
    """

    def __init__(self, part: SplitSentences, max_tokens: int, min_sentences: int) -> None:
        self._part, self._max_tokens, self._min_sentences = part, max_tokens, min_sentences
        self._starts = [0]
        self._kept: dict[int, NDArray[Any]] = {}

    def __getitem__(self, index: int) -> NDArray[Any]:
        while index >= self._starts[-1]:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        number = bisect_right(self._starts, index) - 1
        return self._epoch(number)[index - self._starts[number]]

    def _epoch(self, number: int) -> NDArray[Any]:
        if number not in self._kept:
            from megatron.core.datasets import helpers_cpp

            part = self._part
            rows = helpers_cpp.build_mapping(
                part.borders,
                part.lengths,
                1,
                np.iinfo(np.int64).max,
                self._max_tokens,
                part.options.short_seq_prob,
                part.derived_seed("order", number),
                False,
                self._min_sentences,
            )
            self._kept[number] = rows
            while len(self._kept) > EPOCHS_KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[number]


def masked_dataset(part: SplitSentences) -> Any:
    """megatron-core's dataset over the documents of `part`, with our index of samples."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        from megatron.core.datasets.bert_dataset import (
            BERTMaskedWordPieceDataset,
            BERTMaskedWordPieceDatasetConfig,
        )
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split

    class Masked(BERTMaskedWordPieceDataset):
        def _build_sample_index(self, sequence_length: int, min_sentences_per_sample: int) -> EpochIndex:
            return EpochIndex(part, sequence_length, min_sentences_per_sample)

    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=part.derived_seed("masks"),
        sequence_length=part.seq_length,
        blend=([str(part.prefix)], None),
        split="1",
        tokenizer=_LibraryTokenizer.of(part.tokenizer),
        masking_probability=part.options.mask_prob,
        short_sequence_probability=part.options.short_seq_prob,
        masking_max_ngram=MAX_NGRAM,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=part.options.binary_head,
    )
    return Masked(
        IndexedDataset(str(part.prefix)), str(part.prefix), np.empty(0), None, Split[part.name], config
    )


def require_library() -> None:
    """Raise ConfigError without a megatron-core that we know; importing it to see would take seconds."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if not version.startswith(LIBRARY_VERSIONS):
        raise ConfigError(
            f"BERT's samples are made by megatron-core {' or '.join(LIBRARY_VERSIONS)}; installed is {version}: pip "
            "install 'ds_ext[data]'."
        )


class _Words(dict[int, str]):
    """Word by token id, of all that may stand in for a masked one; special tokens have no word."""

    def __missing__(self, token_id: int) -> str:
        return ""


@dataclass(frozen=True)
class _LibraryTokenizer:
    """A tokenizer as megatron-core's dataset uses it.

    The library puts any key of inv_vocab in the place of a masked word. With [PAD] among them it would take that
    place for padding.
    """

    cls: int
    sep: int
    mask: int
    pad: int
    inv_vocab: _Words
    unique_identifiers: dict[str, str]

    @classmethod
    def of(cls, tokenizer: WordPieceTokenizer) -> "_LibraryTokenizer":
        ids = tokenizer.special_ids
        framing = {ids[name] for name in (PAD, CLS, SEP, MASK)}
        words = {token_id: word for word, token_id in tokenizer.vocab.items() if token_id not in framing}
        return cls(
            cls=ids[CLS],
            sep=ids[SEP],
            mask=ids[MASK],
            pad=ids[PAD],
            inv_vocab=_Words(sorted(words.items())),
            unique_identifiers={"fingerprint": tokenizer.fingerprint},
        )
