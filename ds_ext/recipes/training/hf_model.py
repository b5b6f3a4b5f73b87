"""Sizes and tokenizer of ``--hf-model`` as flags of the script. Imports torch only if the flag is set."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...model.config import TRAINED_FIELDS, WEIGHT_FIELDS, TransformerConfig
from ...model.field_flags import keys_of
from ...model.mixture import decoder_fields_like_llama, experts_of

_POSITIONS = 1 << 20  # of a model without a limit
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def folder_sizes(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields that decide the weights and their computation, except for the vocabulary size."""
    return {name: getattr(config, name) for name in WEIGHT_FIELDS if name != "vocab_size"}


def config_of_model(folder: Path, transformer_impl: str) -> TransformerConfig:
    """Return the config of a model; for one without layers in ds_ext, sizes for estimates."""
    from ..convert.hf_model import config_of_folder, has_own_layers

    if transformer_impl != "transformers" or has_own_layers(folder):
        return config_of_folder(folder)
    return _estimated(folder)


def _estimated(folder: Path) -> TransformerConfig:
    """Return the sizes of any decoder of transformers, as far as a Llama has its parts."""
    from ...hf.weights import config_of, make_source
    from ..models.gpt import GPTConfig

    whole = config_of(folder)
    config, names = whole.get_text_config(), make_source(whole, None).skeleton().state_dict()

    def size(key: str) -> int | None:
        value = getattr(config, key, None)
        return value if isinstance(value, int) and value > 0 else None

    heads, hidden = size("num_attention_heads") or 1, size("hidden_size") or 1
    groups = size("num_key_value_heads") or heads
    # The usual names, of which some models have others.
    values = {
        **config.to_dict(),
        "num_hidden_layers": size("num_hidden_layers") or 1,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups if heads % groups == 0 else heads,
        "head_dim": size("head_dim") or max(2, hidden // heads // 2 * 2),
        "intermediate_size": size("intermediate_size") or size("ffn_dim") or 4 * hidden,
        "max_position_embeddings": size("max_position_embeddings") or _POSITIONS,
    }
    fields = decoder_fields_like_llama(values, experts_of(values))
    return GPTConfig(**{**fields, "swiglu": any("gate" in name for name in names)})


def take_sizes(args: argparse.Namespace, sources: Mapping[str, str]) -> None:
    """Set the model's flags, and the tokenizer unless the user set one, to those of the folder.

    Unless the user set ``--transformer-impl``, layers of transformers train LoRA, and models without layers in ds_ext.

    Args:
        args: flags with ``hf_model``; changed in place.
        sources: ``dest`` -> flag or JSON key, for every value that the user set.
    """
    from ..convert.hf_model import has_own_layers
    from ..models.bert import BertConfig

    folder = Path(args.hf_model)
    if "transformer_impl" not in sources and (args.lora_rank is not None or not has_own_layers(folder)):
        args.transformer_impl = "transformers"
    config = config_of_model(folder, args.transformer_impl)
    if isinstance(config, BertConfig):
        raise ConfigError(
            f"--hf-model: train_gpt.py trains no BERT (got {folder}). Use convert --from hf and train_bert.py."
        )
    if args.train_from_scratch and args.lora_rank is not None:
        raise ConfigError(
            f"--train-from-scratch: adapters of new weights learn little (got --lora-rank {args.lora_rank}). Remove "
            f"one of the flags."
        )
    if args.transformer_impl == "transformer_engine":
        raise ConfigError(
            f"--transformer-impl: --hf-model loads only into local layers and those of transformers (got "
            f"{args.transformer_impl}). Remove one of the flags."
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
    folder = Path(args.hf_model)
    # Flags exist only for some scalings of the rotary frequencies, and for a window of all layers. The others are in
    # folder_sizes() alone. Layers of transformers have the dropout of config.json.
    fixed = (*WEIGHT_FIELDS, *TRAINED_FIELDS) if args.transformer_impl == "transformers" else WEIGHT_FIELDS
    for dest, value in keys_of(TransformerConfig, config.resolved(), fixed).items():
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
