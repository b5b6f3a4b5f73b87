"""``python -m ds_ext plan``: its table, its JSON, and the job that this JSON describes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_ext.__main__ import main
from ds_ext.config.job import load_config
from ds_ext.engine import check_deepspeed
from ds_ext.errors import Problems
from ds_ext.parallel.partition import layer_boundaries
from ds_ext.pipe_schedules.list_scheduling import search
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.planner.memory import model_parameters
from ds_ext.planner.training_sizes import TrainingSizes
from ds_ext.recipes.training.arguments import parse
from ds_ext.recipes.training.preflight import check_job
from ds_ext.recipes.training.setup import model_fields as script_sizes
from tests.selection import select

PLAN = ["plan", "--devices", "8", "--memory", "16GB", "--model", "gpt-1.3b", "--global-batch-size", "16"]


def test_the_printed_json_is_the_first_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--tensor-parallel", "1"]) == 0
    header, table, best, text = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in header.splitlines()][:3] == ["model", "devices", "memory"]
    rows = [row.split() for row in table.splitlines()[1:] if row[0] == " "]
    assert rows and all(row[:2] in (["1", "no"], ["1", "-"]) for row in rows)
    tensor, _, pipeline, data, _, micro_batches, schedule = rows[0][:7]
    assert best.startswith(f"best: TP {tensor} x PP {pipeline} x DP {data}")
    assert best.split("`")[1].split()[2:-1] == [
        *("--deepspeed_config", "plan.json", "--hosts", "1x8", "--vocab-size", "50257")
    ]
    config = json.loads(text)
    job = load_config(config)
    assert (job.ds_ext.tensor_parallel_size, job.ds_ext.pipeline_parallel_size) == (
        int(tensor),
        int(pipeline),
    )
    assert job.ds_ext.schedule == schedule and config["zero_optimization"] == {"stage": 1}
    sizes = make_job_plan(job, 8).sizes
    assert (sizes.train_batch_size, sizes.micro_batches) == (16, int(micro_batches))


def test_the_json_is_written_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*PLAN, "--tensor-parallel", "1"]) == 0
    printed = capsys.readouterr().out.split("\n\n")[3]
    file = tmp_path / "job.json"
    assert main([*PLAN, "--tensor-parallel", "1", "-o", str(file)]) == 0
    shown = capsys.readouterr().out
    assert json.loads(file.read_text()) == json.loads(printed) and "train_batch_size" not in shown
    assert f"--deepspeed_config {file} " in shown
    assert main([*PLAN, "--tensor-parallel", "1", "-o", str(tmp_path)]) == 2


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--json", "--costs", "b=1.5,w=0.5", "--tflops", "100", "--inside", "10GB,1us"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["best", "reason", "fits", "run", "refused", "config"]
    assert found["fits"] and 1 <= len(found["best"]) <= 10
    best = found["best"][0]
    assert found["config"]["ds_ext"]["schedule_options"] == best["schedule_options"]
    least = min(c["step_s"] for c in found["best"] if c["fits"])
    assert best["memory_bytes"] <= 16e9 and least <= best["step_s"] <= 1.01 * least
    for row in found["best"][1:]:
        assert row["fits"] or row["least_step_s"] >= least * (1 - 1e-6)
    assert found["config"]["train_micro_batch_size_per_gpu"] == best["micro_batch_size"]
    sizes = {(c["tensor_parallel_size"], c["pipeline_parallel_size"]) for c in found["best"]}
    assert len(sizes) == len(found["best"])


def test_the_json_passes_the_checks_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a heavy head; the stages are those that were priced."""
    words = "--num-layers 9 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 2000"
    flags = [*words.split(), "--global-batch-size", "16", "--tensor-parallel", "1", "--json"]
    assert main(["plan", "--devices", "4", "--memory", "80MB", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    for best in found["best"]:
        assert best["fits"] or "least_step_s" in best
        assert best["pipeline_parallel_size"] in (1, 2, 4)
    file = tmp_path / "job.json"
    file.write_text(json.dumps(found["config"]))
    args, job = parse(
        "train_gpt.py", ["--deepspeed_config", str(file), "--data-path", str(tmp_path), "--dry-run"]
    )
    problems = Problems()
    check_job(args, job.deepspeed, problems)
    problems.raise_all()
    check_deepspeed(job.deepspeed)
    layout = make_job_plan(job, 4).layout
    bounds = layer_boundaries(9, 2, 2, layout.placement, "any", args.stage_layers)
    assert (len(bounds), bounds[-1]) == (layout.placement.stages + 1, 13)
    replicas = layout.placement.replicas * layout.data_parallel_size
    assert found["config"]["zero_optimization"]["stage"] == (1 if replicas > 1 else 0)


def test_the_json_of_a_llama_has_its_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "plan --devices 8 --memory 80GB --model llama-3-8b --global-batch-size 16 --tensor-parallel 4 --json"
    )
    changes = "--num-query-groups 4 --kv-channels 64 --ffn-hidden-size 8192"
    assert main([*words.split(), *changes.split()]) in (0, 1)
    file = tmp_path / "job.json"
    file.write_text(json.dumps(json.loads(capsys.readouterr().out)["config"]))
    args, job = parse("train_gpt.py", ["--deepspeed_config", str(file)])
    sizes = script_sizes(args, job)
    expected = {
        "hidden_size": 4096,
        "num_query_groups": 4,
        "kv_channels": 64,
        "ffn_hidden_size": 8192,
        "swiglu": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    }
    assert {key: sizes[key] for key in expected} == expected


def test_the_planned_model_is_the_one_that_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With SwiGLU and without a width of the MLP, which plan and scripts once chose differently."""
    file = tmp_path / "plan.json"
    sizes = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --swiglu --seq-length 1024 --vocab-size 32000"
    words = f"plan --gpu h100 --devices 1 --global-batch-size 8 {sizes} -o {file}"
    assert main(words.split()) == 0
    (planned,) = re.findall(r"([\d.]+) million parameters", capsys.readouterr().out)
    args, job = parse("train_gpt.py", ["--deepspeed_config", str(file), "--vocab-size", "32000"])
    trained = model_parameters(TrainingSizes(**script_sizes(args, job)))
    assert float(planned) == pytest.approx(trained / 1e6, abs=0.006)


@pytest.mark.parametrize("memory", ["80GB", "15GB", "1GB"])
def test_one_device_needs_no_schedule(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan --devices 1 --memory {memory} --model gpt-1.3b --global-batch-size 8 --json"
    main(words.split())
    [only] = json.loads(capsys.readouterr().out)["best"]
    assert (only["pipeline_parallel_size"], only["schedule"], only["schedule_options"]) == (1, "1f1b", {})


def test_a_tenth_of_the_memory_stays_free(capsys: pytest.CaptureFixture[str]) -> None:
    def fits(memory: str, *flags: str) -> bool:
        words = (
            f"plan --devices 1 --memory {memory} --model gpt-1.3b --global-batch-size 8 --micro-batch-size 1"
        )
        return main([*words.split(), *flags]) == 0

    assert not fits("1GB", "--json")
    least = json.loads(capsys.readouterr().out.strip())["best"][0]["memory_bytes"]
    assert not fits(f"{least}B") and fits(f"{least}B", "--headroom", "0") and fits(f"{1.12 * least:.0f}B")
    assert main([*PLAN, "--headroom", "1"]) == 2


def test_a_tiny_model_has_digits(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 1000"
    flags = "plan --devices 1 --memory 4GB --global-batch-size 4 --tflops 0.001"
    assert main([*flags.split(), *words.split()]) == 0
    out = capsys.readouterr().out
    count = re.search(r"^model .*, ([\d.]+) million parameters", out, re.MULTILINE)
    rate = re.search(r"tokens/s, ([\d.]+) GFLOP/s", out)
    # 2 layers of 12 x 64^2 + 13 x 64, embeddings of 1000 and 32 rows, and the last norm.
    assert count is not None and float(count[1]) == pytest.approx(0.17, abs=0.005)
    assert rate is not None and float(rate[1]) == pytest.approx(1.0, rel=0.01)


def test_attention_dropout_on_cpus_stores_scores(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 1024 --vocab-size 1000"
    flags = "plan --devices 1 --memory 16GB --global-batch-size 1 --recompute-interval 1 --json"
    bytes_of: dict[tuple[str, str], int] = {}
    for collectives in ("nccl", "gloo"):
        for dropout in ("0", "0.1", "0.2"):
            words = [*flags.split(), *sizes.split(), "--collectives", collectives]
            assert main([*words, "--attention-dropout", dropout]) == 0
            found = json.loads(capsys.readouterr().out)
            bytes_of[collectives, dropout] = found["best"][0]["memory_bytes"]
            carried = found["config"]["ds_ext"]["train"].get("attention_dropout", 0.1)
            assert carried == float(dropout)
    assert bytes_of["gloo", "0"] == bytes_of["nccl", "0"] == bytes_of["nccl", "0.2"]
    # 4 layers keep 12 bytes per score.
    more = bytes_of["gloo", "0.2"] - bytes_of["gloo", "0"]
    assert more > 0.9 * 4 * 12 * 8 * 1024**2


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([*(word.replace("16GB", "1GB") for word in PLAN), "--headroom", "0", "--tensor-parallel", "8"])
        == 1
    )
    out = capsys.readouterr().out
    assert re.search(r"\nsmallest: TP 8 x PP 1 .*\n.* 1\.0 GB.* GB too much\.\n  Use .*more memory\.\n", out)
    assert "{" not in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory", "80"], r"got '80'"),
        (["--inside", "fast"], r"--inside: .*got 'fast'"),
        (["--recompute-interval", "0"], r"--recompute-interval: .*got 0"),
        (["--micro-batch-size", "0"], r"--micro-batch-size: .*got 0"),
        (["--micro-batch-size", "3"], r"micro-batches of 3 .*Use --micro-batch-size 2 or 4, "),
        (["--inside", "300,2us"], r"--inside: .*'300'.*Use 300GB,2us "),
        (["--tflops", "0"], r"--tflops: .*got 0"),
        (["--tflops", "inf"], r"--tflops: .*got inf"),
        (["--devices", "0"], r"--devices: .*got 0"),
        (["--memory", "80Gb"], r"--memory: .*got '80Gb'"),
        (["--costs", "comm=1"], r"costs: "),
        (["--tensor-parallel", "3"], r"8 devices \(got 3\)\. Use --tensor-parallel 1, 2, 4 or 8\."),
        (["--model", "gpt-5"], r"model: .*'gpt-5'"),
        (["--model", "deepseek-v2"], r"experts .*'deepseek-v2'.*mixtral-8x7b"),
        (
            ["--model", "mixtral-8x7b", "--sequence-parallel", "--tensor-parallel", "8"],
            r"experts .*TP 8 .*--sequence-parallel",
        ),
        (["--model", "qwen3-30b-a3b", "--tensor-parallel", "3", "--devices", "24"], r"32 heads .*TP 3"),
        (["--model", "no/folder/config.json"], r"model: .*'no/folder/config\.json'"),
        (["--tokens", "0"], r"--tokens: .*got 0"),
        (["--tokens", "nan"], r"--tokens: .*got nan"),
        (["--price", "2"], r"--price: needs --tokens .*got 2"),
        (["--tokens", "1e9", "--price", "-1"], r"--price: .*got -1"),
        (["--gpu", "a100", "--precision", "fp32"], r"--precision: .*got fp32"),
    ],
)
def test_wrong_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and re.search(words, captured.err) and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], r"--memory: "),
        (["--devices", "8"], r"--memory: "),
        (["--memory", "16GB", "--tokens", "1e9"], r"--devices: "),
        (["--gpu", "h100", "--tokens", "1e9", "--days", "1", "--hosts", "1x8"], r"--hosts: .*got 1x8"),
        (
            ["--gpu", "h100", "--tokens", "1e9", "--days", "1", "--forward-devices", "2"],
            r"--forward-devices: ",
        ),
    ],
)
def test_missing_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt-1.3b", "--global-batch-size", "16", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and re.search(words, captured.err) and captured.err.count("\n") == 1


WORDS = (
    "plan --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 512 --vocab-size 2000 "
    "--global-batch-size 32 --tensor-parallel 1 --micro-batch-size 1"
)
SMALL = WORDS.split()


def found_by(capsys: pytest.CaptureFixture[str], *flags: str, status: int = 0) -> dict[str, Any]:
    """Return the JSON that a command prints."""
    assert main([*flags, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_a_gpu_stands_for_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--memory 80GB --tflops 692.3 --memory-bandwidth 2680GB --inside 450GB,2us --between 50GB,10us"
    named = found_by(capsys, *SMALL, "--devices", "4", "--gpu", "h100")
    typed = found_by(capsys, *SMALL, "--devices", "4", *words.split())
    assert named["best"] == typed["best"] and named["config"] == typed["config"]
    assert typed["run"]["mfu"] is None
    assert named["run"]["mfu"] == pytest.approx(named["run"]["model_flops"] / 989e12)
    slower = found_by(capsys, *SMALL, "--devices", "4", "--gpu", "h100", "--tflops", "100")
    assert slower["best"][0]["step_s"] > 2 * named["best"][0]["step_s"]


def test_a_deadline_finds_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--gpu", "a100", "--tokens", "1e9", "--days", "0.01", "--price", "2.5"]
    found = found_by(capsys, *SMALL, *run)
    figures = found["run"]
    assert list(figures) == ["devices", "tokens_per_s", "model_flops", "mfu", "days", "gpu_hours", "cost"]
    sizes = found["best"][0]
    product = sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"] * sizes["data_parallel_size"]
    assert figures["devices"] == product == 8 and figures["days"] <= 0.01
    assert figures["gpu_hours"] == pytest.approx(24 * 8 * figures["days"])
    assert figures["cost"] == pytest.approx(2.5 * figures["gpu_hours"])
    config = found["config"]
    tokens = config["train_batch_size"] * config["ds_ext"]["train"]["seq_length"]
    assert 0 <= config["ds_ext"]["train"]["train_iters"] * tokens - 1e9 < tokens
    rate = config["scheduler"]["params"]
    assert rate["total_num_steps"] == config["ds_ext"]["train"]["train_iters"] > rate["warmup_num_steps"] > 0
    train = config["ds_ext"]["train"]
    assert train["save_interval"] == max(1, round(3600 / found["best"][0]["step_s"]))
    assert train["save"] and train["keep_checkpoints"] == 2
    assert config["gradient_clipping"] == 1.0
    late = found_by(capsys, *SMALL, *run, "--devices", "4", status=1)
    assert late["fits"] and late["run"]["devices"] == 4 and late["run"]["days"] > 0.01
    tight = ["--tokens", "1e9", "--days", str(1.1 * figures["days"]), "--gpu", "a100", "--devices", "8"]
    assert found_by(capsys, *SMALL, *tight, status=1)["run"]["days"] == pytest.approx(figures["days"])


def test_a_fixed_pipeline_parallel_size(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "a100", "--pipeline-parallel"]
    found = found_by(capsys, *SMALL, *flags, "2", "--devices", "8")
    assert {sizes["pipeline_parallel_size"] for sizes in found["best"]} == {2}
    days = ["--tokens", "1e9", "--days", "0.01"]
    assert found_by(capsys, *SMALL, *flags, "4", *days)["best"][0]["pipeline_parallel_size"] == 4
    assert main([*SMALL, *flags, "3", "--devices", "8"]) == 2
    assert "--pipeline-parallel 2" in capsys.readouterr().err


def test_sizes_that_are_not_planned_are_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SMALL, "--devices", "8", "--gpu", "a100"]
    found = found_by(capsys, *flags)["best"]
    assert [row["planned"] for row in found] == ["step_s" in row for row in found]
    assert [not row["planned"] for row in found] == ["least_step_s" in row for row in found]
    unplanned = [row for row in found if not row["planned"]]
    assert unplanned and main(flags) == 0
    _, table, *_ = capsys.readouterr().out.split("\n\n")
    rows = [line for line in table.splitlines() if line.startswith(" ")]
    assert len(rows) == len(found) - len(unplanned) and ">=" not in table
    (line,) = [line for line in table.splitlines() if line.startswith("not planned")]
    assert re.findall(r" ([\d.]+) s", line) == [f"{row['least_step_s']:.4g}" for row in unplanned][:3]


QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


LITTLE_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("file", ["", "config.json"])
def test_a_model_of_hugging_face(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sizes are those of the named model, and the script takes the JSON."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    words = "plan --devices 8 --gpu h200 --global-batch-size 8 --tensor-parallel 8 --micro-batch-size 1"
    found = found_by(capsys, *words.split(), "--model", str(tmp_path / file))
    named = found_by(capsys, *words.split(), "--model", "qwen3-8b")
    assert found["best"] == named["best"]
    job = tmp_path / "job.json"
    job.write_text(json.dumps(found["config"]))
    args, _ = parse("train_gpt.py", ["--deepspeed_config", str(job)])
    assert (args.num_layers, args.seq_length, args.rotary_base) == (36, 8192, 1e6)


def test_a_mixture_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sizes are those of the named model. The JSON leaves them to the folder."""
    sizes = {
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
    }
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    values = {**QWEN3, **sizes, **experts, "model_type": "qwen3_moe"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    words = [
        "plan",
        "--devices",
        "8",
        "--gpu",
        "h200",
        "--global-batch-size",
        "8",
        "--tensor-parallel",
        "8",
        "--micro-batch-size",
        "1",
    ]
    found = found_by(capsys, *words, "--model", str(tmp_path))
    assert found["best"] == found_by(capsys, *words, "--model", "qwen3-30b-a3b")["best"]
    assert "hidden_size" not in found["config"]["ds_ext"]["train"]
    assert main([*words, "--model", str(tmp_path)]) == 0
    assert f"--hf-model {tmp_path} " in capsys.readouterr().out


def test_a_folder_of_another_decoder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its sizes are those of a Llama here, and its JSON is for layers of transformers."""
    words = ["plan", "--devices", "8", "--gpu", "h100", "--global-batch-size", "8", "--tensor-parallel", "2"]
    for kind in ("llama", "glm4"):
        values = {**QWEN3, "model_type": kind, "architectures": ["Glm4ForCausalLM"]}
        (tmp_path / f"{kind}.json").write_text(json.dumps(values))
    known, other = (
        found_by(capsys, *words, "--model", str(tmp_path / f"{k}.json")) for k in ("llama", "glm4")
    )
    rows = [found["best"][0] for found in (known, other)]
    assert rows[1]["memory_bytes"] == pytest.approx(rows[0]["memory_bytes"], rel=1e-3)
    train = other["config"]["ds_ext"]["train"]
    assert train["transformer_impl"] == "transformers" and "hidden_size" not in train
    assert "hidden_size" in known["config"]["ds_ext"]["train"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, **LITTLE_MIXTURE}, r"qk_nope_head_dim: "),
        ({"model_type": "mixtral", "num_local_experts": 8}, r"num_local_experts: .* experts .*got 8"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, r"num_experts: .* experts .*got 128"),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 16}}, r"experts .*got 16"),
        ({"model_type": "mamba"}, r'model_type: .*got "mamba"'),
        ({"model_type": "bert"}, r'model_type: .*got "bert"'),
        ({"hidden_size": None}, r"hidden_size: .*got null"),
    ],
)
def test_models_that_are_not_supported(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    assert main([*PLAN, "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error) and "config.json" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "label"),
    [
        ("", "gpt-1.3b,"),
        ("--num-layers 24", "gpt-1.3b,"),
        ("--num-layers 12 --seq-length 1024", "gpt-1.3b with num_layers 12, seq_length 1024,"),
    ],
)
def test_a_changed_model_has_another_label(
    flags: str, label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, "--tensor-parallel", "8", "--micro-batch-size", "2", *flags.split()]) == 0
    assert capsys.readouterr().out.partition("\n")[0].split(maxsplit=1)[1].startswith(label)


def test_a_model_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    at = PLAN.index("--model")
    assert main(PLAN[:at] + PLAN[at + 2 :]) == 2
    assert capsys.readouterr().err.startswith("error: --model: ")


@pytest.mark.parametrize("name", select(["schedules", "plans"], ["plans"]))
def test_the_example_of_the_page(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert search._MAX_OPS > 2_000  # the full search
    page = (Path(__file__).parents[3] / "docs" / f"{name}.md").read_text()
    example = re.search(r"    \$ python -m ds_ext (plan .*)\n\n((?:    .*\n|\n)+)", page)
    assert example is not None
    assert main(example[1].split()) == 0
    shown = "\n".join(line[4:] for line in example[2].splitlines()).strip()
    printed = capsys.readouterr().out.strip()
    if shown.startswith("..."):
        shown = shown.removeprefix("...").strip()
        printed = printed.partition("\n\n")[2].partition("\nplan.json")[0]
    assert printed == shown


def test_days_of_given_devices_have_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """With steps longer by the error, they take the days; the JSON has their steps."""
    words = ["plan", "--devices", "8", "--gpu", "h100", "--model", "gpt-1.3b", "--global-batch-size", "16"]
    found = found_by(capsys, *words, "--days", "7", "--price", "2")
    assert found["run"]["days"] == pytest.approx(7 / 1.16, rel=5e-3)
    assert found["run"]["cost"] == pytest.approx(2 * 24 * 8 * 7 / 1.16, rel=5e-3)
    tokens = found["run"]["tokens_per_s"] * 86400 * found["run"]["days"]
    assert found["config"]["ds_ext"]["train"]["train_iters"] == pytest.approx(tokens / 16 / 2048, rel=1e-3)
