"""Several documents in one sample: their boundaries, their labels, and the packing of whole documents."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ConfigError
from .indexed import IndexedTokens

IGNORE_INDEX = -100  # label that does not count, as in torch's cross_entropy
OPEN_SAMPLES = 64
PROBED_DOCUMENTS = 256

Inputs: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Sample: TypeAlias = tuple[Inputs, torch.Tensor]


@dataclass(frozen=True)
class DocumentOptions:
    """Treatment of samples that contain several documents, as in Megatron.

    Attributes:
        starts: return the start of every token's document (``--reset-position-ids``, ``--reset-attention-mask``).
        eod_mask_loss: ignore the label of every end-of-document token (``--eod-mask-loss``).
        eod_id: id of the end-of-document token; required by the other two.
        packs: pack several conversations of chat data into a sample, which needs ``starts``. False: a sample has one
            conversation, and its length.
    """

    starts: bool = False
    eod_mask_loss: bool = False
    eod_id: int | None = None
    packs: bool = True

    def sample(self, tokens_S: torch.Tensor, labels_S: torch.Tensor) -> Sample:
        if self.eod_id is None:
            return tokens_S, labels_S
        if self.eod_mask_loss:
            labels_S = labels_S.masked_fill(tokens_S == self.eod_id, IGNORE_INDEX)
        return (tokens_S, document_starts(tokens_S, self.eod_id)) if self.starts else tokens_S, labels_S

    def check(self, indexed: IndexedTokens, documents: range) -> None:
        """Raise ConfigError unless documents end with the end-of-document token.

        Up to ``PROBED_DOCUMENTS`` evenly spaced documents are read.
        """
        if not self.starts and not self.eod_mask_loss:
            return
        flags = "--reset-position-ids, --reset-attention-mask and --eod-mask-loss"
        if self.eod_id is None:
            raise ConfigError(
                f"{flags}: the end-of-document token is unknown (got {indexed.prefix}). Add --tokenizer, and use the "
                "same tokenizer for all parts of a blend."
            )
        step = max(1, len(documents) // PROBED_DOCUMENTS)
        for number in (*documents[::step], *documents[-1:]):
            document = indexed.document(number)
            if len(document) and document[-1] != self.eod_id:
                raise ConfigError(
                    f"{flags}: document {number} of {indexed.prefix} does not end with the end-of-document token "
                    f"(got token {document[-1]}, expected {self.eod_id}). Prepare the data with `python -m ds_ext "
                    "prepare` or Megatron's --append-eod, or pass its tokenizer."
                )


def document_starts(tokens_S: torch.Tensor, eod_id: int) -> torch.Tensor:
    """Return the index within the sample of the first token of every token's document, int64.

    A document ends with its end-of-document token, as in Megatron's ``_get_ltor_masks_and_position_ids``. A document
    that began before the sample starts at 0.
    """
    after_S = torch.arange(1, len(tokens_S) + 1)
    starts_S = torch.zeros(len(tokens_S), dtype=torch.int64)
    starts_S[1:] = torch.where(tokens_S == eod_id, after_S, 0).cummax(0).values[:-1]
    return starts_S


def pack_best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the sample, 0.., of every document. No length may exceed ``capacity``.

    A document goes into the open sample with the least sufficient space, or else into a new one. At most
    ``OPEN_SAMPLES`` samples are open; beyond that, the fullest is closed.
    """
    samples = np.empty(len(lengths), dtype=np.int64)
    open_samples: list[tuple[int, int]] = []  # (space, sample), ascending
    num_samples = 0
    for document, length in enumerate(lengths.tolist()):
        position = bisect_left(open_samples, (length, -1))
        if position < len(open_samples):
            space, sample = open_samples.pop(position)
        else:
            space, sample = capacity, num_samples
            num_samples += 1
        samples[document] = sample
        if space > length:
            insort(open_samples, (space - length, sample))
            if len(open_samples) > OPEN_SAMPLES:
                del open_samples[0]
    return samples
