"""Models of the Llama family train as in one plain process, with every schedule and every way to split a layer.

Here runs a selection in which every two values of two factors meet; ``make test-all`` runs the whole product. All
jobs of the matrix have at most four ranks.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product, starmap
from pathlib import Path
from typing import NamedTuple

import pytest

from ds_ext.pipe_schedules import SCHEDULES
from tests import engine_runs
from tests.distributed.test_checkpoint import AT, Sizes, go_on, same_contents, settings, train_and_save
from tests.distributed.test_parity import assert_equal, tensor_parallel_reference
from tests.engine_runs import Job, StepBatches, batches_of, build, reference, train
from tests.ranks import Ranks
from tests.selection import covering, select

LLAMA = replace(
    engine_runs.MODEL,
    num_layers=4,
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
# Documents apart, biases of queries, keys and values, a window on some layers, partly rotated heads.
PACKED = replace(
    LLAMA,
    num_query_groups=1,
    add_qkv_bias=True,
    sliding_window=5,
    sliding_window_layers=(1, 3),
    rotary_percent=0.5,
    reset_position_ids=True,
    reset_attention_mask=True,
)
MODELS = {"llama": LLAMA, "qwen3": QWEN3, "packed": PACKED}
STEPS = 2
MOST_RANKS = 4


class Case(NamedTuple):
    """One cell of the matrix; ``split`` is how a layer is split: not, by tensor, by tensor and sequence."""

    schedule: str
    model: str
    split: str
    zero: int
    recompute: str
    pp: int
    dp: int


def job_of(case: Case) -> Job:
    tp = int(case.split[2])
    model = replace(
        MODELS[case.model], recompute=case.recompute, sequence_parallel=case.split.endswith("sequence")
    )
    zero = {"zero_optimization": {"stage": case.zero}, "zero_allow_untested_optimizer": True}
    return Job(case.schedule, case.pp, tp, case.dp, 4, model, steps=STEPS, deepspeed=zero)


def runs(case: Case) -> bool:
    """Return whether the schedule has an order for the devices and 4 micro-batches, and the ranks are few."""
    has_order = {1: case.schedule in ("1f1b", "zb_h1"), 2: True, 4: case.schedule != "dualpipev"}
    return has_order[case.pp] and job_of(case).world_size <= MOST_RANKS


FACTORS = (
    sorted(SCHEDULES),
    [*MODELS],
    ["tp1", "tp2", "tp2-sequence", "tp4-sequence"],
    [0, 1],
    ["none", "selective", "full"],
    [1, 2, 4],
    [1, 2],
)
MATRIX = [case for case in starmap(Case, product(*FACTORS)) if runs(case)]
random.Random(1).shuffle(MATRIX)  # so that the selection has many sizes
CASES = covering(MATRIX, 1)  # test_matrix.py has the pairs


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_trains_as_one_process(ranks: Ranks, case: Case) -> None:
    job = job_of(case)
    expected = reference(replace(job, model=MODELS[case.model]))
    seen = set()
    for result in ranks(job.world_size).run(train, job, timeout_s=120):
        assert result["losses"] == pytest.approx(expected.losses, rel=1e-5)
        assert result["norms"] == pytest.approx(expected.grad_norms, rel=1e-5)
        for name, weight in result["weights"].items():
            assert weight == pytest.approx(expected.parameters[name], abs=1e-5), name
        seen |= result["weights"].keys()
    assert seen == expected.parameters.keys()


def test_merged_forward_ranks_compute_the_shards_with_their_masks(ranks: Ranks) -> None:
    """The two ranks of a backward device share one query group."""
    model = replace(QWEN3, hidden_dropout=0.1, attention_dropout=0.1)
    job = Job("fbd", 2, 2, 1, 4, model, steps=STEPS, fbd={"merge_forward_tensor_parallel": True})
    results = ranks(job.world_size).run(train, job, timeout_s=120)
    assert_equal(results, ranks(2).run(tensor_parallel_reference, job, timeout_s=120)[0])


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        # Four ranks hold the keys and values of both groups, two ranks those of one.
        ("llama", ("1f1b", 1, 4, 1, 4), ("zb_h1", 1, 2, 1, 4)),
        ("qwen3", ("zb_v", 2, 1, 1, 4), ("1f1b", 2, 2, 1, 4)),
        *select([("llama", ("1f1b", 2, 2, 1, 4), ("1f1b", 1, 4, 1, 4))], []),
    ],
)
def test_a_checkpoint_goes_on_under_other_sizes(
    ranks: Ranks, tmp_path: Path, model: str, before: Sizes, after: Sizes
) -> None:
    adam = settings("fp32", 1)
    first, second = (Job(*sizes, MODELS[model], deepspeed=adam) for sizes in (before, after))
    straight = ranks(first.world_size).run(train_and_save, first, str(tmp_path), timeout_s=120)[0]
    for losses, _ in ranks(second.world_size).run(go_on, second, str(tmp_path), None, "again", timeout_s=120):
        assert losses == pytest.approx(straight[AT:], rel=1e-5)
    same_contents(tmp_path / "saved", tmp_path / "again")


def deferred_share(rank: int, job: Job) -> tuple[float, float]:
    """The engine's share of deferred elements, and that of matrices in this rank's parameters."""
    engine, _ = build(job)
    engine.train_batch(StepBatches(batches_of(job)))
    sizes = [(parameter.dim() == 2, parameter.numel()) for parameter in engine.module.parameters()]
    engine.transport.close()
    assert engine.deferred_share is not None
    return engine.deferred_share, sum(n for matrix, n in sizes if matrix) / sum(n for _, n in sizes)


def test_all_matrices_are_deferred(ranks: Ranks) -> None:
    """Replicated keys and values included."""
    for found, matrices in ranks(2).run(deferred_share, Job("zb_h1", 1, 2, 1, 4, QWEN3, steps=1)):
        assert found == matrices < 1
