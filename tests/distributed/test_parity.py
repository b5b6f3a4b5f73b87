"""Every schedule trains to the losses, gradient norms and weights of one plain process.

The layouts are selected by traits of a schedule's timetable, so that a new schedule joins without a change here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_ext.engine import PipelineEngine
from ds_ext.parallel.layout import ParallelLayout
from ds_ext.parallel.partition import layer_boundaries
from ds_ext.pipe_schedules import get_schedule
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.tensor_parallel import TensorParallel, create_tensor_parallel
from tests.engine_runs import MODEL, SCHEDULES, SPLIT, WHOLE, Job, reference, train
from tests.precisions import needs
from tests.ranks import Ranks
from tests.reference import ReferenceRun, random_batches, train_reference
from tests.selection import covering, select

TOLERANCE = 1e-5
WITH_DROPOUT = dataclasses.replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)
MIRRORED = [name for name in SCHEDULES if get_schedule(name).placement(4).replicas > 1]
ON_4_DEVICES, ON_8_RANKS = (4, 1, 1), (2, 2, 2)  # sizes of pipeline, tensor and data parallelism
LAYOUTS = [(2, 2, 1), (2, 1, 2), (2, 1, 1), ON_8_RANKS]
Layout = tuple[int, int, int]
Run = tuple[str, Layout]


def traits(run: Run) -> tuple[Any, ...]:
    """Return what the engine depends on: replicas, stages of a device, split backwards, layout."""
    schedule, layout = run
    placement = get_schedule(schedule).placement(4)
    return placement.replicas, placement.stages // 4, schedule in SPLIT, layout


def assert_equal(results: list[dict], expected: ReferenceRun) -> None:
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(expected.losses, rel=TOLERANCE), f"losses on rank {rank}"
        assert result["norms"] == pytest.approx(expected.grad_norms, rel=TOLERANCE), f"norms on rank {rank}"
        for name, value in result["weights"].items():
            full = expected.parameters[name]
            worst = (value[: len(full)] - full).abs().max() / full.abs().max().clamp(min=1e-3)
            assert worst < TOLERANCE, f"{name} on rank {rank}: {worst}"
    covered = set().union(*(r["weights"] for r in results))
    assert covered == set(expected.parameters)


def named(runs: list[Run], *marks: pytest.MarkDecorator) -> list[Any]:
    return [
        pytest.param(s, sizes, id="{}-pp{}-tp{}-dp{}".format(s, *sizes), marks=marks) for s, sizes in runs
    ]


def sized(model: GPTConfig, devices: int) -> GPTConfig:
    """Return a model with two layers a device, so that a device with two stages has one layer in each."""
    return dataclasses.replace(model, num_layers=2 * devices)


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        *named([*product(SCHEDULES, [ON_4_DEVICES])], pytest.mark.quick),
        *named(covering(product(SCHEDULES, LAYOUTS), 1, traits)),
    ],
)
def test_trains_as_one_process(ranks: Ranks, schedule: str, layout: Layout) -> None:
    pp, tp, dp = layout
    job = Job(schedule, pp, tp, dp, micro_batches=2 * pp, model=sized(MODEL, pp))
    results = ranks(job.world_size).run(train, job, timeout_s=120)
    assert_equal(results, reference(job))


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "options"),
    [
        ("bitpipe", 6, {"mode": "greedy"}),
        ("bitpipe", 10, {"mode": "greedy", "costs": "f=1,b=1,w=1,comm=0.5"}),
        ("bitpipe_zb", 6, {"costs": "f=1,b=1.3,w=0.8,comm=0.5"}),
        ("bitpipe_zb", 2, {}),
        ("zb_v", 5, {}),
        ("dualpipev", 9, {}),
    ],
)
def test_planned_orders_train_as_one_process(
    ranks: Ranks, schedule: str, micro_batches: int, options: dict[str, str]
) -> None:
    """Any number of micro-batches, and orders in which links deliver earlier than needed."""
    job = Job(schedule, 4, 1, 1, micro_batches, model=MODEL, options=options)
    assert_equal(ranks(4).run(train, job, timeout_s=120), reference(job))


@pytest.mark.parametrize(
    ("schedule", "layout"),
    named(covering(product(SCHEDULES, [(2, 1, 2), ON_4_DEVICES, (2, 1, 1)]), 1, traits)),
)
def test_trains_as_one_process_with_dropout(ranks: Ranks, schedule: str, layout: Layout) -> None:
    """Masks depend on (seed, step, micro-batch, layer), never on the order of the schedule."""
    pp, tp, dp = layout
    job = Job(schedule, pp, tp, dp, micro_batches=4, model=sized(WITH_DROPOUT, pp))
    results = ranks(job.world_size).run(train, job, timeout_s=120)
    assert_equal(results, reference(job))


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 4), ("bitpipe", 2), ("bitpipe_zb", 2)])
def test_layers_that_do_not_divide_and_samples_of_any_length(ranks: Ranks, schedule: str, pp: int) -> None:
    """Stages of two and of three layers; every micro-batch of every step has another number of tokens."""
    model = dataclasses.replace(MODEL, num_layers=9)
    boundaries = layer_boundaries(9, 2, 2, get_schedule(schedule).placement(pp), schedule)
    job = Job(schedule, pp, 1, 1, micro_batches=4, model=model, partition_method=boundaries, ragged=True)
    assert_equal(ranks(pp).run(train, job, timeout_s=120), reference(job))


@pytest.mark.parametrize("schedule", ["1f1b", *select(["interleaved", "bitpipe"], []), "bitpipe_zb"])
def test_sequence_parallel_with_selective_recomputation(ranks: Ranks, schedule: str) -> None:
    model = dataclasses.replace(sized(MODEL, 2), sequence_parallel=True, recompute="selective")
    job = Job(schedule, 2, 2, 1, micro_batches=4, model=model)
    assert_equal(ranks(4).run(train, job, timeout_s=120), reference(job))


def test_sequence_parallel_with_dropout_and_full_recomputation(ranks: Ranks) -> None:
    model = dataclasses.replace(sized(WITH_DROPOUT, 2), sequence_parallel=True, recompute="full")
    job = Job("bitpipe_zb", 2, 2, 1, micro_batches=4, model=model)
    expected = ranks(2).run(tensor_parallel_reference, job, timeout_s=120)[0]
    assert_equal(ranks(4).run(train, job, timeout_s=120), expected)


@pytest.mark.parametrize(
    ("schedule", "dp"),
    [
        *select([*product(WHOLE, [1, 2])], [("bitpipe", 1)]),
        ("bitpipe_zb", 1),
    ],
)
def test_dropout_at_tensor_parallel_size_2_equals_two_plain_ranks(
    ranks: Ranks, schedule: str, dp: int
) -> None:
    """Attention masks are drawn per tensor-parallel shard, so the yardstick is a plain loop at the same size."""
    job = Job(schedule, 2, 2, dp, micro_batches=4, model=sized(WITH_DROPOUT, 2))
    expected = ranks(2).run(tensor_parallel_reference, job, timeout_s=120)[0]
    assert_equal(ranks(job.world_size).run(train, job, timeout_s=120), expected)


def tensor_parallel_reference(rank: int, job: Job) -> ReferenceRun:
    batches = random_batches(job.model, job.steps, job.micro_batches * job.dp)
    tp = create_tensor_parallel([[0, 1]])
    return train_reference(job.model, batches, job.steps, lr=0.1, momentum=0.9, clip=1.0, tp=tp)


@pytest.mark.parametrize(
    ("schedule", "layout", "zero"), covering(product(MIRRORED, [ON_4_DEVICES, ON_8_RANKS], [0, 1]), 1)
)
def test_mirror_replicas_are_bitwise_equal_after_every_step(
    ranks: Ranks, schedule: str, layout: Layout, zero: int
) -> None:
    pp, tp, dp = layout
    model = sized(WITH_DROPOUT, pp)
    job = Job(schedule, pp, tp, dp, 2 * pp, model, steps=3, deepspeed=zero_json(zero))
    results = ranks(job.world_size).run(train, job, timeout_s=120)
    mesh = ParallelLayout(get_schedule(schedule).placement(pp), tp, dp)
    for mirror in mesh.groups()["mirror"]:
        for step in range(job.steps):
            assert len({results[rank]["digests"][step] for rank in mirror}) == 1, (
                f"ranks {mirror}, step {step}"
            )
    assert len({results[0]["digests"][step] for step in range(job.steps)}) == job.steps


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("bitpipe", (4, 1, 1)),
        ("1f1b", (2, 1, 2)),
        *select([("chimera", (4, 1, 1)), ("bitpipe", (2, 1, 2)), ("bitpipe_zb", (4, 1, 1))], []),
        ("zb_h1", (2, 1, 2)),
    ],
)
def test_adamw_with_zero_1(ranks: Ranks, schedule: str, layout: Layout) -> None:
    """Adam divides by the root of the squared gradient: where that is tiny, rounding decides the update's direction.

    Biases and norms do not decay. An eps of 1e-3 is large against the gradients here, which keeps the update a smooth
    function of them; with 1e-8 a run would be compared with its own rounding errors.
    """
    pp, tp, dp = layout
    adam = {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.1, "torch_adam": True},
    }
    job = Job(
        schedule,
        pp,
        tp,
        dp,
        micro_batches=2 * pp,
        model=sized(WITH_DROPOUT, pp),
        deepspeed={"optimizer": adam, **zero_json(1)},
        decay_groups=True,
    )
    batches = random_batches(job.model, job.steps, job.micro_batches * job.dp)
    expected = train_reference(
        job.model,
        batches,
        job.steps,
        lr=1e-2,
        optimizer="adamw",
        betas=(0.9, 0.95),
        eps=1e-3,
        weight_decay=0.1,
        no_decay=lambda parameter: parameter.dim() == 1,
        clip=1.0,
    )
    assert_equal(ranks(job.world_size).run(train, job, timeout_s=120), expected)


@pytest.mark.parametrize(
    ("schedule", "layout", "zero"),
    [
        (*run, zero)
        for run, zero in covering(
            product([("bitpipe", ON_4_DEVICES), ("bitpipe_zb", (2, 1, 2)), ("1f1b", (2, 1, 2))], [0, 1]), 1
        )
    ],
)
def test_eager_gradient_sync_changes_nothing(ranks: Ranks, schedule: str, layout: Layout, zero: int) -> None:
    """Reduced while others are still computed, or all at the end: over two ranks the same, bit for bit.

    Over four, gloo's order of a sum depends on the place in the bucket.
    """
    results = []
    for eager in (True, False):
        model, options = sized(WITH_DROPOUT, layout[0]), {"deepspeed": zero_json(zero), "eager": eager}
        job = Job(schedule, *layout, 2 * layout[0], model, steps=3, **options)
        results.append(ranks(job.world_size).run(train, job, timeout_s=120))
    for on, off in zip(*results, strict=True):
        assert on["eager"] and not off["eager"]
        assert on["norms"] == pytest.approx(off["norms"], rel=1e-6)
        for name, weight in on["weights"].items():
            torch.testing.assert_close(weight, off["weights"][name], rtol=1e-5, atol=1e-6)
        if get_schedule(schedule).placement(layout[0]).replicas * layout[2] == 2:
            assert on["digests"] == off["digests"]


class Accesses(TorchDispatchMode):
    """Names of the operations that read or write gradients while they are reduced."""

    def __init__(self, engine: PipelineEngine) -> None:
        super().__init__()
        self.reduction, self.names = engine.update.reduction, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_view = argument.alias_info is not None and not argument.alias_info.is_write
            if not is_view and any(map(self.is_reduced, tree_leaves(value))):
                self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def is_reduced(self, value: Any) -> bool:
        assert self.reduction is not None
        if not isinstance(value, Tensor):
            return False
        memory, pending = memory_of(value), [memory_of(flat) for _, flat, _ in self.reduction._pending]
        return any(memory.start < flat.stop and flat.start < memory.stop for flat in pending)


def memory_of(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


@contextmanager
def watched(engine: PipelineEngine, tp: TensorParallel) -> Iterator[list[str]]:
    with Accesses(engine) as accesses:
        yield accesses.names


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=needs("bf16"))])
def test_a_gradient_is_left_alone_while_it_is_reduced(ranks: Ranks, precision: str, overlap: bool) -> None:
    """The backwards of other stages go on meanwhile. What they write to it would replace the average."""
    sections = zero_json(1) if precision == "fp32" else {"bf16": {"enabled": True}}
    for schedule, pp, dp in (("bitpipe_zb", 2, 1), ("interleaved", 1, 2)):
        job = Job(schedule, pp, 1, dp, 4, sized(MODEL, 2), steps=2, deepspeed=sections, overlap=overlap)
        for result in ranks(2).run(train, job, False, watched, timeout_s=120):
            assert result["eager"] and not result["watched"]


def zero_json(stage: int) -> dict:
    return {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
        "zero_allow_untested_optimizer": True,
    }
