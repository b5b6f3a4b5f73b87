"""Training run of a rank in parity tests: build a GPT, train some steps, return losses, norms and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ds_ext import pipe_schedules
from ds_ext.engine import PipelineEngine, PipelineModule, initialize, weight_decay_groups
from ds_ext.parallel.fbd import make_layout
from ds_ext.parallel.layout import ParallelLayout
from ds_ext.parallel.rank_order import parse_rank_order
from ds_ext.recipes.models.gpt import GPTConfig, gpt_layer_specs, gpt_loss
from ds_ext.tensor_parallel import DropoutClock, TensorParallel, create_tensor_parallel, shard_dim
from tests.plans import placement_of
from tests.reference import ReferenceRun, gather_shards, random_batches, train_reference
from tests.selection import EVERYTHING

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
STEPS = 20 if EVERYTHING else 3
# Other files test these: orders decided at run time, devices for forwards, at least 2 D micro-batches.
OTHERS = ("dpp", "fbd", "dualpipev")
SCHEDULES = sorted(set(pipe_schedules.SCHEDULES) - set(OTHERS))
SPLIT = [name for name in SCHEDULES if pipe_schedules.timetable(name, 4, 8).split_backwards]
WHOLE = [name for name in SCHEDULES if name not in SPLIT]  # by their backwards
Watch = Callable[[PipelineEngine, TensorParallel], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Job:
    """One training run: schedule, sizes, optimizer."""

    schedule: str
    pp: int
    tp: int
    dp: int
    micro_batches: int  # N per pipeline group
    model: GPTConfig
    steps: int = STEPS
    options: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    partition_method: str | list[int] = "type:TransformerLayer"
    eager: bool = True
    overlap: bool = False  # of gathers and the next step
    ragged: bool = False
    decay_groups: bool = False
    fbd: dict[str, Any] = field(default_factory=dict)
    transport: str = "auto"
    rank_order: str = "tp-dp-pp"
    timeout_s: float = 120
    slices: int | tuple[int, ...] = 1  # their number, or their lengths
    head_parts: bool = False
    ds_ext: dict[str, Any] = field(default_factory=dict)  # further keys of the section

    @property
    def layout(self) -> ParallelLayout:
        order = parse_rank_order(self.rank_order)
        return make_layout(placement_of(self.config()), self.tp, self.dp, order)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def num_slices(self) -> int:
        return self.slices if isinstance(self.slices, int) else len(self.slices)

    def config(self) -> dict[str, Any]:
        return {
            "train_batch_size": 2 * self.micro_batches * self.dp,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "steps_per_print": 10**9,
            **self.deepspeed,
            "ds_ext": {
                "schedule": self.schedule,
                "pipeline_parallel_size": self.pp,
                "tensor_parallel_size": self.tp,
                "rank_order": self.rank_order,
                "schedule_options": self.options,
                "eager_gradient_sync": self.eager,
                "overlap_across_steps": self.overlap,
                "fbd": self.fbd,
                "vocabulary_parallel_head": self.head_parts,
                "sequence_slices": self.num_slices,
                "slice_lengths": "equal" if isinstance(self.slices, int) else list(self.slices),
                "sequence_parallel": bool(self.model and self.model.sequence_parallel),
                "transport": self.transport,
                "transport_options": {"timeout_s": self.timeout_s},
                **self.ds_ext,
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


def reference(job: Job) -> ReferenceRun:
    """Return the result of ``job`` in one plain process, with SGD."""
    return _reference(job.model, job.steps, job.micro_batches * job.dp, job.ragged)


@cache
def _reference(model: GPTConfig, steps: int, micro_batches: int, ragged: bool) -> ReferenceRun:
    batches = batches_of(Job("1f1b", 1, 1, 1, micro_batches, model, steps, ragged=ragged))
    return train_reference(model, batches, steps, lr=0.1, momentum=0.9, clip=1.0)


class StepBatches:
    """``batches[step][micro_batch]`` by global micro-batch id."""

    def __init__(self, batches: list[list[Any]]) -> None:
        self.batches, self.step = batches, 0

    def get(self, micro_batch: int) -> Any:
        return self.batches[self.step][micro_batch]

    def advance(self, micro_batches: int) -> None:
        self.step += 1


def build(job: Job, **options: Any) -> tuple[PipelineEngine, TensorParallel]:
    """The engine of this rank. Options are those of ``initialize``."""
    config = job.config()
    tp = create_tensor_parallel(job.layout.groups()["tensor"])
    clock, loss_fn = DropoutClock(), gpt_loss(job.model, tp)
    model = PipelineModule(
        gpt_layer_specs(job.model, tp, clock, loss_fn.chunked),
        config,
        loss_fn=loss_fn,
        clock=clock,
        partition_method=job.partition_method,
    )
    groups = weight_decay_groups(model) if job.decay_groups else None
    engine, *_ = initialize(model=model, model_parameters=groups, config=config, **options)
    return engine, tp


def weights(engine: PipelineEngine, tp: TensorParallel) -> dict[str, Tensor]:
    """Full parameters of this rank's stages by "layer index.name in the layer", gathered over tensor-parallel ranks."""
    engine.wait_for_weights()
    found = {}
    for name, parameter in sorted(engine.module.named_parameters()):
        key = name.replace("tied_modules.embed.", "0.")
        found[key] = gather_shards(parameter.detach(), shard_dim(parameter), tp).clone()
    return found


def digest(engine: PipelineEngine) -> str:
    """A hash of this rank's parameter bytes."""
    engine.wait_for_weights()
    mine = hashlib.sha256()
    for _, parameter in sorted(engine.module.named_parameters()):
        mine.update(parameter.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return mine.hexdigest()


def train(rank: int, job: Job, evaluate: bool = False, watch: Watch | None = None) -> dict[str, Any]:
    """Run ``job`` on this rank of the pool's world.

    Args:
        evaluate: the first batches too, after half of the steps, which must change nothing.
        watch: is shown the engine and its tensor-parallel group first; the context that it gives lasts as long as the
            training, and what that gives is the result's "watched".
    """
    engine, tp = build(job)
    batches = StepBatches(batches_of(job))
    losses, norms, digests, evaluated = [], [], [], None
    with watch(engine, tp) if watch is not None else nullcontext() as watched:
        for step in range(job.steps):
            if evaluate and step == job.steps // 2:
                evaluated = float(engine.eval_batch(StepBatches(batches_of(job))))
            losses.append(float(engine.train_batch(batches)))
            norms.append(float(engine.get_global_grad_norm()))
            digests.append(digest(engine))
    result = {
        "losses": losses,
        "norms": norms,
        "weights": weights(engine, tp),
        "digests": digests,
        "bubble": engine.bubble_measured,
        "eager": engine.update.reduction is not None,
        "skipped": engine.skipped_steps,
        "lr": engine.get_lr()[0],
        "evaluated": evaluated,
        "watched": watched,
    }
    engine.transport.close()
    return result
