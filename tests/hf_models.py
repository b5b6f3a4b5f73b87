"""Small random models of transformers, and comparison of their logits with those of ds_ext."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ext.models.bert import BertConfig
from ds_ext.models.gpt import GPTConfig
from ds_ext.tensor_parallel import DropoutClock, TensorParallel
from tests.bert_runs import BertChain, random_bert_batches
from tests.reference import Chain, random_batches

transformers: Any = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 12,
    "vocab_size": 83,
    "ffn_hidden_size": 80,
    "make_vocab_size_divisible_by": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
GPT, BERT = GPTConfig(**SIZES), BertConfig(**SIZES)
MASKED_ONLY = BertConfig(**SIZES, order_classes=None)


def random_gpt2(**changes: Any) -> Any:
    """Return a GPT2LMHeadModel with the sizes of ``GPT`` and no weight equal to zero or one."""
    config = transformers.GPT2Config(
        **{
            "vocab_size": GPT.vocab_size,
            "n_positions": GPT.seq_length,
            "n_embd": GPT.hidden_size,
            "n_layer": GPT.num_layers,
            "n_head": GPT.num_attention_heads,
            "n_inner": GPT.ffn_hidden_size,
            "bos_token_id": 0,
            "eos_token_id": 0,
            **changes,
        }
    )
    return _randomized(transformers.GPT2LMHeadModel(config))


def random_bert(kind: str = "BertForPreTraining", **changes: Any) -> Any:
    """Return a BERT with the sizes of ``BERT``."""
    config = transformers.BertConfig(
        **{
            "vocab_size": BERT.vocab_size,
            "max_position_embeddings": BERT.seq_length,
            "hidden_size": BERT.hidden_size,
            "intermediate_size": BERT.ffn_size,
            "num_hidden_layers": BERT.num_layers,
            "num_attention_heads": BERT.num_attention_heads,
            **changes,
        }
    )
    return _randomized(getattr(transformers, kind)(config))


def _randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@torch.no_grad()
def logits_difference(config: GPTConfig | BertConfig, weights: dict[str, Tensor], hf_model: Any) -> float:
    """Return the largest difference between the logits of ds_ext's model and of ``hf_model``.

    Args:
        config: sizes of the model.
        weights: "layer.name" -> weight of ds_ext's model, without padding.
        hf_model: model of transformers.
    """
    kind: Any = BertChain if isinstance(config, BertConfig) else Chain
    model = kind(config, TensorParallel(), DropoutClock()).eval()
    parameters = model.parameters_by_layer()
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        parameter.zero_()
        parameter[: len(weights[name])].copy_(weights[name])  # the remaining rows are padding
    pairs = (
        _bert_logits(model, config, hf_model)
        if isinstance(config, BertConfig)
        else [(model(tokens := random_batches(config, 1, 1, 4)[0][0][0]), hf_model(tokens).logits)]
    )
    differences = []
    for logits, expected in pairs:
        assert expected.std() > 0.01
        differences.append(float((logits[..., : expected.size(-1)] - expected).abs().max()))
    return max(differences)


def _bert_logits(model: Any, config: BertConfig, hf_model: Any) -> list[tuple[Tensor, Tensor]]:
    (inputs, _), *_ = random_bert_batches(config, 1, 1, 4)[0]
    tokens_BS, types_BS, mask_BS = inputs
    expected = hf_model(input_ids=tokens_BS, token_type_ids=types_BS, attention_mask=mask_BS.long())
    outputs = model(inputs)
    if config.order_classes is None:
        return [(outputs[0], expected.logits)]
    return list(zip(outputs, (expected.prediction_logits, expected.seq_relationship_logits), strict=True))


def loaded(kind: str, folder: Path) -> Any:
    """Load a folder with ``kind.from_pretrained``, without missing or unexpected weights."""
    model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()
