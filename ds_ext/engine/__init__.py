"""DeepSpeed's pipeline engine and module, subclassed to run any timetable."""

import os

import torch

if not torch.accelerator.is_available():
    # DeepSpeed comes to the same choice by itself, with a warning in every process.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from ..config.deepspeed_check import check_deepspeed
from .batches import MicroBatches
from .engine import PipelineEngine
from .fbd.grid import on_hosts
from .initialize import check_precision, init_distributed, initialize, weight_decay_groups
from .module import PipelineModule
from .topology import FoldedTopology

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
