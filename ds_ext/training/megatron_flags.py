"""Megatron flags that have a different name here, and Megatron's tokenizer types."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# --tokenizer-type -> kind of its file: GPT-2's two files, a tokenizer.json, or a sentencepiece model.
TOKENIZER_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "GPT2BPETokenizer": "gpt2",
        "HuggingFaceTokenizer": "json",
        "SentencePieceTokenizer": "model",
        "GPTSentencePieceTokenizer": "model",
        "Llama2Tokenizer": "model",
        "BertWordPieceLowerCase": "json",
        "BertWordPieceCase": "json",
    }
)
TOKENIZER_FILES: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": "--vocab-file vocab.json and --merge-file merges.txt",
        "json": "--tokenizer-model tokenizer.json (or BERT's vocab.txt)",
        "model": "--tokenizer-model with a sentencepiece .model file",
    }
)

_SCHEDULER = 'the "scheduler" section of the JSON: '
_RECOMPUTE = "recompute-method recompute-num-layers"
_CHECKPOINT = "checkpoint-activations checkpoint-num-layers deepspeed-activation-checkpointing"
_UNEVEN = "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout"
_CHUNKS = "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank"
# Replacement -> Megatron's flags, without dashes.
_REPLACEMENTS = {
    "--recompute-interval K to recompute every K-th layer": _RECOMPUTE,
    "--recompute-granularity selective": "recompute-activations",
    "--recompute-granularity full": _CHECKPOINT,
    _SCHEDULER + '"type": "WarmupCosineLR", "WarmupDecayLR" (linear) or "WarmupLR"': "lr-decay-style",
    _SCHEDULER + '"params": {"cos_min_ratio": min_lr / lr} of "WarmupCosineLR"': "min-lr",
    _SCHEDULER + '"params": {"total_num_steps": steps}': "lr-decay-iters lr-decay-samples",
    _SCHEDULER + '"params": {"warmup_num_steps": steps}': (
        "lr-warmup-iters lr-warmup-fraction lr-warmup-samples warmup"
    ),
    _SCHEDULER + '"params": {"warmup_min_ratio": start / lr}': "lr-warmup-init",
    'the "optimizer" section of the JSON': "optimizer",
    '"zero_optimization": {"stage": 1} in the JSON': "use-distributed-optimizer zero-stage",
    'the "fp16" section of the JSON': "loss-scale initial-loss-scale loss-scale-window",
    "--stage-layers 2,3,3,2 for the layers of every stage": _UNEVEN,
    "--micro-batch-size": "batch-size",
    "--tensor-model-parallel-size": "model-parallel-size",
    "--train-iters": "train-samples exit-interval exit-duration-in-mins",
    '--schedule interleaved, with "schedule_options": {"chunks": 2} in the "ds_ext" section': _CHUNKS,
    "--data-path and --split": "train-data-path valid-data-path test-data-path",
    "train_bert.py": "mask-prob short-seq-prob bert-no-binary-head",
    'the "tensorboard" section of the JSON': "tensorboard-dir tensorboard-log-interval",
    'the "wandb" section of the JSON': "wandb-exp-name wandb-project",
    "--position-embedding-type rope": "use-rotary-position-embeddings",
    "--norm-epsilon": "layernorm-epsilon",
    '"rank_order" in the "ds_ext" section, or --use-tp-pp-dp-mapping': "rank-order",
    "--metrics-file": "log-params-norm log-throughput timing-log-level",
    '"transport_options": {"timeout_s": seconds} in the "ds_ext" section': "distributed-timeout-minutes",
}
REPLACED_FLAGS: Mapping[str, str] = MappingProxyType(
    {f"--{flag}": use for use, flags in _REPLACEMENTS.items() for flag in flags.split()}
)


def refusal(flag: str) -> str | None:
    """Return an error that names the replacement of Megatron's ``flag`` (with its dashes); None for other flags."""
    use = REPLACED_FLAGS.get(flag)
    return None if use is None else f"{flag}: unknown flag. Use {use}."
