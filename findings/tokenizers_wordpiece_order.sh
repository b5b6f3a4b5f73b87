#!/usr/bin/env bash
# tokenizers 0.23.3: WordPieceTrainer, unlike BpeTrainer, gives other token ids in each training on the same text, and
# sometimes other tokens. It numbers the characters within words ("##a") in the order of a hash map, and breaks ties
# between pairs by these numbers. With the characters in front of the vocabulary as special tokens, in a fixed order, all
# trainings are equal (their tokenizer must then be rebuilt from the vocabulary).
#
# Output seen (different vocabularies in 4 trainings):
#   WordPiece 4
#   WordPiece with characters first 1
#   BPE 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq tokenizers==0.23.3
cat > "$folder/run.py" <<'PYTHON'
import random

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

draw = random.Random(0)
words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randrange(2, 9))) for _ in range(3000)]
lines = [" ".join(draw.choice(words) for _ in range(12)) for _ in range(3000)]
UNKNOWN = "[UNK]"


def vocabularies(model, trainer, first=()):
    found = set()
    for _ in range(4):
        tokenizer = Tokenizer(model(unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        special = [UNKNOWN, *first]
        tokenizer.train_from_iterator(lines, trainer(vocab_size=800, special_tokens=special, show_progress=False))
        found.add(tuple(sorted(tokenizer.get_vocab().items())))
    return len(found)


characters = [*"abcdefgh", *(f"##{letter}" for letter in "abcdefgh")]
word_piece = models.WordPiece, trainers.WordPieceTrainer
seen = {
    "WordPiece": vocabularies(*word_piece),
    "WordPiece with characters first": vocabularies(*word_piece, characters),
    "BPE": vocabularies(models.BPE, trainers.BpeTrainer),
}
for name, count in seen.items():
    print(name, count)
# A few of many trainings may be equal by chance.
assert seen["WordPiece"] > 1 and [*seen.values()][1:] == [1, 1], seen
PYTHON
"$folder/venv/bin/python" "$folder/run.py"
