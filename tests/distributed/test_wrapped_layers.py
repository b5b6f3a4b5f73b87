"""Layers wrapped by torch.compile or for recomputation have the names of plain layers, and load either kind."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ds_ext
from ds_ext.engine.checkpoint.file import read_plain, write_plain, write_tensors
from ds_ext.engine.checkpoint.folder import publish, start_writing
from ds_ext.engine.wrappers import COMPILED, RECOMPUTED
from ds_ext.errors import ConfigError
from ds_ext.recipes.convert.export import export
from tests.ranks import Ranks

SIZE, STEPS = 4, 2
KINDS = ("plain", "compiled", "recomputed", "compiled inside", "recomputed inside", "both", "in place")


def compile_layer(layer: nn.Module) -> Any:
    return torch.compile(layer, backend="eager")


class Block(nn.Module):
    """Layer with a submodule, a buffer and an extra state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        linear = nn.Linear(SIZE, SIZE)
        inside = {"compiled inside": compile_layer, "recomputed inside": checkpoint_wrapper}
        self.linear = inside.get(kind, nn.Identity())(linear)
        self.register_buffer("offset", torch.zeros(SIZE))
        self.seen = 0

    def get_extra_state(self) -> int:
        return self.seen

    def set_extra_state(self, state: int) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) + self.offset)


def make_block(kind: str) -> nn.Module:
    block = Block(kind)
    if kind == "in place":
        block.compile(backend="eager")
    block = compile_layer(block) if kind in ("compiled", "both") else block
    return checkpoint_wrapper(block) if kind in ("recomputed", "both") else block


class BlockSpec(LayerSpec):
    def build(self, log: bool = False) -> nn.Module:
        return make_block(*self.module_args)


class TiedSpec(TiedLayerSpec):
    """Tied layer, compiled for an argument."""

    def build(self, log: bool = False) -> nn.Module:
        kind, layer = self.module_args[0], self.typename(*self.module_args[1:], **self.module_kwargs)
        return compile_layer(layer) if kind == "compiled" else layer


def build(kind: str, schedule: str = "zb_v", zero: int = 1) -> Any:
    generator = torch.Generator().manual_seed(0)
    data = [tuple(torch.randn(2, SIZE, generator=generator)) for _ in range(32)]
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "steps_per_print": 10**9,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": 2, "print_plan": False},
    }
    tied = [TiedSpec("tie", nn.Linear, kind, SIZE, SIZE, bias=False) for _ in range(2)]
    layers = [tied[0], *(BlockSpec(Block, kind) for _ in range(3)), tied[1]]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    engine, *_ = ds_ext.initialize(model=model, config=config, training_data=data)
    return engine


def names_of(engine: Any) -> list[list[str]]:
    module = engine.module
    named = dict(module.named_parameters()), dict(module.named_buffers()), module.state_dict()
    return [list(values) for values in named]


def save(rank: int, kind: str, folder: str) -> tuple[list[list[str]], list[float]]:
    """Train, and save. Return the names, and the losses, of which the last is that of the step after the save."""
    engine = build(kind)
    losses = [float(engine.train_batch()) for _ in range(STEPS)]
    engine.save_checkpoint(folder, tag=kind)
    return names_of(engine), [*losses, float(engine.train_batch())]


