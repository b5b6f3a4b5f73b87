"""Sizes of a mixture of experts in a job of train_gpt.py: those of transformers' model, in "auto" and in ``plan``."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_ext.cli.model_flags import add_model_flags, model_of
from ds_ext.pipe_schedules.placement import linear
from ds_ext.planner.auto import training_sizes
from ds_ext.planner.candidates import Candidates
from ds_ext.planner.memory import memory, model_parameters, rank_parameters
from ds_ext.planner.training_sizes import TrainingSizes
from ds_ext.recipes.data.tokenizer import train_bpe
from ds_ext.recipes.training.job import TrainingJob
from ds_ext.recipes.training.setup import plan_job
from tests.decoder_models import EXPERTS_MODELS, LAYERS, MODELS, MORE_MODELS, WORDS
from train_gpt import AFTER, BEFORE, gpt_config

transformers: Any = pytest.importorskip("transformers")
TENSOR, TOKENS = 2, 32
JOB = (
    f"--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 5 --bf16 --schedule auto --dry-run "
    f"--pipeline-model-parallel-size 2 --tensor-model-parallel-size {TENSOR} --vocab-size {WORDS} "
    f"--seq-length {TOKENS}"
).split()
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --num-experts 8 "
    f"--max-position-embeddings {TOKENS} --hidden-dropout 0 --attention-dropout 0 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope"
).split()
SIGMOID = (
    "--moe-router-score-function sigmoid --moe-layer-freq [0]+[1]*3 --moe-shared-expert-intermediate-size 32"
)
# Name of a folder's model, or flags.
MIXTURES = [
    *("Mixtral", "Qwen3Moe", "DeepseekV3", "Glm4Moe", "GptOss", ""),
    *("--moe-router-topk 3 --qk-layernorm --moe-layer-freq 2 --moe-ffn-hidden-size 16",),
    f"{SIGMOID} --moe-ffn-hidden-size 16 --untie-embeddings-and-output-weights",
]
LEFT_OUT = ".sinks"  # of an attention of gpt-oss


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TrainingJob[Any]]:
    @functools.cache
    def job(mixture: str) -> TrainingJob[Any]:
        words = [*FLAGS, *mixture.split()]
        if mixture.isalnum():
            folder = tmp_path_factory.mktemp(mixture)
            values = {**MODELS, **MORE_MODELS, **EXPERTS_MODELS}[mixture]
            getattr(transformers, f"{mixture}Config")(**values).save_pretrained(folder)
            train_bpe(["a text"], 300).save(folder)
            words = ["--hf-model", str(folder), "--train-from-scratch"]
        return plan_job("train_gpt.py", [*words, *JOB], "gpt", gpt_config, BEFORE, AFTER)

    return job


def candidates_of(job: TrainingJob[Any]) -> Candidates:
    assert job.plan.candidates is not None
    return job.plan.candidates


def planned_sizes(job: TrainingJob[Any]) -> TrainingSizes:
    """Return the sizes of ``plan --model FOLDER`` with the settings of the job."""
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    model = model_of(parser.parse_args(["--model", job.args.hf_model]))
    assert model is not None
    return training_sizes(job.plan.job.deepspeed, model, 1, TENSOR, 1)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_auto_prices_the_model_of_plan(jobs: Any, mixture: str) -> None:
    job = jobs(mixture)
    best = candidates_of(job).best
    assert best is not None and best.sizes is not None
    sizes = replace(planned_sizes(job), stage_layers=best.layers)
    assert best.memory_bytes == max(device.total for device in memory(job.plan.timetable, sizes))
    assert best.memory_bytes == max(device.total for device in memory(job.plan.timetable, job.sizes))
    assert best.sizes.forward_flops == sizes.forward_flops == job.model.forward_flops


@pytest.mark.parametrize("mixture", MIXTURES)
def test_parameters_and_flops_are_those_of_transformers(jobs: Any, mixture: str) -> None:
    job = jobs(mixture)
    config = transformers.AutoConfig.from_pretrained(job.args.hf_model)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    best = candidates_of(job).best
    assert best is not None and best.sizes is not None
    experts, latent = job.model.experts, job.model.latent
    assert experts is not None
    total = on_rank = active = 0.0
    for name, parameter in model.named_parameters():
        if LEFT_OUT in name:
            continue
        elements = parameter.numel()
        is_whole = parameter.ndim == 1 or "mlp.gate." in name or "router" in name
        is_whole |= latent is not None and "self_attn" in name
        total += elements
        on_rank += elements if is_whole else elements / TENSOR
        if parameter.ndim > 1 and "bias" not in name and not name.startswith(("lm_head", "model.embed")):
            active += elements * experts.per_token / experts.number if ".experts." in name else elements
    assert model_parameters(job.sizes) == model_parameters(best.sizes) == pytest.approx(total, rel=1e-12)
    [rank] = rank_parameters(replace(best.sizes, stage_layers=None), linear(1))
    if config.model_type != "gpt_oss":  # some of its biases are divided, others not
        assert rank == pytest.approx(on_rank, rel=1e-12)
    head = config.vocab_size * config.hidden_size
    features = 2 * job.model.head_size if latent is None else latent.head_size + latent.value
    attention = LAYERS * TOKENS * config.num_attention_heads * features
    flops = 2 * TOKENS * (active + head + attention)
    assert (best.sizes.forward_flops, job.model.flops_per_sample) == pytest.approx((flops, 3 * flops))
