"""Samples of several documents: their starts and ignored labels as in Megatron, and the packing of whole documents."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.errors import ConfigError
from ds_ext.recipes.data.gpt import GPTDataset, build_gpt_datasets
from ds_ext.recipes.data.indexed import IndexedTokens
from ds_ext.recipes.data.packing import (
    IGNORE_INDEX,
    OPEN_SAMPLES,
    DocumentOptions,
    document_starts,
    pack_best_fit,
)
from tests.unit.recipes.data.test_gpt import EOD, write_documents

ALL_FLAGS = DocumentOptions(starts=True, eod_mask_loss=True, eod_id=EOD)


def megatron(
    tokens_S: torch.Tensor, labels_S: torch.Tensor, eod_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions, allowed attention (queries, keys) and labels by Megatron's definition of its three flags.

    After each end-of-document token the positions restart and earlier tokens are hidden; the label of the token itself
    does not count.
    """
    size = len(tokens_S)
    positions_S, allowed_SS = torch.arange(size), torch.ones(size, size).tril().bool()
    restarted = 0
    for end in (tokens_S == eod_id).nonzero().flatten().tolist():
        allowed_SS[end + 1 :, : end + 1] = False
        positions_S[end + 1 :] -= end + 1 - restarted
        restarted = end + 1
    return positions_S, allowed_SS, labels_S.masked_fill(tokens_S == eod_id, IGNORE_INDEX)


@pytest.fixture
def indexed(tmp_path: Path) -> IndexedTokens:
    write_documents(tmp_path / "a", [7, 30, 1, 1, 12, 50, 3, 25, 1, 70])
    return IndexedTokens(tmp_path / "a")


def test_samples_agree_with_megatron(indexed: IndexedTokens) -> None:
    plain = GPTDataset(indexed, range(10), 16, 40, seed=1)
    packed = GPTDataset(indexed, range(10), 16, 40, seed=1, options=ALL_FLAGS)
    several = 0
    for (tokens_S, labels_S), (inputs, masked_S) in zip(
        (plain[i] for i in range(40)), (packed[i] for i in range(40)), strict=True
    ):
        assert isinstance(inputs, tuple) and isinstance(tokens_S, torch.Tensor)
        assert torch.equal(inputs[0], tokens_S)
        positions_S, allowed_SS, expected_S = megatron(tokens_S, labels_S, EOD)
        starts_S = inputs[1]
        assert starts_S.dtype == torch.int64
        assert torch.equal(torch.arange(16) - starts_S, positions_S)
        same_SS = starts_S[:, None] == starts_S[None, :]
        assert torch.equal(same_SS & torch.ones(16, 16).tril().bool(), allowed_SS)
        assert torch.equal(masked_S, expected_S)
        several += len(starts_S.unique()) > 2
    assert several >= 3


def test_hand_example() -> None:
    tokens_S = torch.tensor([5, EOD, 6, 7, EOD, EOD, 8])
    assert document_starts(tokens_S, EOD).tolist() == [0, 0, 2, 2, 2, 5, 6]
    _, labels_S = ALL_FLAGS.sample(tokens_S, torch.tensor([EOD, 6, 7, EOD, EOD, 8, 9]))
    assert labels_S.tolist() == [EOD, IGNORE_INDEX, 7, EOD, IGNORE_INDEX, IGNORE_INDEX, 9]


def test_documents_by_token_and_by_index_agree(indexed: IndexedTokens) -> None:
    packed = GPTDataset(indexed, range(10), 16, 40, seed=1, options=ALL_FLAGS)
    numbered = {
        token: number for number in range(10) for token in indexed.document(number).tolist() if token != EOD
    }
    for i in range(40):
        inputs, _ = packed[i]
        tokens, starts = (part.tolist() for part in inputs)
        for (token, start), (after, after_start) in pairwise(zip(tokens, starts, strict=True)):
            if token != EOD and after != EOD:
                assert (start == after_start) == (numbered[token] == numbered[after])


def test_each_flag_alone(indexed: IndexedTokens) -> None:
    only_starts = GPTDataset(
        indexed, range(10), 16, 1, seed=1, options=DocumentOptions(starts=True, eod_id=EOD)
    )
    inputs, labels_S = only_starts[0]
    assert len(inputs) == 2 and IGNORE_INDEX not in labels_S
    options = DocumentOptions(eod_mask_loss=True, eod_id=EOD)
    only_mask = GPTDataset(indexed, range(10), 16, 40, seed=1, options=options)
    samples = [only_mask[i] for i in range(40)]
    assert all(isinstance(inputs, torch.Tensor) for inputs, _ in samples)
    ends = sum(int((inputs == EOD).sum()) for inputs, _ in samples if isinstance(inputs, torch.Tensor))
    assert ends == sum(int((labels_S == IGNORE_INDEX).sum()) for _, labels_S in samples) > 0


def test_documents_without_their_token_are_refused(indexed: IndexedTokens, tmp_path: Path) -> None:
    for eod_id, words in ((None, "--tokenizer"), (70, r"\b0\b.*\b70\b")):
        with pytest.raises(ConfigError, match=words):
            GPTDataset(indexed, range(10), 16, 1, seed=1, options=DocumentOptions(starts=True, eod_id=eod_id))
    tokens = write_documents(tmp_path / "b", [9, 8, 7])
    tokens[16] = 99  # the end of document 1
    tokens.tofile(tmp_path / "b.bin")
    with pytest.raises(ConfigError, match=r"document 1 .*\b99\b"):
        build_gpt_datasets(str(tmp_path / "b"), "1", 4, (1, 0, 0), seed=0, options=ALL_FLAGS)
    build_gpt_datasets(str(tmp_path / "b"), "1", 4, (1, 0, 0), seed=0)


@given(lengths=st.lists(st.integers(1, 30), max_size=300))
def test_packing_is_valid_and_leaves_few_gaps(lengths: list[int]) -> None:
    samples = pack_best_fit(np.array(lengths, dtype=np.int64), 30)
    fill = np.bincount(samples, weights=lengths) if lengths else np.zeros(0)
    assert np.all(fill <= 30) and np.all(fill > 0)
    # Two samples that were open at the same time hold more than one sample together.
    if len(fill) <= OPEN_SAMPLES:
        assert np.count_nonzero(fill * 2 <= 30) <= 1


def test_packing_keeps_its_samples_open() -> None:
    first = np.arange(OPEN_SAMPLES) + 500
    assert np.array_equal(
        pack_best_fit(np.concatenate((first, 1000 - first)), 1000), np.tile(np.arange(OPEN_SAMPLES), 2)
    )


def test_packing_by_hand() -> None:
    assert pack_best_fit(np.array([6, 7, 3, 4, 10, 1]), 10).tolist() == [0, 1, 1, 0, 2, 3]
