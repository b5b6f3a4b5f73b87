"""``show``, ``check``, ``dump``, ``simulate`` and ``compare`` equal the library; with a model also its bytes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ds_ext.__main__ import main
from ds_ext.cli.schedule_verbs import title
from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.draw.grid import order_grid, time_grid
from ds_ext.pipe_schedules.files import dump, schedule_of_file
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.memory import memory
from ds_ext.planner.named_models import MODELS
from ds_ext.planner.stage_costs import split_layers, stage_costs
from ds_ext.planner.text import format_bytes
from ds_ext.planner.training_sizes import TrainingSizes

BITPIPE = ["bitpipe", "--num-devices", "4", "--micro-batches", "8"]
SMALL = [
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--vocab-size", "1000", "--seq-length", "32"),
]
PLACEMENT = timetable("bitpipe", 4, 8).placement


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?<![\w/])\d+(?:\.\d+)?", line)]


# --- show and dump ---------------------------------------------------------------------------------------------------


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *BITPIPE]) == 0
    first, grid = capsys.readouterr().out.split("\n", 1)
    assert numbers(first) == [4, 8, 27, 24, 11.1, 3.5, 4, 4, 3.5]
    assert grid == time_grid(simulate(timetable("bitpipe", 4, 8))) + "\n"


def test_show_with_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = "show interleaved --num-devices 2 --micro-batches 2 --option chunks=3 --costs f=2,comm=1"
    assert main([*words.split(), "--labels", "op", "--color", "always"]) == 0
    simulation = simulate(timetable("interleaved", 2, 2, chunks=3), Costs(forward=2, comm=1))
    out = capsys.readouterr().out
    assert out.endswith(time_grid(simulation, labels="op", color=True) + "\n")
    assert "\x1b[36mF0@0\x1b[0m" in out


def test_colors_are_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(**environment: str) -> str:
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert main(["show", *BITPIPE]) == 0
        return capsys.readouterr().out

    assert "\x1b" not in shown()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b" in shown()
    assert "\x1b" not in shown(NO_COLOR="1")


@pytest.mark.parametrize("ending", ["txt", "csv", "json", "svg", "html"])
def test_ops_without_duration_are_drawn(
    ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "show zb_v --num-devices 4 --micro-batches 8 --costs f=0,b=0,w=0"
    assert main([*words.split(), "-o", str(tmp_path / f"x.{ending}")]) == 0
    capsys.readouterr()
    assert main(words.split()) == 0
    assert capsys.readouterr().out.split("\n", 1)[1] == order_grid(timetable("zb_v", 4, 8)) + "\n"


def test_dump(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", *BITPIPE]) == 0
    assert json.loads(capsys.readouterr().out) == dump(lower(timetable("bitpipe", 4, 8)))


# --- check -----------------------------------------------------------------------------------------------------------


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *BITPIPE]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    figures = {line.split()[0]: numbers(line) for line in lines}
    assert figures == {"ops": [128], "messages": [96], "links": [1], "buffers": [7, 8, 8, 7], "loss": [0, 3]}


def test_check_prints_a_deadlock(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["interleaved", "--num-devices", "2", "--micro-batches", "4"]
    assert main(["check", *shape, "--link-slots", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("interleaved: ")
    assert "<-- ERROR HERE" in captured.err
    assert main(["check", *shape, "--link-slots", "2"]) == 0
    capsys.readouterr()
    assert main(["check", *shape, "--link-slots", "0"]) == 2
    assert re.search(r"link.*got 0", capsys.readouterr().err)


def test_one_device_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for slots in ([], ["--link-slots", "1"]):
        assert main(["check", "1f1b", "--num-devices", "1", "--micro-batches", "2", *slots]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "  messages  0" in lines and not any("link" in line for line in lines)


@pytest.mark.parametrize("verb", ["show", "simulate", "compare"])
def test_a_file_that_deadlocks_is_printed(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.txt"
    file.write_text("F0@0 B0@0 F1@0 B1@0\nF0@1 F1@1 B0@1 B1@1\n")
    assert main([verb, str(file)]) == 2
    first, grid = capsys.readouterr().err.split("\n", 1)
    assert first.startswith(f"error: {file}: wrong: ")
    for words in ("B0@0 waits for B0@1", "F1@1 waits for F1@0"):
        assert words in first
    assert re.search(r"^\w+ 0  F0@0  B0@0  F1@0  B1@0   <-- ERROR HERE\n +\^\^\^\^\n", grid, re.MULTILINE)
    assert main(["check", str(file)]) == 1
    assert capsys.readouterr().err.split("\n", 1)[1] == grid


def test_a_file_with_forwards_only_is_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "forward.txt"
    file.write_text("F0@0 F1@0\nF0@1 F1@1\n")
    assert main(["check", str(file)]) == 0
    assert "forward only" in capsys.readouterr().out
    with pytest.raises(ScheduleError, match="no backwards"):
        schedule_of_file(file)


# --- simulate --------------------------------------------------------------------------------------------------------


def test_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *BITPIPE, "--json"]) == 0
    priced = json.loads(capsys.readouterr().out)
    assert list(priced) == ["makespan", "ideal", "bubble", "peak_activations", "messages", "busy"]
    assert (priced["makespan"], priced["peak_activations"], priced["messages"]) == (27, [3.5, 4, 4, 3.5], 96)
    assert priced["busy"] == pytest.approx([8 / 9] * 4) and priced["bubble"] == pytest.approx(1 / 9)
    assert main(["simulate", *BITPIPE]) == 0
    assert re.search(r"makespan +27\n.*bubble +11\.1%\n", capsys.readouterr().out, re.DOTALL)


def test_simulate_with_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    training = ["--micro-batch-size", "2", "--zero", "1", "--tensor-parallel", "2", "--data-parallel", "3"]
    assert main(["simulate", *BITPIPE, *SMALL, *training, "--recompute", "full", "--json"]) == 0
    priced = json.loads(capsys.readouterr().out)
    sizes = TrainingSizes(
        num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=1000, seq_length=32,
        micro_batch=2, tensor_parallel=2, data_parallel=3, zero_stage=1, recompute="full",
    )  # fmt: skip
    sizes = split_layers(sizes, PLACEMENT, "bitpipe")
    costs = stage_costs(Costs(), sizes)
    assert sizes.stage_layers is not None and priced["layers"] == list(sizes.stage_layers)
    # A head of 1000 / (12 x 64 + 2 x 32) layers, and every layer's forward again.
    assert costs.backward_input == 2 and costs.stages is not None
    assert priced["makespan"] == simulate(timetable("bitpipe", 4, 8), costs).makespan
    devices = memory(timetable("bitpipe", 4, 8), sizes)
    assert priced["memory"] == [{**asdict(device), "total": device.total} for device in devices]
    assert priced["message_bytes"] == 2 * 2 * 32 * 64
    assert main(["simulate", *BITPIPE, "--model", "gpt-1.3b", "--json"]) == 0
    # Three layers of 34 s h bytes and 4 per head and token; the first stage also has a dropout mask.
    sh, heads = 2048 * 2048, 4 * 16 * 2048
    kept = [(3 * 34 + 1) * sh + 3 * heads, *[3 * (34 * sh + heads)] * 5, 4 * (34 * sh + heads)]
    assert json.loads(capsys.readouterr().out)["stage_bytes"][:7] == kept


def test_simulate_prints_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *BITPIPE, "--model", "gpt-1.3b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = {line.split()[0]: numbers(line) for line in lines[:-5]}
    assert figures["messages"] == [96, 8.4] and figures["layers"] == [3, 3, 3, 3, 3, 3, 4, 2]
    header, *rows = lines[-5:]
    assert header.split()[1:] == ["weights", "gradients", "optimizer", "activations", "buffers", "total"]
    worst = memory(
        timetable("bitpipe", 4, 8),
        split_layers(TrainingSizes.of_model(MODELS["gpt-1.3b"]), PLACEMENT, "bitpipe"),
    )[0]
    assert rows[0].split()[:3] == ["0", *format_bytes(worst.weights).split()]
    assert rows[0].endswith(format_bytes(worst.total)) and len(rows) == 4


def test_simulate_on_hosts_prints_the_memory_of_their_copies(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "1f1b", "--num-devices", "4", "--micro-batches", "8", *SMALL, "--json"]
    found = []
    for flags in (["--hosts", "2x8"], ["--hosts", "2x8", "--data-parallel", "4"], ["--data-parallel", "4"]):
        assert main([*words, *flags]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["data_parallel_size"] == 4
    assert found[0]["memory"] == found[1]["memory"] == found[2]["memory"]


def test_sizes_change_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate 1f1b --num-devices 4 --micro-batches 4 --model gpt-10b --json"
    assert main(words.split()) == 0
    # A head of 50257 / (12 x 4096 + 2 x 1024) = 0.98 layers.
    assert json.loads(capsys.readouterr().out)["layers"] == [12, 13, 13, 12]
    assert main([*words.split(), "--num-layers", "3"]) == 2
    assert re.search("3 layers.*4 stages", capsys.readouterr().err)
    assert main([*words.split(), "--num-layers", "48", "--sequence-parallel", "--tensor-parallel", "2"]) == 0
    priced = json.loads(capsys.readouterr().out)
    sizes = TrainingSizes.of_model(
        MODELS["gpt-10b"], num_layers=48, sequence_parallel=True, tensor_parallel=2
    )
    assert [r["total"] for r in priced["memory"]] == [r.total for r in memory(timetable("1f1b", 4, 4), sizes)]
    assert priced["message_bytes"] == 1024 * 4096  # split over two ranks


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--zero", "1"], "--zero: .*--model"),
        (["--num-layers", "4"], "--hidden-size, --num-attention-heads, --seq-length, --vocab-size"),
        (["--model", "gpt-5"], "error: --model: .*'gpt-5'.*gpt-124m"),
        (
            ["--model", "gpt-1.3b", "--tensor-parallel", "3"],
            r"--tensor-parallel: .*--num-attention-heads 16.*got 3",
        ),
    ],
)
def test_wrong_models(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("simulate", "compare"):
        assert main([verb, *BITPIPE, *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and re.search(words, captured.err) and captured.err.count("\n") == 1


def test_recomputation_takes_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Full recomputation repeats a layer's forward, selective s / (6h + s) of it."""
    shape = ["1f1b", "--num-devices", "1", "--micro-batches", "4", *SMALL, "--attention-scores"]
    head = 1000 / (12 * 64 + 2 * 32)
    for kind, share in (("none", 0.0), ("selective", 32 / (6 * 64 + 32)), ("full", 1.0)):
        assert main(["simulate", *shape, "--recompute", kind, "--json"]) == 0
        time = json.loads(capsys.readouterr().out)["makespan"]
        assert time == pytest.approx(4 * (3 + share * 8 / (8 + head)))
        assert main(["compare", *shape, "--recompute", kind]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[1] == f"{time:g}"
    assert main(["simulate", *shape, "--recompute", "selective"]) == 0
    assert re.search(r"\n  recompute +8% ", capsys.readouterr().out)


# --- compare ---------------------------------------------------------------------------------------------------------


def test_compare_with_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = "compare 1f1b bitpipe --num-devices 4 --micro-batches 8"
    assert main(words.split()) == 0
    plain = capsys.readouterr().out.splitlines()
    assert main([*words.split(), "--model", "gpt-1.3b"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["weights", "memory"]
    for line, row, name in zip(plain[1:], rows, ["1f1b", "bitpipe"], strict=True):
        order = timetable(name, 4, 8)
        sizes = split_layers(TrainingSizes.of_model(MODELS["gpt-1.3b"]), order.placement, name)
        worst = max(device.total for device in memory(order, sizes))
        cells = row.split()
        assert cells[1] == f"{simulate(order, stage_costs(Costs(), sizes)).makespan:g}"
        assert [cells[0], *cells[4:7]] == [name, *line.split()[4:]] and row.endswith(
            f"  {format_bytes(worst)}"
        )


def test_the_page_of_a_comparison_has_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "compare 1f1b interleaved --num-devices 5 --micro-batches 10 --model gpt-10b --option chunks=5"
    assert main(words.split()) == 0
    *rows, note = capsys.readouterr().out.splitlines()
    file = tmp_path / "page.html"
    assert main([*words.split(), "-o", str(file)]) == 0
    page = file.read_text("utf-8")
    found = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in found]
    assert [" ".join(row) for row in cells] == [" ".join(row.split()) for row in rows]
    assert cells[0][-1] == "memory" and cells[1][-1].endswith(" GB")
    assert f"<p>{note}</p>" in page and note.startswith("--option chunks=5: ")


def test_a_refused_schedule_has_its_own_row(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-devices", "4", "--micro-batches", "6"]
    assert main(["compare", "bitpipe", "1f1b", "interleaved", *sizes]) == 1
    header, first, second, third = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["schedule", "makespan"]
    assert first.split()[:2] == ["bitpipe", "-"] and numbers(first)[:2] == [4, 6]
    assert second.split()[:3] == ["1f1b", "27", "1.000"]
    assert third.split()[:2] == ["interleaved", "-"] and numbers(third)[-2:] == [4, 8]
    assert main(["compare", "bitpipe", "interleaved", *sizes]) == 2
    assert capsys.readouterr().err.startswith("error: bitpipe")


@pytest.mark.parametrize(
    ("devices", "micro_batches", "refused"),
    [(2, 4, set()), (3, 5, {"bitpipe", "bitpipe_zb", "chimera", "dualpipev", "interleaved"})],
)
def test_compare_without_names(
    devices: int, micro_batches: int, refused: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """All schedules that support the sizes, and the others in a line."""
    assert main(["compare", "--num-devices", str(devices), "--micro-batches", str(micro_batches)]) == 0
    _, *rows, fbd, note = [*capsys.readouterr().out.splitlines(), *[""] * (not refused)]
    assert [row.split()[0] for row in rows] == sorted(SCHEDULES.keys() - refused)
    groups = ", ".join(re.findall(r"([\w, ]+): --", note))
    assert fbd.startswith("fbd: ") and set(re.findall(r"\w+", groups)) == refused
    assert main(["compare", "--num-devices", str(devices)]) == 2
    assert capsys.readouterr().err.startswith("error: NAME")


def test_other_numbers_of_micro_batches_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "six.txt")
    assert main(["show", "1f1b", "--num-devices", "4", "--micro-batches", "6", "-o", file]) == 0
    capsys.readouterr()
    (tmp_path / "mine.txt").write_text("F0@0 B0@0")
    assert main(["compare", file, str(tmp_path / "mine.txt"), file]) == 0
    _, first, other, again, note = capsys.readouterr().out.splitlines()
    assert first.split()[2] == again.split()[2] == "1.000" and other.split()[1:3] == ["3", "0.0%"]
    assert numbers(note) == [6]


# --- slices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward_only", [False, True])
def test_slices(forward_only: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["zb_v", "--num-devices", "4", "--micro-batches", "4", "--sequence-slices", "3"]
    words += ["--forward-only"] * forward_only
    method = get_schedule("zb_v")
    made = method.timetable(4, 4, slices=3)
    if forward_only:
        made = forward_timetable(made.placement, 4, "zb_v", 3)
    simulation = simulate(made)
    printed = {}
    for verb in ("dump", "check", "show", "simulate", "compare"):
        assert main([verb, *words, *(["--json"] if verb == "simulate" else [])]) == 0
        printed[verb] = capsys.readouterr().out
    assert json.loads(printed["dump"]) == dump(lower(made)) and json.loads(printed["dump"])["slices"] == 3
    assert all(numbers(printed[verb])[:3] == [4, 4, 3] for verb in ("check", "show"))
    assert printed["show"].startswith(f"{title(simulation)}\n")
    assert json.loads(printed["simulate"])["makespan"] == simulation.makespan
    assert printed["compare"].splitlines()[1].split()[:2] == ["zb_v", f"{simulation.makespan:g}"]


def test_messages_of_slices_are_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "simulate",
        "1f1b",
        "--num-devices",
        "4",
        "--micro-batches",
        "4",
        "--model",
        "gpt-1.3b",
        "--json",
    ]
    sizes = []
    for slices in ("1", "4"):
        assert main([*words, "--sequence-slices", slices]) == 0
        printed = json.loads(capsys.readouterr().out)
        sizes.append((printed["messages"], printed["message_bytes"]))
    (messages, size), in_slices = sizes
    assert in_slices == (4 * messages, size / 4)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("show dpp", r"^dpp: --sequence-slices .*got 4.* 1f1b, bitpipe, bitpipe_zb, "),
        ("dump chimera --forward-only", r"^chimera: --sequence-slices .*got 4"),
        ("compare fbd", r"^fbd: --sequence-slices .*got 4"),
        ("optimise 1f1b", r"^optimise: --sequence-slices .*got 4"),
        ("check 1f1b --sequence-slices 0", r"^1f1b: --sequence-slices .*got 0"),
    ],
)
def test_slices_that_are_refused(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb, *rest = words.split()
    sizes = ["--num-devices", "4", "--micro-batches", "8", "--sequence-slices", "4"]
    assert main([verb, *sizes, *rest]) == 2
    assert re.search(error, capsys.readouterr().err.removeprefix("error: "))


def test_a_comparison_leaves_out_schedules_without_slices(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them in one line, because their reason is the same."""
    sizes = ["--num-devices", "4", "--micro-batches", "8", "--sequence-slices", "2"]
    assert main(["compare", *sizes]) == 0
    _, *rows, note = capsys.readouterr().out.splitlines()
    with_slices = {name for name, method in SCHEDULES.items() if method.has_slices}
    assert {row.split()[0] for row in rows} == with_slices - {"bitpipe"}  # which needs an option
    assert "; chimera, dpp, dualpipev, fbd: --sequence-slices" in note


def test_a_file_has_a_fixed_number_of_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "slices.txt")
    sizes = ["--num-devices", "2", "--micro-batches", "3"]
    assert main(["show", "1f1b", *sizes, "--sequence-slices", "2", "-o", file]) == 0
    capsys.readouterr()
    for words in ([], sizes, ["--sequence-slices", "2"]):
        assert main(["dump", file, *words]) == 0
        made = get_schedule("1f1b").timetable(2, 3, slices=2)
        assert json.loads(capsys.readouterr().out) == dump(lower(made))
    assert main(["dump", file, "--forward-only", "--micro-batches", "5"]) == 0
    made = forward_timetable(made.placement, 5, "1f1b", 2)
    assert json.loads(capsys.readouterr().out) == dump(lower(made))
    assert main(["dump", file, "--sequence-slices", "4"]) == 2
    assert re.search(r"--sequence-slices 2 \(got 4\)", capsys.readouterr().err)


# --- evaluations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "devices", "micro_batches"),
    [("1f1b", 4, 1), ("interleaved", 4, 6), ("bitpipe", 4, 7), ("zb_v", 3, 2), ("dualpipev", 2, 1)],
)
def test_forward_only(
    name: str, devices: int, micro_batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [name, "--num-devices", str(devices), "--micro-batches", str(micro_batches), "--forward-only"]
    order = forward_timetable(get_schedule(name).placement(devices), micro_batches, name)
    simulation = simulate(order)
    printed = {}
    for verb in ("dump", "check", "show", "simulate", "compare"):
        assert main([verb, *words, *(["--json"] if verb == "simulate" else [])]) == 0
        printed[verb] = capsys.readouterr().out
    assert json.loads(printed["dump"]) == dump(lower(order))
    assert all("forward only" in printed[verb] for verb in ("check", "show"))
    assert printed["show"].startswith(f"{title(simulation)}\n")
    assert json.loads(printed["simulate"])["makespan"] == simulation.makespan
    assert printed["compare"].splitlines()[1].split()[:2] == [name, f"{simulation.makespan:g}"]


def test_forward_only_uses_the_placement_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "mine.txt")
    assert main(["show", *BITPIPE, "-o", file]) == 0
    for given, n in (([], 8), (["--micro-batches", "3"], 3)):
        capsys.readouterr()
        assert main(["dump", file, "--forward-only", *given]) == 0
        assert json.loads(capsys.readouterr().out) == dump(lower(forward_timetable(PLACEMENT, n, "bitpipe")))
    for words in (["dump", file, "--num-devices", "2"], ["show", *BITPIPE[:3], "--micro-batches", "0"]):
        assert main([*words, "--forward-only"]) == 2
