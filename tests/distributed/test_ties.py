"""A tied layer is the same layer at all of its places, whatever ranks they are on; else it is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.errors import ConfigError
from tests.engine_runs import StepBatches
from tests.plans import batch_of
from tests.ranks import RankPool, Ranks

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


class FrozenBias(nn.Linear):
    """Layer with a frozen bias and a buffer, both with random values, beside its weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.bias.requires_grad_(False)
        self.register_buffer("offsets", torch.randn(4, 3).t())


def start_values(rank: int, schedule: str) -> list[dict[str, Tensor]]:
    """State of the tied layer on this rank, whose places are layers 1 and 3; empty if it holds no place."""
    layers = [LayerSpec(nn.Linear, 4, 4), TiedLayerSpec("ends", FrozenBias)] * 2
    model = ds_ext.PipelineModule(
        layers, num_stages=2, schedule=schedule, partition_method="uniform", base_seed=7
    )
    return [layer.state_dict() for layer in model.tied_modules.values()]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v", "dualpipev", "bitpipe", "bitpipe_zb"])
def test_a_tied_layer_starts_with_the_values_of_its_first_place(ranks2: RankPool, schedule: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7 + 1)
        expected = FrozenBias().state_dict()
    places = [state for of_rank in ranks2.run(start_values, schedule) for state in of_rank]
    assert places and all(torch.equal(state[name], expected[name]) for state in places for name in expected)


# --- layers of several classes, or with several arguments, under one key ---


class Table(nn.Module):
    """First layer with its weight in a submodule, and an own buffer."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x) * self.scale


class Head(nn.Module):
    """Last layer: the same weight transposed, with a bias that it trains alone and a buffer that it sets."""

    def __init__(self, slope: float = 1.0) -> None:
        super().__init__()
        self.mean: Tensor
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.zeros(4))
        self.slope = slope
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.fill_(0.5)
        return torch.tanh(self.slope * x @ self.weight.t()) + self.bias


class LowHead(Head):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def doubled(head: Any, x: Tensor) -> Tensor:
    return 2 * head(x)


def kinds_of_layers(case: str) -> list[Any]:
    first = TiedLayerSpec("w", Table, tied_weight_attr="embed.weight")
    ends: dict[str, list[Any]] = {
        "classes": [first, TiedLayerSpec("w", Head)],
        "arguments": [TiedLayerSpec("w", Head), TiedLayerSpec("w", Head, slope=3.0)],
        "subclass": [TiedLayerSpec("w", Head), TiedLayerSpec("w", LowHead, forward_fn=doubled)],
        "two of a kind": [first, TiedLayerSpec("w", LowHead), first],
        "lists": [
            TiedLayerSpec("w", Head, tied_weight_attr=["weight", "bias"]),
            TiedLayerSpec("w", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"]),
        ],
    }
    places = ends[case]
    linears = [LayerSpec(nn.Linear, 4, 4) for _ in range(7)]
    middle = places[1:-1]
    return [places[0], *linears[:3], *middle, *linears[3:], places[-1]]


def tied_config(schedule: str, pp: int, gas: int, sections: dict[str, Any]) -> dict[str, Any]:
    return {
        **batch_of(schedule, gas, pp),
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.0, "torch_adam": True}},
        "steps_per_print": 10**9,
        **sections,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": pp, "print_plan": False},
    }


def train_kinds(
    rank: int, case: str, schedule: str, pp: int, gas: int, sections: dict[str, Any], folder: Path, load: bool
) -> Any:
    """Train two steps and save them, or load them; then one step. Returns losses, norms and states by name."""
    config = tied_config(schedule, pp, gas, sections)
    model = ds_ext.PipelineModule(
        kinds_of_layers(case), config, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    engine, *_ = ds_ext.initialize(model=model, config=config, model_parameters=model.parameters())
    generator = torch.Generator().manual_seed(0)
    step = [tuple(torch.randn(2, 2, 4, generator=generator)) for _ in range(8)]
    batches, losses, norms = StepBatches([step] * 3), [], []
    if load:
        engine.load_checkpoint(folder)
        batches.step = engine.global_steps
    while engine.global_steps < 3:
        losses.append(float(engine.train_batch(batches)))
        norms.append(float(engine.get_global_grad_norm()))
        if engine.global_steps == 2 and not load:
            engine.save_checkpoint(folder)
    values = {
        name: value.detach().clone()
        for stage in engine.module.stages
        for index, layer in engine.module.stage_modules(stage).items()
        for name, value in ((f"{index}.{key}", tensor) for key, tensor in layer.state_dict().items())
    }
    engine.transport.close()
    return losses, norms, values


def in_one_process(case: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same training, with a module for each spec and one parameter for all tied weights."""
    modules, calls, first = nn.ModuleList(), [], dict[str, list[nn.Parameter]]()
    for index, spec in enumerate(kinds_of_layers(case)):
        torch.manual_seed(1234 + index)
        module = spec.build()
        modules.append(module)
        if isinstance(spec, TiedLayerSpec):
            names = spec.tied_weight_attr
            weights = first.setdefault(spec.key, [module.get_parameter(name) for name in names])
            for name, weight in zip(names, weights, strict=True):
                owner, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(owner), attribute, weight)
        function = getattr(spec, "forward_fn", None)
        calls.append(module if function is None else partial(function, module))
    optimizer = torch.optim.AdamW(modules.parameters(), lr=0.05, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    step = [tuple(torch.randn(2, 2, 4, generator=generator)) for _ in range(8)]
    losses, norms = [], []
    for _ in range(3):
        optimizer.zero_grad()
        total = 0.0
        for x, labels in step:
            for call in calls:
                x = call(x)
            loss = nn.functional.mse_loss(x, labels) / len(step)
            loss.backward()
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(modules.parameters(), 0.5)))
        optimizer.step()
        losses.append(total)
    return losses, norms, {key: value.detach() for key, value in modules.state_dict().items()}


