"""train_gpt.py --num-experts: Megatron's command line trains a model of transformers from new weights."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_ext
from ds_ext.__main__ import main
from ds_ext.hf.find import find_split
from ds_ext.hf.weights import make_source
from ds_ext.recipes.data.gpt import build_gpt_datasets
from tests.chat_folders import TEMPLATES, write_tokenizer
from tests.decoder_models import MODELS
from tests.launch.forked import run_forked
from tests.launch.jobs import ROOT, write_json
from tests.selection import select
from tests.unit.recipes.data.test_prepare import run

transformers: Any = pytest.importorskip("transformers")
BATCH, LENGTH, STEPS, RATE, SEED = 4, 32, 3, 1e-2, 7
AUXILIARY, Z = 0.02, 0.001
SIZES = (
    f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} --max-position-embeddings 64 "
    "--ffn-hidden-size 48 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --init-method-std 0.1 --hidden-dropout 0 --attention-dropout 0 "
    f"--micro-batch-size 1 --global-batch-size {BATCH} --lr {RATE} --lr-decay-style constant --weight-decay 0 "
    f"--train-iters {STEPS} --eval-iters 1 --seed {SEED} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--split 90,10,0"
)
MIXTRAL = f"--untie-embeddings-and-output-weights --moe-aux-loss-coeff {AUXILIARY} --moe-z-loss-coeff {Z}"
GLM = (
    "--moe-router-score-function sigmoid --moe-layer-freq [0]+[1]*3 --moe-shared-expert-intermediate-size 48 "
    "--moe-router-load-balancing-type none"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    tokenizer = write_tokenizer(path / "tokenizer", TEMPLATES["chatml"])
    (path / "texts").mkdir()
    for number in range(30):
        (path / "texts" / f"{number}.txt").write_text(f"the number is {number}, and it is not 7. " * 20)
    run("--source", path / "texts", "--tokenizer", tokenizer, "--output", path / "prepared")
    return path / "prepared"


def new_model(folder: Path) -> Any:
    """Return the model of a config, with the weights that a run with SEED begins with."""
    config = transformers.AutoConfig.from_pretrained(folder)
    split = find_split(make_source(config, None))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for index, layer in enumerate(ds_ext.from_transformers(config, seed=SEED)[0]):
            for key, value in layer.build().named_parameters():
                name = f"{split.embedding}.weight" if key == "module.weight" else split.name_of(index, key)
                parameters[name].copy_(value)
    return model


def sample(samples: Any, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_S, labels_S = samples[index]
    return tokens_S, labels_S


def losses_of_routers(logits_NE: torch.Tensor, z: float = Z) -> torch.Tensor:
    experts, chosen = logits_NE.size(-1), 2
    tokens_E = logits_NE.topk(chosen).indices.flatten().bincount(minlength=experts) / (
        chosen * len(logits_NE)
    )
    balance = AUXILIARY * experts * (tokens_E * logits_NE.softmax(-1).mean(0)).sum()
    return balance + z * logits_NE.exp().sum(-1).log().square().mean()


def plain_losses(folder: Path, data: Path) -> list[float]:
    """Return the losses of a plain loop, with those of the routers of every layer and micro-batch."""
    model = new_model(folder)
    has_losses = getattr(model.config, "output_router_logits", False)
    samples, *_ = build_gpt_datasets(str(data), "90,10,0", LENGTH, (STEPS * BATCH, 0, 0), SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, eps=1e-8)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for index in range(step * BATCH, (step + 1) * BATCH):
            tokens_S, labels_S = sample(samples, index)
            outputs = model(tokens_S[None])
            loss = torch.nn.functional.cross_entropy(outputs.logits[0], labels_S)
            if has_losses:
                loss = loss + sum(map(losses_of_routers, outputs.router_logits))
            (loss / BATCH).backward()
            total += loss.item() / BATCH
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


LAYOUTS = {
    "bitpipe_zb": "--schedule bitpipe_zb --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
    "expert parallel": "--tensor-model-parallel-size 2 --expert-model-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2 --use-distributed-optimizer",
}


@pytest.mark.parametrize(
    ("flags", "layout"),
    select(
        [(flags, layout) for flags in (MIXTRAL, GLM) for layout in LAYOUTS],
        [(MIXTRAL, "bitpipe_zb"), (GLM, "expert parallel")],
    ),
)
def test_a_command_line_of_megatron_trains_as_one_process(
    data: Path, tmp_path: Path, free_port: Callable[[], int], flags: str, layout: str
) -> None:
    """Then the checkpoint becomes a folder with a tokenizer, which the next step of the run agrees with."""
    saved, output, metrics = tmp_path / "saved", tmp_path / "hf", tmp_path / "metrics.jsonl"
    words = [str(ROOT / "train_gpt.py"), *SIZES.split(), *flags.split(), "--data-path", str(data)]
    words += ["--metrics-file", str(metrics), "--save", str(saved)]
    ranks = 4 if layout == "bitpipe_zb" else 2

    def train(*more: str, layout: str, ranks: int) -> tuple[list[Any], str]:
        command = [*words, *LAYOUTS[layout].split(), *more]
        results = run_forked([command] * ranks, tmp_path, port=free_port())
        assert [result.returncode for result in results] == [0] * ranks, results
        return [json.loads(line) for line in metrics.read_text().splitlines()], results[0].stdout

    rows, output_text = train(layout=layout, ranks=ranks)
    assert [row["loss"] for row in rows] == pytest.approx(plain_losses(saved / "model", data), rel=1e-5)
    assert all(1 <= row["expert_load"] <= 4 and 0 <= row["idle_experts"] < 1 for row in rows)
    of_tokens = rows[-1]["validation_loss"] - rows[-1]["validation_losses"].get("aux_loss", 0.0)
    (perplexity,) = re.findall(r"perplexity ([\d.]+)", output_text)
    assert float(perplexity) == pytest.approx(math.exp(of_tokens), rel=1e-3)
    assert main(["convert", str(saved), "--to", "hf", str(output), "--hf-model", str(saved / "model")]) == 0
    assert (output / "tokenizer.json").is_file()
    trained = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    more = ["--load", str(saved), "--train-iters", str(STEPS + 1)]
    (*_, last), _ = train(*more, layout="pipeline", ranks=2)
    samples, *_ = build_gpt_datasets(str(data), "90,10,0", LENGTH, ((STEPS + 1) * BATCH, 0, 0), SEED)
    expected = 0.0
    for index in range(STEPS * BATCH, (STEPS + 1) * BATCH):
        tokens_S, labels_S = sample(samples, index)
        outputs = trained(tokens_S[None])
        loss = torch.nn.functional.cross_entropy(outputs.logits[0], labels_S)
        if flags == MIXTRAL:
            loss = loss + sum(map(losses_of_routers, outputs.router_logits))
        expected += loss.item() / BATCH
    assert last["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_json_chooses_the_loss_of_routers(
    data: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """A folder has transformers' pooled loss, and that of every layer with the key."""
    model, metrics = tmp_path / "model", tmp_path / "metrics.jsonl"
    shutil.copytree(data, model, ignore=lambda *_: ["tokens.bin"])
    vocab_size = json.loads((data / "meta.json").read_text())["vocab_size"]
    transformers.MixtralConfig(
        **MODELS["Mixtral"] | {"vocab_size": vocab_size, "max_position_embeddings": LENGTH},
        output_router_logits=True,
        router_aux_loss_coef=AUXILIARY,
    ).save_pretrained(model)
    plain = new_model(model)
    samples, *_ = build_gpt_datasets(str(data), "90,10,0", LENGTH, (BATCH, 0, 0), SEED)
    tokens_BS, labels_BS = zip(*(sample(samples, index) for index in range(BATCH)), strict=True)
    with torch.no_grad():
        outputs = [plain(tokens_S[None]) for tokens_S in tokens_BS]  # a micro-batch each
    cross_entropy = sum(
        torch.nn.functional.cross_entropy(output.logits[0], labels_S).item() / BATCH
        for output, labels_S in zip(outputs, labels_BS, strict=True)
    )
    losses = {
        "pooled": sum(AUXILIARY * output.aux_loss.item() / BATCH for output in outputs),
        "per_layer": sum(
            float(losses_of_routers(logits_NE, 0.0)) / BATCH
            for output in outputs
            for logits_NE in output.router_logits
        ),
    }
    assert losses["pooled"] != pytest.approx(losses["per_layer"], rel=0.1)
    for kind, expected in losses.items():
        job = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"lr": RATE}},
            "ds_ext": {"schedule": "1f1b", "pipeline_parallel_size": 2, "auxiliary_loss": kind},
        }
        if kind == "pooled":
            del job["ds_ext"]["auxiliary_loss"]
        command = f"{ROOT / 'train_gpt.py'} --deepspeed_config {write_json(tmp_path / 'job.json', job)} "
        command += f"--hf-model {model} --train-from-scratch --data-path {data} --metrics-file {metrics} "
        command += f"--seq-length {LENGTH} --train-iters 1 --eval-iters 0 --split 90,10,0 --seed {SEED}"
        results = run_forked([command.split()] * 2, tmp_path, port=free_port())
        assert [result.returncode for result in results] == [0, 0], results
        row = json.loads(metrics.read_text().splitlines()[-1])
        assert row["loss"] == pytest.approx(cross_entropy + expected, rel=1e-5)
        assert row["losses"]["aux_loss"] == pytest.approx(expected, rel=1e-5)
