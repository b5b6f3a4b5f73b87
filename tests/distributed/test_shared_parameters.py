"""Layers that share a parameter by identity train as in one process under every schedule, or are refused."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

import ds_ext
from ds_ext.errors import ConfigError
from tests.losses import learned
from tests.precisions import needs
from tests.ranks import RankPool, Ranks
from tests.selection import covering

STEPS, MICRO_BATCHES, LR, CLIP = 3, 4, 0.2, 0.5
WORDS, WIDTH = 8, 4


class Block(nn.Module):
    """Residual layer; its norm is given, and may be that of another block."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Head(nn.Module):
    """Logits by the weight of an embedding."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.weight = table

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def one_linear() -> list[nn.Module | LayerSpec]:
    """One module used at all places."""
    torch.manual_seed(5)
    return [nn.Linear(WIDTH, WIDTH)] * 8


def tied_model() -> list[nn.Module | LayerSpec]:
    """Built modules with tied embeddings; two blocks get one norm as an argument of their LayerSpec."""
    torch.manual_seed(5)
    embedding, norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
    blocks = [Block(nn.LayerNorm(WIDTH)) for _ in range(4)]
    last = LayerSpec(Block, norm)
    return [embedding, LayerSpec(Block, norm), *blocks, last, Head(embedding.weight)]


MODELS = {"one_linear": one_linear, "tied_model": tied_model}


def batch(model: str, step: int, micro_batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(micro_batch)
    if model == "one_linear":
        inputs, labels = torch.randn(2, 2, WIDTH, generator=generator)
        return inputs + 0.1 * step, labels
    tokens, labels = torch.randint(WORDS, (2, 2, 3), generator=generator)
    tokens[0, 0] = step
    return tokens, labels


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point():
        return nn.functional.mse_loss(outputs, labels)
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


class Batches:
    """Micro-batches by (step, micro-batch)."""

    def __init__(self, model: str, step: int = 0) -> None:
        self.model, self.step = model, step

    def get(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        return batch(self.model, self.step, micro_batch)

    def advance(self, micro_batches: int) -> None:
        self.step += 1


def in_one_process(model: str, micro_batches: int = MICRO_BATCHES) -> dict[str, list[float]]:
    """Losses, gradient norms and sums of the first layer's weight of plain training."""
    layers: list[Any] = []
    specs: list[Any] = MODELS[model]()
    for index, spec in enumerate(specs):
        torch.manual_seed(1234 + index)  # as the pipeline seeds each LayerSpec
        layers.append(spec.build() if isinstance(spec, LayerSpec) else spec)
    chain: nn.Module = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(chain.parameters(), lr=LR, momentum=0.9)
    found: dict[str, list[float]] = {"losses": [], "norms": [], "weights": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for j in range(micro_batches):
            x, y = batch(model, step, j)
            total = total + loss_fn(chain(x), y) / micro_batches
        total.backward()
        found["norms"].append(float(nn.utils.clip_grad_norm_(chain.parameters(), CLIP)))
        optimizer.step()
        found["losses"].append(float(total.detach()))
        found["weights"].append(float(layers[0].weight.detach().square().sum()))
    return found | {"losses": learned(found["losses"])}


def config(schedule: str, width: int, **sections: Any) -> dict[str, Any]:
    section = {"schedule": schedule, "pipeline_parallel_size": width, "transport_options": {"timeout_s": 60}}
    return {
        "train_batch_size": 2 * sections.pop("micro_batches", MICRO_BATCHES),
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **sections,
        "ds_ext": section | sections.get("ds_ext", {}),
    }


def build(layers: list[Any], settings: dict[str, Any]) -> Any:
    model = ds_ext.PipelineModule(layers, settings, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=model, config=settings, model_parameters=model.parameters())
    return engine


def weight(engine: Any, model: str) -> float | None:
    """Square sum of the first layer's weight, on the ranks that hold it or what shares it."""
    shape = (WIDTH, WIDTH) if model == "one_linear" else (WORDS, WIDTH)
    held = [p for p in engine.module.parameters() if p.shape == shape]
    return float(held[0].detach().square().sum()) if held else None


def train(rank: int, model: str, settings: dict[str, Any]) -> dict[str, list[float]]:
    engine, batches = build(MODELS[model](), settings), Batches(model)
    found: dict[str, list[float]] = {"losses": [], "norms": [], "weights": []}
    for _ in range(STEPS):
        found["losses"].append(float(engine.train_batch(batches)))
        found["norms"].append(float(engine.get_global_grad_norm()))
        found["weights"].append(weight(engine, model) or 0.0)
    engine.transport.close()
    return found


def agrees(results: list[dict[str, list[float]]], expected: dict[str, list[float]]) -> None:
    for found in results:
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        if any(found["weights"]):
            assert found["weights"] == pytest.approx(expected["weights"], rel=1e-5)
    assert any(any(found["weights"]) for found in results)


# (schedule, devices, ranks): with data parallelism where ranks are more than devices
PLACEMENTS = [
    ("1f1b", 1, 1),
    ("gpipe", 2, 2),
    ("1f1b", 2, 2),
    ("interleaved", 2, 2),
    ("chimera", 2, 2),
    ("bitpipe", 2, 2),
    ("zb_h1", 2, 2),
    ("zb_v", 2, 2),
    ("bitpipe_zb", 2, 2),
    ("dualpipev", 2, 2),
    ("dpp", 2, 2),
    ("bitpipe", 4, 4),
    ("chimera", 4, 4),
    ("1f1b", 4, 4),
    ("fbd", 2, 4),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("schedule", "width", "world"), PLACEMENTS)
def test_every_schedule_trains_as_one_process(
    ranks: Ranks, model: str, schedule: str, width: int, world: int
) -> None:
    micro_batches = 8 if schedule in ("bitpipe", "chimera") and width == 4 else MICRO_BATCHES
    section = config(schedule, width, micro_batches=micro_batches)
    section["ds_ext"]["fbd"] = {"backward_per_forward": 1} if schedule == "fbd" else {}
    agrees(ranks(world).run(train, model, section), in_one_process(model, micro_batches))


@pytest.mark.parametrize(
    ("schedule", "width", "world", "zero", "eager"),
    [
        (*sizes, *mode)
        for sizes, mode in covering(
            product(
                [("1f1b", 2, 4), ("bitpipe", 4, 4), ("bitpipe_zb", 2, 2)], [(0, False), (1, True), (1, False)]
            ),
            1,
        )
    ],
)
def test_zero_and_gradient_synchronization(
    ranks: Ranks, schedule: str, width: int, world: int, zero: int, eager: bool
) -> None:
    sections = {"zero_optimization": {"stage": zero}, "ds_ext": {"eager_gradient_sync": eager}}
    section = config(schedule, width, micro_batches=8, **sections)
    agrees(ranks(world).run(train, "tied_model", section), in_one_process("tied_model", 8))


@needs("bf16")
def test_bf16_sums_gradients_of_all_places(ranks: Ranks) -> None:
    sections = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    alone, apart, folded = (
        ranks(world).run(train, "tied_model", config(schedule, world, **sections))[0]
        for schedule, world in (("1f1b", 1), ("1f1b", 2), ("bitpipe", 2))
    )
    for found in (apart, folded):
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-2)
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-2)


