"""Tokenizers: lossless encoding, saving and loading, fingerprints, errors."""

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.errors import ConfigError
from ds_ext.recipes.data.layout import TOKENIZER_NAMES
from ds_ext.recipes.data.tokenizer import load_gpt2_files, load_tokenizer, train_bpe, train_sentencepiece
from ds_ext.recipes.data.tokenizer_base import Tokenizer

CORPUS = [f"the stage {i} sends micro-batch {i * 7} to its peer\nand waits.\n" for i in range(200)]
HARD = "  two  spaces\n\n\ttab \r\n ünïcödé 漢字 🙂 <|endoftext|> </s> end"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(CORPUS, vocab_size=400)


def test_bpe_has_the_requested_size(bpe: Tokenizer) -> None:
    assert bpe.vocab_size == 400
    assert bpe.eod_id == 0
    assert len(bpe.encode(CORPUS[0])) < len(CORPUS[0]) / 3


@given(text=st.text())
def test_bpe_is_lossless(bpe: Tokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.eod_id not in ids


def test_special_token_in_the_text_stays_text(bpe: Tokenizer) -> None:
    assert bpe.decode(bpe.encode(HARD)) == HARD
    assert bpe.eod_id not in bpe.encode("<|endoftext|>")
    assert bpe.decode([*bpe.encode("a"), bpe.eod_id]) == "a"


def test_batch_is_the_same_as_one_by_one(bpe: Tokenizer) -> None:
    assert bpe.encode_batch([*CORPUS, HARD, ""]) == [bpe.encode(text) for text in [*CORPUS, HARD, ""]]


def test_training_twice_gives_the_same_tokenizer(bpe: Tokenizer) -> None:
    second = train_bpe(CORPUS, vocab_size=400)
    assert second.fingerprint == bpe.fingerprint
    assert second.encode(HARD) == bpe.encode(HARD)


def test_other_corpus_of_the_same_size_has_another_fingerprint(bpe: Tokenizer) -> None:
    other = train_bpe([text[::-1] for text in CORPUS], vocab_size=400)
    assert other.vocab_size == bpe.vocab_size
    assert other.fingerprint != bpe.fingerprint


def test_saved_bpe_loads_from_folder_file_and_gpt2_pair(bpe: Tokenizer, tmp_path: Path) -> None:
    assert bpe.save(tmp_path) == ["tokenizer.json", "vocab.json", "merges.txt"]
    pair = load_gpt2_files(tmp_path / "vocab.json", tmp_path / "merges.txt")
    for loaded in (load_tokenizer(tmp_path), load_tokenizer(tmp_path / "tokenizer.json"), pair):
        assert loaded.fingerprint == bpe.fingerprint
        assert loaded.eod_id == bpe.eod_id
        assert loaded.encode(HARD) == bpe.encode(HARD)
        assert loaded.decode(loaded.encode(HARD)) == HARD
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(tmp_path).fingerprint == bpe.fingerprint


def test_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--vocab-size.*\b257\b.*\b100\b"):
        train_bpe(CORPUS, vocab_size=100)


def test_errors_name_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        load_tokenizer(tmp_path / "nothing.json")
    with pytest.raises(ConfigError, match=r"--vocab-file.*vocab\.json"):
        load_gpt2_files(tmp_path / "vocab.json", tmp_path / "merges.txt")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "t.model").write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"t\.model"):
        load_tokenizer(tmp_path / "t.model")


def test_tokenizer_without_end_of_document_is_refused(tmp_path: Path) -> None:
    import tokenizers

    vocabulary = {"[UNK]": 0, "a": 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json.*<\|endoftext\|>"):
        load_tokenizer(tmp_path)


def test_sentencepiece_is_lossless_and_saved(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    trained = train_sentencepiece(CORPUS, vocab_size=350)
    assert trained.vocab_size == 350
    assert trained.decode(trained.encode(HARD)) == HARD
    assert trained.encode_batch(CORPUS[:3]) == [trained.encode(text) for text in CORPUS[:3]]
    assert trained.save(tmp_path) == ["tokenizer.model"]
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == trained.fingerprint
    assert loaded.encode(HARD) == trained.encode(HARD)
    assert trained.eod_id not in trained.encode(HARD)


def test_too_little_text_for_sentencepiece_is_refused() -> None:
    pytest.importorskip("sentencepiece")
    with pytest.raises(ConfigError, match=r"--vocab-size.*30000"):
        train_sentencepiece(CORPUS, vocab_size=30_000)


def test_error_without_sentencepiece_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "sentencepiece":
            raise ModuleNotFoundError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "sentencepiece", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install sentencepiece"):
        train_sentencepiece(CORPUS)


def test_files_of_a_folder_declare_the_end_of_document(bpe: Tokenizer, tmp_path: Path) -> None:
    """The name in tokenizer_config.json comes before the ids in the other files; a copy keeps the token."""
    bpe.save(tmp_path)
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    names = {token_id: token for token, token_id in vocab.items()}

    def eod_with(file: str, values: dict[str, Any]) -> int:
        (tmp_path / file).write_text(json.dumps(values))
        return load_tokenizer(tmp_path / "tokenizer.json").eod_id

    assert eod_with("config.json", {"eos_token_id": 10**6}) == bpe.eod_id
    assert eod_with("config.json", {"eos_token_id": 7}) == 7
    assert eod_with("generation_config.json", {"eos_token_id": [9, 8]}) == 9
    assert eod_with("tokenizer_config.json", {"eos_token": None}) == 9
    assert eod_with("tokenizer_config.json", {"eos_token": {"content": names[11]}}) == 11
    copy = tmp_path / "copy"
    copy.mkdir()
    assert set(load_tokenizer(tmp_path).save(copy)) <= {*TOKENIZER_NAMES}
    loaded = load_tokenizer(copy)
    assert (loaded.eod_id, loaded.fingerprint) == (11, bpe.fingerprint)
    with pytest.raises(ConfigError, match="nowhere"):
        eod_with("tokenizer_config.json", {"eos_token": "<nowhere>"})
