"""``python -m ds_ext``: help, imports, exit codes, and errors that all verbs share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_ext.__main__ import main
from ds_ext.pipe_schedules import SCHEDULES
from tests.processor import python_s

ROOT = Path(__file__).parents[3]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in ("show", "dump", "check", "simulate", "plan", "prepare", "bench"))
    with pytest.raises(SystemExit, match="0"):
        main(["show", "--help"])
    text = capsys.readouterr().out
    for name, schedule in SCHEDULES.items():
        assert f"  {name} " in text and schedule.summary in text
    for option in ("chunks=2", "policy=group"):
        assert f"--option {option} (" in text
    shown = " ".join(text.split())
    assert (
        "one of group, breadth, depth)" in shown
        and "one of linear, interleaved, v, bidirectional_v)" in shown
    )
    assert re.search(r"--num-devices( D)?, --stages D", shown)  # without the first D from Python 3.13 on


@pytest.mark.parametrize("words", ["auto", "simulate auto --num-devices 4 --micro-batches 8"])
def test_auto_is_a_value_of_the_json(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert re.search(r"auto.* in the JSON", capsys.readouterr().err)


def test_verbs_of_other_packages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "nowhere"
    assert main(["prepare", "--source", str(missing), "--output", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "nowhere" in captured.err
    for verb in ("trace", "convert", "bench"):
        with pytest.raises(SystemExit, match="0"):
            main([verb, "--help"])


def test_benchmarks_need_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "ds_ext").symlink_to(ROOT / "ds_ext")  # as an installed package, without what lies beside it
    result = subprocess.run(
        [sys.executable, "-m", "ds_ext", "bench", "engine"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 2 and result.stderr.startswith("error: bench: ")


@pytest.mark.parametrize("verb", ["show", "dump", "check", "simulate"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("bitpip --num-devices 4 --micro-batches 8", r"'bitpip'.*'bitpipe'.*1f1b"),
        ("bitpipe --num-devices 3 --micro-batches 8", r"bitpipe: --num-devices .*got 3"),
        (
            "bitpipe --stages 4 --micro-batches 6",
            r"bitpipe: --micro-batches (?!.*gradient).*got 6\).* 4 or 8\.",
        ),
        ("dpp --num-devices 4 --micro-batches 4 --option max_in_flight=-1", r"dpp: .*max_in_flight.*got -1"),
        ("bitpipe", r"--num-devices D and --micro-batches N"),
        ("interleaved --num-devices 2 --micro-batches 2 --option chunks", r"got 'chunks'.*chunks=3"),
        ("interleaved --num-devices 2 --micro-batches 2 --option chunks=x", r"got 'x'"),
        ("gpipe --num-devices 2 --micro-batches 2 --costs f=-1", r"error: --costs.* f .*got -1"),
        ("1f1b --num-devices 99999999999 --micro-batches 1", "16,?384"),
        ("nowhere/none.txt", "none.txt.*No such file"),
    ],
)
def test_wrong_requests(verb: str, arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and re.search(words, captured.err)


@pytest.mark.parametrize("verb", ["show", "plan", "trace", "export"])
def test_unknown_flags_come_with_those_of_the_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = {
        "show": ["1f1b"],
        "plan": ["--devices", "8", "--memory", "80GB", "--global-batch-size", "8"],
        "trace": ["summary", "traces"],
        "export": ["checkpoints", "weights"],
    }
    with pytest.raises(SystemExit, match="2"):
        main([verb, *words[verb], "--pp", "4"])
    usage, _, error = capsys.readouterr().err.rpartition(f"python -m ds_ext {verb}: error: ")
    assert usage.startswith(f"usage: python -m ds_ext {verb} ") and "--pp" in error
    assert verb != "show" or "--num-devices" in usage


def test_verbs_for_schedules_are_fast_and_import_no_torch() -> None:
    code = (
        "import sys; from ds_ext.__main__ import main;"
        "status = main(['show', 'bitpipe', '--num-devices', '4', '--micro-batches', '4']);"
        "print(status, *sorted({'torch', 'deepspeed', 'pydantic', 'numpy'} & set(sys.modules)))"
    )

    def processor_s() -> float:
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "0"
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])  # of the children, user and system

    # About 6 times the loop; torch alone takes 60 times as long.
    assert min(processor_s() for _ in range(3)) < 30 * python_s()


def test_a_closed_pipe_is_no_error() -> None:
    words = "-m ds_ext dump bitpipe --num-devices 8 --micro-batches 64"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *words.split()], stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 141


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "mine.txt")
    sizes = ["--num-devices", "2", "--micro-batches", "4"]
    assert main(["show", "1f1b", *sizes, "-o", file]) == 0
    assert main(["check", file]) == main(["check", file, *sizes]) == 0
    capsys.readouterr()
    for words, error in (
        (
            ["check", file, "--stages", "4"],
            r"mine\.txt: .*--num-devices 2 \(got 4\)",
        ),
        (["show", "1f1b", *sizes, "-o", "x.foo"], r"-o: .*x\.foo.*\.html, \.csv, \.svg"),
        (["show", "1f1b", *sizes, "-o", "nowhere/x.txt"], r"-o: .*nowhere/x\.txt"),
        (["optimise", "1f1b", *sizes, "--max-activations", "nan"], "got nan"),
        (["optimise", "1f1b", *sizes, "--time-limit", "0"], "got 0"),
    ):
        assert main(words) == 2
        assert re.search(error, capsys.readouterr().err)


@pytest.mark.parametrize("verb", ["show", "simulate", "compare"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F0@0 F1@0 B0@0", r"micro-batch 1 .*stage 0 .*\b0\b"),
        ("F0@0 F0@0 B0@0", r" 0 .*F0@0"),
        ("F0@0 B0@0 F999999999@0 B999999999@0", "1000000000|1,000,000,000"),
    ],
)
def test_wrong_files(
    verb: str, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.txt"
    file.write_text(text)
    assert main([verb, str(file)]) == 2
    assert re.search(words, capsys.readouterr().err)