def save_and_load(
    rank: int, folder: str, saver: dict[str, Any], loaders: list[dict[str, Any]]
) -> list[float]:
    """The loss of the step after a checkpoint, without it and under each loader."""
    engine, batches = build(tied_model(), saver), Batches("tied_model")
    for _ in range(STEPS - 1):
        engine.train_batch(batches)
    engine.save_checkpoint(folder, tag="saved")
    losses = [float(engine.train_batch(batches))]
    engine.transport.close()
    for settings in loaders:
        engine = build(tied_model(), settings)
        engine.load_checkpoint(folder, tag="saved")
        losses.append(float(engine.train_batch(Batches("tied_model", STEPS - 1))))
        engine.transport.close()
    return losses


@pytest.mark.parametrize("zero", [0, 1])
def test_checkpoints_fit_every_schedule(ranks2: RankPool, tmp_path: Path, zero: int) -> None:
    sections = {"zero_optimization": {"stage": zero}}
    plain, folded, split = (config(schedule, 2, **sections) for schedule in ("1f1b", "bitpipe", "zb_v"))
    expected = in_one_process("tied_model")["losses"][-1]
    for number, (saver, loaders) in enumerate([(plain, [folded, split]), (folded, [plain])]):
        folder = str(tmp_path / str(number))
        for losses in ranks2.run(save_and_load, folder, saver, loaders, timeout_s=120):
            assert losses == pytest.approx([expected] * len(losses), rel=1e-5)


def build_with_other_seeds(rank: int) -> float:
    torch.manual_seed(rank)
    embedding = nn.Embedding(WORDS, WIDTH)
    layers = [embedding, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Head(embedding.weight)]
    model = ds_ext.PipelineModule(layers, config("1f1b", 2), loss_fn=loss_fn, partition_method="uniform")
    return next(float(p.detach().sum()) for p in model.parameters() if len(p) == WORDS)


def test_start_weights_are_equal_on_all_ranks(ranks2: RankPool) -> None:
    first, second = ranks2.run(build_with_other_seeds)
    assert first == second


# --- ties by a property, as Megatron-DeepSpeed's EmbeddingPipe names its weight ---


