"""Kinds of layers that are layers of transformers' decoders, in shards by the plans of their classes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from ds_ext.tensor_parallel import TensorParallel, building_for, gather_tokens

from .kinds import HEADS, WIDTH, Kind, Place

SIZES: dict[str, Any] = {
    **{"vocab_size": 8, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2},
    **{"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": WIDTH // HEADS},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3},
}
# In half precision, rounding changes which experts a router chooses.
EXPERTS: dict[str, dict[str, Any]] = {
    **{family: {"num_local_experts": 4, "num_experts_per_tok": 2} for family in ("Mixtral", "GptOss")},
    "Glm4Moe": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH},
        **{"n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    },
}


class DecoderBlock(nn.Module):
    """Positions and one layer of a decoder, whose weights are in memory or, for odd numbers, drawn for each module.

    Args:
        sequence: divide the tokens between attention and MLP, as with ``sequence_parallel``.
    """

    def __init__(self, family: str, number: int, tp: TensorParallel, sequence: bool) -> None:
        super().__init__()
        import transformers

        from ds_ext.hf.find import find_split
        from ds_ext.hf.layers import DecoderLayer, Positions
        from ds_ext.hf.weights import make_source

        config = getattr(transformers, f"{family}Config")(**SIZES, **EXPERTS.get(family, {}))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            model = config if number % 2 else transformers.AutoModelForCausalLM.from_config(config)
            source = make_source(model, None, number)
            split = find_split(source)
        with building_for(tp, sequence):
            self.positions = Positions(source, split, None)
            self.layer = DecoderLayer(source, split, 0, None)
        self._tp = tp if sequence else TensorParallel()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.size(1)
        x = F.pad(x, (0, 0, 0, -tokens % self._tp.size))  # tokens that no other one attends to
        return gather_tokens(self.layer(self.positions((x,)))[0], self._tp)[:, :tokens]


def _layers(family: str, sequence: bool, place: Place) -> list[Any]:
    return [LayerSpec(DecoderBlock, family, place.number, place.tp, sequence)]


DECODERS: dict[str, Kind] = {
    "llama_decoder": Kind(partial(_layers, "Llama", False), weight=2),
    "gemma3_decoder": Kind(partial(_layers, "Gemma3Text", False), weight=2),  # norms of heads
    "olmo2_decoder": Kind(partial(_layers, "Olmo2", False), weight=2),  # norms of whole queries and keys
    "gpt_neox_decoder": Kind(
        partial(_layers, "GPTNeoX", False), weight=2
    ),  # biases, fused queries, keys and values
    "mixtral_decoder": Kind(partial(_layers, "Mixtral", False), weight=2, fp32=True),
    "gpt_oss_decoder": Kind(partial(_layers, "GptOss", False), weight=2, fp32=True),  # biases, sinks
    "glm4_moe_decoder": Kind(
        partial(_layers, "Glm4Moe", False), weight=2, fp32=True
    ),  # sigmoid, shared experts
    "llama_decoder_tokens": Kind(partial(_layers, "Llama", True), weight=2),
    "gpt_neox_decoder_tokens": Kind(partial(_layers, "GPTNeoX", True), weight=2),
}
