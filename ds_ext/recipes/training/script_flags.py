"""Parser of the training scripts, with Megatron's flag names. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NoReturn

from ... import __version__
from ...environment import package_version
from ...errors import ConfigError, Problems
from ...model.config import GPT_FIELDS, TransformerConfig
from ...model.field_flags import add_flags, flag_name, flags_of
from ..data.blend import DEFAULT_SPLIT
from .megatron_flags import JSON_KEYS, TOKENIZER_TYPES, TRAIN_KEYS, Harmless, row_of

Model = Literal["gpt", "bert"]
SCRIPTS: Mapping[Model, str] = MappingProxyType({"gpt": "train_gpt.py", "bert": "train_bert.py"})
UNSET = object()  # value of a flag that is missing or wrong
# Fields whose flags only train_gpt.py has.
_OF_GPT = ("vocab_size", "layernorm_epsilon", *GPT_FIELDS)


def choice(value: Any, choices: Iterable[Any]) -> Any:
    """Return the choice that equals ``value`` except for case; without one, ``value`` itself."""
    return next((c for c in choices if isinstance(c, str) and c.lower() == str(value).lower()), value)


class Parser(argparse.ArgumentParser):
    """Parser that collects wrong values in ``problems`` and sets their flags to UNSET."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.problems = Problems()

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing in every rank."""
        raise ConfigError(f"{message}. `python {self.prog} --help` lists the flags.")

    def add_harmless(self, words: Iterable[str]) -> None:
        for flag in dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")):
            row = row_of(flag)[1]
            if flag not in self._option_string_actions and isinstance(row, Harmless):
                nargs = None if row.nargs == 1 else row.nargs
                self.add_argument(flag, nargs=nargs, action=_Ignore, default=argparse.SUPPRESS)

    def without_values(self, words: Iterable[str]) -> Iterator[str]:
        """Yield the words of a command line; ``--switch=value``, which argparse stops at, is a problem."""
        for word in words:
            flag, sign, value = word.partition("=")
            action = self._option_string_actions.get(flag)
            if sign and action is not None and action.nargs == 0:
                self.problems.add(f"{flag}: takes no value (got {value}). Write {flag}.")
                word = flag
            yield word

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self._add_problem(action, error)
            return 0

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if not arg_strings and action.nargs is None:
            return UNSET
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self._add_problem(action, error)
            return UNSET

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        return choice(super()._get_value(action, arg_string), action.choices or ())

    def _add_problem(self, action: argparse.Action, error: argparse.ArgumentError) -> None:
        self.problems.add(f"{action.option_strings[0]}: {error.message}.", action.dest)


class _Ignore(argparse.Action):
    """Flag without effect, added to ``ignored_flags`` as (flag, values)."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        words = values if isinstance(values, list) else [] if values in (None, UNSET) else [values]
        namespace.ignored_flags = [*getattr(namespace, "ignored_flags", ()), (option_string, words)]


class _SetKeys(argparse.Action):
    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        for key, value in TRAIN_KEYS[self.dest].values(values).items():
            setattr(namespace, key, value)


