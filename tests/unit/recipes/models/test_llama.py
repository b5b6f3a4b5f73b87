"""Options of the Llama family against a model in plain tensor algebra, packed samples, and the checks of the config."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_ext.errors import ConfigError
from ds_ext.model.config import RopeScaling
from ds_ext.recipes.models.gpt import GPTConfig, gpt_loss
from ds_ext.recipes.models.layers import causal_mask
from ds_ext.recipes.models.rotary import frequencies
from ds_ext.tensor_parallel import IGNORE_INDEX, DropoutClock, TensorParallel
from tests.losses import mean
from tests.reference import Chain, assert_close_gradients, random_batches

ONE = TensorParallel()
LLAMA = GPTConfig(
    num_layers=3,
    hidden_size=24,
    num_attention_heads=4,
    seq_length=10,
    vocab_size=37,
    init_std=0.3,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    ffn_hidden_size=40,
    position_embedding_type="rope",
    rotary_base=100.0,
    normalization="RMSNorm",
    swiglu=True,
    num_query_groups=2,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
QWEN3 = replace(LLAMA, kv_channels=8, qk_layernorm=True, untie_embeddings_and_output_weights=False)
OTHER = replace(LLAMA, add_qkv_bias=True, sliding_window=4, sliding_window_layers=(0, 2), rotary_percent=0.7)


def plain_logits(weights: dict[str, Tensor], tokens_BS: Tensor, config: GPTConfig) -> Tensor:
    """Compute the forward from its definition: complex rotations, one head at a time, explicit softmax and mask."""
    tokens, size, rotated = tokens_BS.size(1), config.head_size, config.rotary_size
    heads, groups, half = config.num_attention_heads, config.query_groups, config.rotary_size // 2

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt() * weights[name]

    def turn(x_BSH: Tensor) -> Tensor:
        pairs = torch.complex(x_BSH[..., :half], x_BSH[..., half:rotated])
        frequency = config.rotary_base ** (-torch.arange(half) * 2 / rotated)
        angle = torch.arange(tokens)[:, None] * frequency
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((pairs.real, pairs.imag, x_BSH[..., rotated:]), -1)

    x = weights["0.word_embeddings.weight"][tokens_BS]
    for layer in range(2, 2 + config.num_layers):
        here = f"{layer}.self_attention."
        i_S, window = torch.arange(tokens), config.window(layer - 2) or tokens
        hidden_SS = (i_S[:, None] < i_S) | (i_S[:, None] - i_S >= window)
        entered = norm(x, f"{layer}.input_layernorm.weight")
        queries, keys_values = linear(entered, f"{here}linear_q"), linear(entered, f"{here}linear_kv")
        per_head = []
        for head in range(heads):
            group = head // (heads // groups)
            q = queries[..., head * size :][..., :size]
            k, v = keys_values[..., group * 2 * size :][..., : 2 * size].split(size, -1)
            if config.qk_layernorm:
                q, k = norm(q, f"{here}q_layernorm.weight"), norm(k, f"{here}k_layernorm.weight")
            scores = (turn(q) @ turn(k).transpose(1, 2) / math.sqrt(size)).masked_fill(hidden_SS, -math.inf)
            per_head.append(scores.softmax(-1) @ v)
        x = x + linear(torch.cat(per_head, -1), f"{here}linear_proj")
        inner = norm(x, f"{layer}.pre_mlp_layernorm.weight")
        gate = linear(inner, f"{layer}.mlp.linear_gate")
        x = x + linear(
            gate * torch.sigmoid(gate) * linear(inner, f"{layer}.mlp.linear_fc1"), f"{layer}.mlp.linear_fc2"
        )
    untied = f"{3 + config.num_layers}.weight"
    head = weights.get(untied, weights["0.word_embeddings.weight"])
    return norm(x, f"{2 + config.num_layers}.weight") @ head.T


@pytest.mark.parametrize("config", [LLAMA, QWEN3, OTHER], ids=["llama", "qwen3", "other"])
def test_forward_and_backward_equal_a_plain_model(config: GPTConfig) -> None:
    model = Chain(config, ONE, DropoutClock())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    tokens_BS, labels_BS = random_batches(config, 1, 1)[0][0]
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.parameters_by_layer().items()}
    logits_BSV, expected_BSV = model(tokens_BS), plain_logits(weights, tokens_BS, config)
    torch.testing.assert_close(logits_BSV, expected_BSV, rtol=1e-5, atol=2e-5)
    mean(gpt_loss(config, ONE)(logits_BSV, labels_BS)).backward()
    F.cross_entropy(expected_BSV[..., : config.vocab_size].flatten(0, 1), labels_BS.flatten()).backward()
    for name, parameter in model.parameters_by_layer().items():
        assert_close_gradients(parameter.grad, weights[name].grad, name)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "attention_factor": 1.5},
    ],
    ids=str,
)
def test_frequencies_equal_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 5000.0, **(scaling or {"rope_type": "default"})}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=parameters
    )
    if scaling is None:
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    found = frequencies(64, 5000.0, None if scaling is None else RopeScaling(**scaling))
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=0)
    assert found[1] == pytest.approx(factor)


def loss_and_gradients(config: GPTConfig, inputs: Any, labels_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of the losses of all labels that count, and its gradients."""
    model = Chain(config, ONE, DropoutClock())
    loss, _ = gpt_loss(config, ONE)(model(inputs), labels_BS)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.parameters_by_layer().items()}
    return loss.detach(), {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize("position_embedding_type", ["rope", "learned_absolute"])
@pytest.mark.parametrize("window", [None, 3])
def test_a_packed_sample_has_the_loss_of_its_documents(
    position_embedding_type: Any, window: int | None
) -> None:
    config = replace(LLAMA, position_embedding_type=position_embedding_type, sliding_window=window)
    lengths, first = [4, 1, 5], [0, 4, 5]
    tokens_BS, labels_BS = random_batches(config, 1, 1, micro_batch_size=1)[0][0]
    labels_BS = labels_BS.clone()
    labels_BS[:, [3, 4, 9]] = IGNORE_INDEX  # the last token of a document predicts nothing
    starts_BS = torch.tensor([[s for s, n in zip(first, lengths, strict=True) for _ in range(n)]])
    packed = replace(config, reset_position_ids=True, reset_attention_mask=True)
    loss, grads = loss_and_gradients(packed, (tokens_BS, starts_BS), labels_BS)
    expected, expected_grads = torch.zeros(()), dict[str, Tensor]()
    for start, length in zip(first, lengths, strict=True):
        if length > 1:
            piece = slice(start, start + length)
            part, part_grads = loss_and_gradients(config, tokens_BS[:, piece], labels_BS[:, piece])
            expected = expected + part
            for name, grad in part_grads.items():
                expected_grads[name] = expected_grads.get(name, 0) + grad
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        assert_close_gradients(grads[name], grad, name)
    plain, _ = loss_and_gradients(config, tokens_BS, labels_BS)
    assert abs(plain - expected) > 1e-3  # the documents see each other without the resets


@pytest.mark.parametrize(("positions", "attention"), [(True, False), (False, True)])
def test_each_reset_alone(positions: bool, attention: bool) -> None:
    config = replace(LLAMA, reset_position_ids=positions, reset_attention_mask=attention)
    tokens_BS = torch.arange(10)[None]
    starts_BS = torch.tensor([[0, 0, 0, 0, 4, 4, 4, 7, 7, 7]])
    model, changed_BS = Chain(config, ONE, DropoutClock()), tokens_BS.clone()
    changed_BS[:, 2] = 30
    moved_BS = starts_BS.clamp(min=4)  # rotary positions are relative: other documents do not see the shift
    logits, changed, moved = (
        model((tokens, starts)).detach()
        for tokens, starts in ((tokens_BS, starts_BS), (changed_BS, starts_BS), (tokens_BS, moved_BS))
    )
    assert torch.equal(changed[:, :2], logits[:, :2])
    assert not torch.equal(changed[:, 2:4], logits[:, 2:4])
    assert torch.equal(changed[:, 4:], logits[:, 4:]) == attention
    torch.testing.assert_close(moved[:, :4], logits[:, :4], rtol=1e-4, atol=1e-4)


def test_a_packed_model_needs_starts() -> None:
    tokens_BS = torch.zeros(1, 10, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"^inputs: "):
        Chain(replace(LLAMA, reset_position_ids=True), ONE, DropoutClock())(tokens_BS)
    with pytest.raises(ConfigError, match=r"^inputs: "):
        Chain(LLAMA, ONE, DropoutClock())((tokens_BS, tokens_BS))


def test_masks_only_where_causal_attention_is_not_enough() -> None:
    cpu, starts_BS = torch.device("cpu"), torch.tensor([[0, 0, 2, 2], [0, 1, 1, 1]])
    assert causal_mask(4, None, None, cpu) is None and causal_mask(4, 4, None, cpu) is None
    window = causal_mask(4, 2, None, cpu)
    assert window is not None and window.shape == (1, 1, 4, 4)
    assert window[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    documents = causal_mask(4, None, starts_BS, cpu)
    assert documents is not None
    assert documents[:, 0].int().tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
    ]


def gradients(config: GPTConfig) -> dict[str, Tensor]:
    inputs, labels_BS = random_batches(config, 1, 1)[0][0]
    return loss_and_gradients(config, inputs, labels_BS)[1]


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_no_bit_of_a_gradient(recompute: Any) -> None:
    config = replace(
        QWEN3, attention_dropout=0.1, hidden_dropout=0.1, reset_position_ids=True, sliding_window=5
    )
    expected, recomputed = gradients(config), gradients(replace(config, recompute=recompute))
    assert expected.keys() == recomputed.keys()
    for name, grad in expected.items():
        assert torch.equal(recomputed[name], grad), name


def test_a_model_trains_after_inference_mode() -> None:
    config = replace(LLAMA, rotary_base=77.0, sliding_window=3)  # not in a cache yet
    inputs, labels_BS = random_batches(config, 1, 1)[0][0]
    model = Chain(config, ONE, DropoutClock())
    with torch.inference_mode():
        expected = model(inputs)
    logits_BSV = model(inputs)
    assert torch.equal(logits_BSV, expected)
    mean(gpt_loss(config, ONE)(logits_BSV, labels_BS)).backward()


def test_names_and_shapes_of_the_weights() -> None:
    shapes = {
        name: tuple(p.shape) for name, p in Chain(QWEN3, ONE, DropoutClock()).parameters_by_layer().items()
    }
    layer = {name.removeprefix("2."): shape for name, shape in shapes.items() if name.startswith("2.")}
    assert layer == {
        "input_layernorm.weight": (24,),
        "self_attention.linear_q.weight": (32, 24),
        "self_attention.linear_kv.weight": (32, 24),
        "self_attention.q_layernorm.weight": (8,),
        "self_attention.k_layernorm.weight": (8,),
        "self_attention.linear_proj.weight": (24, 32),
        "pre_mlp_layernorm.weight": (24,),
        "mlp.linear_gate.weight": (40, 24),
        "mlp.linear_fc1.weight": (40, 24),
        "mlp.linear_fc2.weight": (24, 40),
    }
    ends = {name for name in shapes if name[0] in "0156"}
    assert ends == {"0.word_embeddings.weight", "5.weight"}
    untied = Chain(LLAMA, ONE, DropoutClock()).parameters_by_layer()
    assert untied["6.weight"].shape == (128, 24)
    assert not untied["6.weight"][37:].any() and not torch.equal(
        untied["6.weight"], untied["0.word_embeddings.weight"]
    )


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"num_query_groups": 3}, r"^num_query_groups: .*4 .*3"),
        ({"rotary_percent": 0.5}, r"^kv_channels x rotary_percent: .*3"),
        ({"rotary_percent": 1.5}, r"^rotary_percent: .*1\.5"),
        ({"normalization": "batch"}, r"^normalization: .*batch"),
        ({"position_embedding_type": "alibi"}, r"^position_embedding_type: .*alibi"),
        ({"sliding_window": 0}, r"^sliding_window: .*0"),
        ({"sliding_window": 4, "sliding_window_layers": (0, 40)}, r"^sliding_window_layers: .*\b40\b"),
        ({"sliding_window_layers": (0,)}, r"^sliding_window_layers: .*None"),
        (
            {"position_embedding_type": "learned_absolute", "rope_scaling": RopeScaling("linear", 2.0)},
            r"^rope_scaling: ",
        ),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        replace(LLAMA, **changes)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, r"^rope_scaling\.rope_type: .*dynamic"),
        ({"rope_type": "linear", "factor": 0.0}, r"^rope_scaling\.factor: "),
        ({"rope_type": "yarn", "factor": 2.0}, r"^rope_scaling\.original_max_position_embeddings: "),
        (
            {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8,
            },
            r"^rope_scaling\.high_freq_factor: ",
        ),
    ],
)
def test_unknown_rope_scaling_is_refused(fields: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        RopeScaling(**fields)


def test_tensor_parallel_sizes_fit_the_groups() -> None:
    config = replace(LLAMA, hidden_size=48, num_attention_heads=12, num_query_groups=3, ffn_hidden_size=48)
    for size in (1, 3, 6, 12):
        config.check_tensor_parallel(size)
    with pytest.raises(ConfigError, match=r"num_query_groups 3.*4.* 1, 3, 6 or 12"):
        config.check_tensor_parallel(4)
