"""Sizes and tokenizer of ``--hf-model`` as flags of the script. Imports torch only if the flag is set."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..models.config import TRAINED_FIELDS, WEIGHT_FIELDS, TransformerConfig
from ..models.field_flags import keys_of

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def folder_sizes(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields that decide the weights and what they compute, except for the vocabulary size."""
    return {name: getattr(config, name) for name in WEIGHT_FIELDS if name != "vocab_size"}


def take_sizes(args: argparse.Namespace, sources: Mapping[str, str]) -> None:
    """Set the model's flags, and the tokenizer unless the user set one, to those of the folder.

    Args:
        args: flags with ``hf_model``; changed in place.
        sources: ``dest`` -> flag or JSON key, for every value that the user set.

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
    _take_fields(args, sources, config)
    if not args.tokenizer and not args.vocab_file:
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            raise ConfigError(
                f"--hf-model: no tokenizer in the folder, to compare with that of the data (got {folder}). Add "
                f"--tokenizer with the model's tokenizer."
            )
        args.tokenizer = str(folder)


def _take_fields(args: argparse.Namespace, sources: Mapping[str, str], config: TransformerConfig) -> None:
    """Set the flags of the fields of ``config``. Raises ConfigError if the user set one of them to another value."""
    folder = Path(args.hf_model)
    # Flags exist only for some scalings of the rotary frequencies, and for a window of all layers. The others are in
    # folder_sizes() alone.
    for dest, value in keys_of(TransformerConfig, config.resolved(), WEIGHT_FIELDS).items():
        if dest in sources and getattr(args, dest) != value:
            raise ConfigError(
                f"{sources[dest]}: {folder} has {value} (got {getattr(args, dest)}). Remove it, or use another folder."
            )
        setattr(args, dest, value)
    for dest, value in keys_of(TransformerConfig, config, TRAINED_FIELDS).items():
        if dest not in sources:
            setattr(args, dest, value)
    if "seq_length" in sources and args.seq_length > config.positions:
        raise ConfigError(
            f"{sources['seq_length']}: {folder} has at most {config.positions} tokens per sample (got "
            f"{args.seq_length}). Use {config.positions} or fewer."
        )
    args.seq_length = min(args.seq_length, config.positions)
