"""train_gpt.py --hf-model for a model that only transformers has layers for: the losses of one plain process."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ext.__main__ import main
from ds_ext.launch.process import EXIT_CONFIG
from ds_ext.recipes.data.gpt import build_gpt_datasets
from ds_ext.recipes.data.packing import DocumentOptions
from tests.chat_folders import TEMPLATES, write_tokenizer
from tests.launch.forked import run_forked
from tests.launch.jobs import ROOT, write_json
from tests.selection import select
from tests.unit.recipes.data.test_prepare import run

transformers: Any = pytest.importorskip("transformers")

BATCH, LENGTH = 4, 48
RATE, LORA_RATE = 1e-3, 2e-2
SAVED, STEPS = 3, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 2 with a chat template, beside conversations that it has prepared."""
    path = tmp_path_factory.mktemp("gemma")
    model = write_tokenizer(path / "model", TEMPLATES["chatml"])
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
    torch.manual_seed(0)
    config = transformers.Gemma2Config(vocab_size=400, max_position_embeddings=64, **sizes)
    gemma = transformers.Gemma2ForCausalLM(config).to(torch.bfloat16)
    gemma.generation_config.eos_token_id = [1, 2]
    gemma.save_pretrained(model)
    rows = [{"instruction": f"{i % 5}?", "output": "it is" + " 7" * (i % 9)} for i in range(40)]
    (path / "chat.json").write_text(json.dumps(rows))
    words = ["--format", "chat", "--source", path / "chat.json", "--tokenizer", model]
    run(*words, "--output", path / "data")
    return path


