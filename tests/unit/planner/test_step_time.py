"""Step times on hosts: messages by link, reductions after their last backward, shared ports, rank orders."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ds_ext.__main__ import main
from ds_ext.parallel.crossing import Traffic
from ds_ext.parallel.hosts import Hosts
from ds_ext.parallel.layout import ParallelLayout
from ds_ext.parallel.network import GLOO, HOST_PORTS, NCCL, RANK_PORTS, Link, Network
from ds_ext.parallel.rank_order import parse_rank_order
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.list_scheduling import search
from ds_ext.pipe_schedules.ports import Ports
from ds_ext.pipe_schedules.reductions import eager_reductions
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.activations import layer_activations
from ds_ext.planner.step_time import NetworkStep, StepTime, on_devices
from ds_ext.planner.training_sizes import TrainingSizes
from tests.selection import select

FREE = Link(1e14, 0.0)


def on_hosts(
    hosts: Hosts, between: Link, gradient: float, order: str, ports: str = RANK_PORTS, tied: float = 0.0
) -> StepTime:
    timetable = get_schedule("1f1b").timetable(4, 8)
    layout = ParallelLayout(timetable.placement, 1, 2, parse_rank_order(order))
    volumes = Traffic(1.0, (), (0.0,) * 4, tied=tied, stages=(gradient,) * 4)
    return NetworkStep(
        timetable,
        Costs(),
        Network(hosts, FREE, between, ports),
        volumes,
        1.0,
        eager_reductions(simulate(timetable)),
    ).time(layout)


def test_messages_take_the_time_of_their_link() -> None:
    timetable = get_schedule("1f1b").timetable(4, 8)
    # Devices 0 and 1 are on one host, 2 and 3 on the other.
    expected = simulate(timetable, Costs(links={(1, 2): 0.5, (2, 1): 0.5})).makespan
    step = on_hosts(Hosts((4, 4)), Link(1e14, 0.5), 0.0, "tp-dp-pp")
    assert step.step_s == pytest.approx(expected)


def test_a_tie_starts_after_the_last_op_of_both_devices() -> None:
    between, gradient = Link(1.0, 0.0), 0.0
    step = on_hosts(Hosts((2,) * 4), between, gradient, "tp-dp-pp", tied=4.0)
    ties = [{op.name: (start, end) for op, start, end in row} for row in step.drawn.collectives]
    last_op = max(step.drawn.spans[device][-1][2] for device in (0, 3))
    assert ties[0]["tie"] == ties[3]["tie"] == pytest.approx((last_op, last_op + 4.0))
    assert ties[0]["reduce"][0] == ties[0]["tie"][1] and "tie" not in ties[1]
    assert step.step_s == pytest.approx(step.drawn.end)


@pytest.mark.parametrize("ports", [RANK_PORTS, HOST_PORTS])
def test_long_messages_share_ports_with_each_other_and_with_collectives(ports: str) -> None:
    """Two pipeline groups: on hosts of one rank, or with the same devices of both groups on a host."""
    timetable, links = get_schedule("bitpipe").timetable(4, 8), Link(1.0, 0.0)
    hosts, order = (Hosts((1,) * 8), "tp-pp-dp") if ports == RANK_PORTS else (Hosts((2,) * 4), "tp-dp-pp")
    layout = ParallelLayout(timetable.placement, 1, 2, parse_rank_order(order))
    volumes = Traffic(0.875, (), (1.0,) * 4, zero_stage=1, overlaps=True, stages=(1.0,) * 8)
    reductions = eager_reductions(simulate(timetable))
    network = Network(hosts, FREE, links, ports)
    alone, beside = (
        NetworkStep(timetable, Costs(), network, sizes, 1.0, reductions).time(layout)
        for sizes in (replace(volumes, stages=(0.0,) * 8), volumes)
    )
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    costs = Costs(links=dict.fromkeys(pairs, 0.875))
    users = 1 if ports == RANK_PORTS else 2
    shared = Ports({(a, b): (0.0, (a, ~b), users) for a, b in pairs}, {})
    last_group = 0.875 * (users - 1)
    assert alone.makespan_s == pytest.approx(simulate(timetable, costs, ports=shared).makespan + last_group)
    assert simulate(timetable, costs).makespan < alone.makespan_s < beside.makespan_s


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "bitpipe", "bitpipe_zb"])
@pytest.mark.parametrize(
    ("network", "overlaps"), [(NCCL, False), (NCCL, True), (GLOO, False), ("host", True)]
)
def test_collectives_are_drawn_where_they_run(schedule: str, network: str, overlaps: bool) -> None:
    """Every stage of a device is reduced and gathered once, and the last collective or op ends with the step."""
    timetable = get_schedule(schedule).timetable(4, 8)
    placement = timetable.placement
    volumes = Traffic(
        1.0,
        (),
        (2.0,) * 4,
        zero_stage=1,
        overlaps=overlaps,
        stages=(8 / placement.stages,) * placement.stages,
    )
    layout = ParallelLayout(placement, 1, 2, parse_rank_order("tp-pp-dp"))
    backend, ports = (GLOO, HOST_PORTS) if network == "host" else (network, RANK_PORTS)
    hosts = (8,) if network == GLOO else (4, 4)
    links = Network(Hosts(hosts), Link(1.0, 0.0), Link(1.0, 0.0), ports, backend)
    step = NetworkStep(timetable, Costs(), links, volumes, 1.0, eager_reductions(simulate(timetable))).time(
        layout
    )
    drawn = step.drawn
    assert drawn.end == pytest.approx(step.step_s)
    for device, row in enumerate(drawn.collectives):
        stages = sorted({chunk.stage for chunk in placement.chunks[device]})
        gathers = [f"gather@{stage}" for stage in stages] if overlaps else ["gather"]
        assert sorted(op.name for op, _, _ in row) == sorted(
            [*gathers, *(f"reduce@{stage}" for stage in stages)]
        )
        times = {op.name: (start, end) for op, start, end in row}
        starts: dict[int, float] = {}
        for op, start, _ in drawn.spans[device]:
            starts.setdefault(op.stage, start)
        if overlaps:
            assert all(starts[stage] >= times[f"gather@{stage}"][1] - 1e-9 for stage in stages)
        for stage in stages:
            last = max(end for op, _, end in drawn.spans[device] if op.stage == stage)
            reduction, _ = times[f"reduce@{stage}"]
            assert reduction >= last - 1e-9
            assert network != GLOO or reduction >= step.makespan_s


@pytest.mark.parametrize(
    ("schedule", "gathered", "reduced"),
    [("1f1b", 1.0, (2.0, 1.0)), ("interleaved", 0.5, (1.0, 0.5)), ("zb_v", 0.5, (1.5, 0.5))],
)
def test_only_the_gather_of_the_first_stage_delays_the_next_step(
    schedule: str, gathered: float, reduced: tuple[float, float]
) -> None:
    """Two halves of a device's weights: the second is gathered while the first stage computes."""
    timetable = get_schedule(schedule).timetable(4, 8)
    stages = timetable.placement.stages
    volumes = Traffic(1.0, (), (2.0,) * 4, zero_stage=1, stages=(8 / stages,) * stages)
    layout = ParallelLayout(timetable.placement, 1, 2, parse_rank_order("tp-pp-dp"))
    network = Network(Hosts((4, 4)), FREE, Link(1.0, 0.0), RANK_PORTS)
    reductions = eager_reductions(simulate(timetable))
    alone, beside = (
        NetworkStep(timetable, Costs(), network, replace(volumes, overlaps=overlaps), 1.0, reductions).time(
            layout
        )
        for overlaps in (False, True)
    )
    assert (alone.gather_s, beside.gather_s) == (pytest.approx(1.0), pytest.approx(gathered))
    assert (alone.reductions_s, beside.reductions_s) == pytest.approx(
        reduced
    )  # a reduce-scatter is half of it
    assert beside.step_s == pytest.approx(beside.makespan_s + reduced[1] + gathered)


