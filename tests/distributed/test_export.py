"""Weights of checkpoints load in torch: ``python -m ds_ext export``, and the lines of docs/checkpoints.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_ext
from ds_ext.__main__ import main
from ds_ext.engine.checkpoint.file import TensorFile
from ds_ext.recipes.convert.checkpoint_weights import open_source
from ds_ext.recipes.convert.export import export
from tests.distributed import test_checkpoint
from tests.distributed.test_convert import GPT, HALF, train_and_save
from tests.engine_runs import Job
from tests.precisions import needs
from tests.ranks import RankPool, Ranks

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
WIDTH = 6


class Normed(nn.Module):
    """Linear layer with a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.scale * torch.tanh(self.linear(x))


def built() -> list[nn.Module]:
    return [nn.Linear(2, WIDTH), *(Normed() for _ in range(6)), nn.Linear(WIDTH, 1)]


def save(schedule: str, layers: list[Any], data: Any, folder: str) -> dict[str, Tensor]:
    """Save a checkpoint after some steps in bf16. Returns the state of this rank's module."""
    config = HALF | {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2},
    }
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss)
    engine, *_ = ds_ext.initialize(
        model=model, config=config, model_parameters=model.parameters(), training_data=data
    )
    for _ in range(3):
        engine.train_batch()
    engine.save_checkpoint(folder)
    engine.transport.close()
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def train_own(rank: int, folder: str) -> dict[str, Tensor]:
    """Train layers of a user; see :func:`save`."""
    x = torch.rand(64, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    data = torch.utils.data.TensorDataset(x, x[:, :1] * x[:, 1:])
    specs = [ds_ext.LayerSpec(type(layer)) if isinstance(layer, Normed) else layer for layer in built()]
    return save("bitpipe", specs, data, folder)


@needs("bf16")
def test_own_layers_load_in_torch(
    ranks2: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    trained = {
        name: value for state in ranks2.run(train_own, str(tmp_path / "own")) for name, value in state.items()
    }
    assert main(["export", str(tmp_path / "own"), str(tmp_path / "weights")]) == 0
    assert "convert" not in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict[str, Any] = {"torch": torch, "layers": built()}
    exec(next(block for block in blocks if "load_file" in block), scope)
    loaded = scope["model"].state_dict()
    masters = test_checkpoint.contents(tmp_path / "own" / "global_step3")
    assert loaded.keys() == trained.keys()
    for name, value in loaded.items():
        expected = masters.get(f"{name} fp32", trained[name])
        assert torch.equal(value, expected.to(value.dtype)), name
    assert loaded["1.count"] > 0
    assert not torch.equal(loaded["0.weight"], loaded["0.weight"].bfloat16().float())


@needs("bf16")
@pytest.mark.parametrize("parts", [False, True])
def test_shards_and_ties(ranks: Ranks, tmp_path: Path, parts: bool) -> None:
    """A GPT of four ranks: tensor-parallel shards are joined, a tie is named as in the module."""
    job = Job("1f1b", 2, 2, 1, 4, GPT, deepspeed=HALF, head_parts=parts)
    ranks(4).run(train_and_save, job, str(tmp_path / "gpt"), timeout_s=120)
    said = export(tmp_path / "gpt", tmp_path / "weights", shard_bytes=20_000)
    assert "python -m ds_ext convert" in said
    found = test_checkpoint.contents(tmp_path / "gpt" / "global_step3")
    index = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    names = [name for name in found if " " not in name]
    assert sorted(index) == sorted(names) and "tied_modules.embed.word_embeddings.weight" in names
    for name in names:
        exported = TensorFile(tmp_path / "weights" / index[name]).read_all(name)
        assert torch.equal(exported, found.get(f"{name} fp32", found[name])), name


def train_shared(rank: int, folder: str) -> None:
    """Train two layers that share a weight by identity; see :func:`save`."""
    torch.manual_seed(1)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    x = torch.rand(64, 2).bfloat16()
    data = torch.utils.data.TensorDataset(x, x)
    save("1f1b", [first, nn.Linear(2, 2), second], data, folder)


@needs("bf16")
def test_a_shared_weight_has_all_its_names(ranks2: RankPool, tmp_path: Path) -> None:
    """The second name has the fp32 master weight too, and not the weight of the layer in half precision."""
    ranks2.run(train_shared, str(tmp_path / "shared"))
    export(tmp_path / "shared", tmp_path / "weights")
    file = TensorFile(tmp_path / "weights" / "model.safetensors")
    first, second = file.read_all("0.weight"), file.read_all("2.weight")
    assert torch.equal(first, second)
    assert not torch.equal(second, second.bfloat16().float())


class Read(nn.Embedding):
    """Rows of a table, from numbers of one column."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.long().flatten())


def predict(table: nn.Embedding, hidden: Tensor) -> Tensor:
    return hidden @ table.weight.T


def train_tied(rank: int, folder: str) -> dict[str, Tensor]:
    """Train a table that is the first and the last of ten layers; see :func:`save`."""
    numbers = torch.arange(64.0).reshape(-1, 1) % 3
    data = torch.utils.data.TensorDataset(numbers, torch.ones(64, 3).bfloat16())
    tie = [ds_ext.TiedLayerSpec("table", Read, 3, WIDTH, forward_fn=forward) for forward in (None, predict)]
    return save("1f1b", [tie[0], *(nn.Linear(WIDTH, WIDTH) for _ in range(8)), tie[1]], data, folder)


@needs("bf16")
def test_a_tie_loads_in_torch(ranks2: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the page for a tied layer, whose weight has one name in the export."""
    pytest.importorskip("safetensors")
    trained = ranks2.run(train_tied, str(tmp_path / "own"))[0]
    monkeypatch.chdir(tmp_path)
    checkpoint = Path("own") / "global_step3"
    assert open_source(checkpoint)[0] == open_source(Path("own"))[0] == checkpoint
    assert f" from {checkpoint}: " in export(checkpoint, Path("weights"))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    whole, tied = (next(block for block in blocks if word in block) for word in ("load_file", "tied_modules"))
    table = Read(3, WIDTH)
    layers = [table, *(nn.Linear(WIDTH, WIDTH) for _ in range(8)), table]
    exec(whole.replace("model.load_state_dict(weights)\n", tied), {"torch": torch, "layers": layers})
    assert torch.equal(table.weight.bfloat16(), trained["tied_modules.table.weight"])


def train_two_kinds(rank: int, folder: str) -> dict[str, Tensor]:
    """Train a table and a head of another class without a parameter of its own; see :func:`save`."""
    numbers = torch.arange(64.0).reshape(-1, 1) % 3
    data = torch.utils.data.TensorDataset(numbers, torch.ones(64, 3).bfloat16())
    table = ds_ext.TiedLayerSpec("table", Read, 3, WIDTH)
    head = ds_ext.TiedLayerSpec("table", nn.Linear, WIDTH, 3, bias=False)
    return save("1f1b", [table, *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), head], data, folder)


@needs("bf16")
def test_two_kinds_of_a_tie_have_their_names_in_the_module(ranks2: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    states = ranks2.run(train_two_kinds, str(tmp_path / "own"))
    export(tmp_path / "own", tmp_path / "weights")
    file = TensorFile(tmp_path / "weights" / "model.safetensors")
    trained = {name: value for state in states for name, value in state.items()}
    for name, value in trained.items():
        assert torch.equal(file.read_all(name).to(value.dtype), value), name
    assert torch.equal(trained["tied_modules.table@5.weight"], trained["tied_modules.table.weight"])


def train_frozen(rank: int, folder: str) -> None:
    """Save a checkpoint without its frozen layer, and one with it."""
    data = torch.utils.data.TensorDataset(torch.rand(16, 2), torch.rand(16, 2))
    layers = [nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)]
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "ds_ext": {"schedule": "1f1b", "pipeline_parallel_size": 2, "print_plan": False},
    }
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss)
    engine, *_ = ds_ext.initialize(
        model=model, config=config, model_parameters=model.parameters(), training_data=data
    )
    engine.train_batch()
    engine.save_checkpoint(folder, tag="trained", exclude_frozen_parameters=True)
    engine.save_checkpoint(folder, tag="all")
    engine.transport.close()


def test_weights_that_the_checkpoint_lacks_are_named(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(train_frozen, str(tmp_path))
    for tag, layers in (("trained", {"0"}), ("all", {"0", "1"})):
        summary = export(tmp_path / tag, tmp_path / f"weights_{tag}")
        weights = TensorFile(tmp_path / f"weights_{tag}" / "model.safetensors")
        assert {name.partition(".")[0] for name in weights.names} == layers
        assert ("exclude_frozen_parameters" in summary) == (tag == "trained")


def test_wrong_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "weights")]) == 2
    assert capsys.readouterr().err.startswith("error: SOURCE: ")
