"""Parser of the training scripts, with Megatron's flag names. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import argparse
from typing import Any, Literal, NoReturn

from .. import __version__
from ..environment import package_version
from ..errors import ConfigError
from .megatron_flags import TOKENIZER_TYPES

Model = Literal["gpt", "bert"]


class _Parser(argparse.ArgumentParser):
    """Parser that raises ConfigError instead of printing in every rank."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `python {self.prog} --help` lists the flags.")


class _WithDefaults(argparse.HelpFormatter):
    """Formatter that shows the default of every flag."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        shown = text and "%(default)" not in text and default not in (None, False, [], argparse.SUPPRESS)
        return f"{text} (%(default)s)" if shown else text


def build_parser(prog: str, model: Model = "gpt") -> argparse.ArgumentParser:
    """Return the parser of ``train_gpt.py``, or of ``train_bert.py`` for "bert"."""
    parser = _Parser(
        prog=prog,
        description=f"Pretrain a {model.upper()} with a pipeline schedule of ds_ext.",
        allow_abbrev=False,
        formatter_class=_WithDefaults,
    )
    parser.add_argument("--version", action="version", version=_versions())
    parser.add_argument(
        "--deepspeed_config",
        metavar="JSON",
        help='DeepSpeed JSON with a "ds_ext" section (none: the flags need --lr and --micro-batch-size)',
    )
    parser.add_argument(
        "--write-config", metavar="FILE", help="write the JSON of the job, with all flags, and exit"
    )
    parser.add_argument(
        "--deepspeed",
        action="store_true",
        help="accepted for launch scripts, without effect: DeepSpeed is always used",
    )
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=None, help="set by DeepSpeed's launcher"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the job plan and exit, without other ranks"
    )
    parser.add_argument(
        "--hosts",
        metavar="HOSTS",
        help="with --dry-run: hosts as 4x8 (4 hosts, 8 ranks each), 8,8,4 (ranks of each host) or a hostfile",
    )
    parser.add_argument(
        "--metrics-file", metavar="PATH", help="file for one JSON object per step, written by rank 0"
    )
    parser.add_argument(
        "--peak-tflops",
        type=float,
        metavar="T",
        help="peak TFLOP/s of a device, for the MFU (default: from the GPU's name, if known)",
    )
    _add_model(parser.add_argument_group("model"))
    if model == "gpt":
        _add_gpt_options(parser.add_argument_group("model, Llama family and packed samples"))
    else:
        gpt = argparse.ArgumentParser(add_help=False)
        _add_gpt_options(gpt)
        parser.set_defaults(**vars(gpt.parse_args([])))
    data = parser.add_argument_group("data")
    _add_data(data)
    if model == "gpt":
        _add_gpt_tokenizer(data)
    else:
        _add_bert_data(data)
        parser.set_defaults(vocab_file=None, merge_file=None)  # flags of GPT
    _add_training(parser.add_argument_group("training"))
    _add_json_flags(
        parser.add_argument_group("keys of the JSON (an error if the JSON has a different value)")
    )
    return parser


def _versions() -> str:
    """Return the versions of ds_ext, DeepSpeed and torch without importing them."""
    words = [f"ds_ext {__version__}"]
    for package in ("deepspeed", "torch"):
        words.append(f"{package} {package_version(package) or 'is not installed'}")
    return ", ".join(words)


def _add_model(group: Any) -> None:
    group.add_argument("--num-layers", type=int, default=8, help="transformer layers (%(default)s)")
    group.add_argument(
        "--stage-layers",
        metavar="A,B,..",
        help="transformer layers of every stage; balanced: take the work of the head into account (evenly)",
    )
    group.add_argument("--hidden-size", type=int, default=128, help="hidden size")
    group.add_argument("--num-attention-heads", type=int, default=4, help="attention heads")
    group.add_argument(
        "--ffn-hidden-size",
        type=int,
        default=None,
        help="hidden size of the MLP (4 x hidden-size; two thirds of it with swiglu)",
    )
    group.add_argument("--seq-length", type=int, default=128, help="tokens per sample")
    group.add_argument(
        "--max-position-embeddings", type=int, default=None, help="position embeddings (seq-length)"
    )
    group.add_argument("--hidden-dropout", type=float, default=0.1, help="dropout after attention and MLP")
    group.add_argument(
        "--attention-dropout", type=float, default=0.1, help="dropout of the attention weights"
    )
    group.add_argument(
        "--init-method-std", type=float, default=0.02, help="standard deviation of the initial weights"
    )
    group.add_argument(
        "--make-vocab-size-divisible-by", type=int, default=128, help="multiplied by the tensor-parallel size"
    )
    group.add_argument(
        "--transformer-impl",
        choices=["local", "transformer_engine"],
        default="local",
        help="layers of GPT; transformer_engine needs CUDA and has no dropout",
    )
    group.add_argument(
        "--recompute-granularity",
        choices=["none", "selective", "full"],
        default=None,
        help="recomputation in the backward: full: whole layers from their inputs; selective: only the core "
        "attention (none, or chosen by the schedule auto)",
    )
    group.add_argument(
        "--recompute-interval",
        type=int,
        default=1,
        metavar="K",
        help="recompute every K-th layer (%(default)s)",
    )
    group.add_argument("--seed", type=int, default=1234, help="seed of weights, dropout and data order")


def _add_gpt_options(group: Any) -> None:
    group.add_argument(
        "--hf-model",
        metavar="FOLDER",
        help="Hugging Face model: sizes, tokenizer and, without --load, initial weights",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="rows of the word embeddings without padding, if the model has more than its tokenizer",
    )
    group.add_argument(
        "--position-embedding-type",
        choices=["learned_absolute", "rope"],
        default="learned_absolute",
        help="learned table, or rotary embeddings",
    )
    group.add_argument("--rotary-base", type=float, default=10000.0, help="base of the rotary frequencies")
    group.add_argument("--rotary-percent", type=float, default=1.0, help="rotated share of each head")
    group.add_argument(
        "--use-rope-scaling", action="store_true", help="scale the rotary frequencies as in Llama 3.1"
    )
    group.add_argument(
        "--rope-scaling-factor", type=float, default=8.0, help="factor of --use-rope-scaling (%(default)s)"
    )
    group.add_argument(
        "--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm", help="kind of all norms"
    )
    group.add_argument("--norm-epsilon", type=float, default=None, help="constant added in a norm (1e-5)")
    group.add_argument("--swiglu", action="store_true", help="gated MLP with SiLU instead of GELU")
    group.add_argument(
        "--group-query-attention", action="store_true", help="share keys and values between heads"
    )
    group.add_argument(
        "--num-query-groups",
        type=int,
        default=None,
        help="key and value heads of --group-query-attention (1)",
    )
    group.add_argument(
        "--kv-channels", type=int, default=None, help="size of one head (hidden-size / num-attention-heads)"
    )
    group.add_argument("--disable-bias-linear", action="store_true", help="no biases in linear layers")
    group.add_argument(
        "--add-qkv-bias", action="store_true", help="biases of queries, keys and values nevertheless"
    )
    group.add_argument(
        "--qk-layernorm", action="store_true", help="normalize the queries and keys of every head"
    )
    group.add_argument(
        "--untie-embeddings-and-output-weights", action="store_true", help="separate weight for the head"
    )
    group.add_argument(
        "--window-size",
        metavar="L,0",
        default=None,
        help="attend to L previous tokens and the token itself (all previous tokens)",
    )
    group.add_argument(
        "--reset-position-ids", action="store_true", help="restart positions at every document of a sample"
    )
    group.add_argument(
        "--reset-attention-mask", action="store_true", help="attend only within a document of a sample"
    )


def _add_data(group: Any) -> None:
    group.add_argument(
        "--data-path",
        nargs="*",
        default=[],
        metavar="PATH",
        help="prepared folder, .bin/.idx prefix, or a blend: 0.3 a 0.7 b",
    )
    group.add_argument("--split", default="969,30,1", help="shares of train, valid and test (%(default)s)")


def _add_gpt_tokenizer(group: Any) -> None:
    group.add_argument(
        "--tokenizer",
        "--tokenizer-model",
        metavar="FILE",
        help="tokenizer.json or sentencepiece model; checked against the data",
    )
    group.add_argument(
        "--tokenizer-type",
        choices=[kind for kind in TOKENIZER_TYPES if not kind.startswith("Bert")],
        help="for launch scripts; must match the files",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="GPT-2 vocab.json, with --merge-file")
    group.add_argument("--merge-file", metavar="FILE", help="GPT-2 merges.txt, with --vocab-file")
    group.add_argument(
        "--eod-mask-loss", action="store_true", help="ignore the labels of end-of-document tokens in the loss"
    )


def _add_bert_data(group: Any) -> None:
    group.add_argument(
        "--tokenizer",
        "--tokenizer-model",
        "--vocab-file",
        metavar="FILE",
        help="tokenizer.json or vocab.txt (WordPiece); checked against the data",
    )
    group.add_argument(
        "--tokenizer-type",
        choices=[kind for kind in TOKENIZER_TYPES if kind.startswith(("Bert", "HuggingFace"))],
        help="for launch scripts; must match the file",
    )
    group.add_argument(
        "--mask-prob", type=float, default=0.15, help="share of predicted tokens (%(default)s)"
    )
    group.add_argument(
        "--short-seq-prob", type=float, default=0.1, help="share of shortened samples (%(default)s)"
    )
    group.add_argument(
        "--bert-no-binary-head",
        action="store_true",
        help="predict masked words only, not the order of sentences",
    )


def _add_training(group: Any) -> None:
    group.add_argument(
        "--train-iters", type=int, default=100, help="optimizer steps, including those before a resume"
    )
    group.add_argument("--eval-interval", type=int, default=0, metavar="STEPS", help="0: at the end only")
    group.add_argument("--eval-iters", type=int, default=2, help="steps per evaluation; 0: no evaluation")
    group.add_argument("--save", metavar="DIR", help="folder for checkpoints")
    group.add_argument("--save-interval", type=int, default=0, metavar="STEPS", help="0: at the end only")
    group.add_argument(
        "--stop-if-not-saved",
        action="store_true",
        help="end the job if a checkpoint cannot be written; else go on",
    )
    group.add_argument("--load", metavar="DIR", help="folder of the checkpoint to resume from")
    group.add_argument(
        "--log-interval",
        type=int,
        default=1,
        metavar="STEPS",
        help="print every STEPS steps, and the first and last step (%(default)s)",
    )


def _add_json_flags(group: Any) -> None:
    group.add_argument("--schedule", help="ds_ext.schedule: name, auto, or timetable file")
    group.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="ds_ext.import: Python module with a custom schedule; repeatable",
    )
    group.add_argument(
        "--pipeline-model-parallel-size", type=int, metavar="D", help="ds_ext.pipeline_parallel_size"
    )
    group.add_argument(
        "--tensor-model-parallel-size", type=int, metavar="T", help="ds_ext.tensor_parallel_size"
    )
    group.add_argument("--micro-batch-size", type=int, help="train_micro_batch_size_per_gpu")
    group.add_argument("--global-batch-size", type=int, help="train_batch_size")
    group.add_argument("--lr", type=float, help="optimizer.params.lr")
    group.add_argument("--weight-decay", type=float, help="optimizer.params.weight_decay")
    group.add_argument("--adam-beta1", type=float, help="first of optimizer.params.betas")
    group.add_argument("--adam-beta2", type=float, help="second of optimizer.params.betas")
    group.add_argument("--adam-eps", type=float, help="optimizer.params.eps")
    group.add_argument("--optimizer", choices=["adam", "sgd"], help="optimizer.type: AdamW or SGD")
    group.add_argument("--use-distributed-optimizer", action="store_true", help="zero_optimization.stage: 1")
    group.add_argument(
        "--lr-decay-style",
        choices=["constant", "linear", "cosine", "inverse-square-root"],
        help="scheduler: MegatronLR (linear if another flag of the learning rate is given)",
    )
    group.add_argument("--min-lr", type=float, help="scheduler.params.min_lr")
    group.add_argument(
        "--lr-decay-iters", type=int, metavar="STEPS", help="scheduler.params.total_num_steps (--train-iters)"
    )
    group.add_argument("--lr-decay-samples", type=int, metavar="N", help="the same in samples")
    group.add_argument(
        "--lr-warmup-iters", type=int, metavar="STEPS", help="scheduler.params.warmup_num_steps (0)"
    )
    group.add_argument("--lr-warmup-samples", type=int, metavar="N", help="the same in samples")
    group.add_argument(
        "--lr-warmup-fraction", type=float, metavar="F", help="the same as a share of the decay"
    )
    group.add_argument("--lr-warmup-init", type=float, help="scheduler.params.warmup_init_lr")
    group.add_argument("--loss-scale", type=float, help="fp16.loss_scale; 0: dynamic")
    group.add_argument("--initial-loss-scale", type=float, help="2 to the power of fp16.initial_scale_power")
    group.add_argument("--min-loss-scale", type=float, help="fp16.min_loss_scale")
    group.add_argument("--loss-scale-window", type=int, metavar="STEPS", help="fp16.loss_scale_window")
    group.add_argument("--hysteresis", type=int, metavar="N", help="fp16.hysteresis")
    group.add_argument("--tensorboard-dir", metavar="DIR", help="tensorboard.output_path, and enabled")
    group.add_argument("--bf16", action="store_true", help="bf16.enabled")
    group.add_argument("--fp16", action="store_true", help="fp16.enabled")
    group.add_argument("--sequence-parallel", action="store_true", help="ds_ext.sequence_parallel")
    group.add_argument("--use-tp-pp-dp-mapping", action="store_true", help='ds_ext.rank_order: "tp-pp-dp"')
    group.add_argument(
        "--calculate-per-token-loss", action="store_true", help='ds_ext.loss_weighting: "tokens", the default'
    )
    group.add_argument("--clip-grad", type=float, help="gradient_clipping (DeepSpeed's default: 1.0); 0: off")
    group.add_argument("--enable-bitpipe-schedule", action="store_true", help='ds_ext.schedule: "bitpipe"')
    group.add_argument("--use-dpp", action="store_true", help='ds_ext.schedule: "dpp"')
    group.add_argument(
        "--forward-backward-disaggregating", action="store_true", help='ds_ext.schedule: "fbd"'
    )
    group.add_argument(
        "--ignore-forward-tensor-parallel",
        action="store_true",
        help="ds_ext.fbd.merge_forward_tensor_parallel",
    )
    group.add_argument("--node-ips", metavar="IP,IP", help="ds_ext.transport_options.node_ips")
