"""Text to sentences, by a rule that needs no model and no language: good enough for BERT's pairs of segments.

A paragraph ends at a blank line, a sentence at `.`, `!` or `?` (and closing brackets or quotes) before white space and
something that can begin one. What is longer than `LONGEST_WORDS` words, listings and tables above all, is cut at
the ends of its lines.
"""

import re
from collections.abc import Iterator

LONGEST_WORDS = 40

_PARAGRAPH_END = re.compile(r"\n\s*\n")
# After an abbreviation a small letter follows mostly, or a number.
_SENTENCE_END = re.compile(r"""(?<=[.!?])(?:["')\]}]*)(\s+)(?=["'(\[`*]*[^\W\d_a-zß-öø-ÿ])""")


def split_sentences(text: str) -> list[str]:
    """The sentences of a document in order, without white space around them; all of its words are in one of them."""
    return [sentence for sentence in _sentences(text) if sentence]


def _sentences(text: str) -> Iterator[str]:
    for paragraph in _PARAGRAPH_END.split(text):
        start = 0
        for end in _SENTENCE_END.finditer(paragraph):
            yield from _cut(paragraph[start : end.start(1)].strip())
            start = end.end(1)
        yield from _cut(paragraph[start:].strip())


def _cut(sentence: str) -> Iterator[str]:
    """A long piece as groups of whole lines of at most `LONGEST_WORDS` words, unless one line has more."""
    if len(sentence.split()) <= LONGEST_WORDS:
        yield sentence
        return
    lines: list[str] = []
    words = 0
    for line in sentence.split("\n"):
        line_words = len(line.split())
        if lines and words + line_words > LONGEST_WORDS:
            yield "\n".join(lines).strip()
            lines, words = [], 0
        lines.append(line)
        words += line_words
    yield "\n".join(lines).strip()
