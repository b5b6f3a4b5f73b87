"""WordPiece tokenizers (Wu et al. 2016), as BERT has them: trained here, or read from a file.

What one of them prepares is data for BERT: every document is a row of sequences, one a sentence, without end marks.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ds_ext.data.sentences import split_sentences
from ds_ext.data.tokenizer_base import Tokenizer, fingerprint_of, tokenizers_library
from ds_ext.errors import ConfigError

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUES = "##"
VOCAB_NAME = "vocab.txt"
# megatron-core leaves out documents with a sentence of more than 512 tokens.
LONGEST_SENTENCE = 256


class WordPieceTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library with a WordPiece model; it gives back words, and not white space or case.

    Attributes:
        special_ids: token id by name, for each of `SPECIAL_TOKENS`.
        vocab: token id by token, special ones included.
    """

    def __init__(self, backend: Any, origin: str) -> None:
        """`backend` is a `tokenizers.Tokenizer`; `origin` names it in errors."""
        ids = {name: backend.token_to_id(name) for name in SPECIAL_TOKENS}
        missing = [name for name, token_id in ids.items() if token_id is None]
        if missing:
            raise ConfigError(
                f"{origin} has no {', '.join(missing)} in its vocabulary of {backend.get_vocab_size()}; BERT needs "
                f"{', '.join(SPECIAL_TOKENS)}."
            )
        if ids[PAD] != 0:
            raise ConfigError(
                f"{origin} has {PAD} as token {ids[PAD]}; it must be token 0, because megatron-core's dataset pads "
                "with zeros."
            )
        backend.encode_special_tokens = True
        self._backend = backend
        self.special_ids: dict[str, int] = ids
        self.vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocab.values()) + 1
        self.eod_id = ids[SEP]
        self.fingerprint = fingerprint_of(sorted(self.vocab.items()))

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_documents(self, texts: Sequence[str]) -> list[list[list[int]]]:
        """The sentences of each text that have a token, none longer than `LONGEST_SENTENCE` tokens."""
        sentences = [split_sentences(text) for text in texts]
        encoded = iter(self.encode_batch([sentence for document in sentences for sentence in document]))
        return [
            [
                ids[start : start + LONGEST_SENTENCE]
                for ids in (next(encoded) for _ in document)
                for start in range(0, len(ids), LONGEST_SENTENCE)
            ]
            for document in sentences
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def save(self, folder: Path) -> list[str]:
        self._backend.save(str(folder / "tokenizer.json"))
        words = sorted(self.vocab, key=self.vocab.__getitem__)
        (folder / VOCAB_NAME).write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
        return ["tokenizer.json", VOCAB_NAME]


def train_wordpiece(texts: Iterable[str], vocab_size: int = 4096) -> WordPieceTokenizer:
    """Train a lower-casing WordPiece tokenizer with `vocab_size` tokens, BERT's five special ones among them.

    A corpus with fewer different words gives a smaller vocabulary; read `vocab_size` of the result.

    Raises:
        ConfigError: `vocab_size` leaves no room for words.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise ConfigError(
            f"WordPiece needs a vocabulary of more than {len(SPECIAL_TOKENS)} ({', '.join(SPECIAL_TOKENS)}); got "
            f"{vocab_size}. Use --vocab-size 4096."
        )
    library = tokenizers_library()
    backend = _word_piece(library, library.models.WordPiece(unk_token=UNKNOWN), lowercase=True)
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        continuing_subword_prefix=CONTINUES,
        # As many letters and signs as can have a word of their own and leave half of the vocabulary to longer ones.
        limit_alphabet=min(1000, vocab_size // 4),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return WordPieceTokenizer(backend, "the trained tokenizer")


def load_vocab_txt(path: Path) -> WordPieceTokenizer:
    """BERT's own file, one token a line (Megatron's `--vocab-file`); lower-casing unless a word in it has a capital.

    Raises:
        ConfigError: it lacks one of BERT's special tokens.
    """
    words = path.read_text(encoding="utf-8").splitlines()
    cased = any(word != word.lower() for word in words if not (word.startswith("[") and word.endswith("]")))
    library = tokenizers_library()
    model = library.models.WordPiece(
        {word: token_id for token_id, word in enumerate(words)}, unk_token=UNKNOWN
    )
    backend = _word_piece(library, model, lowercase=not cased)
    backend.add_special_tokens([word for word in SPECIAL_TOKENS if word in set(words)])
    return WordPieceTokenizer(backend, str(path))


def is_word_piece(backend: Any) -> bool:
    """Whether a `tokenizers.Tokenizer` has a WordPiece model."""
    return json.loads(backend.to_str())["model"]["type"] == "WordPiece"


def _word_piece(library: Any, model: Any, lowercase: bool) -> Any:
    backend = library.Tokenizer(model)
    backend.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    backend.decoder = library.decoders.WordPiece(prefix=CONTINUES)
    return backend