def test_only_the_last_reduction_is_exposed() -> None:
    # 2 ranks, 1 byte: a ring takes 1 s; the reductions of other devices end before the last op of device 0.
    step = on_hosts(Hosts((4, 4)), Link(1.0, 0.0), 1.0, "tp-pp-dp")
    assert step.reductions_s == pytest.approx(1.0)


@pytest.mark.parametrize(("slots", "exposed"), [((4,), 2.0), ((2, 2), 1.0)])
def test_reductions_need_the_processors_of_a_host(slots: tuple[int, ...], exposed: float) -> None:
    """With gloo: the first of two reductions of a device overlaps with its ops only between hosts."""
    timetable = get_schedule("interleaved").timetable(2, 4)
    layout = ParallelLayout(timetable.placement, 1, 2, parse_rank_order("tp-pp-dp"))
    network = Network(Hosts(slots), Link(1.0, 0.0), Link(1.0, 0.0), RANK_PORTS, GLOO)
    volumes = Traffic(0.0, (), (0.0,) * 2, stages=(1.0,) * 4)
    reductions = eager_reductions(simulate(timetable))
    step = NetworkStep(timetable, Costs(2.0, 2.0, 2.0), network, volumes, 1.0, reductions).time(layout)
    assert step.reductions_s == pytest.approx(exposed)


