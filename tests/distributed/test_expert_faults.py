"""Faults of mixtures of experts (docs/deepspeed_issues.md) that no other file tests.

The experts of a layer are divided over the tensor-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ds_ext
from ds_ext.engine.parameters import parameters_of
from tests.decoder_models import (
    EXPERTS_MODELS,
    GROUPED,
    LAYERS,
    MORE_MODELS,
    ROUTERS_LOSS,
    config_of,
    mean_loss,
    micro_batch,
    random_decoder,
    save_decoder,
)
from tests.distributed.test_hf_tensor_parallel import joined
from tests.distributed.test_own_layers import Batches
from tests.ranks import Ranks
from tests.reference import assert_close_gradients

pytest.importorskip("transformers")
MICRO_BATCHES = 4


class Job(NamedTuple):
    schedule: str
    pp: int = 1
    tp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.tp * self.dp


class Result(NamedTuple):
    """Results of a rank.

    Attributes:
        numbers: micro-batches that this rank has read.
        weights: name -> (tensor-parallel rank, shard, its dimension, whole size), after the last step.
    """

    losses: list[float]
    norms: list[float]
    numbers: set[int]
    weights: dict[str, Any]


Data = Callable[[int, int], tuple[tuple[Tensor, Tensor], Tensor]]


def train(
    rank: int, model: Any, job: Job, data: Data, steps: int, optimizer: dict[str, Any], sections: Any
) -> Result:
    """Train a folder."""
    layers, loss_fn = ds_ext.from_transformers(model)
    config = config_of(job.schedule, job.pp, MICRO_BATCHES // job.dp, **sections)
    config |= {"optimizer": optimizer, "zero_allow_untested_optimizer": True}
    config["ds_ext"]["tensor_parallel_size"] = job.tp
    config["train_batch_size"] = 2 * MICRO_BATCHES
    config["train_micro_batch_size_per_gpu"] = 2
    module = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=module, model_parameters=module.parameters(), config=config)
    numbers: set[int] = set()

    def read(step: int, number: int) -> Any:
        numbers.add(number)
        return data(step, number)

    batches: Any = Batches(read)
    losses, norms = [], []
    for _ in range(steps):
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
    engine.transport.close()
    split = layers[1].module_args[1]
    _, _, tensor_rank = module.layout.coordinates(rank)
    weights = {
        split.name_of(local.layer, local.key): (
            tensor_rank,
            local.parameter.detach().clone(),
            local.shape.dim,
            local.shape.full,
        )
        for local in parameters_of(module, job.tp).values()
    }
    return Result(losses, norms, numbers, weights)


class OneProcess(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def loss_of_step(model: Any, data: Data, step: int) -> float:
    """Return the mean loss of a step in one process; gradients accumulate in the model."""
    batches = [data(step, number) for number in range(MICRO_BATCHES)]
    count = sum(int((labels_BS[:, 1:] != -100).sum()) for _, labels_BS in batches)
    total = 0.0
    for (ids_BS, mask_BS), labels_BS in batches:
        logits_BSV = model(input_ids=ids_BS, attention_mask=mask_BS).logits
        loss = nn.functional.cross_entropy(logits_BSV[:, :-1].mT, labels_BS[:, 1:], reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total


def one_process(model: Any, data: Data, steps: int, optimizer: Any, clip: float = math.inf) -> OneProcess:
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(loss_of_step(model, data, step))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return OneProcess(losses, norms, {name: p.detach() for name, p in model.named_parameters()})


# --- tokens that decide their experts ---

EXPERTS = 6
FIRST, SECOND, IDLE = (0, 1), (3, 4), (2, 5)  # of even tokens, of odd tokens, of none


def steered(name: str, **changes: Any) -> Any:
    """Return a decoder that sends even tokens to experts 0 and 1, and odd tokens to experts 3 and 4.

    Of two tensor-parallel ranks, the first has experts 0 to 2 and the second has experts 3 to 5.
    """
    sizes = {**GROUPED, "num_experts_per_tok": 2, "num_local_experts": EXPERTS, "num_experts": EXPERTS}
    model = random_decoder(name, **sizes, **changes)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 1.0 - 2.0 * (torch.arange(len(embedding)) % 2)
        embedding[:, 1] = 1.0
        for layer in model.model.layers:
            router_ED = layer.mlp.gate.weight
            router_ED[:, 0], router_ED[:, 1] = 0.0, 0.0
            router_ED[list(FIRST), 0], router_ED[list(SECOND), 0], router_ED[list(IDLE), 1] = 1.0, -1.0, -3.0
    return model


def tokens_of(step: int, number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return a micro-batch of even tokens or of odd ones.

    In every third step, all are even. In other steps, those of the second half differ from those of the first.
    """
    odd = [number >= MICRO_BATCHES // 2, False, number < MICRO_BATCHES // 2][step % 3]
    (ids_BS, mask_BS), labels_BS = micro_batch(step, number)
    ids_BS = ids_BS - ids_BS % 2 + odd
    return (ids_BS, mask_BS), ids_BS.masked_fill(labels_BS == -100, -100)
