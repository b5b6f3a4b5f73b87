"""``bench schedules``, ``engine`` and ``training`` as a user runs them, and emulated layers."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import rivals, schedules, training, transport
from benchmarks.command import costs_on, options_for
from benchmarks.emulated import WIDTH, EmulatedDevice, EmulatedGpu, EmulatedLayer, make_batches, rows_of
from benchmarks.ranks import Run, take_turns
from benchmarks.schedules import Result, as_json, as_table
from benchmarks.torch_rivals import TORCH_SCHEDULES
from ds_ext.__main__ import main
from ds_ext.gpus import peak_tflops
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.tensor_parallel import WeightGradients, deferrable, deferring, let_defer
from tests.selection import extensive, select

ROOT = Path(__file__).parents[2]
SIZES = ["--stages", "2", "--micro-batches", "4", "--forward-ms", "5"]


def bench(*flags: str) -> list[str]:
    return [sys.executable, "-m", "ds_ext", "bench", "schedules", *SIZES, *flags]


def call(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(bench(*flags), cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_measures_ours_and_deepspeed() -> None:
    done = call("--schedules", "1f1b,bitpipe_zb", "--rivals", "deepspeed_1f1b", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert [item["name"] for item in found] == ["1f1b", "deepspeed_1f1b", "bitpipe_zb"]
    for item in found:
        assert set(item) == {"name", "params", "median", "best", "unit", "repeats"}
        assert (item["unit"], item["repeats"]) == ("ms", 2)
        assert item["params"]["ideal"] == 60.0
        assert all(map(math.isfinite, item["params"]["losses"]))
        # The simulation is a lower bound. The upper bound finds a wrong unit; a busy core may take 50 times as long.
        assert 0.95 < item["best"] / item["params"]["simulated"] < 500
        assert item["best"] <= item["median"]
    assert [item["params"]["simulated"] for item in found] == [75.0, 75.0, 60.0]
    assert found[0]["params"]["machine"]["cores"] == os.cpu_count()
    # The same layers, samples and optimizer: what differs is only who runs them.
    assert found[0]["params"]["losses"] == pytest.approx(found[1]["params"]["losses"], rel=1e-5)
    assert found[0]["params"]["losses"][2] < found[0]["params"]["losses"][0]


def test_slices_of_sequences_over_slow_links() -> None:
    done = call(
        "--schedules", "zb_v,1f1b", "--sequence-slices", "1,2", "--link-ms", "2", "--steps", "2", "--json"
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert [item["name"] for item in found] == ["zb_v", "zb_v in 2 slices", "1f1b", "1f1b in 2 slices"]
    costs = Costs(5.0, 5.0, 5.0, comm=2.0)
    for item, slices in zip(found, (1, 2, 1, 2), strict=True):
        params = item["params"]
        assert (params["sequence_slices"], params["ideal"]) == (slices, 60.0)
        timetable = get_schedule(item["name"].split()[0]).timetable(2, 4, {}, Costs(5.0, 5.0, 5.0), slices)
        assert params["simulated"] == pytest.approx(simulate(timetable, costs).makespan)
        assert 0.95 < item["best"] / params["simulated"] < 500
    for whole, sliced in (found[:2], found[2:]):
        assert sliced["params"]["losses"] == pytest.approx(whole["params"]["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("parts", "slices"), [(True, 1), (True, 2), (False, 1)], ids=["parts", "parts in slices", "last stage"]
)
def test_a_head(parts: bool, slices: int) -> None:
    names, flags = ["1f1b", "bitpipe_zb"], ["--head", "0.5", *["--vocabulary-parallel-head"] * parts]
    sizes = ["--jitter", "0.3", "--link-ms", "2", "--steps", "2", "--sequence-slices", str(slices)]
    done = call("--schedules", ",".join(names), *flags, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert [item["name"].partition(" in ")[0] for item in found] == names
    for name, item in zip(names, found, strict=True):
        params, method = item["params"], get_schedule(name).dividing_head(parts)
        assert (params["head"], params["vocabulary_parallel_head"], item["repeats"]) == (0.5, parts, 2)
        assert params["sequence_slices"] == slices
        stages = method.placement(2).stages
        head = Costs(head=0.5) if parts else Costs(stages=(*(1.0,) * (stages - 1), 1 + 0.5 * stages / 2))
        costs = replace(head, forward=5.0, backward_input=5.0, backward_weight=5.0)
        timetable = method.timetable(2, 4, {}, costs, slices)
        steps = [simulate(timetable, replace(costs, comm=2.0, jitter=0.3, seed=seed)) for seed in (1, 2)]
        assert params["simulated"] == pytest.approx(statistics.median(step.makespan for step in steps))
        assert params["ideal"] == pytest.approx(steps[-1].ideal)
        assert 0.95 < item["best"] / params["simulated"] < 500
        assert params["losses"][2] < params["losses"][0]


@extensive
def test_what_an_instruction_costs() -> None:
    flags = ["--micro-batches", "4", "--schedules", "bitpipe_zb", "--transports", "auto,torch"]
    command = [sys.executable, "-m", "ds_ext", "bench", "engine", *flags, "--repeats", "2", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert [item["name"] for item in found] == ["bitpipe_zb", "bitpipe_zb over torch", "deepspeed_1f1b"]
    program = lower(get_schedule("bitpipe_zb").timetable(2, 4)).instructions[0]
    assert found[0]["params"]["instructions"] == len(program)
    assert found[0]["params"]["messages"] == sum(one.peer is not None for one in program)
    for item in found:
        assert (item["unit"], item["repeats"]) == ("us per instruction", 2)
        # Nothing in Python takes less than a microsecond; a loaded machine does not count, as this is CPU time.
        assert 1 < item["best"] <= item["median"] < 5_000
        assert 1 < item["params"]["us_per_message"] < 50_000


@extensive
def test_recoveries_from_memory_and_from_disk() -> None:
    """From memory no step is lost; from disk those since the last of the saves at every other step."""
    sizes = ["--num-devices", "2", "--micro-batches", "2", "--forward-ms", "2", "--save-interval", "2"]
    command = [
        sys.executable,
        "-m",
        "ds_ext",
        "bench",
        "recovery",
        *sizes,
        "--steps",
        "1",
        "--kills",
        "1",
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = {item["name"]: item for item in json.loads(done.stdout)}
    assert list(found) == ["plain", "snapshot", "audit", "host memory", "checkpoint on disk"]
    assert {name: item["unit"] for name, item in found.items()} == {
        **dict.fromkeys(("plain", "snapshot", "audit"), "ms"),
        **dict.fromkeys(("host memory", "checkpoint on disk"), "s"),
    }
    assert found["plain"]["median"] > 8 and found["plain"]["params"]["cost_median"] == 0
    for name, lost in (("host memory", 0), ("checkpoint on disk", 1)):
        parts = found[name]["params"]["parts_s"]
        assert len(parts) == 5 and sum(parts.values()) == pytest.approx(found[name]["median"])
        assert found[name]["params"]["lost_steps"] == lost


def test_one_device_sends_no_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--stages", "1"]) == 2
    assert "--num-devices" in capsys.readouterr().err


@extensive
def test_tokens_a_second() -> None:
    flags = ["--micro-batches", "2", "--schedules", "1f1b", "--steps", "1", "--peak-tflops", "0.5", "--json"]
    command = [sys.executable, "-m", "ds_ext", "bench", "training", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    ours, rival = json.loads(done.stdout)
    assert (ours["name"], rival["name"]) == ("1f1b", "deepspeed_1f1b")
    assert (ours["unit"], ours["repeats"], rival["params"]["ratio"]) == ("tokens/s", 1, 1.0)
    assert ours["params"]["ratio"] == pytest.approx(ours["median"] / rival["median"])
    assert 1 < rival["median"] == rival["best"] < 1e7
    # Eight layers of 12 h^2 + 2 s h multiplications and a head of h * vocabulary, two FLOPs each, three times.
    flops = 6 * (8 * (12 * 256**2 + 2 * 128 * 256) + 256 * 2048)
    for item in (ours, rival):
        assert item["params"]["model_flops_per_s"] == pytest.approx(item["median"] * flops)
        assert item["params"]["mfu"] == pytest.approx(item["median"] * flops / 0.5e12)
        # A CPU has no statistics of its memory; weights, gradients and Adam's states take 16 bytes per parameter.
        assert item["params"]["max_memory_bytes"] is None
        assert item["params"]["simulated_memory_bytes"] > 16 * 4 * 12 * 256**2


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("GPU", None),
    ],
)
def test_peak_of_a_device(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["training", "schedules", "transport"])
def test_a_gpu_is_required_for_cuda(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--device", "cuda"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "--device" in printed.err and printed.err.count("\n") == 1


@extensive
def test_torch_trains_the_same_gpt() -> None:
    sizes = ["--micro-batches", "4", "--num-layers", "4", "--hidden-size", "128", "--seq-length", "32"]
    flags = [*sizes, "--rivals", "torch_1f1b,torch_zbv", "--steps", "8", "--json"]
    command = [sys.executable, "-m", "ds_ext", "bench", "training", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert [item["name"] for item in found] == ["1f1b", "torch_1f1b", "torch_zbv"]
    losses = [item["params"]["losses"] for item in found]
    assert losses[0][2] < losses[0][0] and len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert all(item["repeats"] == 8 and item["params"]["ratio"] is None for item in found)


def test_an_engine_with_other_losses_failed() -> None:
    def run(*losses: float) -> Run:
        return Run(rounds=[[(0.0, 1.0, None, None), (0.0, 1.0, None, loss)] for loss in losses])

    runs = {
        "1f1b": run(7.0, 6.0),
        "same": run(7.0001, 6.0),
        "other": run(7.0, 6.1),
        "nan": run(7.0, math.nan),
    }
    training._compare_losses(runs, 1e-4)
    assert [name for name, one in runs.items() if one.error is not None] == ["other", "nan"]


def test_a_gpu_is_occupied_for_the_times_of_its_passes() -> None:
    queued: list[float] = []
    placement = get_schedule("1f1b").placement(2)
    costs = Costs(forward=3000.0, backward_input=5000.0, backward_weight=7000.0)
    device = EmulatedGpu(costs, placement, queued.append, lambda: queued.append(math.inf))
    start = time.perf_counter()
    EmulatedLayer(0, device)(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    device.finish()
    assert queued == [3000.0, 5000.0, 7000.0, math.inf] and device.computed_ms == 15000.0
    assert start < device.last_end < start + 3.0  # the host waits for no pass


def test_methods_of_a_gpu_run_on_cpu_ranks() -> None:
    assert transport._methods("cuda", 1) == ("ipc", "staged", "memcpy")
    methods = transport._methods("cuda", 2)
    assert methods == ("ipc", "staged", "torch", "memcpy")
    sizes = (4, 1 << 20)
    job = transport.ExchangeJob(transport.build, 2, 60.0, sizes=sizes, methods=methods)
    answers = take_turns(["transport"], job, 1)["transport"].rounds[0]
    times = answers[0]
    assert set(times) == {(name, size) for name in methods for size in sizes} | {("ready", 0)}
    assert all(min(seconds) > 0 for seconds in times.values())
    # Without CUDA IPC, ipc has no figures.
    del times["ipc", 4]
    first, *_ = (line.split() for line in transport._text(times, sizes, methods).splitlines()[1:])
    assert first[:2] == ["ipc", "-"]


@extensive
def test_a_rival_that_cannot_run_is_shown_as_failed() -> None:
    # DeepSpeed's DualPipeV needs twice as many micro-batches as devices; with three it refuses.
    sizes = ["--micro-batches", "3", "--steps", "1"]
    done = call(*sizes, "--schedules", "1f1b", "--rivals", "deepspeed_dualpipev", "--json")
    assert done.returncode == 0, done.stderr
    ours, rival = json.loads(done.stdout)
    assert (ours["name"], ours["repeats"]) == ("1f1b", 1)
    assert (rival["name"], rival["repeats"], rival["best"]) == ("deepspeed_dualpipev", 0, None)
    assert "error" not in ours["params"] and "got 3" in rival["params"]["error"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--stages", "1"], ["--num-devices", "1"]),
        (["--schedules", "bitpip"], ["bitpip", "bitpipe"]),
        (["--schedules", "bitpipe", "--micro-batches", "5"], ["bitpipe", "5"]),
        (["--schedules", "bitpipe_zb", "--micro-batches", "5"], ["--micro-batches", "5", "4", "6"]),
        (["--schedules", "bitpipe:greedy"], ["bitpipe:greedy"]),
        (["--schedules", "fbd"], ["fbd", "python -m ds_ext bench fbd"]),
        (["--rivals", "megatron"], ["--rivals", "megatron", *schedules.RIVALS]),
        (["--schedules", "none", "--rivals", "none"], ["--schedules", "--rivals"]),
        (["--jitter", "2"], ["jitter", "2"]),
        (["--message-kb", "0"], ["--message-kb", "0"]),
        (["--sequence-slices", "1,0"], ["--sequence-slices", "1,0"]),
        (["--sequence-slices", "none"], ["--sequence-slices", "none"]),
        (["--schedules", "chimera", "--sequence-slices", "2"], ["chimera", "2", "1f1b"]),
        (["--link-ms", "1", "--rivals", "torch_zbv"], ["--link-ms", "--rivals"]),
        (["--head", "-1"], ["head", "-1"]),
        (["--vocabulary-parallel-head"], ["--vocabulary-parallel-head", "--head"]),
        (["--link-ms", "1", "--device", "cuda"], ["--link-ms", "--device"]),
    ],
)
def test_a_wrong_request_is_one_error(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "schedules", *SIZES, *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert all(word in printed.err for word in words)


@pytest.mark.parametrize("number", select([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], [signal.SIGKILL]))
def test_no_rank_outlives_the_benchmark(number: signal.Signals, folder: Path) -> None:
    # When the second engine starts, the first one's ranks are stopped.
    process = start_endless(folder, "1f1b", "gpipe")
    try:
        process.send_signal(number)
        process.communicate(timeout=900)
        # Python's resource tracker and the server end by themselves, a moment later.
        wait_until(lambda: not session_of(process.pid))
    finally:
        kill_session(process)
    assert number == signal.SIGKILL or not list(folder.glob("ds_ext_rank_*"))


@extensive
def test_a_rank_of_ours_that_dies_is_a_failure(folder: Path) -> None:
    process = start_endless(folder, "1f1b")
    try:
        os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
        said, _ = process.communicate(timeout=900)
    finally:
        kill_session(process)
    assert process.returncode == 1
    (failed,) = re.findall(r"1f1b .*: rank (\d):", said)
    assert int(failed) in range(2)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder for temporary files with a short path, because sockets are among them."""
    with tempfile.TemporaryDirectory(prefix="b") as path:
        yield Path(path)


