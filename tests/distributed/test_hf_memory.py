"""Peak memory of ranks that load a Hugging Face model of 2 GB. Only with ``make test-all``."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ds_ext.engine.checkpoint.file import write_tensors
from ds_ext.hf.folder import CONFIG, INDEX, shard_name
from ds_ext.recipes.convert.hf_model import HuggingFaceModel
from ds_ext.recipes.convert.into_ranks import load_into_ranks
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.recipes.models.hf import counterparts
from ds_ext.recipes.models.hf_config import to_json
from ds_ext.tensor_parallel import skip_initial_values
from tests.engine_runs import Job, build
from tests.ranks import Ranks
from tests.selection import EVERYTHING

MODEL = GPTConfig(
    num_layers=8,
    hidden_size=2048,
    num_attention_heads=16,
    num_query_groups=4,
    ffn_hidden_size=5632,
    seq_length=64,
    vocab_size=32000,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
SHARD_BYTES = 500_000_000
FACTOR = 1.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the model with random weights in fp32, in files of 0.5 GB."""
    path = tmp_path_factory.mktemp("llama_2gb")
    shapes = {
        name: shape for weight in counterparts(MODEL) for name, shape in weight.hf_shapes(MODEL).items()
    }
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if size > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += 4 * torch.Size(shape).numel()
    index = {}
    for number, names in enumerate(groups, start=1):
        file = shard_name(number, len(groups))
        tensors: dict[str, Tensor] = {name: torch.randn(shapes[name]) for name in names}
        write_tensors(path / file, tensors)
        index |= dict.fromkeys(names, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (path / CONFIG).write_text(json.dumps(to_json(MODEL)))
    yield path
    shutil.rmtree(path)  # pytest keeps the folders of the last runs


def memory_bytes(key: str) -> int:
    """Return VmRSS or VmHWM, its peak, of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def peak_and_share(rank: int, job: Job, path: str) -> tuple[int, int, float]:
    """Load the folder. Return the peak above the memory before, the bytes of the weights, and a sum of the weights."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the current memory
    before = memory_bytes("VmRSS")
    with skip_initial_values():
        engine, _ = build(job)
    load_into_ranks(engine, HuggingFaceModel(Path(path)))
    peak = memory_bytes("VmHWM") - before
    parameters = list(engine.module.parameters())
    share = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    total = sum(float(parameter.detach().double().pow(2).mean()) for parameter in parameters)
    engine.transport.close()
    return peak, share, total / len(parameters)


@pytest.mark.skipif(not EVERYTHING, reason="writes 2 GB and takes a minute; runs with make test-all")
@pytest.mark.parametrize("sizes", [("1f1b", 4, 1, 1, 4), ("1f1b", 2, 2, 1, 4), ("interleaved", 2, 2, 1, 4)])
def test_peak_memory_is_little_more_than_the_weights(
    ranks: Ranks, folder: Path, sizes: tuple[str, int, int, int, int]
) -> None:
    job = Job(*sizes, dataclasses.replace(MODEL, max_position_embeddings=64))
    pool = ranks(4)
    pool.close()  # new ranks, because freed memory of earlier jobs would hide a peak
    results = pool.run(peak_and_share, job, str(folder), timeout_s=240)
    for rank, (peak, share, mean) in enumerate(results):
        print(
            f"{sizes} rank {rank}: share {share / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB, {peak / share:.2f}"
        )
        assert share > 3e8 and mean == pytest.approx(1.0, rel=1e-2)
    assert max(peak / share for peak, share, _ in results) < FACTOR
