"""Replicas stay equal, and when gradients are reduced changes nothing."""

from __future__ import annotations

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
from ds_ext.pipe_schedules import get_schedule
from ds_ext.tensor_parallel import TensorParallel
from tests.engine_runs import MODEL, SCHEDULES, WITH_DROPOUT, Job, sized, train, zero_keys
from tests.precisions import needs
from tests.ranks import Ranks
from tests.selection import covering

MIRRORED = [name for name in SCHEDULES if get_schedule(name).placement(4).replicas > 1]
ON_4_DEVICES, ON_8_RANKS = (4, 1, 1), (2, 2, 2)  # sizes of pipeline, tensor and data parallelism
Layout = tuple[int, int, int]


@pytest.mark.parametrize(
    ("schedule", "layout", "zero"), covering(product(MIRRORED, [ON_4_DEVICES, ON_8_RANKS], [0, 1]), 1)
)
def test_mirror_replicas_are_bitwise_equal_after_every_step(
    ranks: Ranks, schedule: str, layout: Layout, zero: int
) -> None:
    pp, tp, dp = layout
    model = sized(WITH_DROPOUT, pp)
    job = Job(schedule, pp, tp, dp, 2 * pp, model, steps=3, deepspeed=zero_keys(zero))
    results = ranks(job.world_size).run(train, job, timeout_s=120)
    mesh = ParallelLayout(get_schedule(schedule).placement(pp), tp, dp)
    for mirror in mesh.groups()["mirror"]:
        for step in range(job.steps):
            assert len({results[rank]["digests"][step] for rank in mirror}) == 1, (
                f"ranks {mirror}, step {step}"
            )
    assert len({results[0]["digests"][step] for step in range(job.steps)}) == job.steps


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
        model, options = sized(WITH_DROPOUT, layout[0]), {"deepspeed": zero_keys(zero), "eager": eager}
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
    sections = zero_keys(1) if precision == "fp32" else {"bf16": {"enabled": True}}
    for schedule, pp, dp in (("bitpipe_zb", 2, 1), ("interleaved", 1, 2)):
        job = Job(schedule, pp, 1, dp, 4, sized(MODEL, 2), steps=2, deepspeed=sections, overlap=overlap)
        for result in ranks(2).run(train, job, False, watched, timeout_s=120):
            assert result["eager"] and not result["watched"]
