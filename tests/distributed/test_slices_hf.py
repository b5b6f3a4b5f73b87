"""Decoders of transformers in slices of sequences train to the losses, gradients and weights of whole sequences."""

from __future__ import annotations

import contextlib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_ext
from ds_ext.engine.parameters import parameters_of
from ds_ext.errors import ConfigError
from ds_ext.tensor_parallel import Slice, computing
from tests.decoder_models import (
    FEWER_NAMES,
    GROUPED,
    HEADS_OF_8,
    LAYERS,
    MODELS,
    MORE_MODELS,
    WORDS,
    config_of,
    mean_loss,
    micro_batch,
    random_decoder,
)
from tests.distributed.test_own_layers import Batches
from tests.losses import learned
from tests.ranks import Ranks
from tests.selection import covering, select
from tests.unit.hf.test_split import chain

transformers: Any = pytest.importorskip("transformers")

MICRO_BATCHES, LR, STEPS = 4, 0.1, 2
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)}
# Architecture, and what is special -> values of its config.
REFUSED: dict[str, dict[str, Any]] = {
    "Bamba": {
        **{**GROUPED, "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 8},
        **{"mamba_d_state": 8, "mamba_n_groups": 1},
    },
    "Lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "Mamba": {**FEWER_NAMES, "state_size": 4},
    "Qwen3Next": {
        **{**HEADS_OF_8, **LINEAR, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    },
    "RecurrentGemma": {
        **{**GROUPED, "lru_width": 32, "attention_window_size": 4},
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "GPT2 cross-attention": {**MODELS["GPT2"], "add_cross_attention": True},
    "Llama bidirectional": {**GROUPED, "is_causal": False},
    "Gemma3Text bidirectional": {**MODELS["Gemma3Text"], "use_bidirectional_attention": True},
}
EQUAL = [*MODELS, *MORE_MODELS]
# Those that differ most in attention, positions, experts and names.
FEW = [
    *("Llama", "GPT2", "OPT", "GPTNeoX", "Falcon", "Gemma2", "Gemma3Text", "Cohere", "Mixtral", "Bloom"),
    *("Qwen2", "Phi3 longrope", "GptOss", "Llama4Text", "GPTNeo", "Mpt", "CodeGen", "XGLM"),
]
IN_FP32 = ("Mixtral", "Qwen2Moe", "GptOss", "Llama4Text", "XGLM")
# Norms, rotary embeddings or attention compute in fp32, whatever the dtype of the weights is.
PARTLY_IN_FP32 = (
    "Bloom",
    "Gemma",
    "Gemma2",
    "Gemma3Text",
    "Cohere",
    "Cohere2",
    "GPTJ",
    "CodeGen",
    "GPTNeo",
    "Mpt",
)

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "bitpipe_zb")
# (schedule, slices, layers that are recomputed together, whether inputs have a padding mask)
JOBS = covering(product(SCHEDULES, (2, 5, (3, 5, 2)), (0, 1), (True, False)), 1)


def decoder(name: str) -> Any:
    """Return a decoder with random weights, in fp64 if it can compute in it."""
    model = random_decoder(name.split()[0], **MORE_MODELS.get(name, {}))
    return model if name in IN_FP32 else model.double()


@cache
def in_one_process(name: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return losses, gradients of the last step, and weights of the model's own forward on whole sequences."""
    model = decoder(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(mean_loss(model, step, MICRO_BATCHES))
        optimizer.step()
    parameters = dict(model.named_parameters())
    gradients = {key: p.grad for key, p in parameters.items() if p.grad is not None}
    slow = "logits are divided by 16" if name in ("Cohere", "Cohere2") else ""
    return learned(losses, slow), gradients, {key: parameters[key].detach() for key in gradients}


def train_on_rank(rank: int, folder: str, job: Any) -> Any:
    return train(folder, *job)


def train(folder: str, schedule: str, slices: Any, recompute: int, masked: bool) -> Any:
    """Return (losses, gradients of the last step, weights) of this rank by the model's names.

    The first loss is that of an evaluation. Without a mask, padding at the end changes only its own outputs, whose
    labels do not count.
    """
    layers, loss_fn = ds_ext.from_transformers(folder)
    config = config_of(schedule, 2, MICRO_BATCHES)
    lengths = {} if isinstance(slices, int) else {"slice_lengths": [*slices]}
    count = slices if isinstance(slices, int) else len(slices)
    config["ds_ext"] |= {"sequence_slices": count, **lengths}
    module = ds_ext.PipelineModule(
        layers,
        config,
        loss_fn=loss_fn,
        partition_method="uniform",
        activation_checkpoint_interval=recompute,
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    engine, *_ = ds_ext.initialize(model=module, optimizer=optimizer, config=config)
    cut = layers[1].module_args[1]
    gradients: dict[str, Tensor] = {}

    def local() -> Any:
        values = parameters_of(module, 1).values()
        return {cut.name_of(value.layer, value.key): value.parameter for value in values}

    def keep_gradients(*_: Any) -> None:
        gradients.update({key: p.grad.clone() for key, p in local().items() if p.grad is not None})

    optimizer.register_step_pre_hook(keep_gradients)

    def batch(step: int, number: int) -> Any:
        inputs, labels_BS = micro_batch(step, number)
        return inputs if masked else inputs[0], labels_BS

    losses = [float(engine.eval_batch(Batches(batch)))]
    batches = Batches(batch)
    losses += [float(engine.train_batch(batches)) for _ in range(STEPS)]
    engine.transport.close()
    return losses, gradients, {key: local()[key].detach().clone() for key in gradients}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], name: str) -> None:
    assert found.keys() == expected.keys(), name
    tolerance = 1e-10 if name not in (*IN_FP32, *PARTLY_IN_FP32) else 1e-5
    for key, value in found.items():
        # The gradients of biases that softmax cancels are rounding errors.
        error = (value - expected[key]).abs().max() / expected[key].abs().max().clamp(min=1e-4)
        assert error < tolerance, f"{name} {key}: {error}"


@pytest.mark.parametrize("number", range(len(JOBS)), ids=["-".join(map(str, job)) for job in JOBS])
def test_trains_as_the_model_on_whole_sequences(ranks: Ranks, number: int, tmp_path: Path) -> None:
    names = select(EQUAL, FEW[number :: len(JOBS)])
    folders = {name: str(tmp_path / name) for name in names}
    for name, folder in folders.items():
        decoder(name).save_pretrained(folder)
    # In many calls, because engines leave threads that end with their process.
    for name, folder in folders.items():
        losses, gradients, weights = in_one_process(name)
        results = ranks(2).run(train_on_rank, folder, JOBS[number], timeout_s=75)
        for found, _, _ in results:
            assert found == pytest.approx([losses[0], *losses], rel=1e-6), name
        for index, expected in (1, gradients), (2, weights):
            assert_equal({k: v for result in results for k, v in result[index].items()}, expected, name)


def test_losses_with_attention_dropout_depend_on_the_slices_only(ranks: Ranks, tmp_path: Path) -> None:
    random_decoder("GPT2", attn_pdrop=0.1).save_pretrained(tmp_path)
    jobs = [("1f1b", 2, 0, True), ("zb_h1", 2, 1, True), ("1f1b", 5, 0, True)]
    losses = [ranks(2).run(train_on_rank, str(tmp_path), job, timeout_s=60)[0][0] for job in jobs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2][0] == pytest.approx(losses[0][0], rel=1e-6)  # an evaluation
    assert losses[2][1] != pytest.approx(losses[0][1], rel=1e-6)


@pytest.mark.parametrize("place", [0, 4, 9])
def test_padding_before_tokens_is_refused_with_eager_attention(place: int) -> None:
    layers, _ = ds_ext.from_transformers(random_decoder("Llama", attn_implementation="eager"))
    (ids_BS, mask_BS), _ = micro_batch(0, 0)
    mask_BS[:] = 1
    mask_BS[1, place] = 0
    chain(layers)((ids_BS, mask_BS))
    refused = contextlib.nullcontext() if place == 9 else pytest.raises(ConfigError, match="1 of 2 samples")
    with computing(Slice(0, 0, 10, 20)), refused:
        chain(layers)((ids_BS, mask_BS))


@pytest.mark.parametrize("name", REFUSED)
def test_a_decoder_that_needs_more_than_earlier_keys_and_values_is_refused(name: str) -> None:
    architecture = name.split()[0]
    layers, _ = ds_ext.from_transformers(random_decoder(architecture, **REFUSED[name]))
    inputs, _ = micro_batch(0, 0)
    assert chain(layers)(inputs).shape == (2, 10, WORDS)
    with computing(Slice(0, 0, 10, 20)), pytest.raises(ConfigError, match=f"{architecture}.*Config"):
        chain(layers)(inputs)


def test_gradient_checkpointing_of_transformers_is_refused_in_slices() -> None:
    model = random_decoder("Llama").train()
    model.gradient_checkpointing_enable()
    layers, _ = ds_ext.from_transformers(model)
    inputs, _ = micro_batch(0, 0)
    with computing(Slice(0, 0, 10, 20)), pytest.raises(ConfigError, match="gradient_checkpointing"):
        chain(layers)(inputs)


def test_the_loss_of_slices_counts_the_first_label_of_the_next_slice() -> None:
    _, loss_fn = ds_ext.from_transformers(random_decoder("Llama"))
    logits_BSV = torch.randn(2, 10, WORDS, generator=torch.Generator().manual_seed(0))
    _, labels_BS = micro_batch(0, 1)
    shifted_BS = loss_fn.shift_labels(labels_BS)
    pairs = []
    for start, stop in (0, 3), (3, 10):
        with computing(Slice(0, start, stop, 10)):
            pairs.append(
                loss_fn(logits_BSV[:, start:stop].contiguous(), shifted_BS[:, start:stop].contiguous())
            )
    total, count = loss_fn(logits_BSV, labels_BS)
    torch.testing.assert_close(sum(total for total, _ in pairs), total)
    assert sum(count for _, count in pairs) == count == 2 * 9 - 3
