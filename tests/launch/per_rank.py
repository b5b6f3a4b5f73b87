"""Run a script with other words on one rank: per_rank.py RANK SCRIPT [WORD ...] -- [ITS WORD ...]."""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    # The deepspeed launcher puts its own word in front or behind.
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    other, script = int(words[0]), words[1]
    split = words.index("--")
    chosen = words[split + 1 :] if int(os.environ["RANK"]) == other else words[2:split]
    sys.argv = [script, *chosen]
    runpy.run_path(script, run_name="__main__")
