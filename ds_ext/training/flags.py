"""The parser of the training scripts: every flag, under Megatron's names. Pure: imports neither torch nor deepspeed."""

from __future__ import annotations

import argparse
import importlib.metadata
from typing import Any, Literal, NoReturn

from .. import __version__
from ..errors import ConfigError
from .megatron_flags import TOKENIZER_TYPES

Model = Literal["gpt", "bert"]


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print in every rank."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `python {self.prog} --help` lists the flags.")


class _WithDefaults(argparse.HelpFormatter):
    """Shows the default of every flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        shown = text and "%(default)" not in text and default not in (None, False, [], argparse.SUPPRESS)
        return f"{text} (%(default)s)" if shown else text


def build_parser(prog: str, model: Model = "gpt") -> argparse.ArgumentParser:
    """The parser of ``train_gpt.py``, or with model "bert" of ``train_bert.py``."""
    parser = _Parser(
        prog=prog,
        description=f"Pretrain a {model.upper()} with a pipeline schedule of ds_ext.",
        allow_abbrev=False,
        formatter_class=_WithDefaults,
    )
    parser.add_argument("--version", action="version", version=_versions())
    parser.add_argument(
        "--deepspeed_config", required=True, metavar="JSON", help='DeepSpeed JSON with a "ds_ext" section'
    )
    parser.add_argument(
        "--deepspeed", action="store_true", help="accepted for launch scripts; DeepSpeed is always used"
    )
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=None, help="set by the deepspeed launcher"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="validate, print the plan and exit; launches nothing"
    )
    parser.add_argument(
        "--metrics-file", metavar="PATH", help="one JSON object a line and step, written by rank 0"
    )
    _add_model(parser.add_argument_group("model"))
    data = parser.add_argument_group("data")
    _add_data(data)
    if model == "gpt":
        _add_gpt_tokenizer(data)
    else:
        _add_bert_data(data)
        parser.set_defaults(vocab_file=None, merge_file=None)  # GPT's pair of files
    _add_training(parser.add_argument_group("training"))
    _add_json_flags(parser.add_argument_group("keys of the JSON (a contradiction is an error)"))
    return parser


def _versions() -> str:
    """Ours and those of what we run on, read without importing them."""
    words = [f"ds_ext {__version__}"]
    for package in ("deepspeed", "torch"):
        try:
            words.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            words.append(f"{package} is not installed")
    return ", ".join(words)


def _add_model(group: Any) -> None:
    group.add_argument("--num-layers", type=int, default=8, help="transformer layers (%(default)s)")
    group.add_argument(
        "--stage-layers",
        metavar="A,B,..",
        help="transformer layers of every stage of the model, or balanced: by the work of layers and head (evenly)",
    )
    group.add_argument("--hidden-size", type=int, default=128, help="width of hidden states")
    group.add_argument("--num-attention-heads", type=int, default=4, help="heads a layer")
    group.add_argument("--ffn-hidden-size", type=int, default=None, help="4 x hidden-size by default")
    group.add_argument("--seq-length", type=int, default=128, help="tokens of a sample")
    group.add_argument("--max-position-embeddings", type=int, default=None, help="seq-length by default")
    group.add_argument("--hidden-dropout", type=float, default=0.1, help="behind attention and MLP")
    group.add_argument("--attention-dropout", type=float, default=0.1, help="of the weights of attention")
    group.add_argument("--init-method-std", type=float, default=0.02, help="of the start weights")
    group.add_argument(
        "--make-vocab-size-divisible-by", type=int, default=128, help="times tensor-parallel ranks"
    )
    group.add_argument(
        "--transformer-impl",
        choices=["local", "transformer_engine"],
        default="local",
        help="GPT's layers: ours, or Transformer Engine's (CUDA, no dropout)",
    )
    group.add_argument(
        "--recompute-granularity",
        choices=["none", "selective", "full"],
        default=None,
        help="full: keep only each layer's input, compute the rest again in the backward; selective: that of the "
        "attention's core (none, or what the schedule auto chooses)",
    )
    group.add_argument(
        "--recompute-interval",
        type=int,
        default=1,
        metavar="K",
        help="recompute every K-th layer (%(default)s)",
    )
    group.add_argument("--seed", type=int, default=1234, help="of weights, dropout and the order of the data")


def _add_data(group: Any) -> None:
    group.add_argument(
        "--data-path",
        nargs="*",
        default=[],
        metavar="PATH",
        help="a prepared folder or .bin/.idx prefix, or a blend: 0.3 a 0.7 b",
    )
    group.add_argument("--split", default="969,30,1", help="train, valid, test shares (%(default)s)")


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
        help="accepted for launch scripts; must agree with the files, which say what they are",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="GPT-2 vocab.json, with --merge-file")
    group.add_argument("--merge-file", metavar="FILE")


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
        help="accepted for launch scripts; must agree with the file, which says what it is",
    )
    group.add_argument(
        "--mask-prob", type=float, default=0.15, help="share of the tokens to predict (%(default)s)"
    )
    group.add_argument(
        "--short-seq-prob", type=float, default=0.1, help="share of shorter samples (%(default)s)"
    )
    group.add_argument(
        "--bert-no-binary-head",
        action="store_true",
        help="masked words only: no sentence pairs, no head for them",
    )


def _add_training(group: Any) -> None:
    group.add_argument(
        "--train-iters", type=int, default=100, help="optimizer steps in all, those before a resume included"
    )
    group.add_argument("--eval-interval", type=int, default=0, metavar="STEPS", help="0: only at the end")
    group.add_argument("--eval-iters", type=int, default=2, help="steps an evaluation averages over; 0: none")
    group.add_argument("--save", metavar="DIR", help="write checkpoints here")
    group.add_argument("--save-interval", type=int, default=0, metavar="STEPS", help="0: only at the end")
    group.add_argument("--load", metavar="DIR", help="resume from the latest checkpoint in DIR")
    group.add_argument(
        "--log-interval",
        type=int,
        default=1,
        metavar="STEPS",
        help="print every so many steps, and the first and the last (%(default)s)",
    )


def _add_json_flags(group: Any) -> None:
    group.add_argument("--schedule", help="ds_ext.schedule: a name, auto or a timetable file")
    group.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="ds_ext.import: a Python module with a schedule of your own; repeatable",
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
    group.add_argument("--adam-beta1", type=float, help="optimizer.params.betas, the first")
    group.add_argument("--adam-beta2", type=float, help="optimizer.params.betas, the second")
    group.add_argument("--adam-eps", type=float, help="optimizer.params.eps")
    group.add_argument("--bf16", action="store_true", help="bf16.enabled")
    group.add_argument("--fp16", action="store_true", help="fp16.enabled")
    group.add_argument("--sequence-parallel", action="store_true", help="ds_ext.sequence_parallel")
    group.add_argument(
        "--clip-grad", type=float, help="gradient_clipping (DeepSpeed's default is 1.0; 0: none)"
    )
    group.add_argument("--enable-bitpipe-schedule", action="store_true", help='"schedule": "bitpipe"')
    group.add_argument("--use-dpp", action="store_true", help='"schedule": "dpp"')
    group.add_argument("--forward-backward-disaggregating", action="store_true", help='"schedule": "fbd"')
    group.add_argument(
        "--ignore-forward-tensor-parallel",
        action="store_true",
        help="ds_ext.fbd.merge_forward_tensor_parallel",
    )
    group.add_argument("--node-ips", metavar="IP,IP", help="ds_ext.transport_options.node_ips")
