"""Jobs of many kinds train to the losses, gradient norms and weights of one plain process.

A new capability adds its jobs here. Rows in fp64 agree to 1e-10, others to 1e-5. ``make test-all`` has more rows.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from itertools import product, starmap
from typing import Any, NamedTuple

import pytest
import torch

from ds_ext.parallel.partition import layer_boundaries
from ds_ext.pipe_schedules import SCHEDULES as REGISTRY
from ds_ext.pipe_schedules import get_schedule
from ds_ext.recipes.models.gpt import GPTConfig
from tests.engine_runs import (
    ADAM,
    LLAMA,
    MODEL,
    QWEN3,
    SCHEDULES,
    SPLIT,
    TIED,
    UNEQUAL,
    UNTIED,
    WHOLE,
    WITH_DROPOUT,
    Job,
    reference,
    sized,
    sliced,
    zero_keys,
)
from tests.one_process import assert_trains_as_one_process
from tests.ranks import Ranks
from tests.selection import EVERYTHING, cover, covering, select

Layout = tuple[int, int, int]
"""Sizes of pipeline, tensor and data parallelism."""
Rows = Iterator[tuple[str, Job]]

ON_4_DEVICES, IN_TWO_GROUPS, ON_8_RANKS = (4, 1, 1), (2, 1, 2), (2, 2, 2)
LAYOUTS = [(2, 2, 1), IN_TWO_GROUPS, (2, 1, 1), ON_8_RANKS]
PACKED: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True}


def size(layout: Layout) -> str:
    return "pp{}-tp{}-dp{}".format(*layout)


# --- schedules, layouts and dropout ---


def schedules() -> Rows:
    """Every schedule on four devices. A new one joins without a change here."""
    for schedule in SCHEDULES:
        yield schedule, Job(schedule, *ON_4_DEVICES, 8, sized(MODEL, 4))


def traits(run: tuple[str, Layout]) -> tuple[Any, ...]:
    """Return what the engine depends on: replicas, stages of a device, split backwards, layout."""
    schedule, layout = run
    placement = get_schedule(schedule).placement(4)
    return placement.replicas, placement.stages // 4, schedule in SPLIT, layout


def layouts() -> Rows:
    for schedule, layout in covering(product(SCHEDULES, LAYOUTS), 1, traits):
        yield f"{schedule}-{size(layout)}", Job(schedule, *layout, 2 * layout[0], sized(MODEL, layout[0]))
    # Masks depend on (seed, step, micro-batch, layer), never on the order of the schedule.
    for schedule, layout in covering(product(SCHEDULES, [IN_TWO_GROUPS, ON_4_DEVICES, (2, 1, 1)]), 1, traits):
        yield f"{schedule}-{size(layout)}-dropout", Job(schedule, *layout, 4, sized(WITH_DROPOUT, layout[0]))
    # Attention masks are drawn per tensor-parallel shard.
    for schedule, dp in select(
        [*product(WHOLE, [1, 2]), ("bitpipe_zb", 1)], [("bitpipe", 1), ("bitpipe_zb", 1)]
    ):
        yield f"{schedule}-{size((2, 2, dp))}-dropout", Job(schedule, 2, 2, dp, 4, sized(WITH_DROPOUT, 2))


def planned_orders() -> Rows:
    """Any number of micro-batches, and orders in which links deliver earlier than needed."""
    for schedule, micro_batches, options in (
        ("bitpipe", 6, {"mode": "greedy"}),
        ("bitpipe", 10, {"mode": "greedy", "costs": "f=1,b=1,w=1,comm=0.5"}),
        ("bitpipe_zb", 6, {"costs": "f=1,b=1.3,w=0.8,comm=0.5"}),
        ("bitpipe_zb", 2, {}),
        ("zb_v", 5, {}),
        ("dualpipev", 9, {}),
    ):
        yield (
            f"{schedule}-{micro_batches}-planned",
            Job(schedule, 4, 1, 1, micro_batches, MODEL, options=options),
        )


def uneven() -> Rows:
    """Stages of two and of three layers; every micro-batch of every step has another number of tokens."""
    model = dataclasses.replace(MODEL, num_layers=9)
    for schedule, pp in (("1f1b", 4), ("bitpipe", 2), ("bitpipe_zb", 2)):
        boundaries = layer_boundaries(9, 2, 2, get_schedule(schedule).placement(pp), schedule)
        job = Job(schedule, pp, 1, 1, 4, model, partition_method=boundaries, ragged=True)
        yield f"{schedule}-uneven", job


def sequence_parallel() -> Rows:
    model = dataclasses.replace(sized(MODEL, 2), sequence_parallel=True, recompute="selective")
    for schedule in ("1f1b", *select(["interleaved", "bitpipe"], []), "bitpipe_zb"):
        yield f"{schedule}-sequence-selective", Job(schedule, 2, 2, 1, 4, model)
    model = dataclasses.replace(sized(WITH_DROPOUT, 2), sequence_parallel=True, recompute="full")
    yield "bitpipe_zb-sequence-full-dropout", Job("bitpipe_zb", 2, 2, 1, 4, model)


def adamw() -> Rows:
    """AdamW with ZeRO-1; biases and norms do not decay."""
    for schedule, layout in (
        ("bitpipe", ON_4_DEVICES),
        ("1f1b", IN_TWO_GROUPS),
        *select([("chimera", ON_4_DEVICES), ("bitpipe", IN_TWO_GROUPS), ("bitpipe_zb", ON_4_DEVICES)], []),
        ("zb_h1", IN_TWO_GROUPS),
    ):
        model, deepspeed = sized(WITH_DROPOUT, layout[0]), {"optimizer": ADAM, **zero_keys(1)}
        job = Job(schedule, *layout, 2 * layout[0], model, deepspeed=deepspeed, decay_groups=True)
        yield f"{schedule}-{size(layout)}-adamw", job


# --- rank orders ---

ORDERS = ("tp-pp-dp", "tp-mirror-dp-pp", "tp-mirror-pp-dp", "tp-dp-mirror-pp", "tp-pp-mirror-dp")
MIRRORED = ("chimera", "bitpipe", "bitpipe_zb")


def rank_orders() -> Rows:
    few: list[tuple[str, Layout, str, int]] = [
        ("bitpipe", ON_4_DEVICES, "tp-mirror-dp-pp", 1),
        ("bitpipe_zb", ON_4_DEVICES, "tp-mirror-pp-dp", 1),
        ("bitpipe", IN_TWO_GROUPS, "tp-pp-dp", 1),
        ("interleaved", IN_TWO_GROUPS, "tp-pp-dp", 0),
        ("dpp", IN_TWO_GROUPS, "tp-pp-dp", 0),
        ("bitpipe", ON_8_RANKS, "tp-pp-dp", 1),
    ]
    plain = ("1f1b", "gpipe", "zb_h1", "zb_v", "dualpipev", "dpp")
    more = [
        *product(plain, (IN_TWO_GROUPS, ON_8_RANKS), ORDERS[:1], (0, 1)),
        *product(MIRRORED, ((4, 1, 2),), ORDERS, (0, 1)),
        *product(MIRRORED, ((4, 2, 1),), ORDERS[1:2], (0, 1)),
        *product(MIRRORED, (ON_8_RANKS,), ORDERS[:1], (0, 1)),
    ]
    for schedule, layout, order, stage in select([*few, *more], few):
        model = WITH_DROPOUT if layout[1] == 1 else MODEL
        job = Job(schedule, *layout, 4, model, deepspeed=zero_keys(stage), rank_order=order)
        assert job.layout.groups() != dataclasses.replace(job, rank_order="tp-dp-pp").layout.groups()
        yield f"{schedule}-{size(layout)}-{order}-zero{stage}", job


# --- orders decided at run time, devices for forwards ---


def dpp() -> Rows:
    everything = product(
        ("linear", "interleaved", "v", "bidirectional_v"), ("breadth", "depth", "group"), ("whole", "split")
    )
    few: list[Any] = [
        ("linear", "breadth", "whole"),
        ("linear", "group", "split"),
        ("interleaved", "group", "whole"),
        ("interleaved", "breadth", "split"),
        ("v", "depth", "split"),
        ("bidirectional_v", "breadth", "whole"),
    ]
    for placement, policy, backward in select([*everything], few):
        options = {"placement": placement, "policy": policy, "backward": backward}
        yield f"dpp-{placement}-{policy}-{backward}", Job("dpp", 4, 1, 1, 8, WITH_DROPOUT, options=options)


def chunked() -> Rows:
    """A chunked loss where no other order is compared with whole logits (test_chunked_loss.py)."""
    model = dataclasses.replace(MODEL, chunked_loss=True)
    merged = {"merge_forward_tensor_parallel": True}
    yield "fbd-chunked", Job("fbd", 2, 1, 1, 4, model)
    yield "fbd-merged-chunked", Job("fbd", 2, 2, 1, 4, model, fbd=merged)
    yield "dpp-chunked", Job("dpp", 2, 1, 1, 4, model)
    # The two ranks of a backward device share one query group.
    model = dataclasses.replace(QWEN3, hidden_dropout=0.1, attention_dropout=0.1, num_layers=4)
    yield "fbd-merged-query-group", Job("fbd", 2, 2, 1, 4, model, steps=2, fbd=merged)


# --- slices of sequences ---

SLICED_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "bitpipe", "bitpipe_zb")


def slices() -> Rows:
    jobs = {
        "interleaved": sliced("interleaved"),
        "bitpipe": sliced("bitpipe"),
        "zb_v unequal": sliced("zb_v", UNEQUAL),
        "1f1b unequal": sliced("1f1b", UNEQUAL, model=LLAMA),
        "full split": sliced("zb_v", UNEQUAL, model=LLAMA, recompute="full"),
        "selective": sliced("bitpipe_zb", 4, model=QWEN3, recompute="selective"),
        "window": sliced("zb_v", UNEQUAL, model=LLAMA, sliding_window=5),
        "packed learned": sliced("1f1b", 4, recompute="full", **PACKED),
        "packed sequence parallel": sliced("1f1b", 4, (2, 2, 1), sequence_parallel=True, **PACKED),
        "hidden dropout": sliced("zb_h1", UNEQUAL, hidden_dropout=0.1),
    }
    more = {
        **{name: sliced(name) for name in SLICED_SCHEDULES},
        "1f1b 2": sliced("1f1b", 2),
        "tensor": sliced("1f1b", 4, (2, 2, 1)),
        "sequence parallel": sliced("zb_v", 4, (2, 2, 1), model=LLAMA, sequence_parallel=True),
        "data": sliced("zb_h1", 2, IN_TWO_GROUPS),
        "full": sliced("1f1b", 4, recompute="full"),
        "packed": sliced("zb_v", UNEQUAL, model=LLAMA, **PACKED),
        "hidden dropout full": sliced("1f1b", 4, hidden_dropout=0.1, recompute="full"),
    }
    for name, job in select([*{**jobs, **more}.items()], [*jobs.items()]):
        yield f"slices {name}", job


MODELS = {"gpt": MODEL, "llama": LLAMA, "qwen3": QWEN3}
SIZES = {"pipeline": ON_4_DEVICES, "tensor": (2, 2, 1), "sequence": (2, 2, 1), "data": IN_TWO_GROUPS}


def slices_in_fp64() -> Rows:
    few = [
        ("zb_h1", "unequal", "qwen3", "data", "selective", "packed", ""),
        ("gpipe", "4", "llama", "sequence", "full", "", ""),
        ("bitpipe_zb", "2", "gpt", "tensor", "none", "packed", "dropout"),
    ]
    for case in cover(shuffled_slices(), 2) if EVERYTHING else few:
        schedule, number, model, sizes, recompute, packed, dropout = case
        changes: dict[str, Any] = {"recompute": recompute, **(PACKED if packed else {})}
        changes |= {"sequence_parallel": sizes == "sequence", "hidden_dropout": 0.1 if dropout else 0.0}
        lengths = (4, 6, 2, 4) if number == "unequal" else int(number)
        fields: dict[str, Any] = {"model": MODELS[model], "dtype": torch.float64, **changes}
        yield f"slices {'-'.join(case)}", sliced(schedule, lengths, SIZES[sizes], **fields)


def shuffled_slices() -> list[Sequence[str]]:
    cases: list[Sequence[str]] = [
        case
        for case in product(
            *(SLICED_SCHEDULES, ("2", "4", "unequal"), MODELS, SIZES, ("none", "selective", "full")),
            *(("", "packed"), ("", "dropout")),
        )
        if case[3] != "sequence" or not case[6]  # its hidden dropout depends on the slices
    ]
    random.Random(0).shuffle(cases)  # or most cases would have the first values of several factors
    return cases


# --- Llama's layers ---


class Layers(NamedTuple):
    """``split`` is how a layer is split: not, by tensor, by tensor and sequence."""

    schedule: str
    model: str
    split: str
    zero: int
    recompute: str
    pp: int
    dp: int

    def job(self) -> Job:
        model = dataclasses.replace(
            LLAMAS[self.model], recompute=self.recompute, sequence_parallel=self.split.endswith("sequence")
        )
        tp = int(self.split[2])
        return Job(self.schedule, self.pp, tp, self.dp, 4, model, steps=2, deepspeed=zero_keys(self.zero))

    def runs(self) -> bool:
        """Return whether the schedule has an order for the devices and 4 micro-batches, and the ranks are few."""
        has_order = {1: self.schedule in ("1f1b", "zb_h1"), 2: True, 4: self.schedule != "dualpipev"}
        return has_order[self.pp] and self.job().world_size <= 4


# Documents apart, biases of queries, keys and values, a window on some layers, partly rotated heads.
PACKED_LLAMA = dataclasses.replace(
    LLAMA,
    num_query_groups=1,
    add_qkv_bias=True,
    sliding_window=5,
    sliding_window_layers=(1, 3),
    rotary_percent=0.5,
    **PACKED,
)
LLAMAS = {
    name: dataclasses.replace(model, num_layers=4)
    for name, model in {"llama": LLAMA, "qwen3": QWEN3, "packed": PACKED_LLAMA}.items()
}


def llama() -> Rows:
    factors = (
        sorted(REGISTRY),
        [*LLAMAS],
        ["tp1", "tp2", "tp2-sequence", "tp4-sequence"],
        [0, 1],
        ["none", "selective", "full"],
        [1, 2, 4],
        [1, 2],
    )
    matrix = [case for case in starmap(Layers, product(*factors)) if case.runs()]
    random.Random(1).shuffle(matrix)  # so that the selection has many sizes
    for case in covering(matrix, 1):  # test_matrix.py has the pairs
        yield f"llama {'-'.join(map(str, case))}", case.job()


# --- heads in parts ---

SMALL, TIED_SMALL = (
    dataclasses.replace(model, vocab_size=20) for model in (UNTIED, TIED)
)  # of 64 rows: some parts have only padding


def in_parts(layout: Layout, schedule: str, model: GPTConfig = UNTIED, **fields: Any) -> Job:
    changes = {key: fields.pop(key) for key in list(fields) if hasattr(MODEL, key)}
    model = dataclasses.replace(model, **changes)
    return Job(schedule, *layout, 4, model, head_parts=True, dtype=torch.float64, **fields)


def head_parts() -> Rows:
    sequence: dict[str, Any] = {"sequence_parallel": True, "recompute": "selective"}
    dropout: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    two, tensor, both = (2, 1, 1), (2, 2, 1), ON_8_RANKS
    jobs = [
        in_parts(ON_4_DEVICES, "1f1b"),
        in_parts(tensor, "1f1b", **sequence),
        in_parts((1, 1, 2), "1f1b"),
        in_parts(ON_4_DEVICES, "zb_v", **dropout),
        in_parts(tensor, "zb_v", SMALL),
        in_parts(IN_TWO_GROUPS, "bitpipe_zb", SMALL, slices=4),
        in_parts(IN_TWO_GROUPS, "interleaved", ragged=True),
        in_parts(ON_4_DEVICES, "bitpipe", recompute="full"),
        in_parts(two, "1f1b", recompute="full", eager=False, slices=(9, 7)),
        in_parts(two, "1f1b", TIED),
        in_parts(ON_4_DEVICES, "1f1b", TIED_SMALL, slices=2),
        in_parts(ON_4_DEVICES, "zb_v", TIED, recompute="full"),
        in_parts(tensor, "zb_v", TIED_SMALL, slices=2),
        in_parts(ON_4_DEVICES, "bitpipe_zb", TIED),
        in_parts(IN_TWO_GROUPS, "interleaved", TIED, eager=False),
        in_parts(ON_4_DEVICES, "chimera", TIED),
        *select(
            [
                in_parts(ON_4_DEVICES, "bitpipe_zb"),
                in_parts(both, "bitpipe_zb", **sequence),
                in_parts(both, "bitpipe_zb", TIED, **sequence, slices=2),
                in_parts(tensor, "interleaved", SMALL),
                in_parts((1, 1, 2), "1f1b", TIED),
                in_parts(two, "zb_v", TIED),
            ],
            [in_parts(tensor, "bitpipe_zb", TIED, **sequence, slices=2)],
        ),
    ]
    for job in jobs:
        tie = "" if job.model.untie_embeddings_and_output_weights else "-tied"
        yield (
            f"parts {job.schedule}-{size((job.pp, job.tp, job.dp))}-{job.model.vocab_size}-{job.model.recompute}"
            f"-{job.num_slices}{tie}",
            job,
        )


def rows(*tables: Any, marks: Sequence[pytest.MarkDecorator] = ()) -> list[Any]:
    return [pytest.param(job, id=name, marks=marks) for table in tables for name, job in table()]


@pytest.mark.parametrize(
    "job",
    [
        *rows(schedules, marks=[pytest.mark.quick]),
        *rows(layouts, planned_orders, uneven, sequence_parallel, adamw, rank_orders, dpp, chunked, llama),
    ],
)
def test_trains_as_one_process(ranks: Ranks, job: Job) -> None:
    assert_trains_as_one_process(ranks, job)


@pytest.mark.parametrize("job", rows(slices, slices_in_fp64, head_parts))
def test_trains_and_evaluates_as_one_process(ranks: Ranks, job: Job) -> None:
    """An evaluation of the first batches, after half of the steps, changes nothing."""
    results = assert_trains_as_one_process(ranks, job, evaluate=True)
    if not job.model.hidden_dropout:
        expected = reference(job, evaluated=True).losses[-1]
        tolerance = 1e-7 if job.dtype == torch.float64 else 1e-6  # losses are fp32
        found = [result["evaluated"] for result in results]
        assert found == pytest.approx([expected] * len(results), rel=tolerance)
