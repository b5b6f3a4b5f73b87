"""Peak of the live storages of ranks against ``memory`` for the same job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from ds_ext.pipe_schedules import get_schedule
from ds_ext.planner.auto import training_sizes
from ds_ext.planner.memory import memory
from ds_ext.recipes.models.gpt import GPTConfig
from tests.allocations import AllocatedBytes
from tests.engine_runs import Job, StepBatches, batches_of, build
from tests.precisions import needs
from tests.ranks import Ranks
from tests.selection import select

# Weights dominate: 6 million parameters, and micro-batches of 32 tokens.
MODEL = GPTConfig(
    num_layers=8,
    hidden_size=256,
    num_attention_heads=4,
    seq_length=16,
    vocab_size=512,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
# A quarter of the parameters is the embedding, which both pipes of a device share with their heads.
LARGE_VOCABULARY = replace(MODEL, vocab_size=8192)
# Activations as large as the temporary tensors of the optimizer.
LONG_SAMPLES = replace(MODEL, seq_length=128)
# Activations dominate: micro-batches of 512 tokens.
NARROW = replace(MODEL, hidden_size=64, seq_length=256, vocab_size=128)
LLAMA = replace(
    NARROW,
    num_query_groups=2,
    ffn_hidden_size=192,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
LONG_LLAMA = replace(LLAMA, seq_length=1024, num_layers=4)
BUCKET = 10**6
LOOP, FOREACH, FUSED = (
    {"foreach": False},
    {"foreach": True},
    {"fused": True},
)  # torch's default on CPUs comes first


@dataclass(frozen=True)
class Case:
    """Job of two devices."""

    schedule: str
    precision: str = "fp32"
    zero: int = 0
    adam: Any = None
    data: int = 1
    bucket: int = BUCKET
    model: GPTConfig = MODEL
    tensor: int = 1
    slices: int = 1
    devices: int = 2
    head_parts: bool = False

    def __str__(self) -> str:
        adam = "".join(f"-{key}" for key, value in (self.adam or {}).items() if value) or "-loop"
        model, base = vars(self.model), vars(MODEL)
        changed = "".join(f"-{value}" for key, value in model.items() if value != base[key])
        sizes = f"tp{self.tensor}-dp{self.data}-{self.bucket:g}"
        sizes += f"-k{self.slices}" if self.slices > 1 else ""
        changed += "-parts" * self.head_parts
        return f"{self.schedule}-{self.precision}-zero{self.zero}{adam}-{sizes}{changed}"

    @property
    def job(self) -> Job:
        """Job of four steps."""
        adam = {"lr": 1e-3, "torch_adam": True, **(self.adam or {})}
        deepspeed: dict[str, Any] = {
            "zero_optimization": {"stage": self.zero, "reduce_bucket_size": self.bucket},
            "optimizer": {"type": "AdamW", "params": adam},
        }
        if self.precision != "fp32":
            # A fixed loss scale skips no steps.
            scale = {"loss_scale": 128} if self.precision == "fp16" else {}
            deepspeed[self.precision] = {"enabled": True, **scale}
        # Two parameter groups, as in the training scripts.
        sizes = self.devices, self.tensor, self.data, 4
        options = {"deepspeed": deepspeed, "decay_groups": True, "slices": self.slices}
        return Job(self.schedule, *sizes, self.model, 4, head_parts=self.head_parts, **options)


def peak_bytes(rank: int, job: Job) -> int:
    """Return the least peak of a step of this rank. On a busy host, more copies of gradients wait in some steps."""
    peaks, batches = [], StepBatches(batches_of(job))
    with AllocatedBytes() as allocated:
        engine, _ = build(job)
        for _ in range(job.steps):
            allocated.peak = allocated.live
            engine.train_batch(batches)
            peaks.append(allocated.peak)
    engine.transport.close()
    return min(peaks[1:])  # the first step allocates optimizer states


def estimates(job: Job) -> list[int]:
    """Return the bytes that the planner estimates for every rank."""
    sizes = training_sizes(job.config(), job.model, 2, job.tp, job.dp, on_cpu=True)
    sizes = replace(sizes, sequence_parallel=job.model.sequence_parallel)
    schedule = get_schedule(job.schedule).dividing_head(job.head_parts)
    planned = schedule.timetable(job.pp, job.micro_batches, slices=job.num_slices)
    devices = memory(planned, sizes)
    return [devices[job.layout.coordinates(rank)[0]].total for rank in range(job.world_size)]


SCHEDULES, TWO_COPIES = ("1f1b", "bitpipe", "bitpipe_zb"), ("bitpipe", "bitpipe_zb")
SPLIT_AND_WHOLE = ("1f1b", "zb_v")
CASES = [
    Case("1f1b"),
    Case("1f1b", zero=1, bucket=10**7),
    Case("1f1b", "bf16", adam=FUSED),
    Case("bitpipe"),
    Case("bitpipe_zb", zero=1, adam=FUSED),
    Case("bitpipe_zb", "bf16", adam=FUSED),
    Case("chimera", "bf16", adam=FUSED, model=LARGE_VOCABULARY),
    Case("zb_v", "bf16", adam=FUSED, model=LARGE_VOCABULARY, data=2, head_parts=True),
    Case("bitpipe_zb", zero=1, adam=FUSED, model=LARGE_VOCABULARY, devices=4, head_parts=True),
]
MORE = [
    *(
        Case(schedule, precision, zero, FUSED, model=LARGE_VOCABULARY)
        for schedule in ("chimera", "zb_v", *TWO_COPIES)
        for precision, zero in (("fp32", 0), ("fp32", 1), ("bf16", 1))
    ),
    *(
        Case(schedule, precision, zero, adam)
        for schedule in SCHEDULES
        for precision in ("fp32", "bf16")
        for zero in (0, 1)
        for adam in (None, LOOP, FOREACH, FUSED)
    ),
    *(Case("1f1b", precision, zero, data=2) for precision in ("fp32", "bf16") for zero in (0, 1)),
    Case("1f1b", "bf16", adam=LOOP, model=LONG_SAMPLES),
    *(Case(schedule, p, 1, model=LONG_SAMPLES) for schedule in TWO_COPIES for p in ("fp32", "bf16")),
]
HALF = [Case(schedule, "fp16", adam=adam) for schedule in SCHEDULES for adam in (LOOP, FUSED)]


def active(
    schedule: str, precision: str = "bf16", zero: int = 1, tensor: int = 1, slices: int = 1, **model: Any
) -> Case:
    """Return a job whose activations dominate."""
    base = model.pop("base", NARROW)
    return Case(schedule, precision, zero, FUSED, model=replace(base, **model), tensor=tensor, slices=slices)


# Schedule x recomputation x vocabulary x sequence x precision and ZeRO x tensor and sequence parallelism x model x
# slices.
ACTIVE = [
    active("1f1b", vocab_size=2048, recompute="full"),
    active("bitpipe_zb", recompute="full", recompute_interval=2),
    active("zb_v", "fp32", 0, vocab_size=2048),
    active("1f1b", base=LLAMA, hidden_dropout=0.1),
    active("1f1b", tensor=2, sequence_parallel=True),
    active("1f1b", attention_dropout=0.1),
    active("zb_v", "fp32", 0, vocab_size=8192, chunked_loss=True),
    replace(active("zb_v", "fp32", base=LLAMA, vocab_size=8192), head_parts=True),
    replace(active("1f1b", vocab_size=8192), head_parts=True),
    replace(active("zb_v", "fp32", slices=4, base=LONG_LLAMA, vocab_size=2048), head_parts=True),
    active("1f1b", "fp32", slices=4, base=LONG_LLAMA, recompute="selective"),
]
RECOMPUTATIONS: list[dict[str, Any]] = [
    {},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_interval": 3},
]
MORE_ACTIVE = [
    active("zb_v", tensor=2, recompute="full"),
    *(
        replace(active(schedule, precision, base=base, vocab_size=8192), head_parts=True)
        for schedule, precision in (("1f1b", "bf16"), ("zb_v", "fp32"), ("bitpipe_zb", "bf16"))
        for base in (NARROW, LLAMA)
    ),
    replace(active("1f1b", slices=8, base=LONG_LLAMA, vocab_size=8192), head_parts=True),
    *(
        active(schedule, precision, zero, vocab_size=vocabulary, **recomputation)
        for schedule in ("1f1b", "interleaved", "bitpipe", "zb_h1", "zb_v", "bitpipe_zb")
        for recomputation in RECOMPUTATIONS
        for precision, zero in (("bf16", 1), ("fp32", 0))
        for vocabulary in (128, 2048, 8192)
    ),
    *(active(s, base=LLAMA, **r) for s in SPLIT_AND_WHOLE for r in RECOMPUTATIONS),
    *(
        active(s, seq_length=4096, vocab_size=v, **r)
        for s in SPLIT_AND_WHOLE
        for r in RECOMPUTATIONS
        for v in (128, 2048)
    ),
    *(active(s, attention_dropout=0.1, **r) for s in SPLIT_AND_WHOLE for r in RECOMPUTATIONS),
    *(
        active(s, tensor=2, sequence_parallel=sequence, **r)
        for s in SPLIT_AND_WHOLE
        for r in RECOMPUTATIONS
        for sequence in (False, True)
    ),
    *(
        active(s, slices=k, base=base, **r)
        for s in SPLIT_AND_WHOLE
        for k in (4, 8)
        for base in (LONG_LLAMA, replace(NARROW, seq_length=1024))
        for r in RECOMPUTATIONS
    ),
    *(
        active(s, p, zero, tensor, base=base, vocab_size=8192, chunked_loss=True, sequence_parallel=sequence)
        for s in SPLIT_AND_WHOLE
        for p, zero in (("bf16", 1), ("fp32", 0))
        for tensor, sequence in ((1, False), (2, False), (2, True))
        for base in (NARROW, LLAMA)
    ),
    *(active("1f1b", slices=32, base=LONG_LLAMA, **r) for r in RECOMPUTATIONS),
    *(
        active(s, slices=4, tensor=2, base=LONG_LLAMA, sequence_parallel=sequence, recompute=r)
        for s in SPLIT_AND_WHOLE
        for sequence in (False, True)
        for r in ("none", "full")
    ),
]


def assert_close(peaks: list[int], estimated: list[int], above: float) -> None:
    """The estimate may be 5% too low; too high by as much, or by ``above``."""
    for peak, estimate in zip(peaks, estimated, strict=True):
        assert 0.95 * peak <= estimate <= (1 + above) * peak, (peaks, estimated)


@pytest.mark.parametrize(
    "case",
    [*select([*CASES, *MORE], CASES), *(pytest.param(case, marks=needs("fp16")) for case in HALF)],
    ids=str,
)
def test_peaks(ranks: Ranks, case: Case) -> None:
    peaks = ranks(case.job.world_size).run(peak_bytes, case.job, timeout_s=120)
    assert_close(peaks, estimates(case.job), 0.1)


@pytest.mark.parametrize("case", select([*ACTIVE, *MORE_ACTIVE], ACTIVE), ids=str)
def test_peaks_of_activations(ranks: Ranks, case: Case) -> None:
    """Gradients exist from the first backward of a stage on, but are counted from the first op."""
    peaks = ranks(case.job.world_size).run(peak_bytes, case.job, timeout_s=240)
    assert_close(peaks, estimates(case.job), 0.06)
