"""Decoders cut by from_transformers train to the model's own losses and gradients."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_ext
from ds_ext.engine.parameters import parameters_of
from tests.decoder_models import (
    EXPERTS_MODELS,
    MODELS,
    ROUTERS_LOSS,
    config_of,
    mean_loss,
    micro_batch,
    random_decoder,
    save_decoder,
)
from tests.distributed.test_own_layers import Batches
from tests.ranks import Ranks
from tests.reference import assert_close_gradients
from tests.selection import EVERYTHING, extensive, select

transformers: Any = pytest.importorskip("transformers")

MICRO_BATCHES, LR = 8, 0.1
LAYOUTS = select(
    [("1f1b", 2), ("bitpipe_zb", 2), ("1f1b", 4), ("bitpipe_zb", 4)], [("1f1b", 2), ("bitpipe_zb", 2)]
)
WITH_ROUTERS_LOSS = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe", "Phimoe")
FAMILIES = {**MODELS, **EXPERTS_MODELS}
FAMILIES |= {name: {**FAMILIES[name], **ROUTERS_LOSS} for name in WITH_ROUTERS_LOSS}
AT_ONCE = ("GPT2", "Falcon")  # their largest weights are in a subclass of nn.Linear
Result = tuple[float, float | None, dict[str, Tensor]]


@cache
def in_one_process(name: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of the model's own forward."""
    model = random_decoder(name, **FAMILIES[name]).train()
    loss = mean_loss(model, 0, MICRO_BATCHES)
    return loss, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def train(rank: int, folders: dict[str, str], schedule: str, pp: int) -> dict[str, Result]:
    """Return (loss, deferred share, gradients of this rank by the model's names) of one step of each decoder."""
    return {name: train_one(folder, schedule, pp) for name, folder in folders.items()}


def train_one(folder: str, schedule: str, pp: int) -> Result:
    layers, loss_fn = ds_ext.from_transformers(folder)
    config = config_of(schedule, pp, MICRO_BATCHES)
    method = "parameters" if pp == 2 else "uniform"
    module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method=method)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    engine, *_ = ds_ext.initialize(model=module, optimizer=optimizer, config=config)
    found: dict[str, Tensor] = {}
    cut = layers[1].module_args[1]

    def keep_gradients(*_: Any) -> None:
        for local in parameters_of(module, 1).values():
            if local.parameter.grad is not None:
                found[cut.name_of(local.layer, local.key)] = local.parameter.grad.clone()

    optimizer.register_step_pre_hook(keep_gradients)
    batches = Batches(micro_batch)  # pyright: ignore[reportArgumentType]
    loss = float(engine.train_batch(batches))
    engine.transport.close()
    return loss, engine.deferred_share, found


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[f"{s}-pp{pp}" for s, pp in LAYOUTS])
def test_losses_and_gradients_are_the_models_own(ranks: Ranks, number: int, tmp_path: Path) -> None:
    schedule, pp = LAYOUTS[number]
    names = list(FAMILIES) if EVERYTHING else list(FAMILIES)[number :: len(LAYOUTS)]
    folders = {name: save_decoder(name, tmp_path / name, **FAMILIES[name]) for name in names}
    by_rank = ranks(pp).run(train, folders, schedule, pp, timeout_s=60.0 + 15 * len(names))
    for name in names:
        expected_loss, expected = in_one_process(name)
        found: dict[str, Tensor] = {}
        for results in by_rank:
            loss, share, gradients = results[name]
            assert loss == pytest.approx(expected_loss, rel=1e-5), name
            if schedule == "bitpipe_zb":
                assert share is not None and (share < 0.9) == (name in AT_ONCE), name
            for key, gradient in gradients.items():
                assert_close_gradients(gradient, expected[key], f"{name} {key}")
            found |= gradients
        assert found.keys() == expected.keys(), name


# --- chunked loss ---