def start_endless(folder: Path, *engines: str) -> subprocess.Popen[str]:
    """Return a benchmark that has started the two ranks of each engine."""
    process = subprocess.Popen(
        bench("--schedules", ",".join(engines), "--rivals", "none", "--steps", "100000"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder)},
        # As from a terminal, also when the tests themselves run in the background, where SIGINT is ignored.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: process.poll() is not None or len(ranks_of(process.pid)) == 2 * len(engines))
    assert process.poll() is None, process.communicate()[0]
    return process


def kill_session(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def ranks_of(leader: int) -> list[int]:
    """Return the ranks: the benchmark starts a server, and that forks them."""
    return [process for process in session_of(leader) if parent_of(parent_of(process)) == leader]


def parent_of(process: int) -> int:
    """Return the parent of a process; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def session_of(leader: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == leader and state not in "ZX":
                    found.append(int(folder.name))
    return found


def wait_until(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the limit has passed"
        time.sleep(0.2)


def one_layer() -> tuple[EmulatedLayer, EmulatedDevice]:
    placement = get_schedule("1f1b").placement(2)
    device = EmulatedDevice(Costs(forward=3.0, backward_input=5.0, backward_weight=7.0), placement)
    return EmulatedLayer(0, device), device


def test_a_layer_takes_its_times_in_a_whole_backward() -> None:
    layer, device = one_layer()
    start = time.perf_counter()
    y = layer(torch.randn(2, WIDTH, requires_grad=True))
    assert device.computed_ms == 3.0
    assert time.perf_counter() - start >= 0.003
    y.sum().backward()
    assert device.computed_ms == 15.0
    assert time.perf_counter() - start >= 0.015


def test_a_layer_leaves_its_weight_gradient_and_its_time_for_later() -> None:
    layer, device = one_layer()
    let_defer(layer)
    x, later = torch.randn(2, WIDTH, requires_grad=True), WeightGradients()
    with deferrable():
        y = layer(x)
    with deferring(later):
        y.sum().backward()
    assert x.grad is not None and layer.linear.weight.grad is None
    assert device.computed_ms == 8.0
    later.compute()
    assert layer.linear.weight.grad is not None
    assert device.computed_ms == 15.0


def test_every_rival_that_is_offered_exists() -> None:
    assert tuple(rivals.RIVALS) == schedules.RIVALS
    assert tuple(TORCH_SCHEDULES) == training.TORCH_RIVALS


def test_a_schedule_that_plans_is_told_the_costs() -> None:
    costs = Costs(forward=20.0, backward_input=10.0, backward_weight=30.0, jitter=0.5)
    assert options_for("1f1b", costs) == {}
    options = options_for("zb_v", costs)
    planned = get_schedule("zb_v").timetable(2, 4, options)
    assert planned == get_schedule("zb_v").timetable(
        2, 4, {}, Costs(forward=20.0, backward_input=10.0, backward_weight=30.0)
    )
    greedy = options_for("bitpipe:mode=greedy:max_activations=3", costs)
    assert greedy == {"mode": "greedy", "max_activations": 3, "costs": options["costs"]}


@pytest.mark.parametrize("parts", [True, False])
def test_a_schedule_that_plans_gets_the_head(parts: bool) -> None:
    costs, method = Costs(forward=2.0, head=0.5), get_schedule("zb_v").dividing_head(parts)
    costs = costs_on(method.placement(2), costs)
    assert costs.stages == (None if parts else (1.0, 1.0, 1.0, 2.0))
    planned = method.timetable(2, 4, options_for("zb_v", costs))
    assert planned == method.timetable(2, 4, {}, costs)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_jitter_is_the_simulators(name: str) -> None:
    costs = Costs(forward=1.0, backward_input=2.0, backward_weight=3.0, jitter=0.5, seed=4)
    timetable = get_schedule(name).timetable(2, 3)
    device = EmulatedDevice(costs, timetable.placement)
    device.split_backwards = timetable.split_backwards
    layers = [EmulatedLayer(stage, device) for stage in range(2)]
    for batch, _ in make_batches(3, 1):
        layers[1](layers[0](batch)).sum().backward()
    assert device.computed_ms == pytest.approx(2 * simulate(timetable, costs).ideal)


def test_messages_have_the_size_that_is_asked_for() -> None:
    assert rows_of(4) * WIDTH * 4 == 4096
    assert rows_of(0.001) == 1
    inputs, labels = make_batches(3, rows_of(2))[2]
    assert inputs.shape == labels.shape == (1, 16, WIDTH)
    inputs, labels = make_batches(1, rows_of(8), slices=3)[0]
    assert (inputs.shape, labels.shape) == ((1, 66, WIDTH), (1, 33, WIDTH))


def test_report_of_a_failure() -> None:
    failed = Result("rival", error="rank 1: ValueError: no")
    simulation = simulate(get_schedule("1f1b").timetable(2, 4), Costs(5, 5, 5))
    good = Result("1f1b", simulation, [80.0, 76.0, 90.0], simulated_ms=[75.0] * 3, losses=[1.0])
    stopped = Result("1f1b", simulation, [80.0], simulated_ms=[75.0], error="rank 0: ValueError: no")
    first, second, third = as_json([failed, good, stopped], {"stages": 2})
    assert (first["best"], first["median"], first["repeats"]) == (None, None, 0)
    assert first["params"] == {"stages": 2, "sequence_slices": 1, "error": "rank 1: ValueError: no"}
    assert (second["best"], second["median"], second["repeats"]) == (76.0, 80.0, 3)
    assert (third["best"], third["median"], third["repeats"]) == (None, None, 0)
    lines = as_table([failed, good, stopped]).splitlines()
    assert lines[1].split() == ["rival", "failed"]
    assert lines[2].split() == ["1f1b", "76.0", "80.0", "75.0", "60.0", "1.267", "1.250", "1.013"]
    assert lines[3].split() == ["1f1b", "failed", "75.0", "60.0", "1.250"]
    assert len(lines) == 6 and "rank 1: ValueError: no" in lines[4]
