"""GPT layers against a GPT in plain tensor algebra, and the checks of its config."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor

from ds_ext.errors import ConfigError
from ds_ext.recipes.models.gpt import (
    GPTConfig,
    GPTEmbedding,
    gpt_layer_specs,
    gpt_loss,
)
from ds_ext.tensor_parallel import DropoutClock, KeyedDropout, TensorParallel
from tests.losses import mean
from tests.reference import Chain, assert_close_gradients, random_batches, train_reference

ONE = TensorParallel()
CONFIG = GPTConfig(
    num_layers=3,
    hidden_size=24,
    num_attention_heads=4,
    seq_length=10,
    vocab_size=37,
    init_std=0.3,
    ffn_hidden_size=40,
)
PLAIN = replace(CONFIG, hidden_dropout=0.0, attention_dropout=0.0)


def gradients(config: GPTConfig, step: int = 0, micro_batch: int = 0) -> dict[str, Tensor]:
    clock = DropoutClock(step, micro_batch)
    model = Chain(config, ONE, clock)
    tokens_BS, labels_BS = random_batches(config, 1, 1)[0][0]
    loss = mean(gpt_loss(config, ONE)(model(tokens_BS), labels_BS))
    # Run the forward of another micro-batch in between, as a pipeline does.
    clock.set(step + 1, micro_batch + 1)
    loss.backward()
    return {name: p.grad for name, p in model.parameters_by_layer().items() if p.grad is not None}


def plain_logits(weights: dict[str, Tensor], tokens_BS: Tensor, config: GPTConfig) -> Tensor:
    """Compute GPT-2's forward from its definition, with explicit softmax and mask."""
    tokens = tokens_BS.size(1)
    heads, size = config.num_attention_heads, config.head_size

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["0.word_embeddings.weight"][tokens_BS] + weights["1.weight"][:tokens]
    future_SS = torch.ones(tokens, tokens).triu(1).bool()
    for layer in range(2, 2 + config.num_layers):
        qkv = linear(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attention.linear_qkv")
        per_head = []
        for head in range(heads):
            q, k, v = qkv[..., head * 3 * size : (head + 1) * 3 * size].split(size, -1)
            scores = (q @ k.transpose(1, 2) / math.sqrt(size)).masked_fill(future_SS, float("-inf"))
            per_head.append(scores.softmax(-1) @ v)
        x = x + linear(torch.cat(per_head, -1), f"{layer}.self_attention.linear_proj")
        inner = linear(norm(x, f"{layer}.pre_mlp_layernorm"), f"{layer}.mlp.linear_fc1")
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + linear(inner, f"{layer}.mlp.linear_fc2")
    return norm(x, f"{2 + config.num_layers}") @ weights["0.word_embeddings.weight"].T


def test_forward_and_backward_equal_a_plain_gpt() -> None:
    model = Chain(PLAIN, ONE, DropoutClock())
    tokens_BS, labels_BS = random_batches(PLAIN, 1, 1)[0][0]
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.parameters_by_layer().items()}
    logits_BSV, expected_BSV = model(tokens_BS), plain_logits(weights, tokens_BS, PLAIN)
    torch.testing.assert_close(logits_BSV, expected_BSV, rtol=1e-5, atol=1e-5)
    mean(gpt_loss(PLAIN, ONE)(logits_BSV, labels_BS)).backward()
    F.cross_entropy(expected_BSV[..., : PLAIN.vocab_size].flatten(0, 1), labels_BS.flatten()).backward()
    for name, parameter in model.parameters_by_layer().items():
        assert_close_gradients(parameter.grad, weights[name].grad, name)


def test_initial_weights_follow_gpt2() -> None:
    config = replace(CONFIG, hidden_size=128, ffn_hidden_size=None, vocab_size=500, init_std=0.02)
    weights = Chain(config, ONE, DropoutClock()).parameters_by_layer()
    scaled = 0.02 / math.sqrt(2 * config.num_layers)
    for name, weight in weights.items():
        if name.endswith("bias"):
            assert torch.count_nonzero(weight) == 0
        elif "layernorm" in name or name.startswith("5."):
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            std = scaled if "linear_proj" in name or "linear_fc2" in name else 0.02
            assert weight[: config.vocab_size].std().item() == pytest.approx(std, rel=0.06), name
    assert torch.count_nonzero(weights["0.word_embeddings.weight"][500:]) == 0
    same_place = "self_attention.linear_qkv.weight"
    assert not torch.equal(weights[f"2.{same_place}"], weights[f"3.{same_place}"])


