"""Models of the Llama family train as in one plain process, with every schedule and every way to split a layer.

Here runs a selection in which every two values of two factors meet, with schedules grouped by their backwards.
``make test-all`` runs the whole product.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product, starmap
from typing import NamedTuple

import pytest

from ds_ext.pipe_schedules import SCHEDULES
from tests import engine_runs
from tests.engine_runs import SPLIT, Job, reference, train
from tests.ranks import Ranks
from tests.selection import covering

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
# Biases of queries, keys and values, a window on some layers, partly rotated heads.
QWEN2 = replace(
    LLAMA,
    num_query_groups=1,
    add_qkv_bias=True,
    sliding_window=5,
    sliding_window_layers=(1, 3),
    rotary_percent=0.5,
)
PACKED = replace(LLAMA, reset_position_ids=True, reset_attention_mask=True)
MODELS = {"llama": LLAMA, "qwen3": QWEN3, "qwen2": QWEN2, "packed": PACKED}
STEPS = 3
MOST_RANKS = 8


class Case(NamedTuple):
    """One cell of the matrix; ``split`` is how a layer is split: not, by tensor, by tensor and sequence."""

    schedule: str
    model: str
    split: str
    zero: int
    recompute: str
    dp: int


def job_of(case: Case) -> Job:
    tp = int(case.split[2])
    model = replace(
        MODELS[case.model], recompute=case.recompute, sequence_parallel=case.split.endswith("sequence")
    )
    zero = {"zero_optimization": {"stage": case.zero}, "zero_allow_untested_optimizer": True}
    return Job(case.schedule, 2, tp, case.dp, 4, model, steps=STEPS, deepspeed=zero)


FACTORS = (
    sorted(SCHEDULES),
    [*MODELS],
    ["tp1", "tp2", "tp2-sequence", "tp4-sequence"],
    [0, 1],
    ["none", "selective", "full"],
    [1, 2],
)
MATRIX = [case for case in starmap(Case, product(*FACTORS)) if job_of(case).world_size <= MOST_RANKS]
random.Random(1).shuffle(MATRIX)  # so that the selection has many schedules
PAIRS = covering(MATRIX, 2, lambda case: (case.schedule in SPLIT, *case[1:]))
MISSING = [case for case in MATRIX if case.schedule not in {case.schedule for case in PAIRS} and case.dp == 1]
CASES = [*PAIRS, *covering(MISSING, 1, lambda case: (case.schedule,))]


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
