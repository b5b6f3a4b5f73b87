"""Vocabulary-parallel head in the planner: costs, memory, messages, plans and jobs."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ds_ext.__main__ import main
from ds_ext.config.job import load_config
from ds_ext.model.config import TransformerConfig
from ds_ext.parallel.crossing import messages_between
from ds_ext.parallel.partition import StageWork
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs, read_costs
from ds_ext.pipe_schedules.draw.grid import time_grid
from ds_ext.pipe_schedules.draw.page import html
from ds_ext.pipe_schedules.draw.svg import svg
from ds_ext.pipe_schedules.events import Workload
from ds_ext.pipe_schedules.list_scheduling.search import lower_bound
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.simulation import Simulation, simulate
from ds_ext.planner.activation_memory import within_activation_memory
from ds_ext.planner.activations import stage_activations
from ds_ext.planner.auto import training_sizes
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.planner.memory import DeviceMemory, memory, model_parameters, rank_parameters
from ds_ext.planner.named_models import named_model
from ds_ext.planner.parallel_sizes import Cluster, other_head, plan_cluster
from ds_ext.planner.request import Request
from ds_ext.planner.search import choose
from ds_ext.planner.stage_costs import slice_costs, split_layers, stage_costs
from ds_ext.planner.traffic import traffic
from ds_ext.planner.training_sizes import TrainingSizes

LLAMA = TrainingSizes.of_model(named_model("llama-3-8b"))
MODEL = TransformerConfig(
    num_layers=16,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=256,
    vocab_size=4096,
    hidden_dropout=0.0,
    untie_embeddings_and_output_weights=True,
)
TRAIN = {
    "num_layers": 16,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 256,
    "vocab_size": 8192,
    "untie_embeddings_and_output_weights": True,
}


@cache
def step(name: str, devices: int, micro_batches: int) -> tuple[Simulation, tuple[DeviceMemory, ...]]:
    """Return a simulated step of Llama 3 8B with head parts, and its memory."""
    placement = get_schedule(name).dividing_head().placement(devices)
    sizes = split_layers(LLAMA, placement, name)
    costs = stage_costs(Costs(), sizes, devices)
    timetable = get_schedule(name).dividing_head().timetable(devices, micro_batches, costs=costs)
    return simulate(timetable, costs), memory(timetable, sizes)


def test_a_head_of_llama_3_8b() -> None:
    """An even split takes 51.5; with the head on the last stage it is 59.1, and device 0 has 1.21 of the mean."""
    simulation, devices = step("zb_v", 8, 16)
    assert simulation.makespan <= 1.04 * simulate(get_schedule("zb_v").timetable(8, 16)).makespan
    assert devices[0].total <= 1.15 * statistics.fmean(device.total for device in devices)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("text", ["f=1,b=1,w=1", "f=2,b=3,w=1"])
def test_a_part_computes_three_products(recompute: str, text: str) -> None:
    placement = get_schedule("zb_v").dividing_head().placement(8)
    base = read_costs(text)
    sizes = split_layers(replace(LLAMA, recompute=recompute), placement, "zb_v")
    times = stage_costs(base, sizes, 8).durations(placement)
    assert sizes.stage_layers == (2,) * 16
    layer, part = (times["F"][0] / 2, times["W"][0] / 2), (8 * times["F"][16], 8 * times["W"][16])
    assert layer[1] / layer[0] == pytest.approx(base.backward_weight / base.forward)
    head = layer[0] * LLAMA.head_work() / base.forward  # of f = 1
    assert part[0] == pytest.approx(head * (base.forward + base.backward_input))
    assert part[1] == pytest.approx(head * base.backward_weight)


def test_a_chunked_loss_changes_nothing() -> None:
    sizes = replace(LLAMA, stage_layers=(2,) * 16)
    chunked = replace(sizes, chunked_loss=True)
    assert stage_costs(Costs(), sizes, 8) == stage_costs(Costs(), chunked, 8)
    placement = get_schedule("zb_v").dividing_head().placement(8)
    assert stage_activations(sizes, placement) == stage_activations(chunked, placement)


@pytest.mark.parametrize(("name", "pipes"), [("1f1b", 1), ("bitpipe_zb", 2)])
def test_every_device_holds_a_part_per_pipe(name: str, pipes: int) -> None:
    placement = get_schedule(name).dividing_head().placement(8)
    sizes = split_layers(LLAMA, placement, name)
    found = rank_parameters(sizes, placement)
    assert sum(found) == pytest.approx(pipes * model_parameters(LLAMA))
    rows = LLAMA.embedding_parameters / 8 * pipes
    assert found[3] == pytest.approx(4 * pipes * LLAMA.layer_parameters + rows)
    assert sum(sizes.stage_parameters(placement)) == pytest.approx(model_parameters(LLAMA))
    assert len(sizes.stage_parameters(placement)) == placement.loss_stage


def test_a_part_keeps_its_inputs_and_logits_until_its_weight_gradient() -> None:
    sizes = replace(LLAMA, stage_layers=(2,) * 16)
    schedule = get_schedule("zb_v")
    with_head, stages = (
        stage_activations(sizes, one.placement(8)) for one in (schedule, schedule.dividing_head())
    )
    hidden, logits = 2 * 8192 * 4096, 2 * 8192 * 128256
    assert len(stages) == 16 + 8 + 1 and stages[:15] == with_head[:15]
    assert with_head[15].kept - stages[15].kept == logits + hidden  # the norm stays
    part, loss = stages[16], stages[24]
    assert part.kept == part.deferred == hidden + logits / 8 + 12 * 8192
    assert part.forward == 2 * hidden + logits / 8 * 2 * 1.5 / 16  # a chunk in fp32 and in half precision
    assert (loss.kept, loss.forward) == (0, 2 * 8 * hidden)


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "bitpipe_zb", "interleaved"])
def test_messages_are_those_of_the_program(name: str) -> None:
    timetable = get_schedule(name).dividing_head().timetable(4, 8)
    placement = timetable.placement
    sends: Counter[tuple[int, int]] = Counter()
    for device, instructions in enumerate(lower(timetable).instructions):
        for i in instructions:
            if i.name.startswith("Send") and i.peer is not None:
                to_part = i.name == "SendGrad" and placement.is_head_part(i.other_stage or 0)
                sends[device, i.peer] += 2 if i.other_stage == placement.loss_stage else 1 - to_part
    assert messages_between(placement, 8) == sends
    assert traffic(replace(LLAMA, stage_layers=None, num_layers=32), placement, 8).stages[-1] > 0


def test_the_loss_gets_two_tensors_of_a_part() -> None:
    costs = Costs(comm=0.25, head=2.0)
    simulation = simulate(get_schedule("1f1b").dividing_head().timetable(2, 1, costs=costs), costs)
    spans = {str(op): (start, end) for row in simulation.spans for op, start, end in row}
    assert spans["F0@2"] == (2.5, 4.5) and spans["F0@3"] == (2.25, 4.25)
    assert spans["F0@4"] == (5, 5) and spans["B0@1"] == (5, 7)
    assert spans["W0@2"] == (5, 6)  # it gets a few numbers


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "zb_v", "bitpipe", "bitpipe_zb", "interleaved"])
@pytest.mark.parametrize("costs", [Costs(head=1.0), Costs(1, 2, 0.5, 0.1, head=(1, 1, 2)), Costs(head=9)])
@pytest.mark.parametrize("slices", [1, 3])
def test_no_order_is_shorter_than_the_bound(name: str, costs: Costs, slices: int) -> None:
    options = {"mode": "greedy"} if name == "bitpipe" else {}
    timetable = get_schedule(name).dividing_head().timetable(4, 8, options, costs, slices)
    for split in (False, True):
        split = split and bool(timetable.split_backwards)
        workload = Workload(timetable.placement, 8, costs, split, slices=slices)
        assert lower_bound(workload) <= simulate(timetable, costs).makespan * (1 + 1e-9)


def test_a_plan_for_a_cluster() -> None:
    cluster = Cluster(
        devices=8, memory_bytes=72 * 10**9, batch=16, tensor_parallel=1, head_parts=True, slices=(1, 2)
    )
    found = plan_cluster(cluster, replace(LLAMA, zero_stage=1))
    plain = plan_cluster(replace(cluster, head_parts=False, slices=(1,)), replace(LLAMA, zero_stage=1))
    row, other = (
        next(row for row in plan.ranked if (row.pipeline, row.fits) == (8, True)) for plan in (found, plain)
    )
    assert row.section()["vocabulary_parallel_head"] is True
    assert "vocabulary_parallel_head" not in other.section()
    assert (row.step_s or 0) < 0.95 * (other.step_s or 0)
    for sizes in found.ranked:
        if sizes.pipeline == 1 and sizes.candidate is not None:
            assert "vocabulary_parallel_head" not in sizes.section()
    # The job has the order that was priced.
    section = {key: value for key, value in row.section().items() if key != "train"}
    plan = make_job_plan(load_config({"train_batch_size": 16, "ds_ext": section}))
    candidate = row.candidate
    assert candidate is not None and candidate.costs.head
    assert (plan.timetable.placement.head_parts, plan.timetable.slices) == (8, candidate.slices)
    assert plan.simulation.costs.head == pytest.approx(candidate.costs.head)


@pytest.mark.parametrize(("tensor", "pipeline", "slices"), [(2, 2, 2), (1, 4, 4)])
def test_a_job_in_slices_has_the_memory_of_its_plan(tensor: int, pipeline: int, slices: int) -> None:
    """Slices of whole tiles take unequally long, so that more live activations would shorten the step."""
    changes = {"seq_length": 16384, "max_position_embeddings": 16384, "vocab_size": 128000}
    model = TrainingSizes.of_model(replace(named_model("llama-3-8b"), **changes), zero_stage=1)
    cluster = Cluster(
        4,
        72 * 10**9,
        32,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        head_parts=True,
        slices=(slices,),
        micro_batch=1,
        interval=2,
    )
    best = plan_cluster(cluster, model).best
    assert best.candidate is not None and best.candidate.sizes is not None and best.fits
    section = json.loads(json.dumps(best.section()))
    batch = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 1}
    plan = make_job_plan(load_config({**batch, "ds_ext": section}), 4)
    work = StageWork(None, None, slice_costs(Costs(), model, section["slice_lengths"]).slices)  # as a script
    for order in (plan, plan.with_work(work)):
        devices = memory(order.timetable, best.candidate.sizes, section["slice_lengths"])
        assert max(device.total for device in devices) == best.candidate.memory_bytes


def test_too_little_memory_is_known_before_orders_are_planned() -> None:
    sizes = replace(LLAMA, num_layers=16, zero_stage=1)
    costs = Costs()
    fits = choose(Request(4, 8, costs, sizes, 10**12, ("none",), head_parts=True)).best
    assert fits is not None and fits.memory_bytes
    least = choose(Request(4, 8, costs, sizes, fits.memory_bytes // 2, ("none",), head_parts=True))
    assert least.best is None
    assert {row.schedule for row in least.ranked if row.time is None and "head" in row.refusal} >= {"fbd"}


def job(schedule: str, **section: Any) -> dict[str, Any]:
    section |= {"schedule": schedule, "pipeline_parallel_size": 4, "vocabulary_parallel_head": True}
    return {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "ds_ext": section}


def test_auto_chooses_a_schedule_with_parts() -> None:
    plan = make_job_plan(load_config(job("auto", train=TRAIN)))
    assert plan.candidates is not None and plan.candidates.best is not None
    assert plan.simulation.makespan == pytest.approx(plan.candidates.best.time)
    assert plan.timetable.placement.head_parts == 4 and plan.costs.head
    sliced = make_job_plan(load_config(job("auto", train=TRAIN, sequence_slices=2)))
    assert (sliced.timetable.slices, sliced.timetable.placement.head_parts) == (2, 4)


def test_a_tied_head_has_parts() -> None:
    tied = {**TRAIN, "untie_embeddings_and_output_weights": False}
    assert make_job_plan(load_config(job("auto", train=tied))).timetable.placement.head_parts == 4


@pytest.mark.parametrize(("name", "local"), [("1f1b", 1), ("zb_v", 1), ("bitpipe_zb", 2)])
def test_the_parts_of_a_tied_head_are_rows_of_the_embedding(name: str, local: int) -> None:
    """``local`` parts are on the device of the embedding."""
    placement = get_schedule(name).dividing_head().placement(8)
    sizes = split_layers(replace(LLAMA, untie_embeddings_and_output_weights=False), placement, name)
    layers = 4 * local * LLAMA.layer_parameters
    part = LLAMA.embedding_parameters / 8
    counts = rank_parameters(sizes, placement)
    assert counts[0] == pytest.approx(layers + 8 * part, rel=1e-4)  # the last norm may be here
    assert counts[3] == pytest.approx(layers + local * part)
    tied = [sizes.tied_parameters(placement, device) for device in range(8)]
    assert tied[0] == (8 - local) * part and tied[3] == local * part
    reduced = sizes.stage_parameters(placement)
    assert sum(reduced) == pytest.approx(model_parameters(sizes) - tied[0])
    assert reduced[-8:] == (0.0,) * 8
    lookup, untied = (
        stage_activations(replace(one, stage_layers=sizes.stage_layers), placement)[0]
        for one in (sizes, LLAMA)
    )
    assert lookup.kept == untied.kept and lookup.deferred == untied.deferred


def test_activations_within_a_limit() -> None:
    config = job("zb_v", max_activation_memory="1TB")
    sizes = training_sizes(config, MODEL, 1, 1, 1)
    plan = make_job_plan(load_config(config))
    most = max(device.activations for device in memory(plan.timetable, sizes))
    small = make_job_plan(load_config(job("zb_v", max_activation_memory=f"{int(0.95 * most)}B")))
    limited = within_activation_memory(small, sizes)
    assert max(device.activations for device in memory(limited.timetable, sizes)) <= 0.95 * most
    assert limited.timetable.placement.head_parts == 4


# --- command line ---

SIZES = ["--num-devices", "4", "--micro-batches", "4"]
HEAD = [*SIZES, "--vocabulary-parallel-head"]


def test_pictures_name_the_parts() -> None:
    costs = Costs(head=4.0)
    simulation = simulate(get_schedule("1f1b").dividing_head().timetable(4, 4, costs=costs), costs)
    rows = time_grid(simulation).splitlines()
    for row in rows:
        assert [row.split().count(text) for text in ("0h", '0h"', "3h", '3h"')] == [1, 1, 1, 1]
    assert svg(simulation).count(">0h</text>") == 8
    assert '"pipes":[[0,1,2,3]]' in html([simulation])


def test_verbs_know_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "head.txt"
    assert main(["show", "zb_v", *HEAD, "--costs", "head=1", "-o", str(path)]) == 0
    assert main(["check", str(path)]) == main(["check", "zb_v", *HEAD]) == 0
    capsys.readouterr()
    assert main(["dump", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["head_parts"] == 4
    assert main(["dump", "zb_v", *HEAD, "--forward-only"]) == 0
    assert json.loads(capsys.readouterr().out)["head_parts"] == 4
    arguments = ["--model", "llama-3-8b", "--json"]
    assert main(["simulate", "zb_v", *HEAD, *arguments]) == 0
    values = json.loads(capsys.readouterr().out)
    assert len(values["stage_bytes"]) == 13 and values["layers"] == [4] * 8
    assert main(["simulate", "1f1b", *HEAD, "--model", "gpt-1.3b"]) == 0  # its head is tied
    capsys.readouterr()
    assert main(["compare", "1f1b", "zb_v", "dpp", *HEAD]) == 1
    assert "--vocabulary-parallel-head" in capsys.readouterr().out


def test_an_assumed_time_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "1f1b", *HEAD, "--costs", "head=0.5"]) == main(["show", "1f1b", *HEAD]) == 0
    assert capsys.readouterr().err.count("--costs head=4") == 2
    assert main(["show", "1f1b", *HEAD, "--costs", "head=4"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["simulate", "1f1b", *HEAD]) == 0
    assert re.search(r"^  head +0\.5 ", capsys.readouterr().out, re.MULTILINE)


def test_messages_have_a_sum_of_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--forward-only"]):
        assert main(["simulate", "1f1b", *HEAD, "--model", "llama-3-8b", *more]) == 0
        size = re.search(r"messages +\d+, ([\d.]+) GB", capsys.readouterr().out)
        placement = get_schedule("1f1b").dividing_head().placement(4)
        tensors = messages_between(placement, 4).total()
        if more:  # 3 links, 3 parts with one tensor each, which return two
            tensors = 4 * (3 + 3 + 2 * 3)
        assert size is not None and float(size[1]) == pytest.approx(tensors * 2 * 8192 * 4096 / 1e9, abs=0.06)


SMALL = [
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "8000"),
    *("--seq-length", "32", "--untie-embeddings-and-output-weights"),
]


@pytest.mark.parametrize(("rate", "lines"), [("100GB", 0), ("10MB", 1)])
def test_parts_that_slow_links_make_longer(rate: str, lines: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "1f1b", *SIZES, *SMALL, "--hosts", "4x1", "--between", f"{rate},0us"]
    times = []
    for flag in ([], HEAD[-1:]):
        assert main([*words, *flag, "--json"]) == 0
        times.append(json.loads(capsys.readouterr().out)["step_s"])
    assert main([*words, *HEAD[-1:]]) == 0
    found = re.findall(r"^  last stage +(\S+) s .* (\S+) s ", capsys.readouterr().out, re.MULTILINE)
    assert len(found) == lines == (times[0] < times[1])
    for last, parts in found:
        assert [float(last), float(parts)] == pytest.approx(times, rel=1e-3)


def test_a_plan_compares_its_best_with_the_other_head() -> None:
    sizes = replace(LLAMA, num_layers=16, zero_stage=1)
    cluster = Cluster(8, 60 * 10**9, 16, tensor_parallel=1, slices=(1,))
    tied = replace(sizes, untie_embeddings_and_output_weights=False)
    for parts, model in ((False, sizes), (True, sizes), (False, tied)):
        asked = replace(cluster, head_parts=parts)
        plan = plan_cluster(asked, model)
        best, other = plan.best, other_head(asked, model, Costs(), plan)
        assert best.candidate is not None and other is not None and other.time
        assert bool(other.costs.head) != parts == bool(best.candidate.costs.head)
        assert other.label == best.candidate.label and other.time != best.step_s
    one_device = replace(cluster, devices=1, memory_bytes=10**12)
    assert other_head(one_device, sizes, Costs(), plan_cluster(one_device, sizes)) is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["optimise", "1f1b", *HEAD], "4 parts"),
        (["show", "1f1b", *SIZES, "--costs", "head=4"], "stages=1x3/5"),
        (
            [
                "plan",
                "--devices=8",
                "--memory=80GB",
                "--model=gpt-1.3b",
                "--global-batch-size=8",
                "--costs=head=1",
            ],
            "--costs",
        ),
        (["simulate", "fbd", *HEAD], "--vocabulary-parallel-head"),
        (["simulate", "plain.txt", "--vocabulary-parallel-head"], "--vocabulary-parallel-head"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_requests_without_parts(
    words: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["show", "1f1b", *SIZES, "-o", "plain.txt"]) == 0
    assert main(words) == 2
    assert problem in capsys.readouterr().err