def test_reductions_share_the_port_of_a_host() -> None:
    # Device d starts 2 s before device d - 1 and transfers for 4 s.
    alone = on_hosts(Hosts((4, 4)), Link(1.0, 0.0), 4.0, "tp-pp-dp")
    shared = on_hosts(Hosts((4, 4)), Link(1.0, 0.0), 4.0, "tp-pp-dp", HOST_PORTS)
    assert alone.reductions_s == pytest.approx(4.0)
    # 16 s of transfers through one port begin 6 s before the last op ends.
    assert shared.reductions_s == pytest.approx(10.0)


@pytest.mark.parametrize("slots", [(3, 3, 2), (8,), (4, 4)])
def test_the_slowest_tensor_parallel_group_counts(slots: tuple[int, ...]) -> None:
    """With 3 slots per host, ranks 2 and 3 are one group on two hosts."""
    sizes = TrainingSizes(8, 64, 4, 32, 512, stage_layers=(2,) * 4, tensor_parallel=2)
    network = Network(Hosts(slots), Link(1e12, 0.0), Link(1e6, 0.0))
    costs = on_devices(Costs(), sizes, network, 4, 1.0)
    one = Network(Hosts((1, 1)), Link(1e12, 0.0), Link(1e6, 0.0)).all_reduce_time(2 * 32 * 64, range(2))
    assert (costs.forward - 1 > 2 * one) is (3 in slots)


# arXiv 2205.05198, table 5: seconds of a step on A100 GPUs with full recomputation, and with selective recomputation
# and sequence parallelism. TP 8; name, D, N, micro-batch, chunks.
PUBLISHED = {
    ("gpt-22b", 1, 1, 4, 1): (1.42, 1.10),
    ("gpt-175b", 8, 64, 1, 3): (18.13, 13.75),
    ("gpt-530b", 35, 280, 1, 3): (49.05, 37.83),
    ("gpt-1t", 64, 512, 1, 1): (94.42, 71.49),
}