def test_initial_weights_do_not_depend_on_the_partition() -> None:
    whole = Chain(CONFIG, ONE, DropoutClock()).parameters_by_layer()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    alone = gpt_layer_specs(CONFIG, ONE, DropoutClock())[4].build()
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in alone.named_parameters():
        assert torch.equal(parameter, whole[f"4.{name}"])


def test_initial_weights_do_not_depend_on_the_padding_or_the_parts() -> None:
    # torch draws 16 values at once and 37 * 20 is not a multiple of 16, so a longer draw would end differently.
    config = replace(CONFIG, hidden_size=20)
    tables = [
        torch.cat(
            [*GPTEmbedding(replace(config, make_vocab_size_divisible_by=multiple), ONE, parts).parameters()]
        )
        for multiple, parts in ((1, 0), (128, 0), (1, 2), (8, 4))
    ]
    assert [len(table) for table in tables] == [37, 128, 38, 64]
    assert all(torch.equal(tables[0], table[:37]) and not table[37:].any() for table in tables)


@pytest.mark.parametrize(("recompute", "interval"), [("full", 1), ("full", 2), ("selective", 1)])
def test_recomputation_changes_no_bit_of_a_gradient(
    recompute: Literal["full", "selective"], interval: int
) -> None:
    expected = gradients(CONFIG, 3, 5)
    recomputed = gradients(replace(CONFIG, recompute=recompute, recompute_interval=interval), 3, 5)
    assert expected.keys() == recomputed.keys()
    for name, grad in expected.items():
        assert torch.equal(recomputed[name], grad), name


