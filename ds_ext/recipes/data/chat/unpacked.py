"""Samples of chat data for ``ds_ext.from_transformers``: one conversation each, with labels that are not shifted."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ....errors import ConfigError
from ..blend import parse_data_path
from ..indexed import IndexedTokens
from ..meta import check_tokenizer, loss_mask_prefix
from ..packing import IGNORE_INDEX
from ..tokenizer import load_tokenizer
from .dataset import PADDING_TOKEN, check_dropped


class ConversationDataset(Dataset[tuple[Tensor, Tensor]]):
    """Conversations of a prepared folder, in file order, without those that have no label among ``seq_length`` tokens.

    A sample is (ids_S, labels_S) with S of up to seq_length. labels_S are the ids of the tokens that count, and
    ``IGNORE_INDEX`` elsewhere: the model's loss shifts them. :func:`pad_conversations` makes a micro-batch of samples.

    Attributes:
        mean_tokens: mean S.
        num_truncated: number of the conversations that are truncated.
        num_dropped: conversations without a label among ``seq_length`` tokens.
    """

    def __init__(self, folder: str, seq_length: int, model: str | Path) -> None:
        """Open the data.

        Args:
            folder: folder of ``python -m ds_ext prepare --format chat``.
            seq_length: largest number of tokens of a sample; longer conversations are truncated.
            model: folder with the tokenizer of the model.

        Raises:
            ConfigError: the folder has no chat data, none of at most seq_length tokens, or another tokenizer.
        """
        _, (prefix, *_) = parse_data_path(folder)
        mask_prefix = loss_mask_prefix(prefix)
        if mask_prefix is None:
            raise ConfigError(
                f"{folder}: no chat data. Run `python -m ds_ext prepare --format chat --source FILE.jsonl --tokenizer "
                f"{model} --output {folder}`."
            )
        self._tokens = IndexedTokens(prefix)
        check_tokenizer(folder, load_tokenizer(model))
        self._mask = IndexedTokens(mask_prefix)
        self._seq_length = seq_length
        numbers = range(self._tokens.num_documents)
        self._numbers = [number for number in numbers if self._mask.document(number)[1:seq_length].any()]
        if not self._numbers:
            raise ConfigError(
                f"{folder}: no conversation has a token of the assistant among the first {seq_length} (got "
                f"{len(numbers)} conversations). Increase the length of samples."
            )
        dropped = sorted({*numbers} - {*self._numbers})
        check_dropped(self._mask, dropped, len(numbers), seq_length, seq_length - 1)
        lengths = np.diff(self._tokens.document_starts)[self._numbers]
        self.mean_tokens = float(np.minimum(lengths, seq_length).mean())
        self.num_truncated = int(np.count_nonzero(lengths > seq_length))
        self.num_dropped = len(numbers) - len(self)

    def __len__(self) -> int:
        return len(self._numbers)

    def summary(self) -> str:
        """Return one line on the conversations."""
        return (
            f"{len(self)} conversations of at most {self._seq_length} tokens, {self.mean_tokens:.0f} on average; "
            f"truncated {self.num_truncated}, dropped {self.num_dropped}"
        )

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (ids_S, labels_S), int64, of conversation ``index``."""
        number = self._numbers[index]
        ids_S = self._tokens.document(number)[: self._seq_length].astype(np.int64)
        labels_S = np.where(self._mask.document(number)[: self._seq_length] == 1, ids_S, IGNORE_INDEX)
        return torch.from_numpy(ids_S), torch.from_numpy(labels_S)


def pad_conversations(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return (ids_BS, labels_BS) with S of the longest sample. The tokens of a decoder do not attend to the padding."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids, labels = zip(*samples, strict=True)
    return pad(list(ids), True, PADDING_TOKEN), pad(list(labels), True, IGNORE_INDEX)
