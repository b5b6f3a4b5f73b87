"""Bytes that ranks communicate, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.placement import bidirectional_v, linear
from ds_ext.planner.traffic import traffic
from ds_ext.planner.training_sizes import TrainingSizes

GPT = TrainingSizes(8, 64, 4, 32, 512, micro_batch=2, tensor_parallel=2)
ACTIVATION = 2 * 32 * 2 * 64


def test_bytes_of_gradients_and_weights() -> None:
    placement = linear(4)
    parameters = [GPT.device_parameters(placement, device) for device in range(4)]
    for options, reduced, weight, gathers in (
        ({}, 4, 2, 1),  # fp32 sums of bf16 gradients; half precision is always sharded
        ({"reduced_bytes": 2}, 2, 2, 1),
        ({"precision": "fp16"}, 2, 2, 1),
        ({"precision": "fp32"}, 4, 4, 0),
        ({"precision": "fp32", "zero_stage": 1}, 4, 4, 1),
    ):
        found = traffic(replace(GPT, **options), placement, 8)
        assert found.gradients == pytest.approx([reduced * count for count in parameters])
        assert found.weights == pytest.approx([weight * count for count in parameters])
        assert found.zero_stage == gathers


def test_an_embedding_that_is_also_the_head_is_tied() -> None:
    assert traffic(GPT, linear(4), 8).tied == 4 * 512 * 64 / 2  # fp32, tensor-parallel size 2
    assert traffic(replace(GPT, untie_embeddings_and_output_weights=True), linear(4), 8).tied == 0


def test_two_all_reduces_of_a_layer_in_the_forward_and_two_in_the_backward() -> None:
    found = traffic(GPT, linear(4), 8)
    assert found.message == ACTIVATION
    assert found.tensor == (8 * 2 * 4 * ACTIVATION,) * 4  # 8 micro-batches, 2 layers
    # Both pipes together have 8 micro-batches and the same layers.
    assert traffic(GPT, bidirectional_v(4), 8).tensor == found.tensor
    # The backward repeats the forward of a layer.
    assert traffic(replace(GPT, recompute="full"), linear(4), 8).tensor == (8 * 2 * 6 * ACTIVATION,) * 4


def test_sequence_parallelism_slices_messages_only() -> None:
    plain, sliced = (traffic(replace(GPT, sequence_parallel=on), linear(4), 8) for on in (False, True))
    assert (plain.message, sliced.message) == (ACTIVATION, ACTIVATION // 2)
    assert plain.tensor == sliced.tensor


def test_forward_ranks_compute_no_backward() -> None:
    placement = get_schedule("fbd").placement(4)
    found = traffic(GPT, placement, 8)
    forward, backward = placement.forward_devices[0], placement.pipes[0][0]
    assert found.tensor[forward] * 3 == found.tensor[backward]
