"""``python -m ds_ext``: bytes of a model, costs from a file, and ``plan``."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ds_ext.__main__ import main
from ds_ext.config.job import load_config
from ds_ext.engine import check_deepspeed
from ds_ext.parallel.partition import layer_boundaries
from ds_ext.pipe_schedules import get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.list_scheduling import search as planning
from ds_ext.pipe_schedules.simulate import simulate
from ds_ext.planner.candidates import format_bytes
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.planner.memory import MODELS, ModelSizes, memory
from ds_ext.planner.stage_costs import cut, stage_costs
from ds_ext.training.arguments import parse
from ds_ext.training.preflight import check_job

BITPIPE = ["bitpipe", "--stages", "4", "--micro-batches", "8"]

SMALL = [
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--vocab-size", "1000", "--seq-length", "32"),
]


def test_simulate_with_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    training = ["--micro-batch-size", "2", "--zero", "1", "--tensor-parallel", "2", "--data-parallel", "3"]
    assert main(["simulate", *BITPIPE, *SMALL, *training, "--recompute", "full", "--json"]) == 0
    priced = json.loads(capsys.readouterr().out)
    sizes = ModelSizes(
        layers=8, hidden=64, heads=4, vocab=1000, seq=32,
        micro_batch=2, tensor_parallel=2, data_parallel=3, zero_stage=1, recompute="full",
    )  # fmt: skip
    placement = timetable("bitpipe", 4, 8).placement
    sizes = cut(sizes, placement, "bitpipe")
    costs = stage_costs(Costs(), sizes)
    assert priced["layers"] == list(sizes.layers) and sum(priced["layers"]) == 8  # pyright: ignore[reportArgumentType]
    # A head of 1000 / (12 x 64 + 2 x 32) layers, and every layer's forward again.
    assert costs.backward_input == 2 and costs.stages is not None
    assert priced["makespan"] == simulate(timetable("bitpipe", 4, 8), costs).makespan
    ranks = memory(timetable("bitpipe", 4, 8), sizes)
    assert priced["memory"] == [
        {
            "weights": rank.weights,
            "gradients": rank.gradients,
            "optimizer": rank.optimizer,
            "activations": rank.activations,
            "total": rank.total,
        }
        for rank in ranks
    ]
    assert priced["message_bytes"] == 2 * 2 * 32 * 64
    assert main(["simulate", *BITPIPE, "--model", "gpt-1.3b", "--json"]) == 0
    # Three layers of 34 s h bytes each; the first stage also has a mask.
    sh = 2048 * 2048
    kept = [(3 * 34 + 1) * sh, *[3 * 34 * sh] * 5, 4 * 34 * sh]
    assert json.loads(capsys.readouterr().out)["stage_bytes"][:7] == kept
    assert main(["simulate", *BITPIPE, "--model", "gpt-1.3b"]) == 0
    out = capsys.readouterr().out
    assert (
        "  messages          96, 8.4 MB each\n  layers            3 3 3 3 3 3 4 2  (per stage)\n  costs "
        in out
    )
    head, *rows = out.splitlines()[-5:]
    assert head.split() == ["rank", "weights", "gradients", "optimizer", "activations", "total"]
    worst = memory(timetable("bitpipe", 4, 8), cut(MODELS["gpt-1.3b"], placement, "bitpipe"))[0]
    assert rows[0].split()[:3] == ["0", *format_bytes(worst.weights).split()]
    assert rows[0].endswith(format_bytes(worst.total)) and len(rows) == 4


def test_single_sizes_change_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["simulate", "1f1b", "--stages", "4", "--micro-batches", "4", "--model", "gpt-10b", "--json"]
    assert main(shape) == 0
    # A head of 50257 / (12 x 4096 + 2 x 1024) = 0.98 layers.
    assert json.loads(capsys.readouterr().out)["layers"] == [12, 13, 13, 12]
    assert main([*shape, "--num-layers", "3"]) == 2
    assert capsys.readouterr().err.startswith("error: 3 layers are fewer than the 4 stages. Use ")
    assert main([*shape, "--num-layers", "48", "--sequence-parallel", "--tensor-parallel", "2"]) == 0
    priced = json.loads(capsys.readouterr().out)
    sizes = replace(MODELS["gpt-10b"], layers=48, sequence_parallel=True, tensor_parallel=2)
    assert [r["total"] for r in priced["memory"]] == [r.total for r in memory(timetable("1f1b", 4, 4), sizes)]
    assert priced["message_bytes"] == 1024 * 4096  # split over the two ranks


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--zero", "1"], "--zero needs a model: give --model gpt-10b, or its sizes."),
        (
            ["--num-layers", "4"],
            "all sizes are needed; --hidden-size, --num-attention-heads, --vocab-size, --seq",
        ),
        (["--model", "gpt-5"], "model 'gpt-5' is none of the 13 known: gpt-124m"),
        (
            ["--model", "gpt-1.3b", "--tensor-parallel", "3"],
            "tensor_parallel the heads; got hidden 2048, heads 16",
        ),
    ],
)
def test_wrong_models(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("simulate", "compare"):
        assert main([verb, *BITPIPE, *flags]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and sentence in captured.err and captured.err.count("\n") == 1


def test_compare_with_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["compare", "1f1b", "bitpipe", "--stages", "4", "--micro-batches", "8"]
    assert main(shape) == 0
    plain = capsys.readouterr().out.splitlines()
    assert main([*shape, "--model", "gpt-1.3b"]) == 0
    with_bytes = capsys.readouterr().out.splitlines()
    assert with_bytes[0].split()[-2:] == ["weights", "memory"]
    for line, more, name in zip(plain[1:], with_bytes[1:], ["1f1b", "bitpipe"], strict=True):
        made = timetable(name, 4, 8)
        sizes = cut(MODELS["gpt-1.3b"], made.placement, name)
        worst = max(rank.total for rank in memory(made, sizes))
        words = more.split()
        assert words[1] == f"{simulate(made, stage_costs(Costs(), sizes)).makespan:g}"
        assert [words[0], *words[4:7]] == [name, *line.split()[4:]] and more.endswith(
            f"  {format_bytes(worst)}"
        )


def test_recomputation_takes_time(capsys: pytest.CaptureFixture[str]) -> None:
    """As in the table of "plan": full repeats a layer's forward, selective s / (6h + s) of it."""
    shape = ["1f1b", "--stages", "1", "--micro-batches", "4", *SMALL, "--attention-scores"]
    head, again = 1000 / (12 * 64 + 2 * 32), 32 / (6 * 64 + 32)
    for kind, extra in (("none", 0.0), ("selective", again), ("full", 1.0)):
        assert main(["simulate", *shape, "--recompute", kind, "--json"]) == 0
        time = json.loads(capsys.readouterr().out)["makespan"]
        assert time == pytest.approx(4 * (3 + extra * 8 / (8 + head)))
        assert main(["compare", *shape, "--recompute", kind]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[1] == f"{time:g}"
    assert main(["simulate", *shape, "--recompute", "selective"]) == 0
    assert (
        "  recompute         selective: backwards repeat 8% of a layer's forward\n" in capsys.readouterr().out
    )


def test_plan_for_a_head_that_is_heavy_runs_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON passes the checks of the script, and the stages are those that were priced."""
    words = "--num-layers 9 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 2000"
    assert main(["plan", "--devices", "4", "--memory", "80MB", *words.split(), "--global-batch-size", "16",
                 "--tensor-parallel", "1", "--json"]) == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    file = tmp_path / "job.json"
    for best in found["best"]:
        assert best["fits"] and best["pipeline_parallel_size"] in (1, 2, 4)
    file.write_text(json.dumps(found["config"]))
    args, job = parse("train_gpt.py", ["--deepspeed_config", str(file), "--data-path", str(tmp_path)])
    check_job(args, job.deepspeed)
    check_deepspeed(job.deepspeed)
    made = make_job_plan(job, 4)
    bounds = layer_boundaries(9, 2, 2, made.layout.placement, "any", args.stage_layers)
    assert (len(bounds), bounds[-1]) == (made.layout.placement.stages + 1, 13)
    replicas = made.layout.placement.replicas * made.layout.data_parallel_size
    assert found["config"]["zero_optimization"]["stage"] == (1 if replicas > 1 else 0)


def test_the_page_of_a_comparison_has_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["compare", "1f1b", "interleaved", "--stages", "5", "--micro-batches", "10", "--model", "gpt-10b"]
    assert main([*shape, "--option", "chunks=5"]) == 0
    *rows, note = capsys.readouterr().out.splitlines()
    file = tmp_path / "page.html"
    assert main([*shape, "--option", "chunks=5", "-o", str(file)]) == 0
    page = file.read_text("utf-8")
    found = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in found]
    assert [" ".join(row) for row in cells] == [" ".join(row.split()) for row in rows]
    assert cells[0][-1] == "memory" and cells[1][-1].endswith(" GB")
    assert f"<p>{note}</p>" in page and note == "--option chunks=5: interleaved only."


@pytest.mark.parametrize("verb", ["show", "dump", "check", "simulate", "compare", "optimise"])
def test_costs_from_a_file(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if verb == "optimise":
        pytest.importorskip("ortools")
    given = {"f": 1, "b": 2, "comm": 0.5, "links": {"0>1": 1.5}}
    (tmp_path / "costs.json").write_text(json.dumps(given))
    shape = [verb, "zb_v", "--stages", "2", "--micro-batches", "4", "--costs"]
    outputs = []
    for costs in (str(tmp_path / "costs.json"), "b=2,comm=0.5"):
        assert main([*shape, costs]) == 0
        outputs.append(capsys.readouterr().out)
    if verb in ("simulate", "compare"):
        costs = Costs(backward_input=2, comm=0.5, links={(0, 1): 1.5})
        made = get_schedule("zb_v").timetable(2, 4, None, costs)
        assert f" {simulate(made, costs).makespan:g}" in outputs[0] and outputs[0] != outputs[1]
    (tmp_path / "costs.json").write_text('{"g": 1}')
    assert main([*shape, str(tmp_path / "costs.json")]) == 2
    assert "expected an object with f, b, w, comm, stages, links" in capsys.readouterr().err
    assert main([*shape, str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file or directory." in capsys.readouterr().err


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders that are not the best that are known, in a tenth of the time."""
    monkeypatch.setattr(planning, "_MOST_OPS", 2_000)


PLAN = ["plan", "--devices", "8", "--memory", "16GB", "--model", "gpt-1.3b", "--global-batch-size", "32"]


@pytest.mark.usefixtures("short_search")
def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--tensor-parallel", "1", "--zero", "1"]) == 0
    out = capsys.readouterr().out
    assert "not priced: tensor-parallel communication, gradient reduction" in out
    table, rest = out.split("\n\n")[1:3]
    rows = table.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["1"] * 4
    assert rest.startswith("best: TP 1 x PP ")
    assert "tokenizer of 50,257 entries:" in out
    config = json.loads(out[out.index("\n{") :])
    first = rows[0].split()
    job = load_config({key: value for key, value in config.items()})
    assert [job.ds_ext.tensor_parallel_size, job.ds_ext.pipeline_parallel_size] == list(map(int, first[:2]))
    assert job.ds_ext.schedule == first[4] and config["zero_optimization"] == {"stage": 1}
    made = make_job_plan(job, 8)
    assert (made.sizes.train_batch_size, made.sizes.micro_batches) == (32, int(first[3]))


@pytest.mark.usefixtures("short_search")
def test_plan_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--json", "--costs", "b=1.5,w=0.5", "--tflops", "100", "--bandwidth", "10GB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and 1 <= len(found["best"]) <= 10
    best = found["best"][0]
    assert found["config"]["ds_ext"]["schedule_options"] == best["schedule_options"]
    least = min(c["step_s"] for c in found["best"] if c["fits"])
    assert best["memory_bytes"] <= 16e9 and best["step_s"] == pytest.approx(least)
    sizes = {(c["tensor_parallel_size"], c["pipeline_parallel_size"]) for c in found["best"]}
    assert len(sizes) == len(found["best"])


def test_one_device_a_pipeline_has_nothing_to_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("80GB", "15GB", "1GB"):
        words = [
            "plan",
            "--devices",
            "1",
            "--memory",
            size,
            "--model",
            "gpt-1.3b",
            "--global-batch-size",
            "8",
        ]
        main([*words, "--json"])
        [only] = json.loads(capsys.readouterr().out)["best"]
        assert (only["pipeline_parallel_size"], only["schedule"], only["schedule_options"]) == (1, "1f1b", {})


def test_plan_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.replace("16GB", "1GB") for word in PLAN]) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"nearest: TP 8 x PP 1 .*\n  no schedule fits 1.0 GB; the nearest, .* GB too much\."
        r"\n  Use more devices or devices with more memory\.\n",
        out,
    )
    assert "{" not in out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--memory", "80"], "a size in bytes is written 80GB, 512MB or 16GiB; got '80'"),
        (["--bandwidth", "fast"], "a size in bytes is written 80GB, 512MB or 16GiB; got 'fast'"),
        (["--tflops", "0"], "plan: flops must be more than 0; got 0"),
        (["--devices", "0"], "plan: devices must be more than 0; got 0"),
        (["--costs", "comm=1"], "plan: costs are f, b and w relative to each other"),
        (["--tensor-parallel", "3"], "not divide 8 devices. Use --tensor-parallel 1, 2, 4 or 8."),
        (["--model", "gpt-5"], "model 'gpt-5' is none of"),
    ],
)
def test_wrong_plans(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and sentence in captured.err and captured.err.count("\n") == 1


def test_the_page_shows_what_a_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()
    found = re.search(r"    \$ python -m ds_ext (plan .*)\n\n((?:    .*\n|\n)+)", page)
    assert found is not None
    assert main(found[1].split()) == 0
    shown = "\n".join(line[4:] for line in found[2].splitlines())
    assert capsys.readouterr().out.strip() == shown.strip()


def test_a_plan_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    at = PLAN.index("--model")
    assert main(PLAN[:at] + PLAN[at + 2 :]) == 2
    assert capsys.readouterr().err == "error: plan needs a model: give --model gpt-10b, or its sizes.\n"