@pytest.mark.parametrize("job", select([*PUBLISHED], [*PUBLISHED][:2]), ids=lambda job: job[0])
def test_published_step_times(
    job: tuple[str, int, int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Matrix products at 215 TFLOP/s and memory at 1.6 TB/s, 70% and 80% of the A100's peaks, for all models."""
    name, devices, micro_batches, micro_batch, chunks = job
    schedule = "1f1b" if chunks == 1 else f"interleaved --option chunks={chunks}"
    words = (
        f"simulate {schedule} --num-devices {devices} --micro-batches {micro_batches} --model {name} --json "
        f"--micro-batch-size {micro_batch} --tensor-parallel 8 --attention-scores --hosts {devices}x8 --tflops 215 "
        f"--memory-bandwidth 1.6TB"
    )
    recomputations = "--recompute full", "--recompute selective --sequence-parallel"
    for flags, seconds in zip(recomputations, PUBLISHED[job], strict=True):
        assert main([*words.split(), *flags.split()]) == 0
        assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(seconds, rel=0.1)


A100 = "--tflops 218 --memory-bandwidth 1.6TB"  # 70% and 80% of the peaks
H100 = "--tflops 692 --memory-bandwidth 2.68TB --inside 450GB,2us --between 50GB,10us"
BLOOM = (
    f"1f1b --num-devices 12 --micro-batch-size 2 --num-layers 70 --hidden-size 14336 --seq-length 2048 --rope "
    f"--vocab-size 250880 --attention-scores --recompute full --hosts 48x8 --ports host --between 50GB,10us {A100}"
)
ZERO_BUBBLE = f"--seq-length 1024 --vocab-size 50257 --attention-scores {A100}"
GPT_530B = f"interleaved --option chunks=3 --num-devices 35 --model gpt-530b --attention-scores {A100}"
GPT_3 = (
    f"interleaved --num-devices 8 --micro-batches 64 --model gpt-175b --tensor-parallel 4 --data-parallel 4 "
    f"--sequence-parallel --hosts 16x8 {H100}"
)
# Runs that others published, in docs/clusters.md: name -> words of ``simulate``, predicted and published seconds of a
# step, predicted and published gigabytes of the largest device (None: not compared). The page has the sources.
RUNS: dict[str, tuple[str, tuple[float, float], tuple[float, float] | None]] = {
    "bloom-tp4": (
        f"{BLOOM} --micro-batches 128 --num-attention-heads 112 --tensor-parallel 4 --data-parallel 8",
        (95.3, 104.5),
        (55.8, 59),
    ),
    "bloom-tp8": (
        f"{BLOOM} --micro-batches 256 --num-attention-heads 64 --tensor-parallel 8 --data-parallel 4",
        (102.3, 121.63),
        (36, 40),
    ),
    "zero-bubble-6.2b": (
        f"1f1b --num-devices 8 --micro-batches 64 --micro-batch-size 3 --num-layers 30 --hidden-size 4096 "
        f"--num-attention-heads 32 --hosts 1x8 {ZERO_BUBBLE}",
        (5.85, 5.96),
        (42.5, 39),
    ),
    "zero-bubble-28.3b": (
        f"zb_h1 --num-devices 32 --micro-batches 256 --num-layers 62 --hidden-size 6144 --num-attention-heads 48 "
        f"--hosts 4x8 {ZERO_BUBBLE}",
        (7.87, 8.33),
        (47.5, 44),
    ),
    "530b-dp2": (
        f"{GPT_530B} --micro-batches 1120 --tensor-parallel 8 --data-parallel 2 --recompute full --hosts 70x8",
        (196.8, 206.2),
        None,
    ),
    "530b-dp8": (
        f"{GPT_530B} --micro-batches 280 --tensor-parallel 8 --data-parallel 8 --recompute selective "
        f"--sequence-parallel --hosts 280x8",
        (38.45, 39.15),
        None,
    ),
    "gpt3-24.11": (f"{GPT_3} --option chunks=12", (7.76, 8.91), None),
    "gpt3-25.02": (f"{GPT_3} --option chunks=6", (7.83, 8.309), None),
    "nemotron-4": (
        f"interleaved --option chunks=12 --num-devices 8 --micro-batches 16 --num-layers 96 --hidden-size 18432 "
        f"--num-attention-heads 96 --num-query-groups 8 --seq-length 4096 --vocab-size 256000 --rope "
        f"--untie-embeddings-and-output-weights --hidden-dropout 0 --tensor-parallel 8 --data-parallel 4 "
        f"--sequence-parallel --recompute selective --hosts 32x8 {H100}",
        (4.58, 4.67),
        None,
    ),
}


@pytest.mark.parametrize("run", select([*RUNS], [run for run in RUNS if run != "530b-dp2"]))
def test_predictions_in_the_docs(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page prints the prediction, within 1%, and its difference from the published value."""
    page = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text()
    words, seconds, gigabytes = RUNS[run]
    assert main(["simulate", *words.split(), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    largest = max(device["total"] for device in printed["memory"]) / 1e9
    for value, pair, unit in ((printed["step_s"], seconds, "s"), (largest, gigabytes, "GB")):
        if pair is not None:
            predicted, published = pair
            assert value == pytest.approx(predicted, rel=0.01)
            difference = predicted / published - 1
            assert f"{predicted:g} {unit}, {published:g} {unit} ({difference:+.1%})" in page


# Models of BitPipe (arXiv 2410.19367), as flags; and the table of docs/clusters.md: (model, hosts) -> cells.
PAPER = {
    "BERT": "--micro-batches 8 --num-layers 64 --hidden-size 2560 --num-attention-heads 64 --seq-length 512 "
    "--micro-batch-size 4 --vocab-size 28996",
    "GPT": "--micro-batches 16 --num-layers 96 --hidden-size 3072 --num-attention-heads 32 --seq-length 1024 "
    "--vocab-size 50257",
}
ORDERS = "tp-dp-pp", "tp-pp-dp", "tp-mirror-pp-dp"
RIVALS = "1f1b", "interleaved", "chimera"


def rows_of_paper() -> dict[tuple[str, str], list[str]]:
    page = (Path(__file__).parents[3] / "docs/clusters.md").read_text()
    table = page.split("### BitPipe's figures")[1].split("| --- |", 1)[1].split("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {(row[0], row[1]): row[3:] for row in cells}


def paper_step_s(
    capsys: pytest.CaptureFixture[str], model: str, hosts: str, schedule: str, flag: str
) -> float:
    words = (
        f"simulate {schedule} --json --num-devices 8 {PAPER[model]} --precision fp16 --hosts {hosts} {flag}"
    )
    steps = []
    for order in ORDERS:
        status = main([*words.split(), "--data-parallel", hosts[0], "--rank-order", order])
        printed = capsys.readouterr().out
        if status == 0:  # schedules without mirrors refuse one order
            steps.append(json.loads(printed)["step_s"])
    return min(steps)


@pytest.mark.parametrize("row", select([*rows_of_paper()], [("GPT", "2x8")]), ids="-".join)
def test_bitpipe_is_faster_than_its_rivals(
    row: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_MAX_OPS", 50_000)
    *cells, gain, alone = rows_of_paper()[row]
    names = "1f1b", "interleaved", "chimera", "zb_v", "bitpipe", "bitpipe_zb"
    steps = {name: paper_step_s(capsys, *row, name, "--overlap-across-steps") for name in names}
    assert cells == [f"{seconds:.3f}" for seconds in steps.values()]
    assert float(gain) == pytest.approx(min(steps[name] for name in RIVALS) / steps["bitpipe"], abs=0.006)
    waiting = {name: paper_step_s(capsys, *row, name, "") for name in (*RIVALS, "bitpipe")}
    assert float(alone) == pytest.approx(
        min(waiting[name] for name in RIVALS) / waiting["bitpipe"], abs=0.006
    )


def test_element_wise_ops() -> None:
    """A kept byte is moved twice in a forward and three times in a backward; with full recomputation twice more."""
    sizes = TrainingSizes(4, 64, 4, 32, 512, hidden_dropout=0.0, stage_layers=(1,) * 4)
    network = replace(Network(Hosts((4,)), Link(1e9, 0.0), Link(1e9, 0.0)), memory_bandwidth=1e6)
    kept, least = (layer_activations(sizes, kind).kept for kind in ("none", "full"))
    plain, full = (
        on_devices(Costs(), replace(sizes, recompute=kind), network, 4, 1.0) for kind in ("none", "full")
    )
    unit = (4 + sizes.head_work()) / 4 / 1e6
    assert plain.forward - 1 == full.forward - 1 == pytest.approx(2 * kept * unit)
    assert plain.backward_input - 1 == pytest.approx(3 * kept * unit)
    assert full.backward_input - plain.backward_input == pytest.approx(2 * (kept - least) * unit)


def test_tied_weight_is_reduced_after_the_last_op() -> None:
    step = on_hosts(Hosts((4, 4)), Link(1.0, 0.0), 0.0, "tp-pp-dp", tied=2.0)
    assert step.reductions_s == pytest.approx(2.0)


def test_simulate_prints_the_step_of_1024_devices_within_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.process_time()
    words = "simulate bitpipe --num-devices 16 --micro-batches 64 --hosts 128x8 --model gpt-175b"
    assert main([*words.split(), "--tensor-parallel", "8", "--zero", "1", "--json"]) == 0
    assert time.process_time() - start < 20
    printed = json.loads(capsys.readouterr().out)
    assert printed["data_parallel_size"] == 8
    parts = printed["makespan_s"] + printed["exposed_reduction_s"] + printed["gather_s"]
    assert printed["step_s"] == pytest.approx(parts)
    assert printed["bytes_between_hosts"] > 0


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--between 1GB,1us", "--between"),
        ("--tflops 300", "--tflops"),
        ("--rank-order tp-dp-pp", "--rank-order"),
        ("--hosts 2x4", "--hosts"),
        ("--hosts 2x4 --model gpt-10b --costs f=1,comm=1", "--costs"),
        ("--hosts 3x1 --model gpt-10b", "--hosts"),
        ("--hosts 2x4 --model gpt-10b --between 200Gb,10us", "--between"),
        ("--hosts 2x4 --model gpt-10b --inside=", "--inside"),
        ("--hosts 2x4 --model gpt-10b --inside=25GB,1.5.2us", "--inside"),
        ("--hosts 2x4 --model gpt-10b --tflops inf", "--tflops"),
        ("--hosts 2x4 --model gpt-10b --tflops 1e300", "--tflops"),
    ],
)
def test_simulate_refuses_flags_that_do_not_fit(
    words: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "1f1b", "--num-devices", "4", "--micro-batches", "8", *words.split()]) == 2
    printed = capsys.readouterr().err
    assert f"{flag}: " in printed and printed.count("\n") == 1


def test_a_rate_in_bits_is_refused_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate 1f1b --num-devices 4 --micro-batches 8 --hosts 2x4 --model gpt-10b --between 200Gb,10us"
    assert main(words.split()) == 2
    assert "bits" in capsys.readouterr().err


def test_simulate_refuses_forward_ranks_on_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate fbd --num-devices 4 --micro-batches 8 --hosts 2x2 --model gpt-10b"
    assert main(words.split()) == 2
    assert "got fbd" in capsys.readouterr().err


def test_plan_chooses_a_rank_order(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --devices 8 --memory 80GB --global-batch-size 16 --model gpt-6.7b --tensor-parallel 1"
    assert main([*words.split(), "--hosts", "2x4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    order = printed["best"][0]["rank_order"]
    assert printed["config"]["ds_ext"]["rank_order"] == order
    assert str(parse_rank_order(order)) == order
