"""Treatment of documents that the flags and the data select."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from ds_ext.recipes.data.packing import DocumentOptions
from ds_ext.recipes.training.documents import document_options
from tests.unit.recipes.data.test_chat_dataset import write_chat
from tests.unit.recipes.data.test_gpt import write_documents


def args(path: Path, **flags: Any) -> argparse.Namespace:
    switches = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    defaults = {"tokenizer": None, "vocab_file": None, "transformer_impl": "local", **switches}
    return argparse.Namespace(data_path=[str(path)], **{**defaults, **flags})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    write_documents(tmp_path / "text_document", [9, 8])
    (tmp_path / "meta.json").write_text(json.dumps({"eod_id": 0}))
    return tmp_path


def test_flags_select_the_options(text: Path) -> None:
    assert document_options(args(text)) == DocumentOptions()
    for flag in ("reset_position_ids", "reset_attention_mask"):
        assert document_options(args(text, **{flag: True})) == DocumentOptions(starts=True, eod_id=0)
    masked = document_options(args(text, eod_mask_loss=True))
    assert masked == DocumentOptions(starts=False, eod_mask_loss=True, eod_id=0)


def test_chat_separates_its_conversations(tmp_path: Path) -> None:
    given = args(write_chat(tmp_path, [[False, True]]))
    assert document_options(given).starts
    assert (given.reset_position_ids, given.reset_attention_mask) == (True, True)


def test_layers_of_transformers_get_one_conversation_per_sample(tmp_path: Path) -> None:
    given = args(write_chat(tmp_path, [[False, True]]), transformer_impl="transformers")
    assert document_options(given) == DocumentOptions(packs=False)
    assert (given.reset_position_ids, given.reset_attention_mask) == (False, False)


def test_token_of_unknown_data_is_unknown(text: Path) -> None:
    (text / "meta.json").unlink()
    assert document_options(args(text, reset_position_ids=True)).eod_id is None
