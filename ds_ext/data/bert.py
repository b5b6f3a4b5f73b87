"""BERT samples: two segments of a document, in order or swapped, with masked words; megatron-core makes each of them.

Shapes: S tokens of a sample; a sample is ((tokens_S, types_S, seen_S), (labels_S, swapped)).

What is in a sample is the work of megatron-core's BERTMaskedWordPieceDataset: consecutive sentences up to S - 3
tokens, a border at random, in half of the samples the two sides swapped, whole words and n-grams of them masked.
Which samples there are, and in which order, is decided by (seed, seq_length, split, files) alone: every rank, and
every run that resumes, sees the same, and a longer run begins like a shorter one.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ds_ext.data.blend import BlendTable, parse_data_path
from ds_ext.data.gpt import SPLIT_NAMES, parse_split, split_documents
from ds_ext.data.indexed import HEADER, IndexedTokens
from ds_ext.data.megatron_bert import (
    FRAME_TOKENS,
    LONGEST_SENTENCE,
    BertOptions,
    SplitSentences,
    masked_dataset,
    require_library,
)
from ds_ext.data.meta import check_tokenizer, check_vocab_size, read_meta
from ds_ext.data.tokenizer import load_tokenizer
from ds_ext.data.wordpiece import WordPieceTokenizer
from ds_ext.errors import ConfigError

__all__ = ["BertDataset", "BertOptions", "bert_tokenizer", "build_bert_datasets"]

NO_LABEL = -100  # torch's ignore_index
PREPARE_COMMAND = "python -m ds_ext prepare --tokenizer-type wordpiece"

Sample = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


class BertDataset(Dataset[Sample]):
    """Samples of one split of one file, or of several in the fixed order of `BlendTable`."""

    def __init__(self, parts: "Sequence[_Part]", table: BlendTable, num_samples: int) -> None:
        self._parts = parts
        self._table = table
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """((tokens_S, types_S, seen_S), (labels_S, swapped)) of sample `index` < `num_samples`.

        int64, but for the bool seen_S, which is False in the padding. labels_S is the word where one is to be
        predicted, and `NO_LABEL` elsewhere; swapped is 1 when the segments stand in the wrong order. Without binary
        head there is no swapped.
        """
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        source, place = self._table.locate(index)
        return self._parts[source].sample(place)


def build_bert_datasets(
    data_path: str | Sequence[str],
    split: str,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    tokenizer: WordPieceTokenizer,
    options: BertOptions,
) -> tuple[BertDataset, BertDataset, BertDataset]:
    """Train, valid and test datasets with `num_samples` samples each.

    Args:
        data_path: a folder made by `python -m ds_ext prepare`, a prefix of `.bin/.idx` files whose sequences are
            sentences, or a blend of those: "0.3 a 0.7 b", also as a list of its words.
        split: shares of the documents in file order, e.g. "969,30,1"; missing ones are 0.
        seq_length: S.
        num_samples: samples wanted of each split; 0 gives an empty dataset.
        seed: of the order of samples, their segments and masks.
        tokenizer: from :func:`bert_tokenizer`.

    Raises:
        ConfigError: megatron-core is missing, a file is missing or damaged, a weight or share is wrong, or a split
            has not one sample.
    """
    require_library()
    if options.mask_prob * (seq_length - FRAME_TOKENS) < 1:
        needed = int(np.ceil(1 / options.mask_prob)) + FRAME_TOKENS
        raise ConfigError(
            f"no word of a sample of {seq_length} tokens would be masked with --mask-prob {options.mask_prob}: "
            f"{FRAME_TOKENS} tokens frame the segments. Use --seq-length {needed} or more."
        )
    weights, prefixes = parse_data_path(data_path)
    shares = parse_split(split)
    sources = [(IndexedTokens(prefix), *_read_sentences(prefix)) for prefix in prefixes]
    built = []
    for place, name in enumerate(SPLIT_NAMES):
        wanted = num_samples[place]
        table = BlendTable(weights, wanted)
        parts = []
        for (indexed, lengths, borders), count in zip(sources, table.counts, strict=True):
            documents = split_documents(indexed, shares)[place]
            own = borders[documents.start : documents.stop + 1]
            part = SplitSentences(indexed.prefix, lengths, own, seq_length, seed, name, tokenizer, options)
            if count:
                _require_samples(part)
            parts.append(_Part(part))
        built.append(BertDataset(parts, table, wanted))
    return built[0], built[1], built[2]


def bert_tokenizer(data_path: str | Sequence[str], given: str | None = None) -> WordPieceTokenizer:
    """The WordPiece tokenizer that the data was made with: beside it, or the file or folder `given`.

    Raises:
        ConfigError: there is none, it is of another kind or not the data's, or the data is not split into sentences.
    """
    _, prefixes = parse_data_path(data_path)
    for prefix in prefixes:
        meta = read_meta([str(prefix)])
        if meta is not None and "sentences" not in meta:
            raise ConfigError(
                f"the data {prefix} has one sequence a document, as GPT needs it; BERT needs one a sentence. Make "
                f"some: `{PREPARE_COMMAND} --source {meta['source']['name']} --output FOLDER`."
            )
    tokenizer = load_tokenizer(given or prefixes[0].parent)
    if not isinstance(tokenizer, WordPieceTokenizer):
        raise ConfigError(
            f"{given or prefixes[0].parent} is no WordPiece tokenizer; its ## tell what a whole word is. Prepare the "
            f"data with `{PREPARE_COMMAND}`, or give a vocab.txt or tokenizer.json with --tokenizer."
        )
    check_tokenizer(data_path, tokenizer)
    check_vocab_size(data_path, tokenizer.vocab_size)
    return tokenizer


class _Part:
    """The samples of one split in one file."""

    def __init__(self, sentences: SplitSentences) -> None:
        self._sentences = sentences

    def sample(self, index: int) -> Sample:
        item = self._masked[index]
        labels_S = np.where(item["loss_mask"] == 1, item["labels"], NO_LABEL)
        swapped = (torch.tensor(item["is_random"]),) if self._sentences.options.binary_head else ()
        inputs = item["text"], item["types"], item["padding_mask"] == 1
        return tuple(map(torch.from_numpy, inputs)), (torch.from_numpy(labels_S), *swapped)

    @cached_property
    def _masked(self) -> Any:
        return masked_dataset(self._sentences)


def _require_samples(part: SplitSentences) -> None:
    """Raise ConfigError unless a document has a sample in it."""
    needed = 2 if part.options.binary_head else 1
    counts = np.diff(part.borders)
    documents = np.repeat(np.arange(len(counts)), counts)
    first, stop = (part.borders[0], part.borders[-1]) if len(counts) else (0, 0)
    too_long = part.lengths[first:stop] > LONGEST_SENTENCE
    long_sentences = np.bincount(documents, weights=too_long, minlength=len(counts))
    if not np.any((counts >= needed) & (long_sentences == 0)):
        raise ConfigError(
            f"the {part.name} split of {part.prefix} has no sample: of its {len(counts)} documents "
            f"{np.count_nonzero(counts < needed)} have fewer than {needed} sentences, and "
            f"{np.count_nonzero(long_sentences)} have one of more than {LONGEST_SENTENCE} tokens. Give the split a "
            f"larger share with --split, or prepare the text with `{PREPARE_COMMAND}`."
        )


def _read_sentences(prefix: Path) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Tokens of each sentence, and the sentence that each document begins with, plus the end, of a checked index."""
    content = Path(f"{prefix}.idx").read_bytes()
    *_, num_sentences, num_borders = HEADER.unpack_from(content)
    lengths = np.frombuffer(content, np.int32, num_sentences, HEADER.size)
    return lengths, np.frombuffer(content, np.int64, num_borders, HEADER.size + 12 * num_sentences)
