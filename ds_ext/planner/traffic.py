"""Bytes that the ranks of a GPT communicate in a training step.

A transformer layer all-reduces its output over the tensor-parallel group twice in the forward and twice in the backward
(arXiv 1909.08053, section 3). Sequence parallelism replaces each of them by an all-gather and a reduce-scatter with
as many bytes (arXiv 2205.05198, section 4.2.2). Not counted: embedding, loss, norms and overflow checks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..parallel.crossing import Traffic
from ..pipe_schedules import Placement
from .stage_costs import message_bytes
from .training_sizes import TrainingSizes

_ALL_REDUCES = 2  # of a layer, in the forward and again in the backward


def traffic(sizes: TrainingSizes, placement: Placement, micro_batches: int) -> Traffic:
    """Return the bytes that a rank of every device communicates in a step; ``micro_batches`` is N per pipeline group.

    ``sizes`` has layers that fit the placement's stages; see :func:`.stage_costs.split_layers`.
    """
    layers = sizes.stage_layer_counts(placement.stages)
    pipes = Counter(placement.pipes_of(micro_batches))
    reduced = message_bytes(replace(sizes, sequence_parallel=False))
    repeats = 1 / sizes.recompute_interval if sizes.recompute == "full" else 0
    passes = 2 + (1 if placement.forward_devices else repeats)
    per_parameter = sizes.bytes
    parameters, tensor = [], []
    for device, chunks in enumerate(placement.chunks):
        # A merged forward rank holds whole weights.
        forward = device in placement.forward_devices
        shard = replace(sizes, tensor_parallel=1) if forward and placement.merged > 1 else sizes
        parameters.append(shard.device_parameters(placement, device))
        work = sum(
            layers[chunk.stage] * (micro_batches if forward else pipes[chunk.pipe])
            for chunk in chunks
            if chunk.stage
            < placement.stages  # the collectives of the head, also of its parts, are not counted
        )
        tensor.append(_ALL_REDUCES * (1 if forward else passes) * work * reduced)
    return Traffic(
        message=message_bytes(sizes),
        gradients=tuple(count * per_parameter.reduced for count in parameters),
        weights=tuple(count * per_parameter.weights for count in parameters),
        tensor=tuple(map(float, tensor)),
        tied=0.0
        if sizes.untie_embeddings_and_output_weights
        else sizes.head_part_parameters(placement) * per_parameter.reduced,
        zero_stage=int(per_parameter.sharded),
        overlaps=sizes.overlap_across_steps and per_parameter.sharded,
        stages=tuple(count * per_parameter.reduced for count in sizes.stage_parameters(placement)),
    )
