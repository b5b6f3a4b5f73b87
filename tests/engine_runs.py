"""What a rank does in the engine's parity tests: build a GPT, train some steps, report losses, norms and weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_ext.config import load_config
from ds_ext.engine import PipelineEngine, PipelineModule, initialize, weight_decay_groups
from ds_ext.models.gpt import GPTConfig, gpt_layer_specs, gpt_loss
from ds_ext.tensor_parallel import DropoutClock, TensorParallel, create_tensor_parallel, shard_dim
from tests.reference import gather_shards, random_batches

MODEL = GPTConfig(
    num_layers=8,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    vocab_size=96,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    make_vocab_size_divisible_by=8,
    seed=3,
)
WHOLE = ["gpipe", "1f1b", "interleaved", "chimera", "bitpipe"]  # by their backwards
SPLIT = ["zb_h1", "zb_v", "bitpipe_zb"]
SCHEDULES = [*WHOLE, *SPLIT]


@dataclass(frozen=True)
class Job:
    """One training run: schedule, sizes, optimizer."""

    schedule: str
    pp: int
    tp: int
    dp: int
    micro_batches: int  # N per pipeline group
    model: GPTConfig
    steps: int = 20
    options: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    partition_method: str | list[int] = "type:TransformerLayer"
    eager: bool = True
    ragged: bool = False
    decay_groups: bool = False

    @property
    def world_size(self) -> int:
        return load_config(self.config(1)).ds_ext.placement().ranks * self.tp * self.dp

    def config(self, replicas: int) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.micro_batches // replicas,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "steps_per_print": 10**9,
            **self.deepspeed,
            "ds_ext": {
                "schedule": self.schedule,
                "pipeline_parallel_size": self.pp,
                "tensor_parallel_size": self.tp,
                "schedule_options": self.options,
                "eager_gradient_sync": self.eager,
                "transport_options": {"timeout_s": 30},
            },
        }


def batches_of(job: Job) -> list[list[Any]]:
    """``batches[step][micro_batch]``; of a ragged job every one has another number of tokens."""
    batches = random_batches(job.model, job.steps, job.micro_batches * job.dp)
    if job.ragged:
        for step, micro_batches in enumerate(batches):
            for m, (tokens_BS, labels_BS) in enumerate(micro_batches):
                length = job.model.seq_length - (3 * step + m) % 7
                micro_batches[m] = tokens_BS[:, :length].contiguous(), labels_BS[:, :length].contiguous()
    return batches


class StepBatches:
    """``batches[step][micro_batch]`` by global micro-batch id."""

    def __init__(self, batches: list[list[Any]]) -> None:
        self.batches, self.step = batches, 0

    def get(self, micro_batch: int) -> Any:
        return self.batches[self.step][micro_batch]

    def advance(self, micro_batches: int) -> None:
        self.step += 1


def build(job: Job) -> tuple[PipelineEngine, TensorParallel]:
    """The engine of this rank."""
    replicas = load_config(job.config(1)).ds_ext.placement().replicas
    config = job.config(replicas)
    tp = create_tensor_parallel([list(range(r, r + job.tp)) for r in range(0, job.world_size, job.tp)])
    clock = DropoutClock()
    model = PipelineModule(
        gpt_layer_specs(job.model, tp, clock),
        config,
        loss_fn=gpt_loss(job.model, tp),
        clock=clock,
        partition_method=job.partition_method,
    )
    groups = weight_decay_groups(model) if job.decay_groups else None
    engine, *_ = initialize(model=model, model_parameters=groups, config=config)
    return engine, tp


def weights(engine: PipelineEngine, tp: TensorParallel) -> dict[str, Tensor]:
    """Full parameters of this rank's stages by "layer index.name in the layer", gathered over tensor-parallel ranks."""
    found = {}
    for name, parameter in sorted(engine.module.named_parameters()):
        key = name.replace("tied_modules.embed.", "0.")
        found[key] = gather_shards(parameter.detach(), shard_dim(parameter), tp).clone()
    return found


def digest(engine: PipelineEngine) -> str:
    """A hash of this rank's parameter bytes."""
    mine = hashlib.sha256()
    for _, parameter in sorted(engine.module.named_parameters()):
        mine.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return mine.hexdigest()


def train(rank: int, job: Job) -> dict[str, Any]:
    """Run ``job`` on this rank of the pool's world."""
    engine, tp = build(job)
    batches = StepBatches(batches_of(job))
    losses, norms, digests = [], [], []
    for _ in range(job.steps):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
        digests.append(digest(engine))
    result = {
        "losses": losses,
        "norms": norms,
        "weights": weights(engine, tp),
        "digests": digests,
        "bubble": engine.bubble_measured,
        "eager": engine._eager is not None,
    }
    engine.transport.close()
    return result
