"""Flags of Megatron-LM and Megatron-DeepSpeed that this project has under another name or form, or not at all.

Launch scripts bring them along. None is ignored: each is refused with what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# --tokenizer-type -> the kind of file that it needs: GPT-2's two files, a tokenizer.json, a sentencepiece model.
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

_SCHEDULER = 'the learning rate over time is the "scheduler" section of the JSON: '
_COSINE = _SCHEDULER + '"type": "WarmupCosineLR" with '
_FIXED_MODEL = (
    "the models are GPT-2 and BERT (learnt positions, LayerNorm, GELU, biases, one embedding for input and "
    "head)"
)
_ONE_KERNEL = (
    "there is one implementation, torch's scaled_dot_product_attention and plain layers; leave it out"
)
_MICRO = "positions and masks run through a sample whatever documents it holds; leave it out"
_WHOLE = "--load resumes weights, optimizer, scheduler and position in the data together; leave it out"
_BLEND = "--data-path takes the data of all three splits, --split their shares"
_INTERLEAVED = 'use --schedule interleaved, with "schedule_options": {"chunks": 2} in the "ds_ext" section'
_FULL = "use --recompute-granularity full (and --recompute-interval K for every K-th layer)"
_SELECTIVE = "use --recompute-granularity selective"
_ZERO = 'use "zero_optimization": {"stage": 1} in the JSON'
_OVERLAP = "when gradients are reduced is decided by the engine; leave it out"
_SCALE = "it is a key of the JSON: "

# Sentences follow "--flag: ".
_REFUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Recomputation
        "Megatron cuts a stage into units of K layers or recomputes K layers a stage; here every K-th layer of the "
        "model is recomputed: use --recompute-interval K": ("recompute-num-layers",),
        "all layers are alike here; use --recompute-interval K for every K-th layer": ("recompute-method",),
        _SELECTIVE: ("recompute-activations",),
        _FULL: (
            "checkpoint-activations",
            "deepspeed-activation-checkpointing",
            "checkpoint-num-layers",
        ),
        # Learning rate and optimizer
        _COSINE + '"cos_min_ratio" = min-lr / lr': ("min-lr",),
        _SCHEDULER + '"type": "WarmupCosineLR", "WarmupDecayLR" (linear) or "WarmupLR" (constant)': (
            "lr-decay-style",
        ),
        _SCHEDULER + '"params": {"warmup_num_steps": steps, "warmup_type": "linear"}': (
            "lr-warmup-iters",
            "lr-warmup-fraction",
            "lr-warmup-samples",
            "warmup",
        ),
        _COSINE + '"total_num_steps"': ("lr-decay-iters", "lr-decay-samples"),
        _COSINE + '"warmup_min_ratio" = start / lr': ("lr-warmup-init",),
        'use "optimizer": {"type": "AdamW"} or another type of DeepSpeed\'s in the JSON': ("optimizer",),
        _ZERO: ("use-distributed-optimizer", "zero-stage"),
        _SCALE + '"fp16": {"enabled": true, "loss_scale": 0}': ("loss-scale",),
        _SCALE + '"fp16": {"enabled": true, "initial_scale_power": 16}': ("initial-loss-scale",),
        _SCALE + '"fp16": {"enabled": true, "loss_scale_window": 1000}': ("loss-scale-window",),
        _OVERLAP: ("overlap-grad-reduce", "overlap-param-gather", "no-overlap-p2p-communication"),
        # Sizes
        "use --stage-layers 2,3,3,2, the layers of every stage": (
            "decoder-first-pipeline-num-layers",
            "decoder-last-pipeline-num-layers",
            "account-for-embedding-in-pipeline-split",
            "account-for-loss-in-pipeline-split",
            "pipeline-model-parallel-layout",
        ),
        "use --micro-batch-size": ("batch-size",),
        "use --tensor-model-parallel-size": ("model-parallel-size",),
        "use --train-iters; a step is --global-batch-size samples": ("train-samples",),
        "the batch size is constant; leave it out": ("rampup-batch-size",),
        _INTERLEAVED: ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"),
        "this version is parallel over pipeline, tensor and data only; leave it out": (
            "context-parallel-size",
            "expert-model-parallel-size",
            "num-experts",
            "ds-sequence-parallel-size",
        ),
        # Model
        f"{_FIXED_MODEL}; leave it out": (
            "add-position-embedding",
            "disable-bias-linear",
            "group-query-attention",
            "kv-channels",
            "layernorm-epsilon",
            "norm-epsilon",
            "normalization",
            "num-query-groups",
            "position-embedding-type",
            "rotary-base",
            "rotary-percent",
            "squared-relu",
            "swiglu",
            "untie-embeddings-and-output-weights",
            "use-rotary-position-embeddings",
        ),
        _ONE_KERNEL: (
            "attention-backend",
            "attention-softmax-in-fp32",
            "no-bias-dropout-fusion",
            "no-bias-gelu-fusion",
            "no-gradient-accumulation-fusion",
            "no-masked-softmax-fusion",
            "no-persist-layer-norm",
            "use-flash-attn",
            "use-legacy-models",
            "use-mcore-models",
        ),
        # Data
        "samples are read from a memory map without worker processes; leave it out": ("num-workers",),
        "the data are Megatron's .bin/.idx pair, and no index files are written; leave it out": (
            "data-cache-path",
            "data-impl",
            "dataloader-type",
            "mmap-warmup",
        ),
        _BLEND: ("train-data-path", "valid-data-path", "test-data-path"),
        "the size of the vocabulary is that of the data's tokenizer; leave it out": ("vocab-size",),
        "it is a flag of train_bert.py": ("mask-prob", "short-seq-prob", "bert-no-binary-head"),
        _MICRO: ("eod-mask-loss", "reset-attention-mask", "reset-position-ids"),
        # Checkpoints, logs, processes
        _WHOLE: (
            "finetune",
            "no-load-optim",
            "no-load-rng",
            "no-save-optim",
            "no-save-rng",
            "override-opt_param-scheduler",
            "use-checkpoint-opt_param-scheduler",
        ),
        "checkpoints have DeepSpeed's format; leave it out": ("ckpt-format", "use-dist-ckpt"),
        'use the "tensorboard" section of the JSON, or --metrics-file': (
            "tensorboard-dir",
            "tensorboard-log-interval",
        ),
        'use the "wandb" section of the JSON, or --metrics-file': ("wandb-exp-name", "wandb-project"),
        "use --metrics-file, which has everything of every step": (
            "log-params-norm",
            "log-throughput",
            "timing-log-level",
        ),
        "use --train-iters": ("exit-duration-in-mins", "exit-interval"),
        "the backend follows from the device: nccl with GPUs, gloo without; leave it out": (
            "distributed-backend",
        ),
        'use "transport_options": {"timeout_s": seconds} in the "ds_ext" section': (
            "distributed-timeout-minutes",
        ),
    }
)
REFUSED_FLAGS = tuple(flag for flags in _REFUSED.values() for flag in flags)
_SENTENCES: Mapping[str, str] = MappingProxyType(
    {flag: sentence for sentence, flags in _REFUSED.items() for flag in flags}
)


def refusal(flag: str) -> str | None:
    """What to write instead of Megatron's ``flag`` (with its two dashes), or None if it is not in the table."""
    sentence = _SENTENCES.get(flag.removeprefix("--"))
    return None if sentence is None else f"{flag} is a flag of Megatron's that is not taken: {sentence}."
