"""DeepSpeed's pipeline engine and module, subclassed to run any timetable."""

import os

import torch

if not torch.accelerator.is_available():
    # DeepSpeed would choose the same accelerator, with a warning in every process.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from ..config.deepspeed_check import check_deepspeed
from .batches import MicroBatches
from .engine import PipelineEngine
from .grid import FoldedTopology, on_hosts
from .initialize import check_precision, init_distributed, initialize, weight_decay_groups
from .module import PipelineModule

__all__ = [
    "FoldedTopology",
    "MicroBatches",
    "PipelineEngine",
    "PipelineModule",
    "check_deepspeed",
    "check_precision",
    "init_distributed",
    "initialize",
    "on_hosts",
    "weight_decay_groups",
]