def conversations(folder: Path, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and their next tokens of every conversation of a step."""
    options = DocumentOptions(packs=False)
    data, *_ = build_gpt_datasets(
        str(folder / "data"), "969,30,1", LENGTH, (STEPS * BATCH, 0, 0), 1234, options
    )
    for index in range((step - 1) * BATCH, step * BATCH):
        tokens_S, labels_S = data[index]
        assert isinstance(tokens_S, torch.Tensor)
        yield tokens_S, labels_S


def loss_of(model: Any, folder: Path, step: int) -> torch.Tensor:
    """Return the mean loss of a step, with one forward for every conversation, without padding."""
    losses = []
    for tokens_S, labels_S in conversations(folder, step):
        logits_SV = model(tokens_S[None]).logits[0].float()
        losses.append(
            torch.nn.functional.cross_entropy(logits_SV, labels_S, reduction="none")[labels_S != -100]
        )
    return torch.cat(losses).mean()


def plain_losses(model: Any, folder: Path) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(1, STEPS + 1):
        loss = loss_of(model, folder, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def train(folder: Path, tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., Any]:
    """Run train_gpt.py on two ranks: train(precision, flags...). Returns the results and the losses by step."""

    def train(precision: str, *flags: str, schedule: str = "zb_v", pp: int = 2) -> Any:
        rate = LORA_RATE if "--lora-rank" in flags else RATE
        values = {"hf_model": str(folder / "model"), "data_path": str(folder / "data"), "seq_length": LENGTH}
        config = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
            **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.0, "torch_adam": True}},
            "ds_ext": {"schedule": schedule, "pipeline_parallel_size": pp, "train": values},
        }
        metrics = tmp_path / "metrics.jsonl"
        words = ["--deepspeed_config", str(write_json(tmp_path / "job.json", config))]
        words += ["--metrics-file", str(metrics), "--eval-iters", "1", *flags]
        results = run_forked([[str(ROOT / "train_gpt.py"), *words]] * 2, tmp_path, port=free_port())
        if results[0].returncode:
            return results, []
        return results, [json.loads(line) for line in metrics.read_text().splitlines()]

    return train


@pytest.mark.parametrize(
    ("precision", "rank"),
    select([("fp32", 0), ("fp32", 4), ("bf16", 0), ("bf16", 4)], [("fp32", 0), ("bf16", 4)]),
)
def test_every_decoder_trains_resumes_and_is_exported(
    train: Callable[..., Any], folder: Path, tmp_path: Path, precision: str, rank: int
) -> None:
    """The checkpoint becomes a folder of transformers, whose loss is the one of the resumed run."""
    if rank:
        pytest.importorskip("peft")
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    model, saved, output = folder / "model", tmp_path / "saved", tmp_path / "output"
    lora = ["--lora-rank", str(rank)] if rank else []
    tolerance = 1e-5 if precision == "fp32" else 3e-3
    (tmp_path / "saved_hf").mkdir()  # of an earlier export
    results, rows = train(precision, *lora, "--save", str(saved), "--train-iters", str(SAVED))
    assert [result.returncode for result in results] == [0, 0], results
    expected = [float(loss_of(load(model), folder, 1))] if rank else plain_losses(load(model), folder)
    steps = min(SAVED, len(expected))
    assert [row["loss"] for row in rows][:steps] == pytest.approx(expected[:steps], rel=tolerance)
    assert rows[-1]["validation_loss"] > 0
    lengths = [len(tokens_S) for step in range(1, SAVED + 1) for tokens_S, _ in conversations(folder, step)]
    (tokens,) = re.findall(r"samples, ([\d,]+) tokens", results[0].stdout)
    assert int(tokens.replace(",", "")) == pytest.approx(sum(lengths), rel=0.3)  # those of a mean sample
    command = re.search(r"convert .*--to hf +(\S+) .*--dtype bfloat16", results[0].stdout.replace("\\\n", ""))
    assert command is not None and command[1] == f"{saved}_hf_step_{SAVED}"  # new, in the dtype of the folder

    assert main(["convert", str(saved), "--to", "hf", str(output), "--hf-model", str(model)]) == 0
    start, trained = load(model), load(output)
    assert type(trained) is type(start)
    assert json.loads((output / "generation_config.json").read_text())["eos_token_id"] == [1, 2]
    assert transformers.AutoTokenizer.from_pretrained(output).chat_template == TEMPLATES["chatml"]
    before = start.state_dict()
    changed = [name for name, value in trained.state_dict().items() if not torch.equal(value, before[name])]
    assert changed and (not rank or all(name.endswith("_proj.weight") for name in changed))

    flags = [*lora, "--load", str(saved), "--train-iters", str(STEPS)]
    results, rows = train(precision, *flags, schedule="1f1b")
    assert [result.returncode for result in results] == [0, 0], results
    (last,) = (row["loss"] for row in rows if row["step"] == STEPS)
    assert float(loss_of(trained, folder, STEPS)) == pytest.approx(last, rel=tolerance)
    assert abs(float(loss_of(start, folder, STEPS)) - last) > 10 * tolerance * last
    if rank:
        import peft

        adapted = peft.PeftModel.from_pretrained(load(model), saved / "adapter")
        assert float(loss_of(adapted, folder, STEPS)) == pytest.approx(last, rel=tolerance)


def test_slices_and_recomputation_change_no_loss(train: Callable[..., Any], folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    flags = ["--sequence-slices", "2", "--recompute-granularity", "full", "--train-iters", "1"]
    results, rows = train("fp32", *flags, schedule="1f1b")
    assert [result.returncode for result in results] == [0, 0], results
    assert rows[0]["loss"] == pytest.approx(float(loss_of(model, folder, 1)), rel=1e-5)


@pytest.mark.parametrize("rank", select([0, 4], [4]))
def test_shards_train_and_are_exported_whole(
    train: Callable[..., Any], folder: Path, tmp_path: Path, rank: int
) -> None:
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    saved, output = tmp_path / "saved", tmp_path / "output"
    lora = ["--lora-rank", str(rank)] if rank else []
    flags = [*lora, "--tensor-model-parallel-size", "2", "--save", str(saved), "--train-iters", str(SAVED)]
    results, rows = train("fp32", *flags, schedule="1f1b", pp=1)
    assert [result.returncode for result in results] == [0, 0], results
    model = load(folder / "model")
    expected = [float(loss_of(model, folder, 1))] if rank else plain_losses(model, folder)[:SAVED]
    assert [row["loss"] for row in rows][: len(expected)] == pytest.approx(expected, rel=1e-5)
    assert main(["convert", str(saved), "--to", "hf", str(output), "--hf-model", str(folder / "model")]) == 0
    results, rows = train("fp32", *lora, "--load", str(saved), "--train-iters", str(STEPS))
    assert [result.returncode for result in results] == [0, 0], results
    (last,) = (row["loss"] for row in rows if row["step"] == STEPS)
    assert float(loss_of(load(output), folder, STEPS)) == pytest.approx(last, rel=1e-5)


def test_a_mixture_in_shards_is_saved_and_exported(
    train: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    """Its experts are divided over two ranks, then a pipeline continues with whole ones."""
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    model, saved, output = tmp_path / "mixtral", tmp_path / "saved", tmp_path / "output"
    shutil.copytree(folder / "model", model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **sizes, vocab_size=400, num_local_experts=4, num_key_value_heads=2, max_position_embeddings=64
    )
    transformers.MixtralForCausalLM(config).save_pretrained(model)
    flags = ["--hf-model", str(model), "--tensor-model-parallel-size", "2", "--save", str(saved)]
    results, rows = train("fp32", *flags, "--train-iters", str(SAVED), schedule="1f1b", pp=1)
    assert [result.returncode for result in results] == [0, 0], results
    assert [row["loss"] for row in rows] == pytest.approx(plain_losses(load(model), folder)[:SAVED], rel=1e-4)
    assert main(["convert", str(saved), "--to", "hf", str(output), "--hf-model", str(model)]) == 0
    flags = ["--hf-model", str(model), "--load", str(saved), "--train-iters", str(STEPS)]
    results, rows = train("fp32", *flags)
    assert [result.returncode for result in results] == [0, 0], results
    (last,) = (row["loss"] for row in rows if row["step"] == STEPS)
    assert float(loss_of(load(output), folder, STEPS)) == pytest.approx(last, rel=1e-4)


@pytest.mark.parametrize("kind", ["Gemma2", "Llama"])
def test_new_weights_of_a_folder(train: Callable[..., Any], folder: Path, tmp_path: Path, kind: str) -> None:
    """They are the same in every layout, and a folder without weights becomes one with them.

    Those of a Llama are in layers of ds_ext.
    """
    model, saved, output = tmp_path / "model", tmp_path / "saved", tmp_path / "output"
    shutil.copytree(folder / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    if kind == "Llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
        transformers.LlamaConfig(**sizes, vocab_size=400, max_position_embeddings=64).save_pretrained(model)
    flags = ["--hf-model", str(model), "--train-from-scratch", "--train-iters", "2"]
    results, rows = train("fp32", *flags, "--save", str(saved))
    assert [result.returncode for result in results] == [0, 0], results
    assert rows[0]["loss"] == pytest.approx(math.log(400), rel=0.05)
    sharded = train("fp32", *flags, "--tensor-model-parallel-size", "2", schedule="1f1b", pp=1)[1]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in sharded[-2:]], rel=1e-5)
    source = ["--hf-model", str(model)] if kind == "Gemma2" else []
    assert main(["convert", str(saved), "--to", "hf", str(output), *source]) == 0
    assert (output / "tokenizer.json").is_file()
    results, rows = train("fp32", *flags[:-1], "3", "--load", str(saved), schedule="1f1b")
    assert [result.returncode for result in results] == [0, 0], results
    trained = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    expected = loss_of(trained, folder, 3).item()  # a Llama packs its conversations
    assert rows[-1]["loss"] == pytest.approx(expected, rel=1e-4 if kind == "Gemma2" else 1e-2)


def test_text_has_the_loss_of_the_model(train: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    """All tokens of a sample are labels, of the tokens before them."""
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"the number is {number}, and it is not 7. " * 20)
    run("--source", tmp_path / "texts", "--tokenizer", folder / "model", "--output", tmp_path / "data")
    text = str(tmp_path / "data")
    results, rows = train("fp32", "--data-path", text, "--train-iters", "1", "--split", "80,20,0")
    assert [result.returncode for result in results] == [0, 0], results
    data, *_ = build_gpt_datasets(text, "80,20,0", LENGTH, (BATCH, 0, 0), 1234)
    tokens_BS, labels_BS = (
        torch.stack(column) for column in zip(*map(data.__getitem__, range(BATCH)), strict=True)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    loss = torch.nn.functional.cross_entropy(model(tokens_BS).logits.flatten(0, 1), labels_BS.flatten())
    assert rows[0]["loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--tensor-model-parallel-size", "8"), "tensor_parallel_size"),
        (("--tensor-model-parallel-size", "3", "--lora-rank", "4"), "tensor_parallel_size"),
        (("--vocabulary-parallel-head",), "vocabulary_parallel_head"),
        (("--chunked-loss",), "chunked_loss"),
    ],
)
def test_what_a_decoder_lacks_is_refused_before_the_ranks_meet(
    folder: Path, tmp_path: Path, flags: tuple[str, ...], key: str
) -> None:
    """The head of a Gemma is tied, and it caps its logits."""
    section = {"schedule": "1f1b", "pipeline_parallel_size": 2}
    job = write_json(
        tmp_path / "job.json", {"train_batch_size": 4, "ds_ext": section, "optimizer": {"type": "AdamW"}}
    )
    words = [str(ROOT / "train_gpt.py"), "--deepspeed_config", str(job), "--dry-run", *flags]
    words += ["--hf-model", str(folder / "model"), "--data-path", str(folder / "data")]
    (result,) = run_forked([words], tmp_path)
    assert result.returncode == EXIT_CONFIG, result
    assert result.stderr.startswith(f"error: {key}: "), result.stderr