def losses_and_logits(rank: int, folder: str, chunked: bool, compiled: bool) -> tuple[list[float], Any]:
    """Return the losses of two steps in two slices, and the logits of the last stage."""
    layers, loss_fn = ds_ext.from_transformers(folder, chunked_loss=chunked)
    config = config_of("zb_v", 2, 4)
    config["ds_ext"]["sequence_slices"] = 2
    module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    if compiled:
        module.compile(backend="eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, *_ = ds_ext.initialize(model=module, optimizer=optimizer, config=config)
    losses = [float(engine.train_batch(Batches(micro_batch))) for _ in range(2)]  # pyright: ignore[reportArgumentType]
    _, logits = engine.eval_batch(Batches(micro_batch), return_logits=True)  # pyright: ignore[reportArgumentType]
    engine.transport.close()
    return losses, logits


@pytest.mark.parametrize(
    ("name", "compiled"), [("Llama", False), pytest.param("Llama", True, marks=extensive), ("GPTNeoX", False)]
)
def test_a_chunked_loss_is_the_one_of_whole_logits(
    ranks: Ranks, name: str, compiled: bool, tmp_path: Path
) -> None:
    tied = {"tie_word_embeddings": name == "Llama"}
    folder = save_decoder(name, tmp_path / name, **tied)
    ours, theirs = (
        ranks(2).run(losses_and_logits, folder, chunked, compiled, timeout_s=120) for chunked in (True, False)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-6)
        torch.testing.assert_close(one[1], other[1], rtol=1e-5, atol=1e-5)


# --- loss of routers ---


def train_with_routers(
    rank: int, folder: str, pp: int, lora: bool, chunked: bool, interval: int
) -> list[tuple[float, float]]:
    """Return the losses of two steps and of an evaluation, each with that of the routers."""
    from peft import LoraConfig

    adapters = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False) if lora else None
    torch.manual_seed(0)
    layers, loss_fn = ds_ext.from_transformers(folder, lora=adapters, chunked_loss=chunked)
    config = config_of("zb_v" if pp > 1 else "1f1b", pp, 4)
    config["pipeline"] = {"activation_checkpoint_interval": interval}
    module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = ds_ext.initialize(model=module, optimizer=torch.optim.SGD(trained, lr=LR), config=config)
    batches: Any = Batches(micro_batch)  # pyright: ignore[reportArgumentType]
    losses = []
    for run in (engine.train_batch, engine.train_batch, engine.eval_batch):
        loss = float(run(batches))
        assert engine.agg_additional_losses is not None
        losses.append((loss, float(engine.agg_additional_losses["aux_loss"])))
    engine.transport.close()
    return losses


@pytest.mark.parametrize(("lora", "chunked", "interval"), [(True, True, 0), (False, False, 1)])
def test_the_loss_of_routers_goes_with_other_features(
    ranks: Ranks, lora: bool, chunked: bool, interval: int, tmp_path: Path
) -> None:
    folder = save_decoder("Mixtral", tmp_path / "model", **ROUTERS_LOSS)
    (expected,) = ranks(1).run(train_with_routers, folder, 1, lora, False, 0, timeout_s=60)
    for losses in ranks(2).run(train_with_routers, folder, 2, lora, chunked, interval, timeout_s=60):
        assert losses == [pytest.approx(pair, rel=1e-5) for pair in expected]
        assert losses[0] != losses[1] and losses[0][1] > 0.5


def test_the_loss_of_routers_needs_all_tokens_and_a_whole_head() -> None:
    model = random_decoder("Mixtral", **ROUTERS_LOSS)
    layers, _ = ds_ext.from_transformers(model)
    with pytest.raises(ds_ext.errors.ConfigError, match=r"^sequence_slices: "):
        layers[1].module_args[1].sliced_calls()
    with pytest.raises(ds_ext.errors.ConfigError, match=r"^vocabulary_parallel_head: "):
        layers[-1].in_parts(2)


# --- memory ---


def peak_of_loading(rank: int, folder: str) -> tuple[int, int]:
    """Return (peak of the resident memory while this rank builds its layers, bytes of its parameters)."""
    layers, loss_fn = ds_ext.from_transformers(folder)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the current value
    before = resident("VmRSS")
    module = ds_ext.PipelineModule(layers, config_of("1f1b", 4, MICRO_BATCHES), loss_fn=loss_fn)
    peak = resident("VmHWM") - before
    return peak, sum(p.numel() * p.element_size() for p in module.parameters())


def resident(key: str) -> int:
    """Return a value of /proc/self/status in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not EVERYTHING, reason="writes 2 GB")
def test_a_rank_holds_only_its_own_share_while_it_loads(ranks: Ranks, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 28, "vocab_size": 8000}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu").save_pretrained(tmp_path, max_shard_size="300MB")
    assert sum(p.numel() * p.element_size() for p in model.parameters()) >= 1.9e9
    del model
    for rank, (peak, share) in enumerate(ranks(4).run(peak_of_loading, str(tmp_path), timeout_s=240)):
        print(f"rank {rank}: share {share / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB, {peak / share:.2f} x")
        assert peak <= 1.3 * share
