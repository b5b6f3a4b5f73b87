"""WordPiece tokenizers (Wu et al. 2016) as used by BERT, trained or loaded from a file.

They encode a document as one sequence per sentence, without end-of-document tokens.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .tokenizer_base import Tokenizer

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PIECE_PREFIX = "##"
VOCAB_NAME = "vocab.txt"
MAX_SENTENCE_WORDS = 40
MAX_SENTENCE_TOKENS = 256  # megatron-core skips documents with a sentence of more than 512 tokens

_PARAGRAPH_END = re.compile(r"\n\s*\n")
# A lower-case letter or a digit usually follows an abbreviation, not the end of a sentence.
_SENTENCE_END = re.compile(r"""(?<=[.!?])(?:["')\]}]*)(\s+)(?=["'(\[`*]*[^\W\d_a-zß-öø-ÿ])""")


class WordPieceTokenizer(Tokenizer):
    """Tokenizer with a WordPiece model. Decoding restores words, but not whitespace or case."""

    end_names = (SEP,)

    def __init__(self, backend: Any, origin: str, is_replaced: bool = False) -> None:
        """Wrap a ``tokenizers.Tokenizer``. ``origin`` is its name in errors."""
        vocab = backend.get_vocab(with_added_tokens=True)
        missing = [name for name in SPECIAL_TOKENS if name not in vocab]
        if missing:
            raise ConfigError(
                f"{origin}: special tokens of BERT are missing (got {len(vocab)} tokens without "
                f"{', '.join(missing)}). Add them to the vocabulary."
            )
        self.special_ids = {name: vocab[name] for name in SPECIAL_TOKENS}
        if self.special_ids[PAD] != 0:
            raise ConfigError(
                f"{origin}: {PAD} must be token 0, because megatron-core pads with zeros (got token "
                f"{self.special_ids[PAD]}). Move it to the start of the vocabulary."
            )
        super().__init__(backend, origin, is_replaced=is_replaced)

    def encode_documents(self, texts: Sequence[str]) -> list[list[list[int]]]:
        """Return the non-empty sentences of each text; those longer than ``MAX_SENTENCE_TOKENS`` tokens are split."""
        sentences = [split_sentences(text) for text in texts]
        # All sentences are encoded at once, and dealt out to their documents again.
        ids_of_sentences = iter(self.encode_batch([s for document in sentences for s in document]))
        return [
            [
                ids[start : start + MAX_SENTENCE_TOKENS]
                for ids in islice(ids_of_sentences, len(document))
                for start in range(0, len(ids), MAX_SENTENCE_TOKENS)
            ]
            for document in sentences
        ]

    def save(self, folder: Path) -> list[str]:
        file, *others = super().save(folder)
        tokens = sorted(self.vocab, key=self.vocab.__getitem__)
        (folder / VOCAB_NAME).write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
        return [file, VOCAB_NAME, *others]


def train_wordpiece(texts: Iterable[str], vocab_size: int = 4096) -> WordPieceTokenizer:
    """Train a lower-casing WordPiece tokenizer with ``vocab_size`` tokens, including BERT's five special tokens.

    A text with too few distinct words gives a smaller vocabulary; see ``vocab_size`` of the result. The library numbers
    characters within words in a random order, and breaks ties by these numbers. So a first training, without longer
    pieces, finds the characters, and the second one gets them in a fixed order.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise ConfigError(
            f"--vocab-size: WordPiece needs more tokens than the {len(SPECIAL_TOKENS)} special tokens of BERT (got "
            f"{vocab_size}). Use for example 4096."
        )
    import tokenizers

    texts = list(texts)

    def train(first_tokens: Sequence[str], size: int) -> dict[str, int]:
        backend = _word_piece(tokenizers.models.WordPiece(unk_token=UNKNOWN), lowercase=True)
        trainer = tokenizers.trainers.WordPieceTrainer(
            vocab_size=size,
            special_tokens=list(first_tokens),
            continuing_subword_prefix=PIECE_PREFIX,
            # A character takes two tokens (`a` and `##a`), so at least half of the vocabulary remains for longer ones.
            limit_alphabet=min(1000, vocab_size // 4),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return backend.get_vocab()

    characters = sorted(  # 0: characters only
        {*train(SPECIAL_TOKENS, 0)} - {*SPECIAL_TOKENS}, key=lambda token: (len(token), token)
    )
    vocab = train([*SPECIAL_TOKENS, *characters], vocab_size)
    backend = _word_piece(tokenizers.models.WordPiece(vocab, unk_token=UNKNOWN), lowercase=True)
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return WordPieceTokenizer(backend, "trained tokenizer")


def load_vocab_txt(path: Path) -> WordPieceTokenizer:
    """Load BERT's ``vocab.txt``, one token per line. The tokenizer is lower-casing unless a token contains capitals."""
    import tokenizers

    tokens = path.read_text(encoding="utf-8").splitlines()
    cased = any(
        token != token.lower() for token in tokens if not (token.startswith("[") and token.endswith("]"))
    )
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    backend = _word_piece(tokenizers.models.WordPiece(ids, unk_token=UNKNOWN), lowercase=not cased)
    backend.add_special_tokens([token for token in SPECIAL_TOKENS if token in ids])
    return WordPieceTokenizer(backend, str(path))


def split_sentences(text: str) -> list[str]:
    """Split a document into sentences without surrounding whitespace, by rules that need no model or language.

    A paragraph ends at a blank line. A sentence ends at ``.``, ``!`` or ``?`` (and closing brackets or quotes) before
    whitespace and a capital letter. A sentence of more than ``MAX_SENTENCE_WORDS`` words, such as a listing, is split
    at line breaks.
    """
    return [sentence for sentence in _sentences(text) if sentence]


def _sentences(text: str) -> Iterator[str]:
    for paragraph in _PARAGRAPH_END.split(text):
        start = 0
        for end in _SENTENCE_END.finditer(paragraph):
            yield from _limited(paragraph[start : end.start(1)].strip())
            start = end.end(1)
        yield from _limited(paragraph[start:].strip())


def _limited(sentence: str) -> Iterator[str]:
    """Yield groups of whole lines with at most ``MAX_SENTENCE_WORDS`` words. A single line may have more."""
    if len(sentence.split()) <= MAX_SENTENCE_WORDS:
        yield sentence
        return
    lines: list[str] = []
    num_words = 0
    for line in sentence.split("\n"):
        line_words = len(line.split())
        if lines and num_words + line_words > MAX_SENTENCE_WORDS:
            yield "\n".join(lines).strip()
            lines = []
            num_words = 0
        lines.append(line)
        num_words += line_words
    yield "\n".join(lines).strip()


def _word_piece(model: Any, lowercase: bool) -> Any:
    import tokenizers

    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece(prefix=PIECE_PREFIX)
    return backend
