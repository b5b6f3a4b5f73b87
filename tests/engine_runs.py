"""Training run of a rank in parity tests: build a GPT, train some steps, return losses, norms and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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
WITH_DROPOUT = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)
LLAMA = replace(
    MODEL,
    position_embedding_type="rope",
    rotary_base=500.0,
    normalization="RMSNorm",
    swiglu=True,
    ffn_hidden_size=48,
    num_query_groups=2,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    init_std=0.1,
)
QWEN3 = replace(
    LLAMA, num_query_groups=1, kv_channels=16, qk_layernorm=True, untie_embeddings_and_output_weights=False
)
UNTIED = replace(MODEL, untie_embeddings_and_output_weights=True, vocab_size=90)
TIED = replace(MODEL, vocab_size=90)
# An eps of 1e-3 is large against the gradients, which keeps the update a smooth function of them: Adam divides by the
# root of the squared gradient, and where that is tiny, rounding decides the update's direction.
ADAM = {
    "type": "AdamW",
    "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1, "torch_adam": True},
}
STEPS = 20 if EVERYTHING else 3
# Other files test these: orders decided at run time, devices for forwards, at least 2 D micro-batches.
OTHERS = ("dpp", "fbd", "dualpipev")
SCHEDULES = sorted(set(pipe_schedules.SCHEDULES) - set(OTHERS))
SPLIT = [name for name in SCHEDULES if pipe_schedules.timetable(name, 4, 8).split_backwards]
WHOLE = [name for name in SCHEDULES if name not in SPLIT]  # by their backwards
Watch = Callable[[PipelineEngine, TensorParallel], AbstractContextManager[Any]]


def sized(model: GPTConfig, devices: int) -> GPTConfig:
    """Return a model with two layers a device, so that a device with two stages has one layer in each."""
    return replace(model, num_layers=2 * devices)


def zero_keys(stage: int) -> dict[str, Any]:
    """Return the keys of a ZeRO stage for any optimizer."""
    sizes = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
    return {"zero_optimization": {"stage": stage, **sizes}, "zero_allow_untested_optimizer": True}


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
    dtype: torch.dtype = torch.float32
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


UNEQUAL = (3, 6, 2, 5)  # lengths of slices


def sliced(
    schedule: str, slices: int | tuple[int, ...] = 4, layout: tuple[int, int, int] = (4, 1, 1), **fields: Any
) -> Job:
    """Return a job in slices. Options are fields of the job or of its model."""
    model = fields.pop("model", MODEL)
    changes = {key: fields.pop(key) for key in list(fields) if hasattr(MODEL, key)}
    options = {"mode": "greedy"} if schedule == "bitpipe" else {}
    model = replace(model, **changes)
    return Job(schedule, *layout, 4, model, options=options, slices=slices, **fields)


def batches_of(job: Job) -> list[list[Any]]:
    """``batches[step][micro_batch]``; of a ragged job every one has another number of tokens."""
    batches = random_batches(job.model, job.steps, job.micro_batches * job.dp)
    if job.ragged:
        for step, micro_batches in enumerate(batches):
            for m, (tokens_BS, labels_BS) in enumerate(micro_batches):
                length = job.model.seq_length - (3 * step + m) % 7
                micro_batches[m] = tokens_BS[:, :length].contiguous(), labels_BS[:, :length].contiguous()
    return batches


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def reference(job: Job, tp: TensorParallel | None = None, evaluated: bool = False) -> ReferenceRun:
    """Return the result of ``job`` in one plain process, or in the ranks of ``tp``, with the optimizer of its JSON.

    Args:
        evaluated: the last loss is that of the first batches after half of the steps.
    """
    model = replace(job.model, chunked_loss=False)
    if tp is None:
        model = replace(model, sequence_parallel=False, recompute="none", recompute_interval=1)
    optimizer = job.config()["optimizer"]
    keys = {"lr", "momentum", "betas", "eps", "weight_decay"}
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in optimizer["params"].items()
        if key in keys
    }
    values |= {"optimizer": optimizer["type"].lower(), "decays_all": not job.decay_groups}
    run = _reference.__wrapped__ if tp else _reference
    micro_batches, optimizer_values = job.micro_batches * job.dp, tuple(sorted(values.items()))
    return run(model, job.steps, micro_batches, job.ragged, evaluated, job.dtype, optimizer_values, tp)


@cache
def _reference(
    model: GPTConfig,
    steps: int,
    micro_batches: int,
    ragged: bool,
    evaluated: bool,
    dtype: torch.dtype,
    optimizer: tuple[tuple[str, Any], ...],
    tp: TensorParallel | None,
) -> ReferenceRun:
    batches = batches_of(Job("1f1b", 1, 1, 1, micro_batches, model, steps, ragged=ragged))
    if evaluated:
        batches, steps = [*batches[: steps // 2], batches[0]], steps // 2 + 1
    values = dict(optimizer)
    decays_all = values.pop("decays_all")
    values["no_decay"] = lambda parameter: not decays_all and parameter.dim() == 1
    with default_dtype(dtype):
        return train_reference(model, batches, steps, clip=1.0, tp=tp, dtype=dtype, **values)


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
    with default_dtype(job.dtype):
        return _train(job, evaluate, watch)


def _train(job: Job, evaluate: bool, watch: Watch | None) -> dict[str, Any]:
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
