"""BERT samples: two segments of a document, in order or swapped, with masked words.

A sample is ((tokens_S, types_S, mask_S), (labels_S, swapped)) with S = seq_length. It comes from megatron-core's
BERTMaskedWordPieceDataset, which takes consecutive sentences of up to S - 3 tokens, splits them at a random boundary,
swaps the two segments in half of the samples, and masks whole words and n-grams. The samples and their order depend
only on (seed, seq_length, split, files), so all ranks and all resumed runs get the same ones. A longer run starts with
the samples of a shorter one.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ...errors import ConfigError
from .blend import parse_data_path
from .datasets import BlendedDataset, build_datasets
from .indexed import IndexedTokens
from .megatron_bert import (
    FRAME_TOKENS,
    MEGATRON_MAX_SENTENCE_TOKENS,
    BertOptions,
    BertSplit,
    masked_dataset,
    require_megatron,
)
from .meta import check_tokenizer, check_vocab_size, read_meta
from .tokenizer import load_tokenizer
from .wordpiece import WordPieceTokenizer

__all__ = ["BertDataset", "BertOptions", "bert_tokenizer", "build_bert_datasets"]

NO_LABEL = -100  # ignore_index of torch
PREPARE_COMMAND = "python -m ds_ext prepare --tokenizer-type wordpiece"

Sample = tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


class BertDataset(Dataset[Sample]):
    """Samples of one split of one indexed file, for any number of epochs."""

    def __init__(self, split: BertSplit) -> None:
        self._split = split

    def __getitem__(self, index: int) -> Sample:
        """Return ((tokens_S, types_S, mask_S), (labels_S, swapped)) of sample ``index``.

        mask_S is bool and False for padding; the other tensors are int64. labels_S contains the original token at
        positions to predict and ``NO_LABEL`` elsewhere. swapped is 1 if the segments are swapped; without the binary
        head it is omitted.
        """
        item = self._masked[index]
        labels_S = np.where(item["loss_mask"] == 1, item["labels"], NO_LABEL)
        swapped = (torch.tensor(item["is_random"]),) if self._split.options.binary_head else ()
        inputs = item["text"], item["types"], item["padding_mask"] == 1
        return tuple(map(torch.from_numpy, inputs)), (torch.from_numpy(labels_S), *swapped)

    @cached_property
    def _masked(self) -> Any:
        return masked_dataset(self._split)


def build_bert_datasets(
    data_path: str | Sequence[str],
    split: str,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    tokenizer: WordPieceTokenizer,
    options: BertOptions,
) -> tuple[BlendedDataset[Sample], BlendedDataset[Sample], BlendedDataset[Sample]]:
    """Build train, valid and test datasets as :func:`.gpt.build_gpt_datasets` does.

    Files have one sequence per sentence. ``tokenizer`` is the result of :func:`bert_tokenizer`.
    """
    require_megatron()
    if options.mask_prob * (seq_length - FRAME_TOKENS) < 1:
        needed = int(np.ceil(1 / options.mask_prob)) + FRAME_TOKENS
        raise ConfigError(
            f"--mask-prob: less than one masked token per sample (got {options.mask_prob} with {seq_length} tokens, of "
            f"which {FRAME_TOKENS} are [CLS] and [SEP]). Use --seq-length {needed} or more."
        )

    def build_part(indexed: IndexedTokens, documents: range, name: str, num_samples: int) -> BertDataset:
        borders = indexed.document_borders[documents.start : documents.stop + 1]
        part = BertSplit(indexed, borders, seq_length, seed, name, tokenizer, options)
        if num_samples:
            _require_samples(part)
        return BertDataset(part)

    return build_datasets(data_path, split, num_samples, build_part)


def bert_tokenizer(data_path: str | Sequence[str], path: str | None = None) -> WordPieceTokenizer:
    """Load the WordPiece tokenizer of the data from ``path``, by default from the data folder."""
    _, prefixes = parse_data_path(data_path)
    for prefix in prefixes:
        meta = read_meta([str(prefix)])
        if meta is not None and "sentences" not in meta:
            raise ConfigError(
                f"--data-path: BERT needs one sequence per sentence (got {prefix} with one sequence per document). Run "
                f"`{PREPARE_COMMAND} --source {meta['source']['name']} --output FOLDER`."
            )
    tokenizer = load_tokenizer(path or prefixes[0].parent)
    if not isinstance(tokenizer, WordPieceTokenizer):
        raise ConfigError(
            f"--tokenizer: BERT needs a WordPiece tokenizer, whose ## prefixes mark the pieces of a word (got "
            f"{path or prefixes[0].parent}). Prepare the data with `{PREPARE_COMMAND}`, or pass a vocab.txt or "
            "tokenizer.json with --tokenizer."
        )
    check_tokenizer(data_path, tokenizer)
    check_vocab_size(data_path, tokenizer.vocab_size)
    return tokenizer


def _require_samples(split: BertSplit) -> None:
    needed = 2 if split.options.binary_head else 1
    counts = np.diff(split.borders)
    documents = np.repeat(np.arange(len(counts)), counts)
    lengths = split.indexed.sequence_lengths[split.borders[0] : split.borders[-1]]
    long_sentences = np.bincount(documents[lengths > MEGATRON_MAX_SENTENCE_TOKENS], minlength=len(counts))
    if not np.any((counts >= needed) & (long_sentences == 0)):
        raise ConfigError(
            f"--split: the {split.name} split of {split.indexed.prefix} has no samples (got {len(counts)} documents: "
            f"{np.count_nonzero(counts < needed)} have fewer than {needed} sentences, "
            f"{np.count_nonzero(long_sentences)} have a sentence of more than {MEGATRON_MAX_SENTENCE_TOKENS} tokens). "
            f"Increase its share, or prepare the text with `{PREPARE_COMMAND}`."
        )
