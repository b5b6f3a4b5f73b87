"""Interface to megatron-core's BERT dataset, with a sample index that does not depend on the length of the run.

megatron-core's own index depends on the number of samples, so a longer run would start with different samples from a
shorter one. It also needs a process group and writes files beside the data. This module builds the index per epoch
with megatron-core's compiled helper. Importing megatron-core takes seconds, so a rank does it only for its first
sample.
"""

import re
import warnings
from bisect import bisect_right
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...environment import package_version
from ...errors import ConfigError
from .indexed import IndexedTokens
from .wordpiece import CLS, MASK, PAD, SEP, WordPieceTokenizer

OLDEST_MEGATRON = (0, 16)
NEEDS_TRITON = (0, 18)  # to import it, also where nothing runs on a GPU
MEGATRON_MAX_SENTENCE_TOKENS = 512  # megatron-core skips documents with a longer sentence
FRAME_TOKENS = 3  # [CLS] a [SEP] b [SEP]
MAX_NGRAM = 3
EPOCHS_KEPT = 2


@dataclass(frozen=True)
class BertOptions:
    """Settings of BERT samples, named after Megatron's flags.

    Args:
        mask_prob: share of the tokens to predict. Of these, 80 % become [MASK] and 10 % become another word.
        short_seq_prob: share of the samples that are shorter than seq_length.
        binary_head: samples have two segments, swapped in half of the samples. Without it they have one segment.
    """

    mask_prob: float = 0.15
    short_seq_prob: float = 0.1
    binary_head: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob < 1:
            raise ConfigError(
                f"--mask-prob: must be above 0 and below 1 (got {self.mask_prob}). The default is 0.15."
            )
        if not 0 <= self.short_seq_prob <= 1:
            raise ConfigError(
                f"--short-seq-prob: must be from 0 to 1 (got {self.short_seq_prob}). The default is 0.1."
            )


@dataclass(frozen=True)
class BertSplit:
    """Documents of one split of one file, and the settings of their samples.

    Args:
        indexed: file with one sequence per sentence.
        borders: first sentence of every document of the split, and the end of the last document.
        seq_length: tokens per sample.
        seed, name: seed of the run and name of the split, used in all seeds.
    """

    indexed: IndexedTokens
    borders: NDArray[np.int64]
    seq_length: int
    seed: int
    name: str
    tokenizer: WordPieceTokenizer
    options: BertOptions

    def derived_seed(self, *purpose: int) -> int:
        """Return a seed of 31 bits, the maximum that megatron-core accepts."""
        generator = np.random.default_rng((self.seed, *self.name.encode(), *purpose))
        return int(generator.integers(1, 2**31 - 1))


class EpochIndex:
    """Sample index for any number of epochs; row i is (first sentence, end, number of tokens) of sample i.

    Each epoch covers all documents once, with new short samples and in a new order.
    """

    def __init__(self, split: BertSplit, max_tokens: int, min_sentences: int) -> None:
        self._split, self._max_tokens, self._min_sentences = split, max_tokens, min_sentences
        self._starts = [0]
        self._epochs: dict[int, NDArray[Any]] = {}

    def __getitem__(self, index: int) -> NDArray[Any]:
        while index >= self._starts[-1]:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        number = bisect_right(self._starts, index) - 1
        return self._epoch(number)[index - self._starts[number]]

    def _epoch(self, number: int) -> NDArray[Any]:
        if number not in self._epochs:
            from megatron.core.datasets import helpers_cpp

            split = self._split
            self._epochs[number] = helpers_cpp.build_mapping(
                split.borders,
                split.indexed.sequence_lengths,
                1,
                np.iinfo(np.int64).max,
                self._max_tokens,
                split.options.short_seq_prob,
                split.derived_seed(*b"order", number),
                False,
                self._min_sentences,
            )
            if len(self._epochs) > EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
        return self._epochs[number]


def masked_dataset(split: BertSplit) -> Any:
    """Return megatron-core's dataset for the documents of ``split``, with :class:`EpochIndex` as sample index."""
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
            return EpochIndex(split, sequence_length, min_sentences_per_sample)

    prefix = str(split.indexed.prefix)
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=split.derived_seed(*b"masks"),
        sequence_length=split.seq_length,
        blend=([prefix], None),
        split="1",
        tokenizer=_megatron_tokenizer(split.tokenizer),
        masking_probability=split.options.mask_prob,
        short_sequence_probability=split.options.short_seq_prob,
        masking_max_ngram=MAX_NGRAM,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=split.options.binary_head,
    )
    return Masked(IndexedDataset(prefix), prefix, np.empty(0), None, Split[split.name], config)


def require_megatron() -> None:
    """Check the version without importing megatron-core, which takes seconds."""
    version = package_version("megatron-core") or "none"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_MEGATRON:
        raise ConfigError(
            f"megatron-core: BERT samples need version 0.16 or newer (got {version}). Run `pip install "
            "'ds_ext[data]'`."
        )
    if numbers >= NEEDS_TRITON and package_version("triton") is None:
        raise ConfigError(
            f"megatron-core: {version} imports triton, which is not installed (got a torch without CUDA). Run `pip "
            "install triton`, or `pip install 'megatron-core<0.18'`."
        )


class _Replacements(dict[int, str]):
    """Token id -> word for all tokens that may replace a masked one. Other ids map to an empty word."""

    def __missing__(self, token_id: int) -> str:
        return ""


def _megatron_tokenizer(tokenizer: WordPieceTokenizer) -> SimpleNamespace:
    """Return the attributes of a tokenizer that megatron-core's dataset reads.

    megatron-core may replace a masked word with any key of inv_vocab. [PAD] is not a key, because the position would
    then count as padding.
    """
    ids = tokenizer.special_ids
    excluded = {ids[name] for name in (PAD, CLS, SEP, MASK)}
    words = {token_id: word for word, token_id in tokenizer.vocab.items() if token_id not in excluded}
    return SimpleNamespace(
        cls=ids[CLS],
        sep=ids[SEP],
        mask=ids[MASK],
        pad=ids[PAD],
        inv_vocab=_Replacements(sorted(words.items())),
        unique_identifiers={"fingerprint": tokenizer.fingerprint},
    )
