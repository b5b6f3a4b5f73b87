"""What a rank has in memory while it trains: whose graphs, how many outputs that were handed over, which weights."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor

from ds_ext.engine import PipelineEngine
from ds_ext.engine.executor import Observer
from ds_ext.engine.stages.buffer import Buffer
from ds_ext.parallel.fbd import DisaggregatedLayout
from ds_ext.pipe_schedules.bridge import RecomputeForward
from ds_ext.tensor_parallel import TensorParallel
from tests.engine_runs import digest, weights


@dataclass
class Seen:
    """By the end of a run.

    Attributes:
        graphs: most micro-batches of which a graph had kept a tensor at a time; 0 where there was no graph.
        buffers: most micro-batches that a kind of buffer (inputs, outputs, ...) had at a time.
        handed_over: most outputs of forward ranks that had arrived here and were not taken yet.
        weights: by (step, stage, evaluation) hashes of the whole weights with which forwards were computed.
        gradients: parameters that have one, or could have one, at the end.
        optimizer: whether there is one.
    """

    graphs: int = 0
    buffers: int = 0
    handed_over: int = 0
    weights: defaultdict[tuple[int, int, bool], set[str]] = field(default_factory=lambda: defaultdict(set))
    gradients: int = 0
    optimizer: bool = False


class _Kept:
    """A tensor that a graph keeps, for as long as the graph does."""

    def __init__(self, tensor: Tensor, of: Any, alive: Counter[Any]) -> None:
        self.tensor, self.of, self.alive = tensor, of, alive
        alive[of] += 1

    def __del__(self) -> None:
        self.alive[self.of] -= 1
        if not self.alive[self.of]:
            del self.alive[self.of]


@contextmanager
def watch(engine: PipelineEngine, tp: TensorParallel) -> Iterator[Seen]:
    """Look on at every instruction of an engine."""
    seen, alive = Seen(), Counter[Any]()
    layout, now = engine.layout, [(-1, -1, -1)]
    shards: dict[tuple[int, int, bool], str] = {}
    pairs = layout.groups()["hand-over"] if isinstance(layout, DisaggregatedLayout) else []
    givers = {forward for forward, backward in pairs if backward == engine.global_rank}

    def keep(tensor: Tensor) -> _Kept:
        kept = _Kept(tensor, now[0], alive)
        seen.graphs = max(seen.graphs, len(alive))
        return kept

    class Watch(Observer):
        def before(self, instruction: Any) -> None:
            if isinstance(instruction, ds.ForwardPass | RecomputeForward):
                now[0] = engine.global_steps, instruction.stage, instruction.micro_batch
                key = engine.global_steps, instruction.stage, not engine.current_schedule.trains
                if key not in shards:  # gathered once a step; within one no bit changes
                    shards[key] = digest(engine)
                    seen.weights[key].add(_hash(weights(engine, tp)))
                elif shards[key] != digest(engine):
                    seen.weights[key].add(f"changed before micro-batch {instruction.micro_batch}")
            arrived = Counter(peer for peer, _ in engine.transport.ready() if peer in givers)
            seen.handed_over = max(seen.handed_over, *arrived.values(), 0)

        def after(self, instruction: Any) -> None:
            filled = [
                sum(getattr(buffer, kind.name) is not None for buffer in engine.pipe_buffers)
                for kind in fields(Buffer)
            ]
            seen.buffers = max(seen.buffers, *filled)

    watch = Watch()
    engine.executor.observers.append(watch)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
            yield seen
    finally:
        engine.executor.observers.remove(watch)
        parameters = [*engine.module.parameters()]
        seen.gradients = sum(p.grad is not None or p.requires_grad for p in parameters)
        seen.optimizer = engine.optimizer is not None


def _hash(tensors: dict[str, Tensor]) -> str:
    """Of all bits of all tensors."""
    mine = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        mine.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return mine.hexdigest()
