"""Flags of ``python -m ds_ext`` for the model and its training."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..errors import ScheduleError
from ..planner.memory import ModelSizes
from ..planner.named_models import MODELS, model_sizes
from ..planner.parameter_bytes import PRECISIONS

_SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "vocab_size": "vocab",
    "seq_length": "seq",
}
_OPTIONS = {
    "ffn_hidden_size": "ffn",
    "num_query_groups": "query_groups",
    "kv_channels": "kv_channels",
}
_SWITCHES = {"swiglu": "swiglu", "untie_embeddings_and_output_weights": "untied", "rope": "rope"}
_TRAINING = {
    "micro_batch_size": "micro_batch",
    "tensor_parallel": "tensor_parallel",
    "data_parallel": "data_parallel",
    "zero": "zero_stage",
    "precision": "precision",
    "recompute": "recompute",
    "sequence_parallel": "sequence_parallel",
    "attention_scores": "attention_scores",
}


def add_model_flags(verb: argparse.ArgumentParser, *, parallel: bool = True) -> None:
    """Add the flags; ``parallel`` includes the settings that ``plan`` chooses itself."""
    group = verb.add_argument_group("model, for memory and message sizes")
    group.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    for dest in _SIZES:
        group.add_argument(_flag(dest), type=int, metavar="SIZE", help="overrides the model's value")
    for dest in _OPTIONS:
        group.add_argument(
            _flag(dest), type=int, metavar="SIZE", help="overrides the model's value (GPT-2's)"
        )
    for dest, text in (
        ("swiglu", "gated MLP"),
        ("untie_embeddings_and_output_weights", "separate weight for the head"),
        ("rope", "rotary positions: no table"),
    ):
        group.add_argument(_flag(dest), action="store_true", default=None, help=text)
    group.add_argument("--micro-batch-size", type=int, metavar="B", help="samples per micro-batch (1)")
    default = "0" if parallel else "1 with several copies of the weights"
    zero = f"ZeRO stage in fp32 ({default}); half precision always uses 1"
    group.add_argument("--zero", type=int, choices=[0, 1], help=zero)
    group.add_argument("--precision", choices=PRECISIONS, help="of weights and activations (bf16)")
    if parallel:
        group.add_argument("--tensor-parallel", type=int, metavar="T", help="tensor-parallel size (1)")
        group.add_argument("--data-parallel", type=int, metavar="DP", help="number of pipeline groups (1)")
        recompute = ["none", "selective", "full"]
        group.add_argument("--recompute", choices=recompute, help="recomputation in the backward (none)")
        switch = {"action": "store_true", "default": None}
        group.add_argument("--sequence-parallel", **switch, help="same as a job's sequence_parallel key")
        scores = "the attention stores its s x s scores; selective recomputation drops them"
        group.add_argument("--attention-scores", **switch, help=scores)


def model_of(args: argparse.Namespace) -> ModelSizes | None:
    """Return the model that the flags describe, or None if there are no model flags. Raises ScheduleError."""
    sizes = {
        field: value for dest, field in _SIZES.items() if (value := getattr(args, dest, None)) is not None
    }
    options = {
        field: value
        for dest, field in (_OPTIONS | _SWITCHES).items()
        if (value := getattr(args, dest, None)) is not None
    }
    training = {dest: value for dest in _TRAINING if (value := getattr(args, dest, None)) is not None}
    if args.model is None and not sizes:
        if training or options:
            dest, value = next(iter((training | options).items()))
            raise ScheduleError(f"{_flag(dest)}: needs a model (got {value}, no model). Add --model gpt-10b.")
        return None
    changes = options | {_TRAINING[dest]: value for dest, value in training.items()}
    if args.model is not None:
        return replace(model_sizes(args.model), **sizes, **changes)
    missing = [_flag(dest) for dest, field in _SIZES.items() if field not in sizes]
    if missing:
        raise ScheduleError(f"model: sizes are missing. Add {', '.join(missing)}, or --model NAME.")
    return ModelSizes(**sizes, **changes)


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")
