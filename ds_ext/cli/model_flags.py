"""Flags of ``python -m ds_ext`` for the model and its training."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import ConfigError, ScheduleError
from ..model.config import PLANNED, SIZES, TransformerConfig
from ..model.field_flags import add_flags, fields_of, flag_name, flags_of
from ..model.hf_decoder import decoder_fields, is_of_transformers
from ..model.json_values import read_json
from ..model.mixture import decoder_fields_like_llama, experts_of
from ..planner.named_models import LLAMA, MODELS, named_model
from ..planner.training_sizes import TrainingSizes

# Settings of the job with a flag, and those of them that `plan` chooses itself.
_SETTINGS = tuple(name for name in flags_of(TrainingSizes) if name not in flags_of(TransformerConfig))
_CHOSEN = ("tensor_parallel", "data_parallel", "attention_scores")
_MOST_TOKENS = 8192  # of a sample of a config.json without --seq-length, as in MODELS


def add_model_flags(verb: argparse.ArgumentParser, *, all_settings: bool = True) -> None:
    """Add the flags; ``all_settings`` includes the settings that ``plan`` chooses itself."""
    group = verb.add_argument_group("model, for memory and message sizes")
    names = f"one of {', '.join(MODELS)}; or a Hugging Face folder or its config.json"
    group.add_argument("--model", metavar="NAME|FOLDER", help=f"{names}; the flags override its sizes")
    fields = flags_of(TrainingSizes)
    add_flags(group, (fields[name] for name in PLANNED), default=None)
    group.add_argument(
        "--rope",
        dest="position_embedding_type",
        action="store_const",
        const="rope",
        help="--position-embedding-type rope",
    )
    for name in _SETTINGS:
        if all_settings or name not in _CHOSEN:
            flag, default = fields[name], fields[name].default
            if name == "zero_stage" and not all_settings:
                default = "1 with several copies of the weights"
            add_flags(group, [flag], default=None, help=f"{flag.help} ({default})")
    if all_settings:
        recompute = ["none", "selective", "full"]
        group.add_argument("--recompute", choices=recompute, help="recomputation in the backward (none)")
        key = "same as a job's sequence_parallel key"
        group.add_argument("--sequence-parallel", action="store_true", default=None, help=key)


def model_of(args: argparse.Namespace) -> TrainingSizes | None:
    """Return the model that the flags describe, or None if there are no model flags."""
    values = vars(args)
    sizes = fields_of(TrainingSizes, values, (*PLANNED, *_SETTINGS))
    for name in ("recompute", "sequence_parallel"):
        if values.get(name) is not None:
            sizes[name] = values[name]
    is_llama = sizes.get("swiglu") and sizes.get("position_embedding_type") == "rope"
    all_sizes = {**LLAMA, **sizes} if is_llama else sizes
    if args.model is not None:
        return TrainingSizes.of_model(_sizes_of(args.model), **all_sizes)
    if not sizes:
        return None
    required = (*SIZES, "vocab_size")
    if not sizes.keys() & set(required):
        name, value = next(iter(sizes.items()))
        key = flags_of(TrainingSizes)[name].key if name in _SETTINGS else name
        got = "no model" if value is True else f"{value}, no model"
        raise ScheduleError(f"{flag_name(key)}: needs a model (got {got}). Add --model gpt-10b.")
    missing_flags = [flag_name(name) for name in required if name not in sizes]
    if missing_flags:
        raise ScheduleError(f"model: sizes are missing. Add {', '.join(missing_flags)}, or --model NAME.")
    return TrainingSizes(**all_sizes)


def model_label(args: argparse.Namespace) -> str:
    """Return the name of the model of the flags, with the sizes that they change."""
    if args.model is None:
        return "custom"
    model = _sizes_of(args.model)
    values = fields_of(TransformerConfig, vars(args), PLANNED)
    changes = [f"{name} {value}" for name, value in values.items() if getattr(model, name) != value]
    return f"{args.model} with {', '.join(changes)}" if changes else args.model


def _sizes_of(model: str) -> TransformerConfig:
    path = Path(model)
    if model.lower() in MODELS or not path.exists():
        return named_model(model)
    path = path / "config.json" if path.is_dir() else path
    values = read_json(path)
    try:
        experts = experts_of(values)
        if experts is not None or is_of_transformers(values):
            fields = decoder_fields_like_llama(values, experts)
        else:
            fields = decoder_fields(values)
        return TransformerConfig(**{**fields, "seq_length": min(fields["seq_length"], _MOST_TOKENS)})
    except ConfigError as error:
        others = ""
        if str(error).startswith("model_type: "):
            others = (
                " Other decoders need architectures that end with ForCausalLM, and the usual names of sizes."
            )
        raise ConfigError(f"{path}: {error}{others}") from None
