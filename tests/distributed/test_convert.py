"""Checkpoints of ranks go to transformers, and its models are trained on over ranks."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_ext.__main__ import main
from ds_ext.engine.checkpoint.optimizer_states import OptimizerStates
from ds_ext.errors import ConfigError
from ds_ext.pipe_schedules import SCHEDULES
from ds_ext.recipes.convert.hf_model import HuggingFaceModel
from ds_ext.recipes.convert.into_ranks import load_into_ranks
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.recipes.models.hf_config import unseen_in_weights
from ds_ext.recipes.training.checkpoint_fit import check_load
from ds_ext.tensor_parallel import skip_initial_values
from tests.distributed import test_bert, test_checkpoint
from tests.engine_runs import MODEL, Job, StepBatches, build
from tests.losses import learned
from tests.precisions import needs
from tests.ranks import Ranks
from tests.reference import random_batches
from tests.selection import select

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

# The padded vocabulary is 88 without tensor parallelism and 96 with two ranks.
GPT = dataclasses.replace(MODEL, vocab_size=84)
HALF = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def train_and_save(rank: int, job: Job, folder: str) -> None:
    """Some steps and a checkpoint as train_gpt.py makes it."""
    engine, _ = build(job)
    batches = StepBatches(random_batches(job.model, 3, job.micro_batches))
    for _ in range(3):
        engine.train_batch(batches)
    engine.save_checkpoint(folder, client_state={"step": 3, "model": unseen_in_weights(job.model)})
    engine.transport.close()


def best_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Every whole weight by "layer.name", the master weights where there are some; read without the code under test."""
    found = test_checkpoint.contents(checkpoint)
    names = [name for name in found if " " not in name]
    return {
        name.replace("tied_modules.embed.", "0."): found.get(f"{name} fp32", found[name]) for name in names
    }


@needs("bf16")
def test_from_tensor_and_pipeline_parallel_ranks(ranks: Ranks, tmp_path: Path) -> None:
    from tests.hf_models import loaded, logits_difference

    gpt, bert = tmp_path / "gpt", tmp_path / "bert"
    job = Job("1f1b", 2, 2, 1, 4, GPT, deepspeed=HALF)
    ranks(4).run(train_and_save, job, str(gpt), timeout_s=120)
    config = dataclasses.replace(test_bert.MODEL, num_layers=4, hidden_dropout=0.0, attention_dropout=0.0)
    ranks(4).run(test_bert.train, "bitpipe", 2, 2, 1, config, 1, None, str(bert), timeout_s=120)

    assert main(["convert", str(gpt), "--to", "hf", str(tmp_path / "gpt_hf")]) == 0
    weights = best_weights(gpt / "global_step3")
    theirs = loaded("GPT2LMHeadModel", tmp_path / "gpt_hf")
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())
    assert logits_difference(GPT, weights, theirs) < 1e-5

    # A checkpoint of another script, which does not say how many heads there are.
    words = ["convert", str(bert), "--to", "hf", str(tmp_path / "bert_hf")]
    assert main(words) == 2
    assert main([*words, "--num-attention-heads", str(config.num_attention_heads)]) == 0
    theirs = loaded("BertForPreTraining", tmp_path / "bert_hf")
    assert logits_difference(config, best_weights(bert / "last"), theirs) < 1e-5


def load_and_train(rank: int, job: Job, folder: str) -> tuple[list[float], str]:
    """The losses of some steps after the checkpoint, and what a script says whose model has other heads."""
    engine, _ = build(job)
    path, state = engine.load_checkpoint(folder)
    assert path is not None and state is not None and state["step"] == engine.global_steps == 0
    batches: Any = StepBatches(random_batches(job.model, 3, job.micro_batches * job.dp))
    losses = [float(engine.train_batch(batches)) for _ in range(3)]
    other = dataclasses.replace(job.model, num_attention_heads=8)
    with pytest.raises(ConfigError) as refused:
        check_load(argparse.Namespace(load=folder, data_path=[]), other)
    engine.transport.close()
    return losses, str(refused.value)


def expected_losses(theirs: Any, model: GPTConfig, micro_batches: int, steps: int) -> list[float]:
    """The losses of a model of transformers that a plain loop trains."""
    update = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for batches in random_batches(model, steps, micro_batches):
        losses = [
            F.cross_entropy(theirs(tokens_BS).logits.flatten(0, 1), labels_BS.flatten())
            for tokens_BS, labels_BS in batches
        ]
        loss = sum(losses, torch.zeros(())) / len(losses)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        update.step()
        update.zero_grad()
        expected.append(float(loss.detach()))
    return learned(expected)