def test_recomputation_keeps_less_and_only_in_the_chosen_layers() -> None:
    def saved_bytes(config: GPTConfig) -> int:
        sizes: dict[int, int] = {}

        def note(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        model = Chain(config, ONE, DropoutClock())
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            logits = model(random_batches(config, 1, 1, 8)[0][0][0])
        assert logits.requires_grad
        return sum(sizes.values())

    config = replace(CONFIG, num_layers=4)
    none, some, every, core = (
        saved_bytes(replace(config, recompute=mode, recompute_interval=interval))
        for mode, interval in (("none", 1), ("full", 2), ("full", 1), ("selective", 1))
    )
    assert some - every == pytest.approx(none - some, rel=0.1)
    assert every < some < none
    # With dropout the attention keeps scores and mask: at least 4 + 1 bytes per pair of tokens and head.
    scores = 8 * config.num_layers * config.num_attention_heads * config.seq_length**2
    assert every < core <= none - 5 * scores


def test_dropout_depends_only_on_step_and_micro_batch() -> None:
    torch.manual_seed(0)
    first = gradients(CONFIG, 1, 2)
    torch.manual_seed(1)
    again = gradients(CONFIG, 1, 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for other in (gradients(CONFIG, 2, 2), gradients(CONFIG, 1, 3), gradients(PLAIN, 1, 2)):
        assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("attention", [True, False])
def test_each_dropout_probability_has_its_own_effect(attention: bool) -> None:
    name = "attention_dropout" if attention else "hidden_dropout"
    tokens_BS, _ = random_batches(PLAIN, 1, 1)[0][0]
    dropped, plain = (Chain(c, ONE, DropoutClock()) for c in (replace(PLAIN, **{name: 0.3}), PLAIN))
    assert not torch.equal(dropped(tokens_BS), plain(tokens_BS))
    assert torch.equal(dropped.eval()(tokens_BS), plain(tokens_BS))


def test_every_dropout_site_of_the_model_has_its_own_key() -> None:
    model = Chain(CONFIG, ONE, DropoutClock(1, 2))
    keys = [module.key() for module in model.modules() if isinstance(module, KeyedDropout)]
    assert len(keys) == 1 + 3 * CONFIG.num_layers
    assert len(set(keys)) == len(keys)


def test_no_token_sees_the_future() -> None:
    model = Chain(PLAIN, ONE, DropoutClock())
    tokens_BS, _ = random_batches(PLAIN, 1, 1)[0][0]
    changed_BS = tokens_BS.clone()
    changed_BS[:, 6] = (tokens_BS[:, 6] + 1) % PLAIN.vocab_size
    difference_S = (model(tokens_BS) - model(changed_BS)).abs().amax((0, 2))
    assert torch.count_nonzero(difference_S[:6]) == 0
    assert torch.all(difference_S[6:] > 0)


def test_the_tied_module_contains_only_the_tied_weight() -> None:
    tied = [s for s in gpt_layer_specs(CONFIG, ONE, DropoutClock()) if isinstance(s, TiedLayerSpec)]
    assert len(tied) == 2 and {spec.key for spec in tied} == {"embed"}
    for spec in tied:
        module = spec.build()
        (parameter,) = module.parameters()
        # DeepSpeed looks the weight up in this way to reduce its gradient.
        looked_up = [PipelineModule._recursive_getattr(module, name) for name in spec.tied_weight_attr]
        assert len(looked_up) == 1 and looked_up[0] is parameter


def test_padded_vocabulary_is_a_multiple_for_every_rank() -> None:
    assert [CONFIG.padded_vocab_size(size) for size in (1, 2, 4)] == [128, 256, 512]
    gpt2 = replace(CONFIG, vocab_size=50257)
    assert [gpt2.padded_vocab_size(size) for size in (1, 2, 8)] == [50304, 50432, 51200]


@pytest.mark.parametrize(
    ("change", "key_and_numbers"),
    [
        ({"hidden_size": 30}, r"hidden_size: .*4 .*30.* 28 or 32\."),
        ({"seq_length": 12, "max_position_embeddings": 8}, "max_position_embeddings: .*12 .*8.* 12"),
        ({"num_layers": 0}, "num_layers: .*0"),
        ({"ffn_hidden_size": -4}, "ffn_hidden_size: .*-4"),
        ({"hidden_dropout": 1.0}, r"hidden_dropout: .*1\.0"),
        ({"recompute": "some"}, "recompute: .*'some'"),
        ({"recompute_interval": 0}, "recompute_interval: .*0"),
    ],
)
def test_an_invalid_config_is_refused(change: dict[str, object], key_and_numbers: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key_and_numbers}"):
        replace(CONFIG, **change)


def test_a_tensor_parallel_size_that_cuts_a_head_is_refused() -> None:
    config = replace(CONFIG, hidden_size=24, num_attention_heads=6, ffn_hidden_size=48)
    for size in (1, 2, 3, 6):
        config.check_tensor_parallel(size)
    with pytest.raises(ConfigError, match=r"num_attention_heads 6 .*4.* 1, 2, 3 or 6\."):
        config.check_tensor_parallel(4)
    with pytest.raises(ConfigError, match=r"ffn_hidden_size 40 .*3.* 1 or 2\."):
        replace(config, ffn_hidden_size=40).check_tensor_parallel(3)


def test_indivisible_tokens_are_refused() -> None:
    config = replace(CONFIG, sequence_parallel=True, seq_length=10)
    config.check_tensor_parallel(2)
    with pytest.raises(ConfigError, match=r"^seq_length: .*4 .*10.* 8\b"):
        config.check_tensor_parallel(4)


def test_a_sample_longer_than_the_position_table_is_refused() -> None:
    model = Chain(CONFIG, ONE, DropoutClock())
    with pytest.raises(ConfigError, match=r"^max_position_embeddings: .*11 .*10"):
        model(torch.zeros(1, 11, dtype=torch.long))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_reference_learns_a_repeated_batch(optimizer: str) -> None:
    config = replace(CONFIG, init_std=0.02)
    batches = random_batches(config, 1, 2)
    lr = {"sgd": 0.5, "adamw": 0.01}[optimizer]
    run = train_reference(config, batches, 25, lr, optimizer=optimizer, dropout=False)  # type: ignore[arg-type]
    assert run.losses[0] == pytest.approx(math.log(config.vocab_size), abs=0.1)
    assert run.losses[-1] < 0.6 * run.losses[0]
    padding_rows = run.parameters["0.word_embeddings.weight"][config.vocab_size :]
    assert torch.count_nonzero(padding_rows) == 0


def test_bfloat16_trains_close_to_float32() -> None:
    config = replace(CONFIG, init_std=0.02)
    batches = random_batches(config, 1, 2)
    full, half = (train_reference(config, batches, 5, 0.1, dtype=d) for d in (torch.float32, torch.bfloat16))
    assert half.losses == pytest.approx(full.losses, rel=0.02)
