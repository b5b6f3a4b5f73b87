"""Small random decoders of transformers, as folders, and their training in one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plans import batch_of

transformers: Any = pytest.importorskip("transformers")

WORDS, LENGTH, LAYERS = 67, 10, 4
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS_OF_8 = {**GROUPED, "head_dim": 8}
ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
OLD_NAMES: dict[str, Any] = {
    "vocab_size": WORDS,
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 32,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
FALCON = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "max_position_embeddings")}

# Name of the configuration -> (its values, what is special about the architecture).
MODELS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "GPT2": {**OLD_NAMES, **TOKENS, **NO_DROPOUT},
    "OPT": {
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
        **{"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    },
    "GPTNeoX": SIZES,
    "Phi": SIZES,
    "Falcon": FALCON,
    "Gemma2": {**HEADS_OF_8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "Gemma3Text": {**HEADS_OF_8, **ALTERNATING, "query_pre_attn_scalar": 8},
    "Cohere": GROUPED,
    "Mixtral": {**GROUPED, "num_local_experts": 4},
    "Starcoder2": {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "Olmo2": GROUPED,
    "StableLm": GROUPED,
    "Glm": HEADS_OF_8,
    "Bloom": {
        **{"vocab_size": WORDS, "hidden_size": 32, "n_layer": LAYERS, "n_head": 4},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **TOKENS},
    },
    "Granite": {**GROUPED, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "GPTJ": {**OLD_NAMES, **TOKENS, **NO_DROPOUT, "rotary_dim": 4},
    "Qwen2Moe": {
        **{**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    },
}


FEWER_NAMES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": LAYERS, **TOKENS}
MORE_MODELS: dict[str, dict[str, Any]] = {
    "Mistral": {**GROUPED, "sliding_window": 4},
    "Qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3": HEADS_OF_8,
    "Phi3": {**GROUPED, "sliding_window": 4},
    "Phi3 longrope": {
        **{**GROUPED, "original_max_position_embeddings": 6, "max_position_embeddings": 32},
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 4},
            **{"long_factor": [4.0] * 4, "original_max_position_embeddings": 6},
        },
    },
    "Gemma": HEADS_OF_8,
    "Cohere2": {**GROUPED, "sliding_window": 4},
    "Glm4": HEADS_OF_8,
    "GptOss": {**HEADS_OF_8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "SmolLM3": GROUPED,
    "Exaone4": {**GROUPED, "sliding_window": 4},
    "Ernie4_5": HEADS_OF_8,
    "Nemotron": GROUPED,
    "Persimmon": SIZES,
    "GPTNeo": {
        **FEWER_NAMES,
        "num_layers": LAYERS,
        "num_heads": 4,
        "attention_types": [[["global", "local"], LAYERS // 2]],
        "window_size": 4,
        "max_position_embeddings": 32,
        **{"resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
    },
    "GPTBigCode": {**OLD_NAMES, **TOKENS, **NO_DROPOUT},
    "CodeGen": {**OLD_NAMES, **TOKENS, **NO_DROPOUT, "rotary_dim": 4},
    "Mpt": {"vocab_size": WORDS, "d_model": 32, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": 32},
    "BioGpt": {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layerdrop": 0.0},
    "XGLM": {
        **{"vocab_size": WORDS, "d_model": 32, "ffn_dim": 48, "num_layers": LAYERS, "attention_heads": 4},
        **{"max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0},
    },
    "Llama4Text": {
        **{**HEADS_OF_8, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 4},
        **{"num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
    },
}


_ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_IN_GROUPS = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# More models with experts.
EXPERTS_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**HEADS_OF_8, **_ROUTED, "num_experts": 4},
    "Olmoe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        **{**SIZES, **_ROUTED, **_IN_GROUPS, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
    "Glm4Moe": {**HEADS_OF_8, **_ROUTED, **_IN_GROUPS},
    "GraniteMoe": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Phimoe": {
        **{**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    },
}
# Fields that add the loss of the routers.
ROUTERS_LOSS: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
# More models with a tensor-parallel plan.
PLANNED_MODELS: dict[str, dict[str, Any]] = {
    "Apertus": GROUPED,
    "Arcee": GROUPED,
    "Cwm": {**HEADS_OF_8, **ALTERNATING, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "Helium": HEADS_OF_8,
    "Jais2": GROUPED,
    "Ministral": {**HEADS_OF_8, **ALTERNATING},
    "Olmo": GROUPED,
    "Olmo3": {**GROUPED, **ALTERNATING},
    "SeedOss": {**HEADS_OF_8, "attention_dropout": 0.0, "residual_dropout": 0.0},
}


def random_decoder(name: str, **changes: Any) -> Any:
    """Return a causal language model with random weights, none of which is zero or one."""
    config = getattr(transformers, f"{name}Config")(**{**MODELS.get(name, {}), **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def save_decoder(name: str, folder: Path, **changes: Any) -> str:
    """Write a random decoder as several safetensors files. Returns the path."""
    random_decoder(name, **changes).save_pretrained(folder, max_shard_size="40KB")
    return str(folder)


def micro_batch(step: int, number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return ((ids_BS, mask_BS), labels_BS). Odd micro-batches have padding, so that their masks are tensors.

    Every step shifts the tokens, so that models learn.
    """
    generator = torch.Generator().manual_seed(number)
    ids_BS = torch.randint(3, WORDS, (2, LENGTH), generator=generator).roll(step, 1)
    mask_BS = torch.ones_like(ids_BS)
    if number % 2:
        mask_BS[0, -3:] = 0
    return (ids_BS, mask_BS), ids_BS.masked_fill(mask_BS == 0, -100)


def mean_loss(model: Any, step: int, micro_batches: int, backward: bool = True) -> float:
    """Return the loss of a step by the model's own forward, as in transformers; gradients accumulate in the model."""
    total, batches = 0.0, [micro_batch(step, number) for number in range(micro_batches)]
    count = sum(int((labels_BS[:, 1:] != -100).sum()) for _, labels_BS in batches)
    for (ids_BS, mask_BS), labels_BS in batches:
        outputs = model(input_ids=ids_BS, attention_mask=mask_BS, labels=labels_BS, num_items_in_batch=count)
        loss = outputs.loss
        if getattr(outputs, "aux_loss", None) is not None:  # a mean over micro-batches
            loss = loss - (1 - 1 / micro_batches) * model.router_aux_loss_coef * outputs.aux_loss
        if backward:
            loss.backward()
        total += loss.item()
    return total


def config_of(schedule: str, pp: int, micro_batches: int, **sections: Any) -> dict[str, Any]:
    """Return the JSON of a job with ``micro_batches`` per pipeline group, replicas included."""
    replicas = 2 if schedule.startswith(("bitpipe", "chimera")) else 1
    return {
        **batch_of(schedule, micro_batches // replicas, pp),
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        **sections,
        "ds_ext": {"schedule": schedule, "pipeline_parallel_size": pp},
    }
