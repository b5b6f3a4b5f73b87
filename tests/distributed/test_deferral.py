"""Split backwards report the share of the weight gradients that they deferred, as counted in the first step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.tensor_parallel import linear
from tests.engine_runs import StepBatches
from tests.plans import batch_of
from tests.ranks import RankPool

WORDS, WIDTH = 64, 4


def at_once(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embedding.weight)


def deferred(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return linear(x, embedding.weight)


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


class Warnings(logging.Handler):
    """Keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(rank: int, schedule: str, head: Any) -> tuple[float | None, list[str], list[float]]:
    """(deferred share, warnings, losses) of two steps of a model with a tied table."""
    settings = {
        **batch_of(schedule, 4),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2},
    }
    layers = [
        TiedLayerSpec("table", nn.Embedding, WORDS, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("table", nn.Embedding, WORDS, WIDTH, forward_fn=head),
    ]
    warnings, logger = Warnings(), logging.getLogger("ds_ext")
    logger.addHandler(warnings)
    try:
        model = ds_ext.PipelineModule(layers, settings, loss_fn=loss_fn, partition_method="uniform")
        engine, *_ = ds_ext.initialize(model=model, config=settings, model_parameters=model.parameters())
        generator = torch.Generator().manual_seed(0)
        step = [tuple(torch.randint(WORDS, (2, 2, 3), generator=generator)) for _ in range(4)]
        losses = [float(engine.train_batch(StepBatches([step]))) for _ in range(2)]
        engine.transport.close()
    finally:
        logger.removeHandler(warnings)
    return getattr(engine, "deferred_share", None), warnings.texts, losses


TABLE, LINEARS = WORDS * WIDTH, 2 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize(
    ("schedule", "head", "share"),
    [
        (
            "zb_h1",
            at_once,
            (TABLE + LINEARS) / (2 * TABLE + LINEARS),
        ),  # a copy on each rank, one of them at once
        ("zb_v", at_once, LINEARS / (TABLE + LINEARS)),  # both uses on one rank
        ("zb_v", deferred, 1.0),
        ("1f1b", at_once, None),
    ],
)
def test_a_functional_head_counts_as_at_once(
    ranks2: RankPool, schedule: str, head: Any, share: float | None
) -> None:
    first, second = ranks2.run(train, schedule, head)
    assert first[0] == pytest.approx(share) and second[0] == first[0]
    assert not second[1]
    if share is not None and share < 0.5:
        (text,) = first[1]
        assert "weight of layer 3 (Embedding)" in text and "ds_ext.tensor_parallel.linear" in text
    else:
        assert not first[1]
