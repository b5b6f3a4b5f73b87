"""Flags of ``python -m ds_ext`` for the model and its training."""

from __future__ import annotations

import argparse

from ..errors import ScheduleError
from ..models.config import PLANNED, SIZES, TransformerConfig
from ..models.flags import add_flags, flag_name
from ..planner.memory import TrainingSizes
from ..planner.named_models import LLAMA, MODELS, named_model
from ..planner.parameter_bytes import PRECISIONS

# Flags of the job -> settings of TrainingSizes.
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
    """Add the flags; ``parallel`` includes the settings that `plan` chooses itself."""
    group = verb.add_argument_group("model, for memory and message sizes")
    group.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    add_flags(group, TransformerConfig, PLANNED, default=None)
    group.add_argument(
        "--rope",
        dest="position_embedding_type",
        action="store_const",
        const="rope",
        help="--position-embedding-type rope",
    )
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


def model_of(args: argparse.Namespace) -> TrainingSizes | None:
    """Return the model that the flags describe, or None if there are no model flags. Raises ScheduleError."""
    model = {key: value for key in PLANNED if (value := getattr(args, key, None)) is not None}
    training = {dest: value for dest in _TRAINING if (value := getattr(args, dest, None)) is not None}
    settings = {_TRAINING[dest]: value for dest, value in training.items()}
    family = LLAMA if model.get("swiglu") and model.get("position_embedding_type") == "rope" else {}
    if args.model is not None:
        return TrainingSizes.of_model(named_model(args.model), **{**family, **model, **settings})
    if not model.keys() & {*SIZES, "vocab_size"}:
        if training or model:
            dest, value = next(iter((training | model).items()))
            raise ScheduleError(
                f"{flag_name(dest)}: needs a model (got {value}, no model). Add --model gpt-10b."
            )
        return None
    missing = [flag_name(name) for name in (*SIZES, "vocab_size") if name not in model]
    if missing:
        raise ScheduleError(f"model: sizes are missing. Add {', '.join(missing)}, or --model NAME.")
    return TrainingSizes(**{**family, **model, **settings})
