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
from ds_ext.model.data_layout import TOKENIZER_NAMES
from ds_ext.recipes.convert.tokenizer_files import save_tokenizer
from ds_ext.recipes.data.tokenizer import load_gpt2_files, load_tokenizer, train_bpe, train_sentencepiece
from ds_ext.recipes.data.tokenizer_base import Tokenizer

CORPUS = [f"the stage {i} sends micro-batch {i * 7} to its peer\nand waits.\n" for i in range(200)]
HARD = "  two  spaces\n\n\ttab \r\n ünïcödé 漢字 🙂 <|endoftext|> </s> end"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(CORPUS, vocab_size=400)


def without_tokenizer_json(tokenizer: Tokenizer, folder: Path, **files: Any) -> Path:
    """Save the vocabulary of a tokenizer, and JSON files with these names and values beside it."""
    folder.mkdir()
    tokenizer.save(folder)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


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


def test_lengths_in_the_file_change_no_ids(bpe: Tokenizer, tmp_path: Path) -> None:
    import tokenizers

    bpe.save(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(file)
    texts = ["a", CORPUS[0], HARD]
    assert load_tokenizer(tmp_path).encode_batch(texts) == bpe.encode_batch(texts)


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


@pytest.mark.parametrize("name", ["</s>", "<other>"])
def test_a_pair_of_files_gets_no_new_token(bpe: Tokenizer, tmp_path: Path, name: str) -> None:
    """A vocabulary with another end-of-document token keeps its size, and one without any is refused."""
    bpe.save(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    vocab[name] = vocab.pop("<|endoftext|>")
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    files = tmp_path / "vocab.json", tmp_path / "merges.txt"
    if name == "<other>":
        with pytest.raises(ConfigError, match=r"vocab\.json"):
            load_gpt2_files(*files)
    else:
        pair = load_gpt2_files(*files)
        assert (pair.eod_id, pair.vocab_size) == (vocab["</s>"], len(vocab))


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


END = "<|im_end|>"
QWEN = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": END,
    "added_tokens_decoder": {"400": {"content": END, "special": True}},
}
# Name of a case -> files beside vocab.json and merges.txt, and the end-of-document token.
FOLDERS: dict[str, tuple[dict[str, Any], str]] = {
    "tokenizer_config": ({"tokenizer_config": QWEN}, END),
    "added_tokens": (
        {
            "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "eos_token": END},
            "added_tokens": {END: 400},
        },
        END,
    ),
    "model_type": ({"config": {"model_type": "qwen2"}}, "<|endoftext|>"),
}


TEXT = "in 2023 it cost 2043, don't!  e\u0301\n\n x"
# Files beside tokenizer.json, and whether transformers replaces what splits texts.
REPLACED: dict[str, tuple[dict[str, Any], bool]] = {
    "none": ({}, False),
    "model_type": ({"config": {"model_type": "qwen2"}}, True),
    "class of a model type": (
        {"config": {"model_type": "qwen2"}, "tokenizer_config": {"tokenizer_class": "TokenizersBackend"}},
        True,
    ),
    "class": ({"tokenizer_config": {"tokenizer_class": "CohereTokenizer"}}, True),
    "normalizer": ({"config": {"model_type": "gpt_neox"}}, True),
    "added tokens": ({"config": {"model_type": "gpt2"}}, False),
    "no replacement": ({"config": {"model_type": "llama"}}, False),
    "damaged": ({"config": {"model_type": "t5"}}, False),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_folder_splits_texts_as_transformers_does(tmp_path: Path, name: str) -> None:
    """The fingerprint is that of ``tokenizer.json`` unless the ids differ; a copy keeps both."""
    transformers: Any = pytest.importorskip("transformers")
    import tokenizers

    files, is_replaced = REPLACED[name]
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator([f"{TEXT} \u00e9"] * 9, trainer)
    own.save(str(tmp_path / "tokenizer.json"))
    for file, values in files.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(values))
    plain, tokenizer = load_tokenizer(tmp_path / "tokenizer.json"), load_tokenizer(tmp_path)
    assert (tokenizer.fingerprint != plain.fingerprint) == is_replaced
    assert (tokenizer.encode(TEXT) != plain.encode(TEXT)) == is_replaced
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (plain.vocab_size, plain.eod_id)
    if name != "damaged":
        expected = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
        assert tokenizer.encode(TEXT) == expected(TEXT, add_special_tokens=False)["input_ids"]
    copy = tmp_path / "copy"
    copy.mkdir()
    names = tokenizer.save(copy)
    assert {*names} <= {*TOKENIZER_NAMES}
    for path in (copy, copy / names[0]):
        loaded = load_tokenizer(path)
        assert (loaded.fingerprint, loaded.encode(TEXT)) == (tokenizer.fingerprint, tokenizer.encode(TEXT))
    save_tokenizer((tokenizer, tmp_path), copy)  # of a converted model
    loaded = load_tokenizer(copy)
    assert (loaded.fingerprint, loaded.encode(TEXT)) == (tokenizer.fingerprint, tokenizer.encode(TEXT))


def test_tokenizer_json_without_transformers(
    bpe: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bpe.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load_tokenizer(tmp_path).fingerprint == bpe.fingerprint


def test_word_pieces_are_split_as_transformers_does(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "two", "TWO"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    load_tokenizer(tmp_path).save(tmp_path)
    plain = load_tokenizer(tmp_path)
    assert plain.encode("two TWO") == [5, 6]
    values = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    expected = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("two TWO") == expected("two TWO", add_special_tokens=False)["input_ids"] == [5, 5]
    copy = tmp_path / "copy"
    copy.mkdir()
    tokenizer.save(copy)
    assert load_tokenizer(copy).fingerprint == tokenizer.fingerprint != plain.fingerprint
    assert load_tokenizer(copy).encode("two TWO") == [5, 5]


@pytest.mark.parametrize("name", FOLDERS)
def test_declarations_of_a_folder_without_tokenizer_json(bpe: Tokenizer, tmp_path: Path, name: str) -> None:
    """Ids are those of transformers, and so are added tokens and the end of documents."""
    transformers: Any = pytest.importorskip("transformers")
    files, end = FOLDERS[name]
    folder = without_tokenizer_json(bpe, tmp_path / "hf", **files)
    tokenizer = load_tokenizer(folder)
    expected = transformers.AutoTokenizer.from_pretrained(str(folder))
    text = "stage 149 sends 1043 to its\u2003peer\nAND waits"
    assert tokenizer.encode(text) == expected(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.vocab_size == len(expected) == (400 if name == "model_type" else 401)
    assert tokenizer.eod_id == expected.convert_tokens_to_ids(end)
    if name != "added_tokens":  # Qwen2 splits numbers into digits
        assert tokenizer.encode(text) != bpe.encode(text)
    copy = tmp_path / "copy"
    copy.mkdir()
    tokenizer.save(copy)
    loaded = load_tokenizer(copy)
    assert (loaded.eod_id, loaded.fingerprint) == (tokenizer.eod_id, tokenizer.fingerprint)
    assert loaded.encode(text) == tokenizer.encode(text)


def test_declarations_beside_a_sentencepiece_model(tmp_path: Path) -> None:
    """transformers loads the folder only if it has other tokens than the model."""
    pytest.importorskip("sentencepiece")
    transformers: Any = pytest.importorskip("transformers")
    trained = train_sentencepiece(CORPUS, vocab_size=350)
    tokens = {str(i): {"content": name, "special": True} for i, name in enumerate(trained.pieces[:3])}
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "added_tokens_decoder": tokens}
    folder = without_tokenizer_json(trained, tmp_path / "same", tokenizer_config=config)
    assert load_tokenizer(folder).fingerprint == trained.fingerprint

    files = {"tokenizer_config": {**config, "eos_token": END}, "added_tokens": {END: 350}}
    folder = without_tokenizer_json(trained, tmp_path / "more", **files)
    try:
        expected = transformers.AutoTokenizer.from_pretrained(str(folder))
    except ValueError:  # protobuf does not fit sentencepiece
        with pytest.raises(ConfigError, match=str(folder)):
            load_tokenizer(folder)
        return
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(CORPUS[3]) == expected(CORPUS[3], add_special_tokens=False)["input_ids"]
    assert tokenizer.eod_id == expected.eos_token_id != trained.eod_id


@pytest.mark.parametrize("lower", [True, False])
def test_declarations_beside_a_vocab_txt(tmp_path: Path, lower: bool) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "two"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    assert load_tokenizer(tmp_path).encode("two TWO") == [5, 5]
    pytest.importorskip("transformers")
    values = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    assert load_tokenizer(tmp_path).encode("two TWO") == [5, 5 if lower else 1]


def test_code_of_a_tokenizer_folder_is_not_run(
    bpe: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("a question to the user"))
    values = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    folder = without_tokenizer_json(bpe, tmp_path / "hf", tokenizer_config=values)
    (folder / "own.py").write_text("raise SystemExit(7)")
    with pytest.raises(ConfigError, match=str(folder)):
        load_tokenizer(folder)


def test_special_tokens_are_parsed_on_request(tmp_path: Path) -> None:
    tokenizer = train_bpe(CORPUS, vocab_size=300)
    assert tokenizer.special_tokens == ("<|endoftext|>",)
    text = "a<|endoftext|>b"
    assert tokenizer.eod_id not in tokenizer.encode(text)
    tokenizer.parse_special_tokens()
    assert tokenizer.encode(text) == [*tokenizer.encode("a"), tokenizer.eod_id, *tokenizer.encode("b")]
    pytest.importorskip("sentencepiece")
    model = train_sentencepiece(CORPUS, vocab_size=350)
    assert set(model.special_tokens) == {"<unk>", "<s>", "</s>"}
    with pytest.raises(ConfigError, match="--parse-special-tokens"):
        model.parse_special_tokens()
