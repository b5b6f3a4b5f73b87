"""Tokenizers trained on the user's text or loaded from files; nothing is downloaded.

The default is byte-level BPE (Radford et al. 2019, section 2.2) from the ``tokenizers`` library; the alternative is a
sentencepiece unigram model (Kudo 2018). Both are lossless. BERT's WordPiece is in wordpiece.py. transformers loads the
folders whose JSON files change what the vocabulary alone would give.
"""

import argparse
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .tokenizer_base import (
    END_OF_DOCUMENT,
    END_OF_DOCUMENT_NAMES,
    GENERIC_CLASSES,
    REPLACED,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    Tokenizer,
    fingerprint_of,
    splitting,
)
from .wordpiece import VOCAB_NAME, WordPieceTokenizer, load_vocab_txt

# Vocabularies in a folder, the first of which counts, and files of transformers that add to all but tokenizer.json.
VOCABULARIES = (TOKENIZER_JSON, "tokenizer.model", "vocab.json", VOCAB_NAME)
ADDITIONS = ("added_tokens.json", "special_tokens_map.json")
END_FILES = ("generation_config.json", "config.json")  # with eos_token_id
BYTE_VALUES = 256


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer with a sentencepiece model, as used by Llama."""

    def __init__(self, model_proto: bytes, origin: str) -> None:
        """Load the content of a ``.model`` file. ``origin`` is its name in errors."""
        try:
            self._backend: Any = _sentencepiece().SentencePieceProcessor(model_proto=model_proto)
        except RuntimeError as error:
            raise ConfigError(f"{origin}: not a sentencepiece model ({error}). Use another file.") from error
        self.eod_id = self._backend.eos_id()
        if self.eod_id < 0:
            raise ConfigError(
                f"{origin}: no end-of-document token (got eos id {self.eod_id}). Train the model with an eos id."
            )
        self._model_proto = model_proto
        self.vocab_size = self._backend.vocab_size()
        self.pieces: list[str] = [self._backend.id_to_piece(i) for i in range(self.vocab_size)]
        is_special = self._backend.is_control, self._backend.is_unknown
        pieces = list(enumerate(self.pieces))
        self.special_tokens = tuple(piece for i, piece in pieces if any(test(i) for test in is_special))
        self.fingerprint = fingerprint_of([[piece, i] for i, piece in pieces])

    def parse_special_tokens(self) -> None:
        raise ConfigError(
            "--parse-special-tokens: sentencepiece encodes control tokens in a text as plain text (got a .model file). "
            "Use a folder with tokenizer.json, which save_pretrained() of transformers writes."
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._backend.encode(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([i for i in ids if not self._backend.is_control(i)])

    def save(self, folder: Path) -> list[str]:
        (folder / "tokenizer.model").write_bytes(self._model_proto)
        return ["tokenizer.model"]


def train_bpe(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Train byte-level BPE with ``vocab_size`` tokens, including all 256 bytes and the end-of-document token.

    A text with too few distinct words gives a smaller vocabulary; see ``vocab_size`` of the result.
    """
    if vocab_size < BYTE_VALUES + 1:
        raise ConfigError(
            f"--vocab-size: byte-level BPE needs at least {BYTE_VALUES + 1} tokens, for all bytes and "
            f"{END_OF_DOCUMENT} (got {vocab_size}). Use for example 4096."
        )
    import tokenizers

    backend = _byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, "trained tokenizer")


def train_sentencepiece(texts: Iterable[str], vocab_size: int = 4096) -> SentencePieceTokenizer:
    """Train a lossless sentencepiece unigram model with byte fallback."""
    library = _sentencepiece()
    model = io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in text.split("\n") if line),
            model_writer=model,
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            input_sentence_size=200_000,
            shuffle_input_sentence=True,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"--vocab-size: sentencepiece cannot train a tokenizer of this size on the text (got {vocab_size}: "
            f"{error}). Use more text or a smaller vocabulary."
        ) from error
    return SentencePieceTokenizer(model.getvalue(), "trained tokenizer")


