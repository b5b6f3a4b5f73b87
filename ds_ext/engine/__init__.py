"""DeepSpeed's pipeline engine and module, subclassed to run any timetable."""

import os

import torch

if not torch.accelerator.is_available():
    # DeepSpeed would choose the same accelerator, with a warning in every process.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.ops
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from ..config.deepspeed_check import check_deepspeed
from .batches import MicroBatches
from .engine import PipelineEngine
from .grid import FoldedTopology, hosts_of_job, on_hosts
from .initialize import initialize, weight_decay_groups
from .module import PipelineModule
from .start import check_precision, init_distributed

if get_accelerator().device_name() == "cpu":
    # Otherwise init_distributed() spends 30 s compiling an op that only DeepSpeed's inference engine uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

__all__ = [
    "FoldedTopology",
    "LayerSpec",
    "MicroBatches",
    "PipelineEngine",
    "PipelineModule",
    "TiedLayerSpec",
    "check_deepspeed",
    "check_precision",
    "hosts_of_job",
    "init_distributed",
    "initialize",
    "on_hosts",
    "weight_decay_groups",
]