class EmbeddingPipe(nn.Module):
    """Embedding with a property that returns its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)

    @property
    def word_embeddings_weight(self) -> Tensor:
        return self.word_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_embeddings(tokens)


def logits(embedding: EmbeddingPipe, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embedding.word_embeddings_weight)


def tied_by_a_property() -> list[Any]:
    name = "word_embeddings_weight"
    return [
        TiedLayerSpec("embed", EmbeddingPipe, tied_weight_attr=name),
        *(LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)),
        # Both names are one weight: its gradient is summed once.
        TiedLayerSpec(
            "embed", EmbeddingPipe, forward_fn=logits, tied_weight_attr=["word_embeddings.weight", name]
        ),
    ]


def train_by_a_property(rank: int, settings: dict[str, Any]) -> list[float]:
    engine, batches = build(tied_by_a_property(), settings), Batches("tied_model")
    losses = [float(engine.train_batch(batches)) for _ in range(STEPS)]
    engine.transport.close()
    return losses


def test_a_tie_by_a_property(ranks2: RankPool) -> None:
    plain, folded = (
        ranks2.run(train_by_a_property, config(schedule, 2))[0] for schedule in ("1f1b", "bitpipe")
    )
    assert len(set(plain)) == STEPS and plain == pytest.approx(folded, rel=1e-5)


# --- what is refused ---


class Counted(nn.Module):
    """Layer with a running mean, which ranks would count apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


COMMON = nn.Linear(WIDTH, WIDTH)


class Global(nn.Module):
    """Layer that takes a parameter from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = COMMON

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def uses_a_global(x: Tensor) -> Tensor:
    return COMMON(x)


class Lists(nn.Module):
    """Layer that keeps another layer where torch does not see it."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0](x)


def linears(*others: Any) -> list[Any]:
    return [*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), *others]


def refused_models() -> dict[str, list[Any]]:
    linear, counted = nn.Linear(WIDTH, WIDTH), Counted()
    tied = TiedLayerSpec("key", Head, linear.weight)
    return {
        "buffer": linears(counted, counted),
        "mixed with a tie": [tied, *linears(), linear, TiedLayerSpec("key", Head, linear.weight)],
        "bound method": linears(linear.forward),
        "partial": linears(partial(nn.functional.linear, weight=linear.weight)),
        "global": linears(uses_a_global),
        "list": linears(linear, Lists(linear)),
        "list in a LayerSpec": linears(linear, LayerSpec(Lists, linear)),
        "closure": linears(lambda x: nn.functional.linear(x, linear.weight)),
    }


def refuse(rank: int) -> dict[str, str]:
    said = {}
    for name, layers in refused_models().items():
        with pytest.raises(ConfigError) as caught:
            ds_ext.PipelineModule(layers, config("1f1b", 2), loss_fn=loss_fn, partition_method="uniform")
        said[name] = str(caught.value)
    with pytest.raises(ConfigError) as caught:
        ds_ext.PipelineModule(linears(), config("1f1b", 2), loss_fn=nn.Linear(4, 4))  # pyright: ignore[reportArgumentType]
    said["loss_fn"] = str(caught.value)
    return said


def test_what_depends_on_the_schedule_is_refused(ranks2: RankPool) -> None:
    first, second = ranks2.run(refuse)
    assert first == second
    assert all("TiedLayerSpec" in text for text in first.values())
    assert "mean of layer 3 (Counted)" in first["buffer"] and "layer 4" in first["buffer"]
    assert "weight of layer 4 (Linear)" in first["mixed with a tie"]
    assert first["bound method"].startswith("layer 3 (") and "Linear" in first["bound method"]
    assert first["loss_fn"].startswith("loss_fn (Linear)")


def refuse_a_hidden_one(rank: int) -> str:
    layers = [LayerSpec(Global), LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Global)]
    with pytest.raises(ConfigError) as caught:
        ds_ext.PipelineModule(layers, config("1f1b", 1), loss_fn=loss_fn)
    return str(caught.value)


def test_sharing_that_only_the_built_layers_show_is_refused(ranks: Ranks) -> None:
    (text,) = ranks(1).run(refuse_a_hidden_one)
    assert "layer 0 (Global)" in text and "layer 2 (Global)" in text and "TiedLayerSpec" in text


def copies(rank: int) -> int:
    """Layers that copy a module they are given share nothing."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8)
    layers = [LayerSpec(nn.TransformerEncoder, layer, 1, enable_nested_tensor=False) for _ in range(4)]
    model = ds_ext.PipelineModule(layers, config("1f1b", 2), loss_fn=loss_fn, partition_method="uniform")
    return len(model.shared) + len(model.tied_comms)


def test_copies_of_an_argument_are_not_shared(ranks2: RankPool) -> None:
    assert ranks2.run(copies) == [0, 0]