def load_gpt2_files(vocab_file: str | Path, merge_file: str | Path) -> Tokenizer:
    """Load GPT-2's vocabulary and merges (Megatron's ``--vocab-file`` and ``--merge-file``)."""
    import tokenizers

    vocab_path = _require_file(vocab_file, "--vocab-file")
    merge_path = _require_file(merge_file, "--merge-file")
    try:
        backend = _byte_level(tokenizers.models.BPE.from_file(str(vocab_path), str(merge_path)))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"--vocab-file and --merge-file: not GPT-2's files (got {vocab_path} and {merge_path}: {error}). Use "
            "vocab.json and merges.txt."
        ) from error
    # The library would give a token that is not in the vocabulary a new id.
    known = [name for name in END_OF_DOCUMENT_NAMES if backend.token_to_id(name) is not None]
    backend.add_special_tokens(known[:1])
    return Tokenizer(backend, str(vocab_path))


def flagged_tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    if args.tokenizer:
        return load_tokenizer(args.tokenizer)
    return load_gpt2_files(args.vocab_file, args.merge_file) if args.vocab_file else None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a file or folder.

    ``path`` is a ``tokenizer.json``, a sentencepiece ``.model``, BERT's ``vocab.txt``, or a folder that contains one of
    these or GPT-2's pair of files. transformers loads a folder whose other files, such as ``config.json`` and
    ``tokenizer_config.json``, may change what the vocabulary alone gives.
    """
    folder = Path(path)
    if not folder.is_dir():
        return _load_file(_require_file(path, "tokenizer"))
    file = next((folder / name for name in VOCABULARIES if (folder / name).is_file()), None)
    if file is None or (file.name == "vocab.json" and not (folder / "merges.txt").is_file()):
        raise ConfigError(
            f"tokenizer: no tokenizer in the folder (got {folder}). Use a folder with tokenizer.json, tokenizer.model, "
            "vocab.json and merges.txt, or vocab.txt."
        )
    if not _may_change(file):
        return _load_file(file)
    try:
        loaded = transformers_tokenizer(folder)
    except ConfigError:
        if file.name != TOKENIZER_JSON:
            raise
        return _load_file(file)  # texts do not need transformers
    backend = loaded.backend_tokenizer
    if file.name != TOKENIZER_JSON:
        return _wrap(backend, file, loaded.eos_token)
    import tokenizers

    # Classes such as Qwen2's build a tokenizer from the vocabulary alone. Tokens that transformers adds are left out,
    # because the model may lack them.
    own, parts = (json.loads(b.to_str()) for b in (tokenizers.Tokenizer.from_file(str(file)), backend))
    same_model = all(own["model"].get(key) == parts["model"].get(key) for key in ("vocab", "merges"))
    if same_model and splitting(own) == splitting(parts):
        return _load_file(file)
    own |= {key: parts[key] for key in ("normalizer", "pre_tokenizer", "decoder", "model")}
    return _wrap(tokenizers.Tokenizer.from_str(json.dumps(own)), file, is_replaced=True)


def _load_file(path: Path) -> Tokenizer:
    if path.suffix == ".model":
        return SentencePieceTokenizer(path.read_bytes(), str(path))
    if path.suffix == Path(VOCAB_NAME).suffix:
        return load_vocab_txt(path)
    if path.name == "vocab.json":
        return load_gpt2_files(path, path.with_name("merges.txt"))
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"tokenizer: the file cannot be read (got {path}: {error}). Use a tokenizer.json."
        ) from error
    return _wrap(backend, path, is_replaced=REPLACED in _read_object(path.parent / TOKENIZER_CONFIG))


def _wrap(
    backend: Any, path: Path, end_of_document: str | None = None, is_replaced: bool = False
) -> Tokenizer:
    if type(backend.model).__name__ == "WordPiece":
        return WordPieceTokenizer(backend, str(path), is_replaced)
    vocab = backend.get_vocab(with_added_tokens=True)
    end_of_document = end_of_document or declared_end_of_document(path.parent, vocab)
    return Tokenizer(backend, str(path), end_of_document, is_replaced)


def _may_change(file: Path) -> bool:
    """Return whether files beside a vocabulary may change how texts are split, the tokens or the end of documents."""
    folder = file.parent
    config = _read_object(folder / TOKENIZER_CONFIG)
    model_type = _read_object(folder / "config.json").get("model_type", "gpt2")
    adds = any((folder / name).is_file() for name in ADDITIONS)
    if file.name == TOKENIZER_JSON:
        is_generic = config.get("tokenizer_class", GENERIC_CLASSES[0]) in GENERIC_CLASSES
        is_generic = is_generic and config.keys() <= {"tokenizer_class", "eos_token"}
        return REPLACED not in config and (adds or not is_generic or (folder / "config.json").is_file())
    declares = adds or (folder / TOKENIZER_CONFIG).is_file()
    if file.name != "tokenizer.model":
        # Other models with GPT-2's pair of files, such as Qwen2 and RoBERTa, split words or end documents differently.
        return declares or (file.name == "vocab.json" and model_type != "gpt2")
    if not declares:
        return False
    model = SentencePieceTokenizer(file.read_bytes(), str(file))
    added_tokens = {token["content"] for token in config.get("added_tokens_decoder", {}).values()}
    added_tokens.update(_read_object(folder / "added_tokens.json"))
    end = declared_token(folder, "eos_token")
    return not added_tokens.issubset(model.pieces) or end not in (None, model.pieces[model.eod_id])


def transformers_tokenizer(folder: str | Path) -> Any:
    """Return the fast tokenizer that transformers loads from a folder, without running code in it."""
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tokenizer: transformers is needed for {folder} (got {error}). Run `pip install 'ds_ext[hf]'`."
        ) from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        if not tokenizer.is_fast:
            raise TypeError(f"{type(tokenizer).__name__} is a Python tokenizer")
    except Exception as error:  # the library raises several types
        raise ConfigError(
            f"tokenizer: transformers cannot load the folder (got {folder}: {str(error).partition(chr(10))[0]}). Use a "
            "folder with tokenizer.json, which save_pretrained() writes, or a tokenizer_class in tokenizer_config.json."
        ) from error
    return tokenizer


def declared_end_of_document(folder: Path, vocab: Mapping[str, int]) -> str | None:
    """Return the end-of-sequence token from the JSON files of a Hugging Face folder.

    The name in tokenizer_config.json comes first, then the id in generation_config.json, then that in config.json. The
    first id of a list counts. Ids outside the vocabulary are ignored.
    """
    name = declared_token(folder, "eos_token")
    if name is not None:
        if name not in vocab:
            raise ConfigError(
                f"{folder / TOKENIZER_CONFIG}: eos_token is not in the vocabulary (got {name!r}). Use a folder whose "
                "files belong together."
            )
        return name
    names = {token_id: token for token, token_id in vocab.items()}
    firsts = (ids[0] for file in END_FILES if (ids := _end_ids(folder / file)))
    return next((names[token_id] for token_id in firsts if token_id in names), None)


def stop_ids(folder: Path) -> list[int]:
    """Return the tokens that end a generation: those in generation_config.json, or else in config.json."""
    return next((ids for file in END_FILES if (ids := _end_ids(folder / file))), [])


def _end_ids(path: Path) -> list[int]:
    ids = _read_object(path).get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def declared_token(folder: Path, key: str) -> str | None:
    """Return the text of a token, such as ``bos_token``, in the ``tokenizer_config.json`` of a folder."""
    token = _read_object(folder / TOKENIZER_CONFIG).get(key)
    return token.get("content") if isinstance(token, dict) else token


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON (got {error}). Download the file again.") from None
    return value if isinstance(value, dict) else {}


def _byte_level(model: Any) -> Any:
    import tokenizers

    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _require_file(path: str | Path, key: str) -> Path:
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"{key}: the file does not exist (got {path}). Train a tokenizer with `python -m ds_ext prepare`."
        )
    return path


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ModuleNotFoundError as error:
        raise ConfigError(
            "sentencepiece: the package is not installed. Run `pip install sentencepiece`, or use --tokenizer-type bpe."
        ) from error
    return sentencepiece
