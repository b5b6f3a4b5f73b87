"""Decoders of transformers in tensor-parallel shards train to the model's own losses, gradients and norms."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_ext
from ds_ext.engine.parameters import parameters_of
from tests.decoder_models import (
    MODELS,
    config_of,
    mean_loss,
    micro_batch,
    random_decoder,
    save_decoder,
)
from tests.distributed.test_own_layers import Batches
from tests.ranks import Ranks
from tests.reference import assert_close_gradients

transformers: Any = pytest.importorskip("transformers")

MICRO_BATCHES, LR = 4, 0.1
Result = tuple[float, float, dict[str, Tensor]]


@cache
def in_one_process(name: str) -> tuple[float, float, dict[str, Tensor]]:
    """Return the loss, the norm of the gradients and the gradients of the model's own forward."""
    model = random_decoder(name).train()
    loss = mean_loss(model, 0, MICRO_BATCHES)
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    return loss, float(norm), gradients


def train(rank: int, folders: dict[str, str], schedule: str, pp: int, tp: int) -> dict[str, Any]:
    return {name: train_one(folder, schedule, pp, tp) for name, folder in folders.items()}


def train_one(folder: str, schedule: str, pp: int, tp: int) -> Any:
    """Return (loss, norm, name -> (shard, gradient, dimension of the shards, size of the whole)), or a refusal."""
    try:
        layers, loss_fn = ds_ext.from_transformers(folder)
        config = config_of(schedule, pp, MICRO_BATCHES)
        config["ds_ext"]["tensor_parallel_size"] = tp
        config["train_batch_size"] //= tp  # counted for groups of one rank
        module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    except ds_ext.errors.ConfigError as error:
        return str(error)
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    engine, *_ = ds_ext.initialize(model=module, optimizer=optimizer, config=config)
    found: dict[str, Any] = {}
    split = layers[1].module_args[1]
    _, _, tensor_rank = module.layout.coordinates(torch.distributed.get_rank())

    def keep_gradients(*_: Any) -> None:
        for local in parameters_of(module, tp).values():
            gradient = local.parameter.grad
            if gradient is not None:
                key = split.name_of(local.layer, local.key)
                found[key] = tensor_rank, gradient.clone(), local.shape.dim, local.shape.full

    optimizer.register_step_pre_hook(keep_gradients)
    loss = float(engine.train_batch(Batches(micro_batch)))  # pyright: ignore[reportArgumentType]
    norm = engine.get_global_grad_norm()
    engine.transport.close()
    return loss, None if norm is None else float(norm), found


def joined(by_rank: list[Any]) -> dict[str, Tensor]:
    """Return name -> whole gradient, from the shards of all ranks."""
    shards: dict[str, dict[int, Any]] = {}
    for _, _, found in by_rank:
        for key, (tensor_rank, *rest) in found.items():
            shards.setdefault(key, {})[tensor_rank] = rest
    whole = {}
    for key, parts in shards.items():
        gradients, (_, dim, full) = [parts[r][0] for r in sorted(parts)], parts[0]
        if dim is None:
            for gradient in gradients[1:]:
                torch.testing.assert_close(gradient, gradients[0], rtol=1e-5, atol=1e-6)
            whole[key] = gradients[0]
        else:
            whole[key] = torch.cat(gradients, dim).narrow(dim, 0, full[dim])
    return whole


REFUSED = ("StableLm", "GPT2", "OPT", "Falcon", "Bloom", "Mixtral", "Qwen2Moe", "Glm")
DIVIDED = [name for name in MODELS if name not in REFUSED]
LAYOUTS = [("1f1b", 2, 2), ("bitpipe_zb", 2, 2), ("zb_v", 1, 2), ("1f1b", 1, 4)]


@pytest.mark.parametrize(("schedule", "pp", "tp"), LAYOUTS)
def test_losses_gradients_and_norms_are_the_models_own(
    ranks: Ranks, schedule: str, pp: int, tp: int, tmp_path: Path
) -> None:
    folders = {name: save_decoder(name, tmp_path / name) for name in DIVIDED}
    by_rank = ranks(pp * tp).run(train, folders, schedule, pp, tp, timeout_s=60.0 + 15 * len(DIVIDED))
    for name in DIVIDED:
        results = [results[name] for results in by_rank]
        expected_loss, expected_norm, expected = in_one_process(name)
        for loss, norm, _ in results:
            assert loss == pytest.approx(expected_loss, rel=1e-5), name
            assert norm == pytest.approx(expected_norm, rel=1e-5), name
        found = joined(results)
        assert found.keys() == expected.keys(), name
        for key, gradient in found.items():
            assert_close_gradients(gradient, expected[key], f"{name} {key}")


def test_models_without_exact_shards_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    folders = {name: save_decoder(name, tmp_path / name) for name in REFUSED}
    for by_name in ranks(2).run(train, folders, "1f1b", 1, 2, timeout_s=60.0 + 15 * len(REFUSED)):
        assert all(
            isinstance(refusal, str) and "tensor_parallel_size" in refusal for refusal in by_name.values()
        )
