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

_RECOMPUTE = "recompute-method recompute-num-layers"
_CHECKPOINT = "checkpoint-activations checkpoint-num-layers deepspeed-activation-checkpointing"
_UNEVEN = "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout"
_CHUNKS = "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank"
# Replacement -> Megatron's flags, without dashes.
_REPLACEMENTS = {
    "--recompute-interval K to recompute every K-th layer": _RECOMPUTE,
    "--recompute-granularity selective": "recompute-activations",
    "--recompute-granularity full": _CHECKPOINT,
    "--lr-warmup-fraction": "warmup",
    "--use-distributed-optimizer for ZeRO stage 1": "zero-stage",
    "--stage-layers 2,3,3,2 for the layers of every stage": _UNEVEN,
    "--micro-batch-size": "batch-size",
    "--tensor-model-parallel-size": "model-parallel-size",
    "--train-iters": "train-samples exit-interval exit-duration-in-mins",
    '--schedule interleaved, with "schedule_options": {"chunks": 2} in the "ds_ext" section': _CHUNKS,
    "--data-path and --split": "train-data-path valid-data-path test-data-path",
    "train_bert.py": "mask-prob short-seq-prob bert-no-binary-head",
    "--tensorboard-dir; every step is written": "tensorboard-log-interval",
    "the flag of the launcher, deepspeed or torchrun, for the number of ranks": "num-gpus nproc-per-node",
    '"trace": {"dir": DIR} in the "ds_ext" section': "trace trace-dir trace-interval trace-granularity",
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


# Flag -> why it has no replacement.
_NEEDLESS = {
    "--workload": "messages are not cut into slices of a fixed size",
    "--use-flash-attn": "attention uses the kernels of torch's scaled_dot_product_attention",
    "--use-mcore-models": "there is one implementation of the models",
    "--transformer-pipeline-model-parallel-size": "the encoder and the decoder are one pipeline",
    "--no-masked-softmax-fusion": "there are no fused kernels to turn off",
    "--no-gradient-accumulation-fusion": "there are no fused kernels to turn off",
    "--no-bias-gelu-fusion": "there are no fused kernels to turn off",
    "--no-async-tensor-model-parallel-allreduce": "tensor-parallel all-reduces are not asynchronous",
    "--deepspeed-mpi": "the launcher sets the ranks",
    "--cpu-optimizer": "the optimizer runs where the weights are",
    "--distributed-backend": "nccl is used on GPUs and gloo elsewhere",
    "--no-load-optim": "a checkpoint is loaded as a whole",
    "--no-load-rng": "random numbers depend on the seed and the step only",
    "--no-save-optim": "a checkpoint is saved as a whole",
    "--no-save-rng": "random numbers depend on the seed and the step only",
    "--num-workers": "samples are read from memory-mapped files, without worker processes",
    "--data-impl": "data are in Megatron's indexed format",
    "--dataloader-type": "samples are shuffled once per epoch, as with single",
    "--ckpt-format": "checkpoints have one format",
}


def refusal(flag: str) -> str | None:
    """Return an error with the replacement of Megatron's ``flag`` (with its dashes); None for other flags."""
    if flag in _NEEDLESS:
        return f"{flag}: has no equivalent, because {_NEEDLESS[flag]}. Remove it."
    use = REPLACED_FLAGS.get(flag)
    return None if use is None else f"{flag}: unknown flag. Use {use}."
