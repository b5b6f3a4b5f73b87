"""The flags of ``python -m ds_ext`` that say which model is meant and how it is trained."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..errors import ScheduleError
from ..planner.memory import MODELS, ModelSizes, model_sizes

_SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "vocab_size": "vocab",
    "seq_length": "seq",
}
_TRAINING = {
    "micro_batch_size": "micro_batch",
    "tensor_parallel": "tensor_parallel",
    "data_parallel": "data_parallel",
    "zero": "zero_stage",
    "recompute": "recompute",
    "sequence_parallel": "sequence_parallel",
    "attention_scores": "attention_scores",
}


def add_model_flags(verb: argparse.ArgumentParser, *, parallel: bool = True) -> None:
    """The model and its training; ``parallel``: also what a plan would choose itself."""
    group = verb.add_argument_group("the model, for bytes")
    group.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    for dest in _SIZES:
        group.add_argument(_flag(dest), type=int, metavar="SIZE", help="instead of the model's")
    group.add_argument("--micro-batch-size", type=int, metavar="B", help="samples of a micro-batch (1)")
    default = "0" if parallel else "1 where there is more than one copy of the weights"
    group.add_argument("--zero", type=int, choices=[0, 1], help=f"1: shard the optimizer ({default})")
    if parallel:
        group.add_argument("--tensor-parallel", type=int, metavar="T", help="(1)")
        group.add_argument("--data-parallel", type=int, metavar="DP", help="copies of the pipeline group (1)")
        group.add_argument("--recompute", choices=["none", "selective", "full"], help="(none)")
        group.add_argument("--sequence-parallel", action="store_true", default=None)
        group.add_argument(
            "--attention-scores",
            action="store_true",
            default=None,
            help="the attention stores its s x s scores, which selective recomputation drops",
        )


def model_of(args: argparse.Namespace) -> ModelSizes | None:
    """The model that the flags mean; None when they mean none. Raises ScheduleError."""
    own = {field: value for dest, field in _SIZES.items() if (value := getattr(args, dest, None)) is not None}
    training = {dest: value for dest in _TRAINING if (value := getattr(args, dest, None)) is not None}
    if args.model is None and not own:
        if training:
            raise ScheduleError(
                f"{_flag(next(iter(training)))} needs a model: give --model gpt-10b, or its sizes."
            )
        return None
    changes = {_TRAINING[dest]: value for dest, value in training.items()}
    if args.model is not None:
        return replace(model_sizes(args.model), **own, **changes)
    missing = [_flag(dest) for dest, field in _SIZES.items() if field not in own]
    if missing:
        raise ScheduleError(f"without --model all sizes are needed; {', '.join(missing)} is missing.")
    return ModelSizes(**own, **changes)


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")
