"""Memory of a device equals the figures of the papers and sums computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_ext.errors import ConfigError, ScheduleError
from ds_ext.pipe_schedules import get_schedule, timetable
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.activations import layer_activations, stage_activations
from ds_ext.planner.memory import DeviceMemory, memory
from ds_ext.planner.named_models import MODELS, named_model
from ds_ext.planner.training_sizes import TrainingSizes

# s = 8, b = 2, h = 4, a = 2, v = 100: sbh = 64, 5as/h = 20. A layer has 12 * 16 + 13 * 4 = 244 parameters.
SMALL = TrainingSizes(
    num_layers=4, hidden_size=4, num_attention_heads=2, vocab_size=100, seq_length=8, micro_batch=2
)
LAYER, EMBEDDING, HEAD = 244, 432, 408  # 100 * 4 + 8 * 4; 100 * 4 + 2 * 4 of the norm


def kept(sizes: TrainingSizes) -> float:
    return layer_activations(sizes, sizes.recompute).kept


# --- figures of the papers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-124m", 0.124439808),  # exact counts of GPT-2
        ("gpt-355m", 0.354823168),
        ("gpt-774m", 0.774030080),
        ("gpt-1.5b", 1.557611200),
        ("gpt-1.3b", 1.3),
        ("gpt-2.7b", 2.7),
        ("gpt-6.7b", 6.7),
        ("gpt-10b", 10.3),
        ("gpt-13b", 12.9),
        ("gpt-22b", 22.1),
        ("gpt-175b", 174.7),
        ("gpt-530b", 529.6),
        ("gpt-1t", 1008.2),
        ("llama-2-7b", 6.738415616),
        ("llama-2-13b", 13.015864320),
        ("llama-2-70b", 68.976648192),
        ("llama-3-8b", 8.030261248),
        ("llama-3-70b", 70.553706496),
        ("llama-3.1-405b", 405.853388800),
        ("qwen2.5-7b", 7.615616512),
        ("qwen2.5-72b", 72.706203648),
        ("mistral-7b", 7.241732096),
        ("qwen3-8b", 8.190735360),
        ("qwen3-32b", 32.762123264),
    ],
)
def test_models_have_the_parameters_in_their_names(name: str, billions: float) -> None:
    found = TrainingSizes.of_model(named_model(name)).device_parameters(linear(1), 0) / 1e9
    is_published = name in list(MODELS)[:4] or not name.startswith("gpt")  # with all digits
    assert found == pytest.approx(billions, rel=1e-12 if is_published else 0.02)


@pytest.mark.parametrize(("name", "scores", "saved"), [("gpt-175b", 80, 0.70), ("gpt-530b", 64, 0.65)])
def test_savings_of_selective_recomputation(name: str, scores: int, saved: float) -> None:
    """arXiv 2205.05198, section 5: 5as/h is 80 and 64, and dropping it saves 70% and 65%."""
    sizes = TrainingSizes.of_model(named_model(name), attention_scores=True)
    sbh = sizes.seq_length * sizes.hidden_size
    none, selective = kept(sizes), kept(replace(sizes, recompute="selective"))
    assert (none - selective) / sbh == scores
    assert 1 - selective / none == pytest.approx(saved, abs=0.005)


def test_zero_1_of_the_paper() -> None:
    """arXiv 1910.02054, figure 1: 7.5 billion parameters on 64 ranks take 120 GB, with ZeRO-1 31.4 GB."""
    sizes = TrainingSizes.of_model(named_model("gpt-6.7b"), precision="fp16")
    plain, sharded = (memory(timetable("gpipe", 1, 1), replace(sizes, data_parallel=n))[0] for n in (1, 64))
    scale = 7.5e9 / sizes.device_parameters(linear(1), 0) / 1e9
    assert (plain.weights + plain.gradients + plain.optimizer) * scale == pytest.approx(120)
    assert (sharded.weights + sharded.gradients + sharded.optimizer) * scale == pytest.approx(31.4, abs=0.01)


def test_the_first_device_of_1f1b_keeps_a_model_and_interleaving_more() -> None:
    """arXiv 2205.05198, section 4.2.3: L layers, and L (1 + (p - 1) / (pm)) with m chunks per device."""
    sizes = replace(PLAIN, num_layers=16)
    plain = memory(timetable("1f1b", 4, 16), sizes)[0]
    assert plain.activations == 16 * KEPT + BACKWARD
    interleaved = memory(timetable("interleaved", 4, 16, chunks=2), sizes)[0]
    assert interleaved.activations == 16 * (1 + 3 / 8) * KEPT + BACKWARD


# --- measured: tests/distributed/test_memory.py ---------------------------------------------------------------------


def bytes_per_parameter(schedule: str, **settings: Any) -> tuple[float, float]:
    """Return (total, buffers) of device 0 without activations, for a model of many equal layers."""
    made = timetable(schedule, 2, 4)
    sizes = TrainingSizes(
        2048,
        8,
        1,
        seq_length=1,
        vocab_size=1,
        bucket=1,
        position_embedding_type="rope",
        recompute="full",
        **settings,
    )
    count = sizes.device_parameters(made.placement, 0)
    device = memory(made, sizes)[0]
    assert device.activations < 0.1 * count
    return (device.total - device.activations) / count, device.buffers / count


@pytest.mark.parametrize(
    ("settings", "one_copy", "two_copies"),
    [
        # weights + gradients + states, and with two copies of the weights, a copy of the gradients of two stages
        ({"precision": "fp32"}, 4 + 4 + 8, 4 + 4 + 8 + 2),
        ({"precision": "fp32", "optimizer": "foreach"}, 4 + 4 + 8 + 4, 4 + 4 + 8 + 4),
        # weights, master weights, states, partition of the gradients and its fp32 copy, temporary tensors
        ({"precision": "fp32", "zero_stage": 1}, 4 + 4 + 8 + 4 + 4, 4 + 4 + 6 + 2),
        ({"precision": "fp32", "zero_stage": 1, "optimizer": "foreach"}, 4 + 24 + 0, 4 + 4 + 6 + 2),
        ({"precision": "fp32", "zero_stage": 1, "optimizer": "for-loop"}, 4 + 28, 4 + 14),
        ({"precision": "fp16"}, 2 + 12 + 8, 2 + 6 + 4),
        ({"precision": "fp16", "optimizer": "for-loop"}, 2 + 12 + 2 + 4 + 8, 2 + 6 + 7),
        # weights, gradients, fp32 sums, master weights and states, temporary tensors; the sums are reduced in place
        ({}, 2 + 6 + 12 + 4, 2 + 6 + 6),
        ({"optimizer": "foreach"}, 2 + 6 + 12 + 4, 2 + 6 + 6 + 2),
        ({"optimizer": "for-loop"}, 2 + 6 + 12 + 8, 2 + 6 + 6 + 4),
    ],
)
def test_bytes_per_parameter(settings: dict[str, Any], one_copy: float, two_copies: float) -> None:
    for schedule, expected in (("1f1b", one_copy), ("bitpipe", two_copies)):
        assert bytes_per_parameter(schedule, **settings)[0] == pytest.approx(expected, rel=0.01)
        # Half precision is always sharded.
        if settings.get("precision") != "fp32":
            assert bytes_per_parameter(schedule, zero_stage=1, **settings) == bytes_per_parameter(
                schedule, **settings
            )


def test_buckets() -> None:
    """ZeRO allocates its bucket with the first backward, and a second one for the reduction."""
    sizes = replace(SMALL, precision="fp16")
    small, large = (
        memory(timetable("1f1b", 2, 4), replace(sizes, bucket=b))[0] for b in (10**6, 10**6 + 500)
    )
    assert large.total - small.total == 2 * 2 * 500
    n = 2 * LAYER + EMBEDDING
    assert small.total == 2 * n + 12 * n + 2 * 2 * 10**6 + 2 * n  # the gradients have moved into a bucket
    # Without ZeRO, DeepSpeed's bucket has a fixed size; it does not exceed the gradients.
    plain = replace(SMALL, precision="fp32", recompute="full", seq_length=1)
    assert (
        memory(timetable("1f1b", 2, 4), plain)[0]
        == memory(timetable("1f1b", 2, 4), replace(plain, bucket=1))[0]
    )


def test_buffers_use_the_memory_of_activations() -> None:
    """Activations are free when the optimizer steps."""
    made, loop = timetable("1f1b", 2, 4), replace(SMALL, optimizer="for-loop")
    for micro_batch in (1, 8, 64):
        device = memory(made, replace(loop, micro_batch=micro_batch))[0]
        n = 2 * LAYER + EMBEDDING
        assert device.activations + device.buffers == max(device.activations, 8 * n)


def test_fp32_activations_count_twice() -> None:
    """But not the fp32 numbers of the attention, 4 bytes for each of 2 heads and 16 tokens."""
    half, full = (kept(replace(PLAIN, precision=p)) for p in ("bf16", "fp32"))
    assert full == 2 * half - 128


# --- by hand --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "times_sbh"),
    [
        ({"attention_scores": True}, 54),
        ({"attention_scores": True, "hidden_dropout": 0.0}, 52),
        ({"attention_scores": True, "recompute": "selective"}, 34),
        ({"recompute": "full"}, 2),
        ({}, 34 + 2),  # and for every head of a token an fp32 number instead of scores
        ({"recompute": "selective"}, 34),
        ({"tensor_parallel": 2, "recompute": "selective"}, 22),
        ({"tensor_parallel": 2, "attention_scores": True}, 32),
        ({"tensor_parallel": 2, "sequence_parallel": True, "recompute": "selective"}, 17),
        ({"tensor_parallel": 2, "sequence_parallel": True, "attention_scores": True}, 27),
        ({"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"}, 1),
        # 10 + 4 (q + k + f) / h, with k = 2 and twice f = 6
        (
            {"num_query_groups": 1, "ffn_hidden_size": 6, "swiglu": True, "recompute": "selective"},
            10 + 4 + 2 + 12,
        ),
        # q, k, rotated q and k beside the output of the linear layer
        ({"position_embedding_type": "rope", "recompute": "selective"}, 34 + 4),
        # an RMSNorm keeps an fp32 copy of its input and the result in 16 bits instead of its input
        ({"normalization": "RMSNorm", "recompute": "selective"}, 34 + 2 * 4),
        ({"normalization": "RMSNorm", "recompute": "selective", "precision": "fp32"}, 2 * 32 + 2 * 4 + 2),
    ],
)
def test_activations_of_a_layer(options: dict[str, Any], times_sbh: int) -> None:
    assert kept(replace(SMALL, **options)) == times_sbh * 64


# Bytes of a token, without dropout and in 16 bits: a layer keeps 32h + 4a = 136. The first half of a split backward
# passes on 32h = 128. A backward adds the gradients of its output and of fc2's input, 2h + 8h, the first half another
# 8h, and both the weight gradient of fc2.
PLAIN = replace(SMALL, hidden_dropout=0.0)
KEPT, DEFERRED, WEIGHT = 16 * 136, 16 * 128, 2 * 4 * 16
BACKWARD, FIRST_HALF = 16 * 40 + WEIGHT, 16 * 72


def test_passes_of_a_stage() -> None:
    middle = stage_activations(replace(PLAIN, num_layers=6, stage_layers=(2, 2, 2)), linear(3))[1]
    assert (middle.kept, middle.deferred) == (2 * KEPT, 2 * DEFERRED)
    assert (middle.forward, middle.backward) == (2 * KEPT + 16 * 24, BACKWARD)
    assert (middle.backward_input, middle.backward_weight) == (FIRST_HALF, 2 * WEIGHT)


def test_a_recomputed_stage_keeps_inputs_until_its_first_half_and_everything_until_the_second() -> None:
    sizes = replace(PLAIN, num_layers=6, stage_layers=(2, 2, 2), recompute="full")
    full = stage_activations(sizes, linear(3))[1]
    assert (full.kept, full.deferred) == (2 * 16 * 8, 2 * DEFERRED)
    assert full.backward == KEPT - 16 * 8 + BACKWARD  # of the layer that it computes again
    assert full.backward_input == DEFERRED - 16 * 8 + KEPT - 16 * 8 + FIRST_HALF
    odd = replace(sizes, recompute_interval=4)
    assert [stage.kept for stage in stage_activations(odd, linear(3))][:2] == [16 * 8 + KEPT, 2 * KEPT]


def test_logits_and_their_gradient_count_together() -> None:
    """128 rows of the vocabulary, 16 tokens: 4096 bytes in 16 bits, and fp32 logits of one chunk."""
    last = stage_activations(replace(PLAIN, num_layers=2, stage_layers=(1, 1)), linear(2))[1]
    assert last.kept == KEPT + 16 * 16 + 4096
    assert last.backward == 4096 + 2 * 4096
    large = replace(PLAIN, num_layers=2, stage_layers=(1, 1), seq_length=1 << 16, vocab_size=1280)
    logits = (1 << 17) * 2 * 1280
    assert stage_activations(large, linear(2))[1].backward == logits + 2 * logits / 16


def test_the_backward_of_the_last_norm_counts() -> None:
    """Five fp32 tensors of an RMSNorm, without two of 16 bits and the logits: 64 (20 - 4) - 256 bytes of a token."""
    sizes = replace(
        PLAIN, num_layers=2, stage_layers=(1, 1), hidden_size=64, seq_length=1 << 16, normalization="RMSNorm"
    )
    assert stage_activations(sizes, linear(2))[1].backward == (1 << 17) * 768


def test_slices_add_gradients_of_keys_in_the_attention() -> None:
    """Keys and values of a slice take 16 bytes per token and layer.

    Attention needs 104 bytes per token and 16 for every earlier slice, the MLP before it 168.
    """
    sizes = replace(PLAIN, num_layers=6, stage_layers=(2, 2, 2), recompute="full")
    tokens = sizes.seq_length
    third, ninth, tenth = (
        stage_activations(sizes, linear(3), index * tokens, (9 - index) * tokens)[1] for index in (2, 8, 9)
    )
    assert third.kept == 2 * 16 * (8 + 16)
    assert third.backward == 16 * 168 + WEIGHT
    assert ninth.backward == 16 * (104 + 8 * 16) + WEIGHT
    # The other layer is done: without its input, with nine gradients.
    assert tenth.backward == 16 * (104 + 9 * 16 - 8 + 9 * 16) + WEIGHT
    assert (ninth.gradients, tenth.gradients) == (-2 * 16 * 16, 9 * 2 * 16 * 16)


def test_long_first_slices_need_more() -> None:
    sliced = get_schedule("1f1b").timetable(2, 4, slices=4)
    sizes = replace(PLAIN, num_layers=4, seq_length=64)
    equal, listed, longer = (
        [device.activations for device in memory(sliced, sizes, lengths)]
        for lengths in ("equal", [16] * 4, [40, 8, 8, 8])
    )
    assert equal == listed and all(more > less for more, less in zip(longer, equal, strict=True))


def test_parameters_of_a_grouped_layer() -> None:
    sizes = replace(
        SMALL,
        num_layers=1,
        num_query_groups=1,
        ffn_hidden_size=6,
        swiglu=True,
        untie_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    # q, k, v, output; gate, up, down; biases of columns; other biases and norms
    layer = 16 + 2 * 8 + 16 + 3 * 24 + (4 + 2 * 2 + 12) + 6 * 4
    assert sizes.device_parameters(linear(1), 0) == layer + 2 * 400 + 8
    # Both ranks hold the keys and values.
    halves = (layer - 6 * 4 - 20) / 2 + 10
    assert replace(sizes, tensor_parallel=2).device_parameters(linear(1), 0) == halves + 24 + 10 + 400 + 8


def test_a_linear_pipeline() -> None:
    """Device 0: two layers, embedding, positions, two live micro-batches. Device 1: two layers, norm, head, one."""
    first, last = memory(timetable("1f1b", 2, 4), PLAIN)
    n, m = 2 * LAYER + EMBEDDING, 2 * LAYER + HEAD
    # The copies of the reduced gradients are smaller than the activations, which are free by then.
    peak = 4 * KEPT + BACKWARD
    assert first == DeviceMemory(2 * n, 6 * n, 12 * n, peak, 0)
    assert last == DeviceMemory(2 * m, 6 * m, 12 * m, 2 * KEPT + 16 * 16 + 4096 + 3 * 4096, 0)
    assert first.total == 20 * n + peak


def test_bitpipe_holds_two_pipes() -> None:
    """At D = 2 a device holds four stages, with first and last stage of one pipe, which share the embedding."""
    made = timetable("bitpipe", 2, 4)
    whole = 4 * LAYER + EMBEDDING + 8  # stages 0 and 3 of one pipe, 1 and 2 of the other: a whole model
    assert [device.weights for device in memory(made, SMALL)] == [2 * whole] * 2
    zero = memory(made, replace(SMALL, data_parallel=3))[0]
    assert zero.optimizer == 12 * whole / 6
    assert (zero.weights, zero.gradients) == (2 * whole, 6 * whole)


def test_tensor_parallel_parameters() -> None:
    """Split: biases of column-parallel layers, 7h. Whole: those of row-parallel layers, 2h, norms, 4h, positions."""
    sizes = replace(SMALL, tensor_parallel=2)
    layer = (12 * 16 + 28) / 2 + 24
    assert memory(timetable("gpipe", 1, 1), sizes)[0].weights == 2 * (4 * layer + 400 / 2 + 32 + 8)


def test_stages_with_different_layers() -> None:
    first, last = memory(timetable("gpipe", 2, 3), replace(PLAIN, stage_layers=(3, 1)))
    assert (first.weights, last.weights) == (2 * (3 * LAYER + EMBEDDING), 2 * (LAYER + HEAD))
    assert first.activations == 9 * KEPT + BACKWARD
    assert last.activations == 3 * (KEPT + 16 * 16 + 4096) + 3 * 4096


def test_activations_live_until_the_backward_weight() -> None:
    """Device 1 of zb_h1 has three micro-batches between forward and first half, or before the second half."""
    made = timetable("zb_h1", 4, 8)
    sizes = replace(PLAIN, num_layers=4)
    assert max(simulate(made).peak_activations) == simulate(made).peak_activations[1]
    live = simulate(made).peak_activations[1] * KEPT
    assert live < memory(made, sizes)[1].activations <= live + FIRST_HALF


def test_an_evaluation_keeps_weights_only() -> None:
    for device in memory(forward_timetable(linear(2), 3), SMALL):
        assert device.total == device.weights > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layers": 5}, r"^num_layers: .*2 stages \(got 5\)\. Use 4 or 6\."),
        ({"num_layers": 1}, r"^num_layers: .*2 stages \(got 1\)\. Use 2\."),
        ({"stage_layers": (1, 2, 3)}, r"^stage_layers: .*2 .*got 3"),
        ({"hidden_size": 0}, r"^hidden_size: .*positive \(got 0\)"),
        ({"micro_batch": 0}, r"^micro_batch: .*positive \(got 0\)"),
        ({"precision": "fp8"}, r"^precision: .*'fp8'.*bf16, fp16, fp32"),
        ({"optimizer": "apex"}, r"^optimizer: .*'apex'.*fused, foreach, for-loop"),
        ({"num_attention_heads": 3}, r"^hidden_size: .*num_attention_heads 3 \(got 4\)"),
        ({"tensor_parallel": 4}, r"^tensor_parallel: .*2 \(got 4\)"),
        ({"zero_stage": 2}, r"^zero_stage: .*got 2"),
        ({"recompute": "some"}, r'^recompute: .*"none", "selective" or "full" \(got .some'),
    ],
)
def test_wrong_sizes(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, ScheduleError), match=words):
        memory(timetable("gpipe", 2, 2), replace(SMALL, **options))


def test_an_unknown_model() -> None:
    with pytest.raises(ScheduleError, match=r"^model: .*'gpt-5'.*gpt-124m, "):
        named_model("gpt-5")
    with pytest.raises(ScheduleError, match=r"llama-3.1-405b\?"):
        named_model("llama-3-405b")
    assert named_model("GPT-10B") == MODELS["gpt-10b"]


@pytest.mark.parametrize(
    ("name", "base"),
    [("llama-2-7b", 1e4), ("llama-3-8b", 5e5), ("qwen2.5-7b", 1e6), ("qwen3-8b", 1e6)],
)
def test_named_models_have_the_rotary_base_of_their_family(name: str, base: float) -> None:
    assert named_model(name).rotary_base == base
