"""Step times on hosts: messages by link, reductions after their last backward, shared ports, rank orders."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from ds_ext.__main__ import main
from ds_ext.parallel.crossing import Traffic
from ds_ext.parallel.hosts import Hosts
from ds_ext.parallel.layout import ParallelLayout
from ds_ext.parallel.network import HOST_PORTS, RANK_PORTS, Link, Network
from ds_ext.parallel.rank_order import parse_rank_order
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.reductions import eager_reductions
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.activations import layer_activations
from ds_ext.planner.step_time import StepTime, on_devices, step_time
from ds_ext.planner.training_sizes import TrainingSizes
from tests.selection import select

FREE = Link(1e14, 0.0)


def on_hosts(
    hosts: Hosts, between: Link, gradient: float, order: str, ports: str = RANK_PORTS, tied: float = 0.0
) -> StepTime:
    timetable = get_schedule("1f1b").timetable(4, 8)
    layout = ParallelLayout(timetable.placement, 1, 2, parse_rank_order(order))
    volumes = Traffic(1.0, (), (0.0,) * 4, tied=tied, stages=(gradient,) * 4)
    return step_time(
        timetable,
        Costs(),
        layout,
        Network(hosts, FREE, between, ports),
        volumes,
        1.0,
        eager_reductions(simulate(timetable)),
    )


def test_messages_take_the_time_of_their_link() -> None:
    timetable = get_schedule("1f1b").timetable(4, 8)
    # Devices 0 and 1 are on one host, 2 and 3 on the other.
    expected = simulate(timetable, Costs(links={(1, 2): 0.5, (2, 1): 0.5})).makespan
    step = on_hosts(Hosts((4, 4)), Link(1e14, 0.5), 0.0, "tp-dp-pp")
    assert step.step_s == pytest.approx(expected)


def test_only_the_last_reduction_is_exposed() -> None:
    # 2 ranks, 1 byte: a ring takes 1 s; the reductions of other devices end before the last op of device 0.
    step = on_hosts(Hosts((4, 4)), Link(1.0, 0.0), 1.0, "tp-pp-dp")
    assert step.reductions_s == pytest.approx(1.0)


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
