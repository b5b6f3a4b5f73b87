"""Weights of ds_ext's models under their names in transformers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ds_ext.model.config import TransformerConfig

Weights = Mapping[str, Tensor]


def split_heads(qkv: Tensor, config: TransformerConfig) -> tuple[Tensor, ...]:
    """Split the rows (head, query | key | value, head size) of a fused weight or bias into query, key and value."""
    return tuple(
        part.reshape(config.hidden_size, *qkv.shape[1:])
        for part in qkv.unflatten(0, (config.num_attention_heads, 3, config.head_size)).unbind(1)
    )


def gpt2_state(weights: Weights, config: TransformerConfig) -> dict[str, Tensor]:
    """Return the state_dict of GPT2LMHeadModel. Its Conv1D layers store weights as (in, out)."""
    last = config.num_layers + 2
    state = {
        "transformer.wte.weight": weights["0.word_embeddings.weight"][: config.vocab_size],
        "transformer.wpe.weight": weights["1.weight"],
        "transformer.ln_f.weight": weights[f"{last}.weight"],
        "transformer.ln_f.bias": weights[f"{last}.bias"],
    }
    state["lm_head.weight"] = state["transformer.wte.weight"]
    for layer in range(config.num_layers):
        source, target = f"{layer + 2}.", f"transformer.h.{layer}."
        for kind in ("weight", "bias"):
            qkv = torch.cat(split_heads(weights[f"{source}self_attention.linear_qkv.{kind}"], config))
            values = {
                "ln_1": weights[f"{source}input_layernorm.{kind}"],
                "ln_2": weights[f"{source}pre_mlp_layernorm.{kind}"],
                "attn.c_attn": qkv.t() if kind == "weight" else qkv,
            }
            for name, conv in (
                ("self_attention.linear_proj", "attn.c_proj"),
                ("mlp.linear_fc1", "mlp.c_fc"),
                ("mlp.linear_fc2", "mlp.c_proj"),
            ):
                value = weights[f"{source}{name}.{kind}"]
                values[conv] = value.t() if kind == "weight" else value
            state.update({f"{target}{name}.{kind}": value for name, value in values.items()})
    return state


def bert_state(weights: Weights, config: TransformerConfig) -> dict[str, Tensor]:
    """Return the state_dict of BertForPreTraining."""
    heads = config.num_layers + 2
    embeddings, predictions = "bert.embeddings.", "cls.predictions."
    state = {
        f"{embeddings}word_embeddings.weight": weights["0.word_embeddings.weight"][: config.vocab_size],
        f"{embeddings}position_embeddings.weight": weights["1.position_embeddings"],
        f"{embeddings}token_type_embeddings.weight": weights["1.token_type_embeddings"],
        f"{predictions}bias": weights[f"{heads + 2}.bias"][: config.vocab_size],
    }
    state[f"{predictions}decoder.weight"] = state[f"{embeddings}word_embeddings.weight"]
    state[f"{predictions}decoder.bias"] = state[f"{predictions}bias"]
    for kind in ("weight", "bias"):
        state[f"{embeddings}LayerNorm.{kind}"] = weights[f"1.layernorm.{kind}"]
        state[f"bert.pooler.dense.{kind}"] = weights[f"{heads}.pooler.{kind}"]
        state[f"cls.seq_relationship.{kind}"] = weights[f"{heads}.classifier.{kind}"]
        state[f"{predictions}transform.dense.{kind}"] = weights[f"{heads}.transform.{kind}"]
        state[f"{predictions}transform.LayerNorm.{kind}"] = weights[f"{heads}.transform_layernorm.{kind}"]
        for layer in range(config.num_layers):
            source, target = f"{layer + 2}.", f"bert.encoder.layer.{layer}."
            qkv = split_heads(weights[f"{source}self_attention.linear_qkv.{kind}"], config)
            for name, part in zip(("query", "key", "value"), qkv, strict=True):
                state[f"{target}attention.self.{name}.{kind}"] = part
            for name, hf_name in (
                ("self_attention.linear_proj", "attention.output.dense"),
                ("attention_layernorm", "attention.output.LayerNorm"),
                ("mlp.linear_fc1", "intermediate.dense"),
                ("mlp.linear_fc2", "output.dense"),
                ("mlp_layernorm", "output.LayerNorm"),
            ):
                state[f"{target}{hf_name}.{kind}"] = weights[f"{source}{name}.{kind}"]
    return state


def llama_state(weights: Weights, config: TransformerConfig) -> dict[str, Tensor]:
    """Return the state_dict of a LlamaForCausalLM, or of one of its family."""
    width = config.head_size
    state = {
        "model.embed_tokens.weight": weights["0.word_embeddings.weight"][: config.vocab_size],
        "model.norm.weight": weights[f"{config.num_layers + 2}.weight"],
    }
    head = weights.get(f"{config.num_layers + 3}.weight", state["model.embed_tokens.weight"])
    state["lm_head.weight"] = head[: config.vocab_size]
    hf_names = {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_q": "self_attn.q_proj",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_gate": "mlp.gate_proj",
        "mlp.linear_fc1": "mlp.up_proj",
        "mlp.linear_fc2": "mlp.down_proj",
    }
    for name, weight in weights.items():
        layer, _, key = name.partition(".")
        module, _, kind = key.rpartition(".")
        prefix = f"model.layers.{int(layer) - 2}."
        if module in hf_names:
            state[f"{prefix}{hf_names[module]}.{kind}"] = weight
        parts = {"self_attention.linear_qkv": "qkv", "self_attention.linear_kv": "kv"}.get(module, "")
        for index, part in enumerate(parts):
            rows = [
                weight[start : start + width]
                for start in range(index * width, len(weight), len(parts) * width)
            ]
            state[f"{prefix}self_attn.{part}_proj.{kind}"] = torch.cat(rows)
    return state