@pytest.mark.parametrize(("sizes", "zero"), [(("bitpipe_zb", 2, 2, 1, 4), 1), (("1f1b", 2, 1, 2, 2), 0)])
def test_training_goes_on_from_transformers(
    ranks: Ranks, tmp_path: Path, sizes: tuple[str, int, int, int, int], zero: int
) -> None:
    """The losses are those of the model itself, trained by a plain loop."""
    from tests.hf_models import random_gpt2

    theirs = random_gpt2(vocab_size=84, n_positions=16, n_layer=8, n_inner=None)
    theirs.save_pretrained(tmp_path / "hf")
    assert main(["convert", str(tmp_path / "hf"), "--from", "hf", str(tmp_path / "ours")]) == 0
    job = Job(*sizes, GPT, 3, deepspeed=zero_json(zero))
    results = ranks(4).run(load_and_train, job, str(tmp_path / "ours"), timeout_s=120)
    expected = expected_losses(theirs, GPT, 4, 3)
    for losses, refused in results:
        assert losses == pytest.approx(expected, rel=1e-5)
        assert "num_attention_heads 4, here 8" in refused


def zero_json(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}


def weights_of_both(rank: int, job: Job, folder: str, checkpoint: str) -> tuple[list[float], list[str]]:
    """Load a folder and train; load its conversion. Return the losses, and a checksum of the weights for each load."""
    losses, checksums = [], []
    for from_folder in (True, False):
        with skip_initial_values() if from_folder else nullcontext():
            engine, _ = build(job)
        if from_folder:
            load_into_ranks(engine, HuggingFaceModel(Path(folder)))
        else:
            engine.load_checkpoint(checkpoint)
        states = OptimizerStates(engine.optimizer)
        master = (fragment.master for fragment in states.fragments().values())
        tensors = [*engine.module.parameters(), *(tensor for tensor in master if tensor is not None)]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        checksums.append(digest.hexdigest())
        if from_folder:
            batches: Any = StepBatches(random_batches(job.model, 2, job.micro_batches * job.dp))
            losses = [float(engine.train_batch(batches)) for _ in range(2)]
        engine.transport.close()
    return losses, checksums


# Model, sizes, and sections of the JSON.
LOADED: list[tuple[str, tuple[str, int, int, int, int], dict[str, Any]]] = [
    ("llama3", ("bitpipe_zb", 4, 1, 1, 4), zero_json(1)),
    ("llama3 in parts", ("bitpipe_zb", 2, 2, 1, 4), zero_json(1)),
    ("qwen2", ("interleaved", 2, 2, 1, 4), zero_json(0)),
    ("qwen2 in parts", ("bitpipe_zb", 4, 1, 1, 4), zero_json(1)),  # its head is tied
    ("qwen3", ("fbd", 2, 1, 1, 4), zero_json(0)),
    ("gpt2", ("1f1b", 2, 2, 1, 4), HALF),
    ("mistral", ("chimera", 2, 2, 1, 4), HALF),
]


EVERY_SCHEDULE = [("llama3", (name, 4, 1, 1, 8), zero_json(1)) for name in sorted(SCHEDULES)]


@pytest.mark.parametrize(("name", "sizes", "sections"), select([*LOADED, *EVERY_SCHEDULE], LOADED))
def test_ranks_load_their_part_of_a_folder(
    ranks: Ranks,
    tmp_path: Path,
    name: str,
    sizes: tuple[str, int, int, int, int],
    sections: dict[str, Any],
) -> None:
    """A folder and its conversion give the same weights bit by bit, and the losses of transformers' model."""
    from tests.hf_models import random_gpt2, random_llama

    changes: dict[str, Any] = {"vocab_size": 84}
    if name == "gpt2":
        theirs = random_gpt2(**changes, n_positions=16, n_layer=8, n_inner=None)
    else:
        theirs = random_llama(name.split()[0], **changes, max_position_embeddings=16, num_hidden_layers=8)
    folder, checkpoint = tmp_path / "hf", tmp_path / "checkpoint"
    theirs.save_pretrained(folder, max_shard_size="100KB")
    assert len([*folder.glob("model-*.safetensors")]) > 1
    assert main(["convert", str(folder), "--from", "hf", str(checkpoint)]) == 0
    model = dataclasses.replace(
        HuggingFaceModel(folder).config,
        make_vocab_size_divisible_by=8,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    assert isinstance(model, GPTConfig)
    job = Job(*sizes, model, 2, deepspeed=sections, head_parts=name.endswith("in parts"))
    results = ranks(job.world_size).run(weights_of_both, job, str(folder), str(checkpoint), timeout_s=120)
    assert all(first == second for _, (first, second) in results)
    expected = expected_losses(theirs, model, job.micro_batches, 2)
    for losses, _ in results:
        if sections is HALF:
            assert losses[0] == pytest.approx(expected[0], rel=2e-2)
        else:
            assert losses == pytest.approx(expected, rel=1e-5)
