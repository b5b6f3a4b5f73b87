"""Weights of a Hugging Face folder for the ranks of a job. Each rank reads only its layers and its shards.

A rank reads a few MiB at a time into its own weights, so that loading needs no memory beside them. Files whose layout
differs (GPT-2's Conv1D) are read one weight at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...engine import PipelineEngine
from ...engine.parameters import LocalParameter, Shape
from ...engine.rank_state import RankState
from ...errors import ConfigError
from ...hf.folder import shape_text
from ..models.hf import Counterpart
from .hf_model import HuggingFaceModel

_BLOCK_ELEMENTS = 1 << 21  # 8 MiB in fp32


def load_into_ranks(engine: PipelineEngine, model: HuggingFaceModel) -> None:
    """Set the weights of this rank, and its master weights. All ranks must call this together."""
    state = RankState(engine)
    tensor_rank = engine.mpu.get_slice_parallel_rank()
    with torch.no_grad():
        for local, start, target in state.weights(state.parameters):
            shard = local.shard(tensor_rank, engine.layout.tensor_parallel_size)
            _fill(_counterpart(model, local), local.shape, shard, model, start, target.view(-1))
        state.optimizer.weights_changed()
    engine.role.weights_loaded()


def _counterpart(model: HuggingFaceModel, local: LocalParameter) -> Counterpart:
    weight = model.weights.get(f"{local.layer}.{local.key}")
    if weight is None or weight.shape != local.shape.full:
        raise ConfigError(
            f"{local.name}: {model.folder.path} has {shape_text(weight and weight.shape)} (got "
            f"{shape_text(local.shape.full)} in the model). Build the layers with the config of the folder."
        )
    return weight


def _fill(
    weight: Counterpart, shape: Shape, shard: int, model: HuggingFaceModel, start: int, target_E: Tensor
) -> None:
    """Set ``target_E`` to the elements from ``start`` on of a flattened shard."""
    columns = math.prod(shape.shard[1:])
    stop = start + len(target_E)
    blocks = _row_blocks(weight, shape, shard, model, start // columns, -(-stop // columns))
    for first_row, rows in blocks:
        elements = rows.reshape(-1)
        begin = first_row * columns  # of the block
        low = max(start, begin)
        high = min(stop, begin + len(elements))
        target_E[low - start : high - start].copy_(elements[low - begin : high - begin])


def _row_blocks(
    weight: Counterpart, shape: Shape, shard: int, model: HuggingFaceModel, start: int, stop: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, rows) of a shard in blocks that contain at least the rows ``start`` to ``stop - 1``.

    Rows of padding are zero.
    """
    offset = shard * shape.shard[0] if shape.dim == 0 else 0  # of the shard in the full weight
    model_rows = min(shape.shard[0], max(0, shape.full[0] - offset))  # the others of the shard are padding
    multiple = model.row_multiple(weight)
    if multiple is None:
        full = model.read(weight)
        yield 0, _columns(full[offset : offset + model_rows], shape, shard)
    else:
        block_rows = max(1, _BLOCK_ELEMENTS // (math.prod(shape.full[1:]) * multiple)) * multiple
        for begin in range(start // multiple * multiple, min(stop, model_rows), block_rows):
            end = min(begin + block_rows, -(-stop // multiple) * multiple, model_rows)
            rows = model.read_rows(weight, offset + begin, offset + end)
            yield begin, _columns(rows, shape, shard)
    if stop > model_rows:
        padding = max(start, model_rows)
        yield padding, torch.zeros(stop - padding, *shape.shard[1:])


def _columns(rows: Tensor, shape: Shape, shard: int) -> Tensor:
    return rows.narrow(1, shard * shape.shard[1], shape.shard[1]) if shape.dim == 1 else rows
