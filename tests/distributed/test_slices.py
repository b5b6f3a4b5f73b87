"""Micro-batches in slices of their sequences train to the losses, norms and weights of one process without slices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.distributed.test_parity import assert_equal
from tests.engine_runs import MODEL, Job, reference, train
from tests.ranks import Ranks
from tests.selection import select

UNEQUAL = (3, 6, 2, 5)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "bitpipe", "bitpipe_zb")
OPTIONS: dict[str, dict[str, Any]] = {"bitpipe": {"mode": "greedy"}}
LLAMA = dataclasses.replace(
    MODEL,
    num_query_groups=2,
    ffn_hidden_size=64,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
QWEN3 = dataclasses.replace(LLAMA, qk_layernorm=True)


def job(schedule: str, slices: int | tuple[int, ...] = 4, sizes: Any = (4, 1, 1), **fields: Any) -> Job:
    model = fields.pop("model", MODEL)
    changes = {key: fields.pop(key) for key in list(fields) if hasattr(MODEL, key)}
    options = OPTIONS.get(schedule, {})
    model = dataclasses.replace(model, **changes)
    return Job(schedule, *sizes, 8, model, options=options, slices=slices, **fields)


JOBS = {
    **{name: job(name) for name in SCHEDULES},
    "1f1b 2": job("1f1b", 2),
    "zb_v unequal": job("zb_v", UNEQUAL),
    "1f1b unequal": job("1f1b", UNEQUAL, model=LLAMA),
    "tensor": job("1f1b", 4, (2, 2, 1)),
    "sequence parallel": job("zb_v", 4, (2, 2, 1), model=LLAMA, sequence_parallel=True),
    "data": job("zb_h1", 2, (2, 1, 2)),
    "full": job("1f1b", 4, recompute="full"),
    "full split": job("zb_v", UNEQUAL, model=LLAMA, recompute="full"),
    "selective": job("bitpipe_zb", 4, model=QWEN3, recompute="selective"),
    "window": job("zb_v", UNEQUAL, model=LLAMA, sliding_window=5),
    "hidden dropout": job("zb_h1", UNEQUAL, hidden_dropout=0.1),
    "hidden dropout full": job("1f1b", 4, hidden_dropout=0.1, recompute="full"),
}


@pytest.mark.parametrize("name", select([*JOBS], [*JOBS]))
def test_trains_as_one_process(ranks: Ranks, name: str) -> None:
    sliced = JOBS[name]
    results = ranks(sliced.world_size).run(train, sliced, True, timeout_s=180)
    assert_equal(results, reference(sliced))
