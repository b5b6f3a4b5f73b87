"""Equal weights give the logits of transformers' models. Needs the package `transformers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ext.recipes.models.bert import BertConfig
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.tensor_parallel import DropoutClock, TensorParallel, create_tensor_parallel, shard_dim
from tests.bert_runs import BertChain, random_bert_batches
from tests.hf_models import LLAMA_FAMILY, llama_model
from tests.hf_weights import bert_state, gpt2_state, llama_state
from tests.ranks import RankPool
from tests.reference import Chain, gather_shards, random_batches

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 12,
    "vocab_size": 83,
    "make_vocab_size_divisible_by": 8,
    "init_std": 0.1,
}
GPT, BERT = GPTConfig(**SIZES), BertConfig(**SIZES)


def randomize(model: nn.Module) -> None:
    """Change biases and norms, whose initial zeros and ones would hide a wrong name. Replicas stay equal."""
    generator = torch.Generator().manual_seed(1)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1 and shard_dim(parameter) is None:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        elif parameter.dim() == 1:
            parameter.data += torch.linspace(-0.3, 0.3, len(parameter))


def full_weights(model: Chain | BertChain, tp: TensorParallel) -> dict[str, Tensor]:
    return {name: gather_shards(p, shard_dim(p), tp) for name, p in model.parameters_by_layer().items()}


def gathered(logits_BSV: Tensor, tp: TensorParallel, config: GPTConfig | BertConfig) -> Tensor:
    return gather_shards(logits_BSV, logits_BSV.dim() - 1, tp)[..., : config.vocab_size]


def load(model: Any, state: dict[str, Tensor]) -> Any:
    """Load ``state`` into ``model``, without missing or unexpected weights."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and not [name for name in missing if not name.endswith("position_ids")]
    return model.eval()


@torch.no_grad()
def gpt_difference(rank: int, tp_size: int) -> float:
    tp = TensorParallel() if tp_size == 1 else create_tensor_parallel([list(range(tp_size))])
    model = Chain(GPT, tp, DropoutClock()).eval()
    randomize(model)
    config = transformers.GPT2Config(
        vocab_size=GPT.vocab_size,
        n_positions=GPT.seq_length,
        n_embd=GPT.hidden_size,
        n_layer=GPT.num_layers,
        n_head=GPT.num_attention_heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    hf_model = load(transformers.GPT2LMHeadModel(config), gpt2_state(full_weights(model, tp), GPT))
    tokens_BS, _ = random_batches(GPT, 1, 1, micro_batch_size=4)[0][0]
    logits_BSV, expected_BSV = gathered(model(tokens_BS), tp, GPT), hf_model(tokens_BS).logits
    assert expected_BSV.std() > 0.1
    return float((logits_BSV - expected_BSV).abs().max())


@torch.no_grad()
def bert_difference(rank: int, tp_size: int) -> float:
    tp = TensorParallel() if tp_size == 1 else create_tensor_parallel([list(range(tp_size))])
    model = BertChain(BERT, tp, DropoutClock()).eval()
    randomize(model)
    config = transformers.BertConfig(
        vocab_size=BERT.vocab_size,
        max_position_embeddings=BERT.seq_length,
        hidden_size=BERT.hidden_size,
        intermediate_size=BERT.ffn_size,
        num_hidden_layers=BERT.num_layers,
        num_attention_heads=BERT.num_attention_heads,
    )
    hf_model = load(transformers.BertForPreTraining(config), bert_state(full_weights(model, tp), BERT))
    (inputs, _), *_ = random_bert_batches(BERT, 1, 1, micro_batch_size=4)[0]
    tokens_BS, types_BS, mask_BS = inputs
    assert not mask_BS.all()
    logits_BSV, order_B2 = model(inputs)
    expected = hf_model(input_ids=tokens_BS, token_type_ids=types_BS, attention_mask=mask_BS.long())
    assert expected.prediction_logits.std() > 0.1 and expected.seq_relationship_logits.std() > 0.01
    words = (gathered(logits_BSV, tp, BERT) - expected.prediction_logits).abs().max()
    return float(torch.maximum(words, (order_B2 - expected.seq_relationship_logits).abs().max()))


@torch.no_grad()
def llama_difference(rank: int, tp_size: int) -> float:
    """Return the largest difference of all models of the Llama family."""
    tp = TensorParallel() if tp_size == 1 else create_tensor_parallel([list(range(tp_size))])
    differences = []
    for name, (config, _, _) in LLAMA_FAMILY.items():
        config = dataclasses.replace(config, init_std=0.1)
        model = Chain(config, tp, DropoutClock()).eval()
        randomize(model)
        hf_model = load(llama_model(name), llama_state(full_weights(model, tp), config))
        tokens_BS, _ = random_batches(config, 1, 1, micro_batch_size=4)[0][0]
        logits_BSV, expected_BSV = gathered(model(tokens_BS), tp, config), hf_model(tokens_BS).logits
        assert expected_BSV.std() > 0.1
        differences.append(float((logits_BSV - expected_BSV).abs().max()))
    return max(differences)


@pytest.mark.parametrize("difference", [gpt_difference, bert_difference, llama_difference])
def test_logits_equal_those_of_transformers(
    ranks2: RankPool, difference: Callable[[int, int], float]
) -> None:
    """Compare on one rank and with tensor-parallel size 2."""
    differences = [difference(0, 1), *ranks2.run(difference, 2)]
    assert max(differences) < TOLERANCE, differences


def embedding_gradient_difference(rank: int, tp_size: int) -> float:
    """Return the largest difference of the embedding's gradients, with a token of the text as padding."""
    tp = TensorParallel() if tp_size == 1 else create_tensor_parallel([list(range(tp_size))])
    differences = []
    for name, (config, _, _) in LLAMA_FAMILY.items():
        for sequence_parallel in {False, tp_size > 1}:
            config = dataclasses.replace(config, init_std=0.1, sequence_parallel=sequence_parallel)
            tokens_BS, _ = random_batches(config, 1, 1, micro_batch_size=4)[0][0]
            padding = int(tokens_BS[0, 3])
            model = Chain(dataclasses.replace(config, pad_token_id=padding), tp, DropoutClock()).eval()
            state = llama_state(full_weights(model, tp), config)
            hf_model = load(llama_model(name), {key: value.detach().clone() for key, value in state.items()})
            hf_model.model.embed_tokens.padding_idx = padding
            hf_model(tokens_BS).logits.square().sum().backward()
            logits_BSV = model(tokens_BS)
            logits_BSV[
                ..., : max(0, config.vocab_size - tp.rank * logits_BSV.size(-1))
            ].square().sum().backward()
            (weight,) = (p for key, p in model.parameters_by_layer().items() if "word_embeddings" in key)
            assert weight.grad is not None
            gradient = gather_shards(weight.grad, 0, tp)[: config.vocab_size]
            expected = hf_model.model.embed_tokens.weight.grad
            assert config.untie_embeddings_and_output_weights == (not expected[padding].any())
            differences.append(float((gradient - expected).abs().max() / expected.abs().max()))
    return max(differences)


def test_the_padding_token_is_trained_as_by_transformers(ranks2: RankPool) -> None:
    differences = [
        embedding_gradient_difference(0, 1),
        *ranks2.run(embedding_gradient_difference, 2),
    ]
    assert max(differences) < TOLERANCE, differences
