"""BERT against plain tensor algebra: both losses, padding, dropout, recomputation, tied layers."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor

from ds_ext.errors import ConfigError
from ds_ext.recipes.models.bert import BertConfig, BertLoss, bert_layer_specs
from ds_ext.recipes.training.arguments import parse
from ds_ext.tensor_parallel import IGNORE_INDEX, DropoutClock, KeyedDropout, TensorParallel
from tests.bert_runs import Batch, BertChain, random_bert_batches
from tests.losses import mean
from tests.reference import assert_close_gradients

ONE = TensorParallel()
CONFIG = BertConfig(
    num_layers=3,
    hidden_size=24,
    num_attention_heads=4,
    seq_length=10,
    vocab_size=37,
    init_std=0.3,
    ffn_hidden_size=40,
)
PLAIN = replace(CONFIG, hidden_dropout=0.0, attention_dropout=0.0)


def one_batch(config: BertConfig) -> Batch:
    return random_bert_batches(config, 1, 1, micro_batch_size=3)[0][0]


def gradients(config: BertConfig, step: int = 0, micro_batch: int = 0) -> dict[str, Tensor]:
    clock = DropoutClock(step, micro_batch)
    model = BertChain(config, ONE, clock)
    inputs, labels = one_batch(config)
    loss = mean(BertLoss(config, ONE)(model(inputs), labels))
    # Run the forward of another micro-batch in between, as a pipeline does.
    clock.set(step + 1, micro_batch + 1)
    loss.backward()
    return {name: p.grad for name, p in model.parameters_by_layer().items() if p.grad is not None}


def plain_logits(
    weights: dict[str, Tensor], inputs: tuple[Tensor, ...], config: BertConfig
) -> tuple[Tensor, Tensor]:
    """Compute BERT's forward from its definition, with explicit softmax, mask, norm and error function."""
    tokens_BS, types_BS, mask_BS = inputs
    heads, size, last = config.num_attention_heads, config.head_size, config.num_layers + 2

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    words = weights["0.word_embeddings.weight"]
    places = weights["1.position_embeddings"][: tokens_BS.size(1)]
    x = norm(words[tokens_BS] + places + weights["1.token_type_embeddings"][types_BS], "1.layernorm")
    for layer in range(2, last):
        qkv = dense(x, f"{layer}.self_attention.linear_qkv")
        per_head = []
        for head in range(heads):
            q, k, v = qkv[..., head * 3 * size : (head + 1) * 3 * size].split(size, -1)
            scores = (q @ k.transpose(1, 2) / math.sqrt(size)).masked_fill(~mask_BS[:, None], float("-inf"))
            per_head.append(scores.softmax(-1) @ v)
        attended = dense(torch.cat(per_head, -1), f"{layer}.self_attention.linear_proj")
        x = norm(x + attended, f"{layer}.attention_layernorm")
        inner = gelu(dense(x, f"{layer}.mlp.linear_fc1"))
        x = norm(x + dense(inner, f"{layer}.mlp.linear_fc2"), f"{layer}.mlp_layernorm")
    transformed = norm(gelu(dense(x, f"{last}.transform")), f"{last}.transform_layernorm")
    order = dense(torch.tanh(dense(x[:, 0], f"{last}.pooler")), f"{last}.classifier")
    return transformed @ words.T + weights[f"{last + 2}.bias"], order


