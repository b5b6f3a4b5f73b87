"""Samples of chat data: whole conversations, packed into seq_length tokens or one in each sample.

A packed sample is ((tokens_S, starts_S), labels_S) with S = seq_length. A sample of one conversation is (tokens_S,
labels_S) with its own S, up to seq_length; :func:`pad_conversations` makes a micro-batch of them. A conversation of n
tokens takes n - 1 positions: its last token is only a label. Labels that are not the assistant's are ``IGNORE_INDEX``.
Samples depend only on (seed, seq_length, split, files), so all ranks and all resumed runs get the same ones.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ....errors import ConfigError
from ..datasets import Epoch, EpochDataset
from ..indexed import IndexedTokens
from ..packing import IGNORE_INDEX, Sample, pack_best_fit

MOST_DROPPED = 0.01  # share of the conversations that may be too long for a label
PADDING_TOKEN = 0  # any token of the vocabulary; the loss ignores padding


class ChatDataset(EpochDataset[Sample]):
    """Samples of one split of prepared chat data.

    Each epoch shuffles the conversations, packs and pads them with :func:`pack_best_fit` unless a sample has only one,
    and shuffles the samples. Epochs may have different numbers of packed samples. A conversation of more than
    seq_length + 1 tokens is truncated at its end, or dropped if no token of the assistant remains. Sample i does not
    depend on ``num_samples``.

    Attributes:
        mean_tokens: mean S of the samples of an epoch.
        num_conversations, num_truncated: counts of an epoch.
        num_dropped: conversations of the split that are not in an epoch.
    """

    def __init__(
        self,
        indexed: IndexedTokens,
        mask: IndexedTokens,
        documents: range,
        seq_length: int,
        num_samples: int,
        seed: int,
        name: str = "train",
        packs: bool = True,
    ) -> None:
        """Use consecutive ``documents`` of a file as the split ``name``; ``num_samples`` may exceed one epoch.

        Args:
            indexed: tokens, one conversation per document.
            mask: 1 for each token that counts as a label, else 0, in the same documents.
            packs: pack several conversations into a sample.
        """
        super().__init__(seq_length, num_samples, seed, name)
        if not np.array_equal(indexed.document_starts, mask.document_starts):
            raise ConfigError(
                f"{mask.prefix}: the loss mask has other conversations than the tokens (got {mask.num_documents} with "
                f"{len(mask.tokens)} tokens, expected {indexed.num_documents} with {len(indexed.tokens)}). Prepare the "
                "data again with --force."
            )
        self._indexed = indexed
        self._mask = mask
        self._packs = packs
        # A conversation takes one position less than it has tokens.
        lengths = np.diff(indexed.document_starts[documents.start : documents.stop + 1]) - 1
        numbers = np.arange(documents.start, documents.stop, dtype=np.int64)
        is_long = lengths > seq_length
        is_used = (lengths > 0) & ~is_long
        is_used[is_long] = [self._label_mask(number).any() for number in numbers[is_long]]
        self._conversations = numbers[is_used]
        self._lengths = np.minimum(lengths[is_used], seq_length)
        self._ends: list[int] = []  # number of samples up to the end of every known epoch
        self.num_conversations = len(self._conversations)
        self.mean_tokens = seq_length if packs or not self.num_conversations else float(self._lengths.mean())
        self.num_truncated = int(np.count_nonzero(is_long & is_used))
        self.num_dropped = len(documents) - self.num_conversations
        if num_samples > 0 and name == "train":
            _check_dropped(mask, numbers[~is_used], len(documents), seq_length)
        if num_samples > 0 and not self.num_conversations:
            raise ConfigError(
                f"--split: the {name} split of {indexed.prefix} has no conversation with tokens of the assistant among "
                f"its first {seq_length + 1} (got {len(documents)} of {indexed.num_documents} conversations). Increase "
                f"its share{' or --seq-length' * bool(documents)}{', or set --eval-iters 0' * (name == 'valid')}."
            )

    @property
    def samples_per_epoch(self) -> int:
        """Samples of the first epoch."""
        return len(self._epoch(0).samples) if self.num_conversations else 0

    def _sample(self, index: int) -> Sample:
        """Return ((tokens_S, starts_S), labels_S), int64, of sample ``index``, or (tokens_S, labels_S) without packing.

        starts_S is the index of the first token of every token's conversation, or of the padding.
        """
        tokens_S = np.full(self.seq_length, PADDING_TOKEN, dtype=np.int64)
        labels_S = np.full(self.seq_length, IGNORE_INDEX, dtype=np.int64)
        starts_S = np.zeros(self.seq_length, dtype=np.int64)
        start = 0
        for number in self._conversations_of(index):
            conversation = self._indexed.document(number)[: self.seq_length + 1].astype(np.int64)
            stop = start + len(conversation) - 1
            tokens_S[start:stop] = conversation[:-1]
            labels_S[start:stop] = np.where(self._label_mask(number), conversation[1:], IGNORE_INDEX)
            starts_S[start:stop] = start
            start = stop
        starts_S[start:] = start
        if not self._packs:
            return torch.from_numpy(tokens_S[:start]), torch.from_numpy(labels_S[:start])
        return (torch.from_numpy(tokens_S), torch.from_numpy(starts_S)), torch.from_numpy(labels_S)

    def summary(self) -> str:
        samples = self.samples_per_epoch
        full = self._lengths.sum() / (samples * self.seq_length)
        sizes = f"in {samples} samples of {self.seq_length} tokens, {full:.1%} full"
        if not self._packs:
            sizes = f"of at most {self.seq_length} tokens, {self.mean_tokens:.0f} on average"
        return (
            f"{self.num_conversations} conversations {sizes}; truncated {self.num_truncated}, dropped "
            f"{self.num_dropped}; {len(self) / samples:.1f} epochs in {len(self)} samples"
            f"{' (--reset-position-ids, --reset-attention-mask)' * self._packs}"
        )

    def _conversations_of(self, index: int) -> list[int]:
        while not self._ends or self._ends[-1] <= index:
            samples = len(self._epoch(len(self._ends)).samples)
            self._ends.append(samples + (self._ends[-1] if self._ends else 0))
        number = bisect_right(self._ends, index)
        epoch = self._epoch(number)
        sample = epoch.samples[index - (self._ends[number - 1] if number else 0)]
        return epoch.documents[epoch.borders[sample] : epoch.borders[sample + 1]].tolist()

    def _shuffled(self, generator: np.random.Generator) -> Epoch:
        shuffled = generator.permutation(self.num_conversations)
        samples = np.arange(self.num_conversations)
        if self._packs:
            samples = pack_best_fit(self._lengths[shuffled], self.seq_length)
        by_sample = np.argsort(samples, kind="stable")
        num_samples = int(samples.max()) + 1
        borders = np.searchsorted(samples[by_sample], np.arange(num_samples + 1))
        return Epoch(self._conversations[shuffled[by_sample]], borders, generator.permutation(num_samples))

    def _label_mask(self, number: int) -> NDArray[np.bool_]:
        return self._mask.document(number)[1 : self.seq_length + 1] == 1


def pad_conversations(
    samples: Sequence[tuple[Tensor, Tensor]], length: int = 0, multiple: int = 1
) -> tuple[Tensor, Tensor]:
    """Return (tokens_BS, labels_BS) with S of the longest sample, or ``length`` if that is longer.

    S is rounded up to a ``multiple``. The padding is at the end, where a decoder's tokens do not attend to it.
    """
    length = max(length, *(len(tokens_S) for tokens_S, _ in samples))
    length += -length % multiple
    tokens, labels = (
        torch.stack([pad(tensor_S, (0, length - len(tensor_S)), value=value) for tensor_S in column])
        for column, value in zip(zip(*samples, strict=True), (PADDING_TOKEN, IGNORE_INDEX), strict=True)
    )
    return tokens, labels


def _check_dropped(mask: IndexedTokens, dropped: NDArray[np.int64], total: int, length: int) -> None:
    """Raise ConfigError if more than ``MOST_DROPPED`` of all conversations are ``dropped``: without a label."""
    allowed = int(MOST_DROPPED * total)
    first_labels = sorted(int(mask.document(number)[1:].argmax()) + 1 for number in dropped)
    if len(first_labels) > allowed:
        needed = first_labels[len(first_labels) - 1 - allowed]
        raise ConfigError(
            f"--seq-length: {len(first_labels)} of {total} conversations have no token of the assistant in a sample "
            f"(got --seq-length {length}). Use {needed} or more, or remove these conversations from the source and "
            "prepare it again."
        )
