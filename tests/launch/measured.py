"""Run a script and write the largest memory of its tensors in a step: measured.py FILE SCRIPT [WORD ...].

Every rank writes FILE.<rank>, with the bytes in JSON: the least peak of the steps after the first one, which allocates
the states of the optimizer. On a busy host, more messages wait in some steps.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    from ds_ext.engine import PipelineEngine
    from tests.allocations import AllocatedBytes

    train_batch, peaks = PipelineEngine.train_batch, []

    def measured(engine: PipelineEngine, *args: Any, **kwargs: Any) -> Any:
        allocated.peak = allocated.live
        loss = train_batch(engine, *args, **kwargs)
        peaks.append(allocated.peak)
        return loss

    file = Path(f"{words[0]}.{os.environ['RANK']}")
    atexit.register(
        lambda: file.write_text(json.dumps(min(peaks[1:], default=0)))
    )  # the script does not return
    sys.argv = words[1:]
    sys.path.insert(0, str(Path(words[1]).parent))
    with AllocatedBytes() as allocated, mock.patch.object(PipelineEngine, "train_batch", measured):
        runpy.run_path(words[1], run_name="__main__")