def load(rank: int, pairs: list[tuple[str, str]], folder: str) -> list[float]:
    losses = []
    for saved, kind in pairs:
        engine = build(kind, schedule="1f1b")
        engine.load_checkpoint(folder, tag=saved)
        losses.append(float(engine.train_batch()))
    return losses


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Checkpoints of all kinds of layers, and the results of rank 0."""
    folder = tmp_path_factory.mktemp("wrapped")
    return folder, [ranks(2).run(save, kind, str(folder), timeout_s=240)[0] for kind in KINDS]


def test_names_and_losses_are_those_of_plain_layers(saved: tuple[Path, list[Any]]) -> None:
    folder, results = saved
    for names, losses in results:
        assert names == results[0][0]
        assert losses == pytest.approx(results[0][1])
    manifests = [json.loads((folder / kind / "ds_ext.json").read_text()) for kind in KINDS]
    for manifest, kind in zip(manifests, KINDS, strict=True):
        records = {name: (record["layer"], record["key"]) for name, record in manifest["parameters"].items()}
        assert (records, manifest["aliases"]) == (
            {name: (r["layer"], r["key"]) for name, r in manifests[0]["parameters"].items()},
            {},
        )
        for file in folder.glob(f"{kind}/layer_*.pt"):
            assert list(read_plain(file)) == list(read_plain(folder / "plain" / file.name))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_checkpoints_load_both_ways(ranks: Ranks, saved: tuple[Path, list[Any]], kind: str) -> None:
    folder, results = saved
    pairs = [("plain", kind), (kind, "plain"), (kind, kind)]
    for losses in ranks(2).run(load, pairs, str(folder), timeout_s=240):
        assert losses == pytest.approx([results[0][1][-1]] * 3)


def exported(folder: Path, output: Path) -> dict[str, Tensor]:
    load_file: Any = pytest.importorskip("safetensors.torch").load_file
    export(folder, output)
    return load_file(output / "model.safetensors")


def test_exports_have_plain_names(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, _ = saved
    plain = exported(folder / "plain", tmp_path / "plain")
    for kind in KINDS[1:]:
        tensors = exported(folder / kind, tmp_path / kind)
        assert tensors.keys() == plain.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, plain[name])


def name_in_wrapper(name: str, wrapper: str) -> str:
    """Return a name as torch has it for layers in a wrapper; ``name`` may begin with the number of a layer."""
    head, dot, key = name.rpartition("linear.")
    layer, number, _ = head.partition(".")
    if not layer.isdigit() or not number:
        return f"{wrapper}.{name}"
    return f"{layer}.{wrapper}.{dot}{key}"


def write_as_earlier_versions(folder: Path, tag: str, wrapper: str) -> None:
    """Write a checkpoint of plain layers again under ``tag``, with the names that compiled layers had."""
    manifest = json.loads((folder / "plain" / "ds_ext.json").read_text())
    tied = [name for name in manifest["parameters"] if name.startswith("tied")]
    parameters = {
        name if name in tied else name_in_wrapper(name, wrapper): record
        if name in tied
        else {**record, "key": f"{wrapper}.{record['key']}"}
        for name, record in manifest["parameters"].items()
    }
    written = start_writing(folder, tag)
    files = {}
    for name, record in manifest["files"].items():
        source = folder / "plain" / name
        if name.startswith("layer_"):
            state = read_plain(source)
            is_tied = "linear.weight" not in state
            files[name] = write_plain(
                written / name,
                state if is_tied else {f"{wrapper}.{key}": value for key, value in state.items()},
            )
        elif name.endswith(".safetensors"):
            load_file: Any = pytest.importorskip("safetensors.torch").load_file
            tensors = {
                key if key.startswith("tied") else name_in_wrapper(key, wrapper): tensor
                for key, tensor in load_file(source).items()
            }
            files[name] = write_tensors(written / name, tensors)
        else:
            shutil.copyfile(source, written / name)
            files[name] = record
    rest = {key: manifest[key] for key in ("job", "aliases")}
    publish(written, tag, {**rest, "files": files, "parameters": parameters})


@pytest.mark.parametrize("wrapper", [COMPILED, RECOMPUTED])
def test_checkpoints_of_earlier_versions_load(
    ranks: Ranks, saved: tuple[Path, list[Any]], wrapper: str, tmp_path: Path
) -> None:
    folder, results = saved
    write_as_earlier_versions(folder, wrapper, wrapper)
    pairs = [(wrapper, "plain"), (wrapper, "compiled")]
    for losses in ranks(2).run(load, pairs, str(folder), timeout_s=240):
        assert losses == pytest.approx([results[0][1][-1]] * 2)
    assert (
        exported(folder / wrapper, tmp_path / "old").keys()
        == exported(folder / "plain", tmp_path / "new").keys()
    )


def load_names_of_both_kinds(rank: int, kinds: tuple[str, ...]) -> list[bool]:
    found = []
    for kind, wrapper in itertools.product(kinds, (None, COMPILED, RECOMPUTED)):
        engine, other = build(kind), build("plain")
        state = {
            name: torch.full_like(v, 2.0) if isinstance(v, Tensor) else 3
            for name, v in other.module.state_dict().items()
        }
        names = {
            name: name if wrapper is None or "tied" in name else name_in_wrapper(name, wrapper)
            for name in state
        }
        result = engine.module.load_state_dict({names[name]: value for name, value in state.items()})
        loaded = engine.module.state_dict()
        found.append(not result.missing_keys and not result.unexpected_keys)
        found += [v == 3 if not isinstance(v, Tensor) else bool((v == 2).all()) for v in loaded.values()]
        layer = engine.module.stage_modules(engine.module.stages[-1])
        found += [bool(m.load_state_dict(m.state_dict())) for m in layer.values()]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_of_either_kind_load(ranks: Ranks, kind: str) -> None:
    for found in ranks(2).run(load_names_of_both_kinds, (kind,), timeout_s=240):
        assert len(found) > 9


def load_layer_files(rank: int, folder: str) -> list[bool]:
    """Write the layer files of compiled layers by DeepSpeed's method, and read them into plain ones."""
    source, engine = build("compiled", zero=0), build("plain", zero=0)
    source.train_batch()
    source.module.save_state_dict(folder, TorchCheckpointEngine())
    torch.distributed.barrier()
    engine.module.load_state_dir(folder, TorchCheckpointEngine())
    pairs = zip(source.module.parameters(), engine.module.parameters(), strict=True)
    return [torch.equal(one, other) for one, other in pairs]


def test_layer_files(ranks: Ranks, tmp_path: Path) -> None:
    assert all(map(all, ranks(2).run(load_layer_files, str(tmp_path), timeout_s=120)))


def tie_a_part(rank: int) -> str:
    config = {"train_batch_size": 8, "ds_ext": {"pipeline_parallel_size": 2, "print_plan": False}}
    specs = [
        TiedSpec("tie", Block, "compiled", "compiled inside", tied_weight_attr="linear.weight")
        for _ in range(2)
    ]
    with pytest.raises(ConfigError) as raised:
        ds_ext.PipelineModule(specs, config, loss_fn=nn.functional.mse_loss)
    return str(raised.value)


def test_errors_have_plain_names(ranks: Ranks) -> None:
    for text in ranks(2).run(tie_a_part, timeout_s=120):
        assert "linear.bias" in text and COMPILED not in text


def test_torch_wraps_layers_under_these_names() -> None:
    linear = nn.Linear(SIZE, SIZE)
    assert [*dict(compile_layer(linear).named_children())] == [COMPILED]
    assert [*dict(checkpoint_wrapper(linear).named_children())] == [RECOMPUTED]
