"""Errors that are found before launch, and notes on settings without effect."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ds_ext
from ds_ext.errors import ConfigError
from ds_ext.model.config import TransformerConfig
from ds_ext.model.data_layout import DATA_NAME
from ds_ext.planner.job_plan import JobPlan
from ds_ext.planner.job_text import describe
from ds_ext.recipes.data.indexed import IndexedWriter
from ds_ext.recipes.training.job import TrainingJob
from ds_ext.recipes.training.setup import model_fields
from tests.launch.jobs import tiny_config, write_json
from tests.plans import plan_job

ROOT = Path(__file__).parents[4]


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    writer = IndexedWriter(folder / DATA_NAME, np.uint16)
    writer.add_document(np.arange(8), [8])
    writer.close()


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function (name, section, *flags) that returns the plan of configs/NAME.json, by default of --dry-run."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(
        name: str, section: dict[str, Any] | None, *flags: str, dry_run: bool = True, **keys: Any
    ) -> JobPlan:
        job = json.loads((ROOT / "configs" / f"{name}.json").read_text()) | keys
        job["ds_ext"] |= section or {}
        if section is None:
            del job["ds_ext"]
        given = {key: value for key, value in job.items() if value is not None}
        (tmp_path / "job.json").write_text(json.dumps(given))
        words = ["--deepspeed_config", "job.json", *["--dry-run"] * dry_run, *flags]
        if not dry_run:
            write_data(tmp_path / job["ds_ext"]["train"]["data_path"])
        return plan_job("train_gpt.py", words, "gpt")[1]

    return run


@pytest.mark.parametrize(
    ("name", "section", "words"),
    [
        ("dpp", {"trace": {"dir": "job.json/traces"}}, r"trace.dir: cannot write to .*job.json is a file"),
        (
            "dpp",
            {"trace": {"steps": "10:20"}},
            r"trace.steps.*'10:20'.*\"dir\": \"traces\"",
        ),
        (
            "fbd",
            {"fbd": {"merge_forward_tensor_parallel": True}},
            r"merge_forward_tensor_parallel: .*tensor_parallel_size 1",
        ),
    ],
)
def test_wrong_sections(planned: Any, name: str, section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(name, section, dry_run=False)


def test_trace_steps_without_a_folder(planned: Any, tmp_path: Path) -> None:
    planned("dpp", {"trace": {"dir": None, "steps": "10:20"}})
    planned("fbd", {"tensor_parallel_size": 2}, "--ignore-forward-tensor-parallel")
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]  # a dry run creates no folder


@pytest.mark.parametrize("with_data", [True, False])
def test_a_refused_job_creates_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_data: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    section = {"schedule": "1f1b", "pipeline_parallel_size": 1, "trace": {"dir": "traces"}}
    config = tiny_config(tmp_path, **section)
    write_data(tmp_path)
    if not with_data:
        del config["ds_ext"]["train"]["data_path"]
    write_json(tmp_path / "job.json", config)
    words = ["--deepspeed_config", "job.json", "--save", "saved", "--metrics-file", "metrics/steps.jsonl"]
    with nullcontext() if with_data else pytest.raises(ConfigError, match=r"^--data-path: "):
        plan_job("train_gpt.py", words, "gpt")
    folders = ["metrics", "saved", "traces"] if with_data else []
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == folders


REMOVED = "elasticity amp eigenvalue sparse_attention sparse_gradients graph_harvesting quantize_training"


@pytest.mark.parametrize(
    ("flags", "found"),
    [(("--split", "90,10,0"), ["--split"]), (("--split", "50,50,0"), []), (("--eval-iters", "0"), [])],
)
def test_a_split_without_a_sample_is_named_beside_other_problems(
    flags: tuple[str, ...], found: list[str], planned: Any, tmp_path: Path
) -> None:
    writer = IndexedWriter(tmp_path / DATA_NAME, np.uint16)
    for _ in range(4):
        writer.add_document(np.arange(100), [100])
    writer.close()
    meta = {"documents": 4, "vocab_size": 128}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    words = ("--data-path", str(tmp_path), "--seq-length", "128", "--save-interval", "-1", *flags)
    with pytest.raises(ConfigError) as error:
        planned("1f1b", {}, *words)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["--save-interval", *found]


@pytest.mark.parametrize("key", [*REMOVED.split(), "compression_training"])
def test_keys_without_support_in_deepspeed(planned: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: .*\(got \{{'enabled': True\}}\)"):
        planned("dpp", {}, **{key: {"enabled": True}})


@pytest.mark.parametrize("name", ["musgd", "muadamw"])
def test_optimizers_that_need_base_shapes(planned: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer\.type: .*'{name}'.*AdamW"):
        planned("dpp", {}, optimizer={"type": name})


def test_muon_trains_the_models_of_the_scripts(planned: Any) -> None:
    assert planned("dpp", {}, optimizer={"type": "Muon"}).job.deepspeed["optimizer"]["type"] == "Muon"


def test_settings_without_effect_have_a_note(planned: Any) -> None:
    def notes(plan: JobPlan) -> list[str]:
        options = {"boundaries": [0] * 9, "layer_names": [], "message_bytes": 4, "verbose": False}
        return [line for line in describe(plan, **options).splitlines() if line.startswith("note: ")]

    [note] = notes(planned("dpp", {"sequence_parallel": True}))
    assert "sequence_parallel" in note and "tensor_parallel_size 1" in note
    assert not notes(planned("dpp", {"sequence_parallel": True, "tensor_parallel_size": 2}))
    [note] = notes(planned("dpp", {}, wall_clock_breakdown=True))
    assert note.startswith("note: wall_clock_breakdown: ") and '"trace"' in note
    assert not notes(planned("dpp", {}, wall_clock_breakdown=False))


def test_a_missing_section_is_refused_first(planned: Any) -> None:
    for flags in ((), ("--metrics-file", "nowhere/file")):
        with pytest.raises(ConfigError, match=r'^"ds_ext": missing'):
            planned("dpp", None, *flags, optimizer=None)
    with pytest.raises(ConfigError, match=r'^"ds_ext": missing'):
        ds_ext.PipelineModule([torch.nn.Linear(4, 4)], {"train_batch_size": 4})
    planned("dpp", None, "--schedule", "gpipe")
    with pytest.raises(ConfigError, match=r"^optimizer: "):
        planned("dpp", {}, optimizer=None)


@pytest.mark.parametrize(
    ("section", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")]
)
def test_monitor_without_its_package(
    planned: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, section: str, package: str
) -> None:
    installed = importlib.util.find_spec
    missing: dict[str, Any] = {"spec": None}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: missing["spec"] if name == package else installed(name, *more),
    )
    run = functools.partial(planned, "gpipe", {"pipeline_parallel_size": 1}, dry_run=False)
    run(**{section: {"enabled": False}})
    planned("dpp", {}, **{section: {"enabled": True}})  # a dry run writes nothing
    with pytest.raises(ConfigError, match=rf"^{section}: .*{package}.*pip install '?{package}"):
        run(**{section: {"enabled": True}})
    (tmp_path / package).mkdir()  # a folder of this name is not an installation
    monkeypatch.syspath_prepend(str(tmp_path))
    missing["spec"] = installed(package)
    with pytest.raises(ConfigError, match=f"^{section}: "):
        run(**{section: {"enabled": True}})
    monkeypatch.setenv("RANK", "1")  # only rank 0 writes
    run(**{section: {"enabled": True}})


def test_forward_hosts_of_a_job_on_one_host(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    here = socket.gethostname()
    with pytest.raises(ConfigError, match=rf"fbd.forward_hosts: .*'small-0'.* {here.split('.')[0]}"):
        planned("fbd", {"fbd": {"forward_hosts": ["small-0"]}})
    with pytest.raises(ConfigError, match=r"fbd.forward_hosts: .*4 .*8"):
        planned("fbd", {"fbd": {"forward_hosts": [here]}})


@pytest.mark.parametrize(("sequence_parallel", "slices"), [(False, 1), (True, 2)])
def test_sequence_parallelism_slices_only_the_activation_of_a_message(
    tmp_path: Path, sequence_parallel: bool, slices: int
) -> None:
    section = {"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel}
    file = write_json(tmp_path / "job.json", tiny_config(tmp_path, **section))
    args, plan = plan_job("train_gpt.py", ["--deepspeed_config", str(file), "--dry-run", "--verbose"], "gpt")
    model = TransformerConfig(**model_fields(args, plan.job), vocab_size=100)
    text = TrainingJob(args, plan, model, ["a", "b"], ["c", "d"], [0, 2, 4, 6, 8]).describe(token_bytes=8)
    # Two samples of 16 tokens: fp32 activations of size 16, and 8 bytes per token that every rank sends.
    assert f" {2 * 16 * 16 * 4 // slices + 2 * 16 * 8:,} bytes" in text


def test_a_folder_to_load_without_a_checkpoint(planned: Any, tmp_path: Path) -> None:
    """A script with --save and --load of the same folder starts at step 0 in its first run, as in Megatron."""
    (tmp_path / "logs" / "empty").mkdir(parents=True)
    for folder in ("missing", "logs"):
        words = ["--deepspeed_config", "job.json", "--dry-run", "--data-path", "x"]
        planned("dpp", {})
        args, _ = plan_job("train_gpt.py", [*words, "--load", folder, "--save", folder], "gpt")
        *_, note = args.notes
        assert args.load is None and note.startswith("load ") and folder in note
        with pytest.raises(ConfigError, match=f"^--load {folder}: "):
            planned("dpp", {}, "--load", folder, "--exit-on-missing-checkpoint", dry_run=False)
    (tmp_path / "logs" / "empty" / "events").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for folder in ("logs", "job.json", "link"):
        with pytest.raises(ConfigError, match=f"^--load {folder}: "):
            planned("dpp", {}, "--load", folder)


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (
            ["latest_checkpointed_iteration.txt", "iter_0000100/.metadata"],
            "latest_checkpointed_iteration.txt",
        ),
        (["common.pt", ".metadata", "__0_0.distcp"], "common.pt"),
        (["mp_rank_00/model_optim_rng.pt"], "model_optim_rng.pt"),
        (["latest", "global_step100/mp_rank_00_model_states.pt"], "mp_rank_00_model_states.pt"),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_checkpoint_of_megatron(
    planned: Any, tmp_path: Path, files: list[str], name: str, dry_run: bool
) -> None:
    for file in files:
        (tmp_path / "old" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "old" / file).write_text("global_step100")
    with pytest.raises(
        ConfigError, match=rf"^--load: old .*got {name}.*--hf-model.*ds_ext convert .*--from hf"
    ):
        planned("gpipe", {"pipeline_parallel_size": 1}, "--load", "old", dry_run=dry_run)


def test_the_name_of_a_run_in_wandb(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_NAME", "before")
    for dry_run, name in ((True, "before"), (False, "mine")):
        planned("gpipe", {"pipeline_parallel_size": 1}, "--wandb-exp-name", "mine", dry_run=dry_run)
        assert os.environ["WANDB_NAME"] == name


def test_the_plan_has_the_learning_rate(tmp_path: Path) -> None:
    words = [
        "--lr",
        "6e-4",
        "--micro-batch-size",
        "1",
        "--data-path",
        "x",
        "--dry-run",
        "--train-iters",
        "50",
    ]

    def rate(*flags: str) -> str:
        args, plan = plan_job("train_gpt.py", flags, "gpt")
        config = TransformerConfig(**model_fields(args, plan.job), vocab_size=64)
        text = TrainingJob(args, plan, config, ["a", "b"], ["c", "d"], [0, args.num_layers + 4]).describe()
        return next(line for line in text.splitlines() if line.startswith("rate "))

    assert {"0.0006", "linear", "50"} <= {word.strip(",") for word in rate(*words).split()}
    assert {"cosine", "1e-05"} <= {*rate(*words, "--lr-decay-style", "cosine", "--min-lr", "1e-5").split()}
    optimizer = {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}}
    job = {"train_batch_size": 1, "optimizer": optimizer, "ds_ext": {}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    words = ["--deepspeed_config", str(tmp_path / "job.json"), "--data-path", "x", "--dry-run"]
    assert {"0.002", "constant"} <= {word.strip(",") for word in rate(*words).split()}
