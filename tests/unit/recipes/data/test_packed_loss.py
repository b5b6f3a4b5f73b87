"""Packed samples train as their documents alone: loss and gradients of a GPT."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from ds_ext.engine.batches import MicroBatches
from ds_ext.recipes.data.gpt import GPTDataset
from ds_ext.recipes.data.indexed import IndexedTokens
from ds_ext.recipes.data.packing import IGNORE_INDEX, DocumentOptions
from ds_ext.recipes.models.gpt import GPTConfig, gpt_loss
from ds_ext.tensor_parallel import DropoutClock, TensorParallel
from tests.losses import mean
from tests.reference import Chain
from tests.unit.recipes.data.test_chat_dataset import dataset, write_chat
from tests.unit.recipes.data.test_gpt import EOD, write_documents

ONE = TensorParallel()
Packed = tuple[tuple[Tensor, Tensor], Tensor]


def chat_batch(folder: Path) -> Packed:
    """Return a micro-batch of two samples of several conversations, the second with padding."""
    masks = [[False, *[True] * 4], [False, False, True, True], [False, True, False, True, False, True, True]]
    data = dataset(write_chat(folder, [*masks, *masks]), 10, seq_length=16)
    return MicroBatches(data, 2).get(0)


def text_batch(folder: Path) -> Packed:
    """Return a micro-batch of two samples of several documents, without labels at their ends."""
    write_documents(folder / "a", [5, 1, 9, 3, 12, 7, 4, 11])
    indexed = IndexedTokens(folder / "a")
    options = DocumentOptions(starts=True, eod_mask_loss=True, eod_id=EOD)
    return MicroBatches(GPTDataset(indexed, range(8), 16, 2, 1, options=options), 2).get(0)


def documents(batch: Packed) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and labels, each of shape (1, length), of the documents of a micro-batch that have labels."""
    (tokens_BS, starts_BS), labels_BS = batch
    pieces = []
    for tokens_S, starts_S, labels_S in zip(tokens_BS, starts_BS, labels_BS, strict=True):
        for start in starts_S.unique():
            at = starts_S == start
            if (labels_S[at] != IGNORE_INDEX).any():
                pieces.append((tokens_S[at][None], labels_S[at][None]))
    return pieces


@pytest.mark.parametrize("batch_of", [chat_batch, text_batch])
@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_packed_loss_is_the_documents_own(
    tmp_path: Path, batch_of: Callable[[Path], Packed], positions: Literal["learned_absolute", "rope"]
) -> None:
    batch = batch_of(tmp_path)
    alone = GPTConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=16,
        vocab_size=60,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_std=0.3,
        position_embedding_type=positions,
    )
    together = dataclasses.replace(alone, reset_position_ids=True, reset_attention_mask=True)
    packed_model, model = (Chain(config, ONE, DropoutClock()) for config in (together, alone))
    loss_fn = gpt_loss(alone, ONE)

    inputs, labels_BS = batch
    packed_loss = mean(loss_fn(packed_model(inputs), labels_BS))
    packed_loss.backward()

    pieces = documents(batch)
    assert len(pieces) >= 5
    counts = [int((labels != IGNORE_INDEX).sum()) for _, labels in pieces]
    expected = torch.zeros(())
    for tokens, labels in pieces:
        expected = expected + loss_fn(model(tokens), labels)[0] / sum(counts)
    expected.backward()
    assert packed_loss.item() == pytest.approx(expected.item(), abs=1e-6)
    expected_of = dict(model.named_parameters())
    for name, parameter in packed_model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected_of[name].grad, atol=1e-6, rtol=1e-5)

    # Without the starts the loss differs, so the comparison can fail.
    assert abs(mean(loss_fn(model(inputs[0]), labels_BS)).item() - expected.item()) > 1e-4