class _WithDefaults(argparse.HelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        shown = text and "%(default)" not in text and default not in (None, False, [], argparse.SUPPRESS)
        return f"{text} (%(default)s)" if shown else text


def build_parser(prog: str, model: Model = "gpt") -> Parser:
    parser = Parser(
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
        "--verbose", action="store_true", help='print the whole plan, as "print_plan": "all" does'
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
    data = parser.add_argument_group("data")
    _add_data(data)
    if model == "gpt":
        _add_gpt_tokenizer(data)
    else:
        _add_bert_data(data)
    _add_training(parser.add_argument_group("training"))
    _add_json_flags(
        parser.add_argument_group("keys of the JSON (an error if the JSON has a different value)")
    )
    _add_other_names(parser.add_argument_group("other names"), {action.dest for action in parser._actions})
    return parser


def _versions() -> str:
    words = [f"ds_ext {__version__}"]
    for package in ("deepspeed", "torch"):
        words.append(f"{package} {package_version(package) or 'is not installed'}")
    return ", ".join(words)


def _add_model(group: Any) -> None:
    group.add_argument(
        "--stage-layers",
        metavar="A,B,..",
        help="transformer layers of every stage; balanced: take the work of the head into account (evenly)",
    )
    common = [name for name in flags_of(TransformerConfig) if name not in _OF_GPT]
    add_flags(group, TransformerConfig, common)


def _add_gpt_options(group: Any) -> None:
    group.add_argument(
        "--hf-model",
        metavar="FOLDER",
        help="Hugging Face model: sizes, tokenizer and, without --load, initial weights",
    )
    add_flags(group, TransformerConfig, _OF_GPT)
    group.add_argument(
        "--rope-scaling-factor", type=float, default=8.0, help="factor of --use-rope-scaling (%(default)s)"
    )
    group.add_argument(
        "--group-query-attention", action="store_true", help="share keys and values between heads"
    )


def _add_data(group: Any) -> None:
    group.add_argument(
        "--data-path",
        nargs="*",
        default=[],
        metavar="PATH",
        help="prepared folder, .bin/.idx prefix, or a blend: 0.3 a 0.7 b",
    )
    group.add_argument("--split", default=DEFAULT_SPLIT, help="shares of train, valid and test (%(default)s)")


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
    group.add_argument(
        "--train-samples", type=int, metavar="N", help="samples of all steps, instead of --train-iters"
    )
    group.add_argument("--eval-interval", type=int, default=0, metavar="STEPS", help="0: at the end only")
    group.add_argument("--eval-iters", type=int, default=2, help="steps per evaluation; 0: no evaluation")
    group.add_argument("--save", metavar="DIR", help="folder for checkpoints")
    group.add_argument("--save-interval", type=int, default=0, metavar="STEPS", help="0: at the end only")
    group.add_argument(
        "--async-save",
        action="store_true",
        help="copy the state to memory, and write checkpoints beside the next steps",
    )
    group.add_argument(
        "--keep-checkpoints",
        type=int,
        default=0,
        metavar="N",
        help="after a save, remove the older complete checkpoints of --save except N in all; 0: keep all",
    )
    group.add_argument(
        "--stop-if-not-saved",
        action="store_true",
        help="end the job if a checkpoint cannot be written; else go on",
    )
    group.add_argument(
        "--exit-signal-handler",
        action="store_true",
        help="after SIGTERM or SIGUSR1 to the launcher or a rank, end the step, save, and exit with 0; a launcher "
        "that gets the signal may end with its own status (torchrun: 1, deepspeed: 143)",
    )
    group.add_argument(
        "--exit-signal",
        choices=["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"],
        help="the only signal of --exit-signal-handler, which this flag includes",
    )
    group.add_argument(
        "--exit-duration-in-mins",
        type=float,
        metavar="M",
        help="save and exit with 0 after the step in which the ranks have run for M minutes",
    )
    group.add_argument(
        "--exit-interval",
        type=int,
        default=0,
        metavar="STEPS",
        help="save and exit with 0 after a step that is divisible by it; 0: never",
    )
    group.add_argument("--wandb-exp-name", metavar="NAME", help="name of the run in wandb")
    group.add_argument("--load", metavar="DIR", help="folder of the checkpoint to resume from")
    group.add_argument(
        "--exit-on-missing-checkpoint", action="store_true", help="refuse a --load folder without checkpoints"
    )
    group.add_argument(
        "--log-interval",
        type=int,
        default=1,
        metavar="STEPS",
        help="print every STEPS steps, and the first and last step (%(default)s)",
    )


def _add_json_flags(group: Any) -> None:
    group.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="ds_ext.import: Python module with a custom schedule; repeatable",
    )
    for key, row in JSON_KEYS.items():
        group.add_argument(flag_name(key), **row.arguments)


def _add_other_names(group: Any, known: Collection[str]) -> None:
    """Add Megatron's flags for keys of "train" with other names; ``known`` are the keys of this script."""
    for key, row in TRAIN_KEYS.items():
        if row.keys.keys() <= {*known}:
            settings = {"nargs": 0} if row.kind is None else {"type": row.kind, "metavar": "N"}
            settings |= {"action": _SetKeys, "default": argparse.SUPPRESS, "help": row.help}
            group.add_argument(flag_name(key), **settings)