ZERO_1 = {"zero_optimization": {"stage": 1}}
RUNS = [  # of the same checkpoint: schedule, ranks, devices, accumulation, sections
    ("1f1b", 2, 2, 8, {}),
    ("1f1b", 1, 1, 8, {}),
    ("zb_v", 2, 2, 8, {}),
    ("bitpipe", 2, 2, 4, ZERO_1),
    ("fbd", 4, 2, 8, {}),
]


@pytest.mark.parametrize("case", ["classes", "arguments", "subclass", "two of a kind", "lists"])
def test_layers_of_several_kinds_share_the_weights_of_a_tie(ranks: Ranks, tmp_path: Path, case: str) -> None:
    losses, norms, values = in_one_process(case)
    assert losses[-1] < losses[0]
    for number, (schedule, world, *rest) in enumerate(RUNS):
        folder = tmp_path / str(number)
        for saved, loads in ((folder, False), (tmp_path / str(max(0, number - 1)), True)):
            for got in ranks(world).run(train_kinds, case, schedule, *rest, saved, loads):
                assert got[0] == pytest.approx(losses[2:] if loads else losses, rel=1e-5)
                assert got[1] == pytest.approx(norms[2:] if loads else norms, rel=1e-4)
                for name, value in got[2].items():
                    torch.testing.assert_close(value, values[name], rtol=1e-4, atol=1e-5)


def refused_kinds(rank: int, schedule: str) -> list[str]:
    """Errors of ties whose layers of several kinds have other weights."""
    ends = [
        (TiedLayerSpec("w", nn.Embedding, 4, 4), TiedLayerSpec("w", nn.Linear, 4, 5, False)),
        (
            TiedLayerSpec("w", nn.Linear, 4, 4, tied_weight_attr=["weight", "bias"]),
            TiedLayerSpec("w", nn.Linear, 4, 4, False),
        ),
        (
            TiedLayerSpec("w", Table, tied_weight_attr="embed.weight"),
            TiedLayerSpec("w", Head, tied_weight_attr="missing"),
        ),
    ]
    texts = []
    for first, last in ends:
        layers = [first, *(LayerSpec(nn.Linear, 4, 4) for _ in range(3)), last]
        with pytest.raises(ConfigError) as caught:
            ds_ext.PipelineModule(layers, num_stages=2, schedule=schedule, partition_method="uniform")
        texts.append(str(caught.value))
    return texts


def test_layers_of_several_kinds_with_other_weights_are_refused(ranks2: RankPool) -> None:
    (first, second), (third, fourth) = (ranks2.run(refused_kinds, schedule) for schedule in ("1f1b", "zb_v"))
    assert first == second == third == fourth
    shape, number, missing = first
    for text in (shape, number):
        assert "'w'" in text and "Linear" in text and "forward_fn" in text
    assert "Embedding" in shape and "missing; Head has" in missing
