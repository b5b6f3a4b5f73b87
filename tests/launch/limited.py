"""Run a script whose files may have no more bytes than that on one rank: limited.py RANK BYTES SCRIPT [WORD ...]."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys

if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    if os.environ["RANK"] == words[0]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing fails with EFBIG instead, as on a full disk
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (int(words[1]), resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
    sys.argv = words[2:]
    runpy.run_path(words[2], run_name="__main__")
