"""A tied layer is the same layer at all of its places, whatever ranks they are on; else it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import ds_ext
from ds_ext.errors import ConfigError
from tests.engine_runs import StepBatches
from tests.plans import batch_of
from tests.ranks import RankPool

pytestmark = pytest.mark.quick


def build(schedule: str, gas: int, bias: bool, *tied: Any) -> Any:
    """An engine whose first and last layer are tied, each place with its ``tied_weight_attr``."""
    config = {
        **batch_of(schedule, gas),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2},
    }
    first, last = (TiedLayerSpec("ends", nn.Linear, 4, 4, bias, tied_weight_attr=names) for names in tied)
    layers = [first, LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4), last]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    return ds_ext.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def train_and_be_refused(rank: int, schedule: str, gas: int) -> tuple[list[float], list[str]]:
    """Losses with all of the layer tied, then without a bias; what is said when something is left out."""
    generator, losses, said = torch.Generator().manual_seed(0), [], []
    step = [tuple(torch.randn(2, 2, 4, generator=generator)) for _ in range(4)]
    for bias, tied in ((True, ["weight", "bias"]), (False, "weight")):
        engine = build(schedule, gas, bias, tied, tied)
        batches = StepBatches([step] * 4)
        losses += [float(engine.train_batch(batches)) for _ in range(4)]
        engine.transport.close()
    for tied in (("weight", "weight"), (["weight", "bias"], ["weight"]), ("weights", "weights")):
        with pytest.raises(ConfigError) as refused:
            build(schedule, gas, True, *tied)
        said.append(str(refused.value))
    return losses, said


def test_a_tied_layer_trains_alike_on_two_ranks_and_on_one(ranks2: RankPool) -> None:
    apart, together = (
        ranks2.run(train_and_be_refused, schedule, gas) for schedule, gas in (("1f1b", 4), ("bitpipe", 2))
    )
    assert len(set(apart[0][0])) == 8
    for losses, said in (*apart, *together):
        assert losses == pytest.approx(apart[0][0], rel=1e-5)
        assert said == apart[0][1]  # also the rank that holds no place
    bias, one_place, unknown = apart[0][1]
    assert bias == one_place
    assert "'ends'" in bias and "got bias of Linear" in bias
    assert "tied_weight_attr=['weight', 'bias']" in bias
    assert "'ends' (got weights; Linear has weight, bias)" in unknown


def start_weights(rank: int, schedule: str) -> list[list[float]]:
    """Weights of the tied layer on this rank, whose places are layers 1 and 3; none if it holds no place."""
    layers = [
        *(LayerSpec(nn.Linear, 4, 4), TiedLayerSpec("ends", nn.Linear, 4, 4, False)),
        *(LayerSpec(nn.Linear, 4, 4), TiedLayerSpec("ends", nn.Linear, 4, 4, False)),
    ]
    model = ds_ext.PipelineModule(
        layers, num_stages=2, schedule=schedule, partition_method="uniform", base_seed=7
    )
    return [layer.weight.tolist() for layer in model.tied_modules.values()]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v", "dualpipev", "bitpipe", "bitpipe_zb"])
def test_a_tied_layer_starts_with_the_weights_of_its_first_place(ranks2: RankPool, schedule: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7 + 1)
        expected = nn.Linear(4, 4, False).weight.tolist()
    places = [weights for of_rank in ranks2.run(start_weights, schedule) for weights in of_rank]
    assert places and all(weights == expected for weights in places)
