"""Sizes and tokenizer of ``--hf-model`` as flags of the script. Imports torch only if the flag is set."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.layout import TOKENIZER_NAMES
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..models.config import TransformerConfig

# Fields of a config that follow from the folder only if their flag is not set.
_DEFAULTS = ("hidden_dropout", "attention_dropout", "init_std")
# Fields that do not follow from the folder.
_FREE = (
    *("seq_length", "make_vocab_size_divisible_by", "recompute", "recompute_interval", "sequence_parallel"),
    *("transformer_impl", "seed", "reset_position_ids", "reset_attention_mask"),
)
_DESTS = {"init_std": "init_method_std"}
# Field -> property with its value if it is None.
_RESOLVED = {
    "ffn_hidden_size": "ffn_size",
    "max_position_embeddings": "positions",
    "num_query_groups": "query_groups",
    "kv_channels": "head_size",
}


def folder_sizes(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields that decide the weights and what they compute, except for the vocabulary size."""
    skipped = {*_FREE, *_DEFAULTS, "vocab_size"}
    return {
        field.name: getattr(config, _RESOLVED.get(field.name, field.name))
        for field in fields(config)
        if field.name not in skipped
    }


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
    values = {**folder_sizes(config), "vocab_size": config.vocab_size}
    for name, value in values.items():
        dest = _DESTS.get(name, name)
        if dest in given and getattr(args, dest) != value:
            raise ConfigError(
                f"{given[dest]}: {folder} has {value} (got {getattr(args, dest)}). Remove it, or use another folder."
            )
    defaults = {name: getattr(config, name) for name in _DEFAULTS if _DESTS.get(name, name) not in given}
    for name, value in {**values, **defaults}.items():
        dest = _DESTS.get(name, name)
        if hasattr(args, dest):
            setattr(args, dest, value)
    if "seq_length" in given and args.seq_length > config.positions:
        raise ConfigError(
            f"{given['seq_length']}: {folder} has at most {config.positions} tokens per sample (got "
            f"{args.seq_length}). Use {config.positions} or fewer."
        )
    args.seq_length = min(args.seq_length, config.positions)
    if (
        not args.tokenizer
        and not args.vocab_file
        and any((folder / name).exists() for name in TOKENIZER_NAMES)
    ):
        args.tokenizer = str(folder)
