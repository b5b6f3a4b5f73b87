"""Run a script without DeepSpeed's op of collectives through shared memory, which takes two minutes to compile."""

from __future__ import annotations

import runpy
import sys

import deepspeed.ops

if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
