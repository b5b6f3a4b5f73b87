"""DeepSpeed's pipeline engine and module, subclassed to run any timetable."""

import os

import torch

if not torch.accelerator.is_available():
    # DeepSpeed comes to the same choice by itself, with a warning in every process.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from ..config.deepspeed_check import check_deepspeed
from .engine import PipelineEngine
from .fbd.grid import on_hosts
from .initialize import check_precision, init_distributed, initialize
from .module import PipelineModule
from .parameter_groups import weight_decay_groups
from .topology import FoldedTopology

__all__ = [
    "FoldedTopology",
    "PipelineEngine",
    "PipelineModule",
    "check_deepspeed",
    "check_precision",
    "init_distributed",
    "initialize",
    "on_hosts",
    "weight_decay_groups",
]
