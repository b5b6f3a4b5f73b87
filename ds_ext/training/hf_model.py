"""Sizes and tokenizer of ``--hf-model`` as flags of the script. Imports torch only if the flag is set."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..models.config import TransformerConfig

# Fields that follow from the folder only if their flags are not set, and their flags.
_DEFAULTS = {
    "hidden_dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
    "init_std": "init_method_std",
}
# Fields that do not follow from the folder.
_FREE = (
    *("seq_length", "make_vocab_size_divisible_by", "recompute", "recompute_interval", "sequence_parallel"),
    *("transformer_impl", "seed", "reset_position_ids", "reset_attention_mask"),
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def folder_sizes(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields that decide the weights and what they compute, except for the vocabulary size."""
    skipped = {*_FREE, *_DEFAULTS, "vocab_size"}
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in skipped}


def take_sizes(args: argparse.Namespace, given: Mapping[str, str]) -> None:
    """Set the model's flags, and the tokenizer unless it is given, to those of the folder.

    Args:
        args: flags with ``hf_model``; changed in place.
        given: ``dest`` -> name of every flag that the user set.

    Raises:
        ConfigError: if the folder contains no supported model, or contradicts a flag.
    """
    from ..convert.hf_model import config_of_folder
    from ..models.bert import BertConfig

    folder = Path(args.hf_model)
    config = config_of_folder(folder)
    if isinstance(config, BertConfig):
        raise ConfigError(
            f"--hf-model: train_gpt.py trains no BERT (got {folder}). Use convert --from hf and train_bert.py."
        )
    if args.transformer_impl != "local":
        raise ConfigError(
            f"--transformer-impl: --hf-model loads only into local layers (got {args.transformer_impl}). Remove one of "
            f"the flags."
        )
    for dest, value in _flags(config).items():
        if dest in given and getattr(args, dest) != value:
            raise ConfigError(
                f"{given[dest]}: {folder} has {value} (got {getattr(args, dest)}). Remove it, or use another folder."
            )
        setattr(args, dest, value)
    for name, dest in _DEFAULTS.items():
        if dest not in given:
            setattr(args, dest, getattr(config, name))
    if "seq_length" in given and args.seq_length > config.positions:
        raise ConfigError(
            f"{given['seq_length']}: {folder} has at most {config.positions} tokens per sample (got "
            f"{args.seq_length}). Use {config.positions} or fewer."
        )
    args.seq_length = min(args.seq_length, config.positions)
    if not args.tokenizer and not args.vocab_file:
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            raise ConfigError(
                f"--hf-model: no tokenizer in the folder, to compare with that of the data (got {folder}). Add "
                f"--tokenizer with the model's tokenizer."
            )
        args.tokenizer = str(folder)


def _flags(config: TransformerConfig) -> dict[str, Any]:
    """Return the values of all flags that the folder decides.

    Flags exist only for some scalings of the rotary frequencies, and for a window of all layers. The others are in
    :func:`folder_sizes` alone.
    """
    scaling, window = config.rope_scaling, config.sliding_window
    llama3 = scaling is not None and scaling.rope_type == "llama3"
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": config.ffn_size,
        "max_position_embeddings": config.positions,
        "vocab_size": config.vocab_size,
        "position_embedding_type": config.position_embedding_type,
        "rotary_base": config.rotary_base,
        "rotary_percent": config.rotary_percent,
        "use_rope_scaling": llama3,
        **({"rope_scaling_factor": scaling.factor} if scaling is not None and llama3 else {}),
        "normalization": config.normalization,
        "norm_epsilon": config.layernorm_epsilon,
        "swiglu": config.swiglu,
        "group_query_attention": True,
        "num_query_groups": config.query_groups,
        "kv_channels": config.head_size,
        "disable_bias_linear": not config.add_bias_linear,
        "add_qkv_bias": config.add_qkv_bias,
        "qk_layernorm": config.qk_layernorm,
        "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
        "window_size": None if window is None else f"{window - 1},0",
    }
