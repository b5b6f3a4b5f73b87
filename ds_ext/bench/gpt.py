"""A rank of ``bench training``: a GPT in our engine or in DeepSpeed's, with real arithmetic."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule

from ..engine import PipelineModule, initialize
from ..models.gpt import GPTConfig, gpt_layer_specs, gpt_loss
from ..pipe_schedules import Timetable, get_schedule
from ..tensor_parallel import DropoutClock, TensorParallel
from .ranks import Job
from .rivals import SameBatches
from .training import RIVAL

# Small, so that the engine's part shows: some 0.8 million parameters a layer.
_MODEL = GPTConfig(
    num_layers=8,
    hidden_size=256,
    num_attention_heads=4,
    seq_length=128,
    vocab_size=2048,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
_SAMPLES = 4
_CUT = "type:TransformerLayer"


@dataclass(frozen=True)
class Trained:
    """An engine of this rank; ``step()`` trains one step and gives its loss."""

    step: Callable[[], float]
    timetable: Timetable
    tokens: int

    def run(self) -> tuple[float, float, int, float]:
        """(start, end, tokens, loss) of one step, which ends when all ranks have finished it."""
        start = time.perf_counter()
        loss = self.step()
        dist.barrier()
        return start, time.perf_counter(), self.tokens, loss


def build(name: str, job: Job) -> Trained:
    """The engine called ``name`` on this rank: DeepSpeed's, or ours with the schedule of that name."""
    tokens = job.micro_batches * _SAMPLES * _MODEL.seq_length
    schedule = "1f1b" if name == RIVAL else name
    timetable = get_schedule(schedule).timetable(job.devices, job.micro_batches)
    step = (_deepspeed if name == RIVAL else _ours)(job, timetable)
    return Trained(step, timetable, tokens)


def _ours(job: Job, timetable: Timetable) -> Callable[[], float]:
    section = {
        "schedule": timetable.schedule,
        "pipeline_parallel_size": job.devices,
        "transport_options": {"timeout_s": job.timeout_s},
    }
    config = {**_config(job, timetable.placement.replicas), "ds_ext": section}
    clock, tp = DropoutClock(), TensorParallel()
    layers = gpt_layer_specs(_MODEL, tp, clock)
    module = PipelineModule(layers, config, loss_fn=gpt_loss(_MODEL, tp), clock=clock, partition_method=_CUT)
    engine, *_ = initialize(model=module, config=config)
    batches = SameBatches(_batches(job))
    return lambda: float(engine.train_batch(batches))


def _deepspeed(job: Job, timetable: Timetable) -> Callable[[], float]:
    tp = TensorParallel()
    layers = gpt_layer_specs(_MODEL, tp, DropoutClock())
    module = DeepSpeedPipelineModule(
        layers, num_stages=job.devices, loss_fn=gpt_loss(_MODEL, tp), partition_method=_CUT
    )
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=module.parameters(), config=_config(job, 1)
    )
    batches = itertools.cycle(_batches(job))
    return lambda: float(engine.train_batch(data_iter=batches))


def _config(job: Job, replicas: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": _SAMPLES,
        "gradient_accumulation_steps": job.micro_batches // replicas,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "steps_per_print": 10**9,
    }


def _batches(job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (job.micro_batches, _SAMPLES, _MODEL.seq_length + 1)
    ids = torch.randint(_MODEL.vocab_size, shape, generator=generator)
    return [(sample[:, :-1].contiguous(), sample[:, 1:].contiguous()) for sample in ids]
