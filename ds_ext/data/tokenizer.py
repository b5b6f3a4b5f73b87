"""Tokenizers that are trained on the user's own text or read from files; nothing is downloaded.

Byte-level BPE (Radford et al. 2019, section 2.2) through `tokenizers` is the default, sentencepiece unigram
(Kudo 2018) an option. Both give back every text they encode, byte for byte. BERT's WordPiece is in wordpiece.py.
"""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_ext.data.tokenizer_base import Tokenizer, fingerprint_of, tokenizers_library
from ds_ext.data.wordpiece import VOCAB_NAME, WordPieceTokenizer, is_word_piece, load_vocab_txt
from ds_ext.errors import ConfigError

END_OF_DOCUMENT = "<|endoftext|>"
END_OF_DOCUMENT_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eod|>", "[EOD]")
BYTE_VALUES = 256


class BpeTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library; byte-level BPE when we trained it."""

    def __init__(self, backend: Any, origin: str) -> None:
        """`backend` is a `tokenizers.Tokenizer`; `origin` names it in errors."""
        ids = {name: backend.token_to_id(name) for name in END_OF_DOCUMENT_NAMES}
        known = [token_id for token_id in ids.values() if token_id is not None]
        if not known:
            raise ConfigError(
                f"{origin} has no end-of-document token: none of {', '.join(END_OF_DOCUMENT_NAMES)} is in "
                f"its vocabulary of {backend.get_vocab_size()}. Add one of them to the tokenizer as a "
                "special token."
            )
        backend.encode_special_tokens = True
        model = json.loads(backend.to_str())["model"]
        vocab = backend.get_vocab(with_added_tokens=True)
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", [])]
        self._backend = backend
        self.vocab_size = max(vocab.values()) + 1
        self.eod_id = known[0]
        self.fingerprint = fingerprint_of([sorted(vocab.items()), merges])

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def save(self, folder: Path) -> list[str]:
        self._backend.save(str(folder / "tokenizer.json"))
        self._backend.model.save(str(folder))
        names = ("tokenizer.json", "vocab.json", "merges.txt")
        return [name for name in names if (folder / name).exists()]


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, as Llama-style models use it."""

    def __init__(self, model_proto: bytes, origin: str) -> None:
        """`model_proto` is the content of a `.model` file; `origin` names it in errors."""
        try:
            self._backend: Any = _sentencepiece().SentencePieceProcessor(model_proto=model_proto)
        except RuntimeError as error:
            raise ConfigError(f"{origin} is not a sentencepiece model: {error}") from error
        if self._backend.eos_id() < 0:
            raise ConfigError(f"{origin} has no end-of-document token: train it with an eos id (</s>)")
        self._model_proto = model_proto
        self.vocab_size = self._backend.vocab_size()
        self.eod_id = self._backend.eos_id()
        self.fingerprint = fingerprint_of([[self._backend.id_to_piece(i), i] for i in range(self.vocab_size)])

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._backend.encode(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([i for i in ids if not self._backend.is_control(i)])

    def save(self, folder: Path) -> list[str]:
        (folder / "tokenizer.model").write_bytes(self._model_proto)
        return ["tokenizer.model"]


def train_bpe(texts: Iterable[str], vocab_size: int = 4096) -> BpeTokenizer:
    """Train byte-level BPE with `vocab_size` tokens, all 256 bytes and the end-of-document token among them.

    A corpus with fewer different words gives a smaller vocabulary; read `vocab_size` of the result.

    Raises:
        ConfigError: `vocab_size` is below 257.
    """
    if vocab_size < BYTE_VALUES + 1:
        raise ConfigError(
            f"byte-level BPE needs a vocabulary of at least {BYTE_VALUES + 1} (256 bytes and "
            f"{END_OF_DOCUMENT}); got {vocab_size}. Use --vocab-size 4096."
        )
    library = tokenizers_library()
    backend = _byte_level(library, library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return BpeTokenizer(backend, "the trained tokenizer")


def train_sentencepiece(texts: Iterable[str], vocab_size: int = 4096) -> SentencePieceTokenizer:
    """Train a sentencepiece unigram model with byte fallback that keeps white space as it is.

    Raises:
        ConfigError: sentencepiece is not installed, or the text is too small for `vocab_size`.
    """
    library = _sentencepiece()
    model = io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
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
            f"sentencepiece cannot make {vocab_size} tokens of this text: {error}. Give more text or a "
            "smaller --vocab-size."
        ) from error
    return SentencePieceTokenizer(model.getvalue(), "the trained tokenizer")


def load_gpt2_files(vocab_file: str | Path, merge_file: str | Path) -> BpeTokenizer:
    """Load GPT-2's pair of files (Megatron's `--vocab-file` and `--merge-file`)."""
    vocab_path, merge_path = _existing(vocab_file, "--vocab-file"), _existing(merge_file, "--merge-file")
    library = tokenizers_library()
    try:
        backend = _byte_level(library, library.models.BPE.from_file(str(vocab_path), str(merge_path)))
    except Exception as error:
        raise ConfigError(
            f"{vocab_path} and {merge_path} are not GPT-2 vocabulary and merges: {error}"
        ) from error
    backend.add_special_tokens([END_OF_DOCUMENT])
    return BpeTokenizer(backend, str(vocab_path))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a `tokenizer.json`, a sentencepiece `.model`, a BERT `vocab.txt`, or a folder with one of them or GPT-2's.

    Raises:
        ConfigError: nothing is there, or it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        for name in ("tokenizer.json", "tokenizer.model"):
            if (path / name).exists():
                return load_tokenizer(path / name)
        if (path / "vocab.json").exists() and (path / "merges.txt").exists():
            return load_gpt2_files(path / "vocab.json", path / "merges.txt")
        raise ConfigError(
            f"no tokenizer in {path}: expected tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
        )
    path = _existing(path, "the tokenizer")
    if path.suffix == ".model":
        return SentencePieceTokenizer(path.read_bytes(), str(path))
    if path.suffix == Path(VOCAB_NAME).suffix:
        return load_vocab_txt(path)
    try:
        backend = tokenizers_library().Tokenizer.from_file(str(path))
    # The library raises bare Exception for a file that it cannot parse.
    except Exception as error:
        raise ConfigError(f"{path} is not a tokenizer.json that `tokenizers` can read: {error}") from error
    return (WordPieceTokenizer if is_word_piece(backend) else BpeTokenizer)(backend, str(path))


def _byte_level(library: Any, model: Any) -> Any:
    backend = library.Tokenizer(model)
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    return backend


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (line for line in text.split("\n") if line)


def _existing(path: str | Path, what: str) -> Path:
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {path}. Train one with `python -m ds_ext prepare`.")
    return path


def _sentencepiece() -> Any:
    try:
        import sentencepiece
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the `sentencepiece` package is missing: pip install sentencepiece, or use --tokenizer-type bpe"
        ) from error
    return sentencepiece