def test_forward_and_backward_equal_a_plain_bert() -> None:
    model = BertChain(PLAIN, ONE, DropoutClock())
    inputs, labels = one_batch(PLAIN)
    assert not inputs[2].all() and inputs[1].any()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.parameters_by_layer().items()}
    logits_BSV, order_B2 = model(inputs)
    expected_BSV, expected_B2 = plain_logits(weights, inputs, PLAIN)
    torch.testing.assert_close(logits_BSV, expected_BSV, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(order_B2, expected_B2, rtol=1e-5, atol=1e-5)

    loss = mean(BertLoss(PLAIN, ONE)((logits_BSV, order_B2), labels))
    words = F.cross_entropy(expected_BSV[..., : PLAIN.vocab_size].flatten(0, 1), labels[0].flatten())
    expected = words + F.cross_entropy(expected_B2, labels[1])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for name, parameter in model.parameters_by_layer().items():
        assert_close_gradients(parameter.grad, weights[name].grad, name)


def test_both_terms_of_the_loss_have_their_counts() -> None:
    loss_fn = BertLoss(PLAIN, ONE)
    for seed in (1, 2):
        model = BertChain(replace(PLAIN, seed=seed), ONE, DropoutClock())
        inputs, (labels_BS, swapped_B) = one_batch(PLAIN)
        logits_BSV, order_B2 = model(inputs)
        terms = loss_fn((logits_BSV, order_B2), (labels_BS, swapped_B))
        words = F.cross_entropy(logits_BSV[..., : PLAIN.vocab_size].flatten(0, 1), labels_BS.flatten())
        order = F.cross_entropy(order_B2, swapped_B)
        assert mean(terms["masked_words"]).item() == pytest.approx(words.item(), rel=1e-6)
        assert mean(terms["sentence_order"]).item() == pytest.approx(order.item(), rel=1e-6)
        counts = loss_fn.counts((labels_BS, swapped_B))
        assert {name: int(count) for name, count in counts.items()} == {
            "masked_words": int((labels_BS != IGNORE_INDEX).sum()),
            "sentence_order": len(swapped_B),
        }


def test_without_the_sentence_head_the_output_is_words_only() -> None:
    config = replace(PLAIN, order_classes=None)
    inputs, labels = one_batch(config)
    outputs = BertChain(config, ONE, DropoutClock())(inputs)
    assert len(outputs) == len(labels) == 1
    # Initial weights depend only on their names, so the words equal those of the model with both heads.
    assert torch.equal(outputs[0], BertChain(PLAIN, ONE, DropoutClock())(inputs)[0])
    expected = F.cross_entropy(outputs[0][..., : config.vocab_size].flatten(0, 1), labels[0].flatten())
    loss_fn = BertLoss(config, ONE)
    assert mean(loss_fn(outputs, labels)).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_micro_batch_without_masked_words_has_a_loss() -> None:
    inputs, (labels_BS, swapped_B) = one_batch(PLAIN)
    model = BertChain(PLAIN, ONE, DropoutClock())
    logits_BSV, order_B2 = model(inputs)
    labels = torch.full_like(labels_BS, IGNORE_INDEX), swapped_B
    loss = mean(BertLoss(PLAIN, ONE)((logits_BSV, order_B2), labels))
    assert loss.item() == pytest.approx(F.cross_entropy(order_B2, swapped_B).item())


def test_attention_covers_all_tokens_but_padding() -> None:
    model = BertChain(PLAIN, ONE, DropoutClock())
    tokens_BS, types_BS, mask_BS = one_batch(PLAIN)[0]
    logits_BSV, order_B2 = model((tokens_BS, types_BS, mask_BS))
    padded_BS = torch.where(mask_BS, tokens_BS, 5)
    other_BSV, other_B2 = model((padded_BS, types_BS, mask_BS))
    assert torch.equal(order_B2, other_B2)
    assert torch.equal(logits_BSV[mask_BS], other_BSV[mask_BS])
    changed_BS = tokens_BS.clone()
    changed_BS[:, 2] = (tokens_BS[:, 2] + 1) % PLAIN.vocab_size
    difference_BS = (logits_BSV - model((changed_BS, types_BS, mask_BS))[0]).abs().amax(2)
    assert (difference_BS > 0).all()
    assert (logits_BSV != model((tokens_BS, 1 - types_BS, mask_BS))[0]).any(2).all()


def test_initial_weights_do_not_depend_on_the_global_generator() -> None:
    config = replace(CONFIG, hidden_size=128, ffn_hidden_size=None, vocab_size=500, init_std=0.02)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    weights = BertChain(config, ONE, DropoutClock()).parameters_by_layer()
    assert torch.equal(torch.get_rng_state(), before)
    scaled = 0.02 / math.sqrt(2 * config.num_layers)
    for name, weight in weights.items():
        if name.endswith("bias"):
            assert torch.count_nonzero(weight) == 0
        elif "layernorm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            std = scaled if "linear_proj" in name or "linear_fc2" in name else 0.02
            # Small tables have few numbers and thus a larger error.
            margin = 0.06 if weight.numel() > 1000 else 0.15
            assert weight[: config.vocab_size].std().item() == pytest.approx(std, rel=margin), name
    assert torch.count_nonzero(weights["0.word_embeddings.weight"][500:]) == 0
    alone = bert_layer_specs(config, ONE, DropoutClock())[5].build()
    for name, parameter in alone.named_parameters():
        assert torch.equal(parameter, weights[f"5.{name}"])


@pytest.mark.parametrize(("what", "interval"), [("full", 1), ("full", 2), ("selective", 1)])
def test_recomputation_changes_no_bit_of_a_gradient(
    what: Literal["full", "selective"], interval: int
) -> None:
    expected = gradients(CONFIG, 3, 5)
    recomputed = gradients(replace(CONFIG, recompute=what, recompute_interval=interval), 3, 5)
    assert expected.keys() == recomputed.keys()
    for name, grad in expected.items():
        assert torch.equal(recomputed[name], grad), name


def test_dropout_depends_only_on_step_and_micro_batch() -> None:
    torch.manual_seed(0)
    first = gradients(CONFIG, 1, 2)
    torch.manual_seed(1)
    again = gradients(CONFIG, 1, 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for other in (gradients(CONFIG, 2, 2), gradients(CONFIG, 1, 3), gradients(PLAIN, 1, 2)):
        assert not any(torch.equal(first[name], other[name]) for name in first if "classifier" not in name)


@pytest.mark.parametrize("attention", [True, False])
def test_each_dropout_probability_has_its_own_effect(attention: bool) -> None:
    name = "attention_dropout" if attention else "hidden_dropout"
    inputs, _ = one_batch(PLAIN)
    dropped, plain = (BertChain(c, ONE, DropoutClock()) for c in (replace(PLAIN, **{name: 0.3}), PLAIN))
    assert not torch.equal(dropped(inputs)[0], plain(inputs)[0])
    assert torch.equal(dropped.eval()(inputs)[0], plain(inputs)[0])


def test_every_dropout_site_of_the_model_has_its_own_key() -> None:
    model = BertChain(CONFIG, ONE, DropoutClock(1, 2))
    keys = [module.key() for module in model.modules() if isinstance(module, KeyedDropout)]
    assert len(keys) == 1 + 3 * CONFIG.num_layers
    assert len(set(keys)) == len(keys)


def test_the_tied_module_contains_only_the_word_embeddings() -> None:
    tied = [spec for spec in bert_layer_specs(CONFIG, ONE, DropoutClock()) if isinstance(spec, TiedLayerSpec)]
    assert len(tied) == 2 and {spec.key for spec in tied} == {"embed"}
    for spec in tied:
        ((name, _),) = spec.build().named_parameters()
        assert [name] == spec.tied_weight_attr


def test_a_sample_longer_than_the_position_table_is_refused() -> None:
    model = BertChain(CONFIG, ONE, DropoutClock())
    ids_BS = torch.zeros(1, 11, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"^max_position_embeddings: .*11 .*10"):
        model((ids_BS, ids_BS, ids_BS == 0))


def test_the_example_config_fits_the_script() -> None:
    from ds_ext.recipes.training.setup import model_fields
    from tests.plans import plan_job

    path = Path(__file__).parents[4] / "configs" / "bert_bitpipe.json"
    args, plan = plan_job("train_bert.py", ["--deepspeed_config", str(path), "--dry-run"], "bert")
    config = BertConfig(**model_fields(args, plan.job), vocab_size=4096)
    assert plan.timetable.schedule == "bitpipe" and plan.layout.placement.num_devices == 4
    assert config.num_layers % plan.layout.placement.stages == 0


def flags_of(tmp_path: Path, train: dict[str, object], *flags: str) -> argparse.Namespace:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"train_batch_size": 8, "ds_ext": {"schedule": "1f1b", "train": train}}))
    return parse("train_bert.py", ["--deepspeed_config", str(path), *flags], "bert")[0]


def test_flags_of_megatrons_bert_script(tmp_path: Path) -> None:
    args = flags_of(tmp_path, {"mask_prob": 0.2, "bert_no_binary_head": True}, "--short-seq-prob", "0.3")
    assert (args.mask_prob, args.short_seq_prob, args.bert_no_binary_head) == (0.2, 0.3, True)
    words = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "vocab.txt"]
    args = flags_of(tmp_path, {}, *words)
    assert (args.tokenizer, args.vocab_file, args.merge_file) == ("vocab.txt", None, None)
    assert (args.mask_prob, args.short_seq_prob, args.bert_no_binary_head) == (0.15, 0.1, False)
    with pytest.raises(ConfigError, match=r"bert_no_binary_head.* 1"):
        flags_of(tmp_path, {"bert_no_binary_head": 1})
    with pytest.raises(ConfigError, match=r"--tokenizer-type: .*'GPT2BPETokenizer'"):
        flags_of(tmp_path, {}, "--tokenizer-type", "GPT2BPETokenizer")
    with pytest.raises(ConfigError, match=r"--mask-prob.*train_bert\.py"):
        parse("train_gpt.py", ["--deepspeed_config", str(tmp_path / "job.json"), "--mask-prob", "0.1"])
