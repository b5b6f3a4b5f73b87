"""``python -m ds_ext prepare``: convert text to a folder: ``text_document.bin/.idx``, a tokenizer and ``meta.json``.

The pair of files has Megatron's indexed format. For GPT every document is one sequence that ends with an
end-of-document token (Megatron's ``--append-eod``). For BERT, selected by a WordPiece tokenizer, every sentence is one
sequence (``--split-sentences``). Chat data also has a loss mask; see chat/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...environment import package_version
from ...errors import ConfigError
from ...model.data_layout import DATA_NAME, LOSS_MASK_NAME, META_NAME, TOKENIZER_NAMES
from .finetune import checkpoints_of, seq_length_of, write_jobs
from .sources import Source, open_source, row_files, source_details
from .tokenizer import flagged_tokenizer, train_bpe, train_sentencepiece
from .tokenizer_base import Tokenizer
from .wordpiece import VOCAB_NAME, WordPieceTokenizer, train_wordpiece

if TYPE_CHECKING:
    from .chat.template import ChatTemplate  # imports numpy

FORMAT = 1
ENCODE_BATCH_CHARACTERS = 2_000_000
TOKENIZER_TRAINING_CHARACTERS = 100_000_000
PROGRESS_INTERVAL_S = 5.0
VOCAB_SIZE = 4096
TRAINERS = {"bpe": train_bpe, "sentencepiece": train_sentencepiece, "wordpiece": train_wordpiece}
# Megatron's tokenizer type -> flags of its files.
MEGATRON_TYPES = {
    "GPT2BPETokenizer": "--vocab-file and --merge-file",
    "BertWordPieceLowerCase": "--vocab-file vocab.txt",
    "BertWordPieceCase": "--vocab-file vocab.txt",
    "HuggingFaceTokenizer": "--tokenizer-model FOLDER",
    "SentencePieceTokenizer": "--tokenizer-model FILE",
    "GPTSentencePieceTokenizer": "--tokenizer-model FILE",
    "Llama2Tokenizer": "--tokenizer-model FILE",
}
NEXT_GPT = "train_gpt.py", "--deepspeed_config", "configs/bitpipe.json"
NEXT_BERT = "train_bert.py", "--deepspeed_config", "configs/bert_bitpipe.json"
VERSIONED_PACKAGES = ("ds_ext", "tokenizers", "sentencepiece", "numpy", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        "--input",
        default="stdlib",
        metavar="stdlib|PATH",
        help="the Python standard library, a text file, a .jsonl file or a folder of these (default: stdlib)",
    )
    parser.add_argument(
        "--output",
        "--output-prefix",
        type=Path,
        metavar="FOLDER",
        help="output folder (default: data/SOURCE_NAME; for BERT data/SOURCE_NAME_bert)",
    )
    parser.add_argument(
        "--format",
        choices=["text", "chat"],
        default="text",
        help="text, or chat: conversations (messages, ShareGPT or Alpaca), rendered by the chat template of "
        "--tokenizer FOLDER (default: text)",
    )
    parser.add_argument(
        "--json-key",
        "--json-keys",
        nargs="+",
        default=["text"],
        help="key of the text in jsonl objects (default: text)",
    )
    parser.add_argument(
        "--tokenizer-type",
        choices=[*TRAINERS, *MEGATRON_TYPES],
        default="bpe",
        help="tokenizer to train (default: bpe); wordpiece prepares data for BERT, split into sentences. Megatron's "
        "types need the files of an existing tokenizer",
    )
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--vocab-size", type=int, help=f"size of the trained tokenizer (default: {VOCAB_SIZE})"
    )
    tokenizer.add_argument(
        "--tokenizer",
        "--tokenizer-model",
        metavar="PATH",
        help="existing tokenizer.json, .model, vocab.txt or prepared folder to use instead of training; for chat a "
        "tokenizer folder of transformers",
    )
    tokenizer.add_argument(
        "--vocab-file", help="GPT-2's vocab.json, or BERT's vocab.txt, to use instead of training"
    )
    parser.add_argument("--merge-file", help="GPT-2's merges.txt for --vocab-file")
    parser.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help="encode special tokens in the text, such as <|im_end|>, as their ids and not as plain text; chat: always",
    )
    parser.add_argument(
        "--epochs",
        type=float,
        metavar="N",
        help="epochs of the fine-tuning JSONs for the folder of a model (default: 3 for chats, 1 for text)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="threads that tokenize (default: all cores)")
    for name, always in (
        ("--append-eod", "documents of GPT end with a token"),
        ("--split-sentences", "for BERT"),
    ):
        parser.add_argument(name, action="store_true", help=f"accepted from Megatron, always on: {always}")
    parser.add_argument("--force", action="store_true", help="replace data that is already in the folder")


def run(args: argparse.Namespace) -> int:
    from .blend import DEFAULT_SPLIT, parse_split, split_documents

    _take_megatrons_flags(args)
    if (args.vocab_file is None) != (args.merge_file is None):
        raise ConfigError(
            f"--vocab-file and --merge-file: both are needed (got only {args.vocab_file or args.merge_file}). Pass "
            "both, or BERT's vocab.txt with --tokenizer."
        )
    if args.epochs is not None and not args.epochs > 0:
        raise ConfigError(f"--epochs: must be greater than 0 (got {args.epochs:g}).")
    tokenizer = flagged_tokenizer(args)
    template = _load_template(args, tokenizer)
    is_bert = isinstance(tokenizer, WordPieceTokenizer) or (
        tokenizer is None and args.tokenizer_type == "wordpiece"
    )
    output = _output_folder(args, is_bert)
    arguments = _recorded_arguments(args, tokenizer, template)
    meta = None if args.force else _read_finished(output, arguments)
    if meta is None:
        start_s = time.monotonic()
        meta = _prepare(args, tokenizer, template, output, arguments)
        print(f"wrote {output} in {time.monotonic() - start_s:.0f} s")
    else:
        print(f"{output} is already prepared (--force prepares it again)")
    _print_summary(meta)
    words = ["deepspeed", "--num_gpus", "4", *(NEXT_BERT if is_bert else NEXT_GPT)]
    if template is not None:
        words += ["--seq-length", str(seq_length_of(meta, {}))]
    words += ["--data-path", str(output), "--save", checkpoints_of(output)]
    if not split_documents(meta["documents"], parse_split(DEFAULT_SPLIT))[1]:
        words += ["--eval-iters", "0"]
    commands, note = [], ""
    if args.tokenizer and not is_bert:
        commands, note = write_jobs(Path(args.tokenizer), output, meta, args.epochs)
    if note:
        print(note)
    if commands:
        print("the learning rates of the JSONs (lr, min_lr) suit pretrained weights")
    print("next: " + "\nor with LoRA: ".join(commands or [command_lines(words)]))
    return 0


def command_lines(words: Sequence[str]) -> str:
    """Return a command for a shell, in lines with at most 120 columns that start at column 6."""
    words = [shlex.quote(word) for word in words]
    lines = [words[0]]
    for word, value in zip(words[1:], [*words[2:], ""], strict=True):
        if word.startswith("--") and len(f"{lines[-1]} {word} {value}") > 120 - 6 - len(" \\"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n      ".join(lines)


def _output_folder(args: argparse.Namespace, is_bert: bool) -> Path:
    source = Path(args.source).resolve()
    output: Path = args.output or Path("data") / (source.stem + ("_bert" if is_bert else ""))
    if source.is_dir() and output.resolve().is_relative_to(source):
        raise ConfigError(
            f"--output: the folder is inside --source {args.source} (got {output}). Use a folder outside it."
        )
    return output


def _print_summary(meta: dict[str, Any]) -> None:
    if "loss_mask" in meta:
        from .chat.files import summary

        print(summary(meta))
    else:
        print(
            f"documents {meta['documents']}, tokens {meta['tokens']}, bytes per token "
            f"{meta['bytes'] / meta['tokens']:.2f}, vocabulary {meta['vocab_size']}, unigram entropy "
            f"{meta['unigram_entropy_nats']:.3f} nats"
        )
    if special_tokens := meta.get("special_tokens"):
        is_parsed = "parse_special_tokens" in meta["arguments"]
        encoding = "encoded as their ids" if is_parsed else "encoded as plain text; --parse-special-tokens"
        counts = ", ".join(f"{token} {count}" for token, count in special_tokens.items())
        print(f"special tokens in the text ({encoding}): {counts}")


def _take_megatrons_flags(args: argparse.Namespace) -> None:
    if len(args.json_key) > 1:
        raise ConfigError(
            f"--json-keys: the text has one key (got {' '.join(args.json_key)}). Prepare each key into a folder."
        )
    (args.json_key,) = args.json_key
    if args.workers is not None:
        if args.workers < 1:
            raise ConfigError(f"--workers: must be at least 1 (got {args.workers}).")
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # read by the package tokenizers
    files = MEGATRON_TYPES.get(args.tokenizer_type)
    if files is None:
        return
    if args.tokenizer_type.startswith("Bert") and args.vocab_file and args.merge_file is None:
        args.tokenizer = args.vocab_file
        args.vocab_file = None
    is_complete = args.vocab_file and args.merge_file if "--merge-file" in files else args.tokenizer
    if not is_complete:
        raise ConfigError(f"--tokenizer-type: {args.tokenizer_type} needs {files} (got none). Add the files.")


def _load_template(args: argparse.Namespace, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    if args.format != "chat":
        return None
    if not row_files(Path(args.source)):
        raise ConfigError(
            f"--format chat: needs a .jsonl file or a folder with some (got --source {args.source}). Use one JSON "
            "object with messages per line."
        )
    if tokenizer is None or not args.tokenizer or not Path(args.tokenizer).is_dir():
        raise ConfigError(
            f"--format chat: needs the folder of a tokenizer with a chat template (got --tokenizer {args.tokenizer}). "
            "Use the folder of a chat model."
        )
    if isinstance(tokenizer, WordPieceTokenizer):
        raise ConfigError(
            f"--format chat: BERT's WordPiece tokenizer has no end-of-document token (got {args.tokenizer}). Use the "
            "folder of a chat model."
        )
    from .chat.template import ChatTemplate

    return ChatTemplate(args.tokenizer, tokenizer.eod_id)


def _recorded_arguments(
    args: argparse.Namespace, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> dict[str, Any]:
    """Return everything that determines the result: options, and state of the source files."""
    return {
        "source": args.source,
        "json_key": args.json_key,
        "tokenizer": (
            {"fingerprint": tokenizer.fingerprint}
            if tokenizer is not None
            else {"type": args.tokenizer_type, "vocab_size": args.vocab_size or VOCAB_SIZE}
        ),
        "source_details": source_details(args.source),
        **({} if template is None else {"chat_template": template.fingerprint}),
        **({"parse_special_tokens": True} if args.parse_special_tokens else {}),
    }


def _read_finished(output: Path, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Return meta.json of complete data with the same arguments; None without complete data."""
    try:
        meta = json.loads((output / META_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    prefixes = [DATA_NAME, *([meta["loss_mask"]] if "loss_mask" in meta else [])]
    if not all((output / name).exists() for prefix in prefixes for name in _indexed_file_names(prefix)):
        return None
    old = meta.get("arguments", {})
    changes = [
        f"{key} {arguments.get(key)} instead of {old.get(key)}"
        for key in {**old, **arguments}
        if old.get(key) != arguments.get(key)
    ]
    if changes:
        raise ConfigError(
            f"--output: {output} contains data prepared with different arguments (got {'; '.join(changes)}). Use "
            "another folder, or --force to replace the data."
        )
    return meta


def _prepare(
    args: argparse.Namespace,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    output: Path,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Write all files to a temporary folder and move them to ``output`` when they are complete, meta.json last."""
    print(f"reading {args.source}", flush=True)
    source = open_source(args.source, args.json_key) if template is None else None
    # Moving files is fast within one file system, and a failed run must not create `output`.
    nearest = next(path for path in (output, *output.parents) if path.exists())
    try:
        folder = tempfile.TemporaryDirectory(prefix=".partial-", dir=nearest)
    except OSError as error:
        raise ConfigError(
            f"--output: cannot write to {nearest} (got {output}: {error.strerror}). Use another folder."
        ) from None
    with folder:
        partial = Path(folder.name)
        if source is not None:
            tokenizer = tokenizer or _train_tokenizer(args, source)
            if args.parse_special_tokens:
                tokenizer.parse_special_tokens()
            counts = _write_texts(source, tokenizer, partial)
            source_meta = {"name": source.name, **source.details}
        else:
            assert tokenizer is not None and template is not None
            counts = _write_chat(Path(args.source), template, tokenizer.vocab_size, partial)
            source_meta = {"name": args.source, **source_details(args.source)}
        tokenizer_files = tokenizer.save(partial)
        meta = {
            "format": FORMAT,
            "arguments": arguments,
            "source": source_meta,
            **counts,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
            "tokenizer": tokenizer_files[0],
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "versions": _versions(),
        }
        (partial / META_NAME).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        masks = _indexed_file_names(LOSS_MASK_NAME) if template is not None else ()
        output.mkdir(parents=True, exist_ok=True)
        # Without meta.json the folder counts as incomplete if this process is killed while it replaces files.
        for name in (META_NAME, *TOKENIZER_NAMES, VOCAB_NAME, *_indexed_file_names(LOSS_MASK_NAME)):
            (output / name).unlink(missing_ok=True)
        for name in (*tokenizer_files, *_indexed_file_names(DATA_NAME), *masks, META_NAME):
            os.replace(partial / name, output / name)
    return meta


def _write_chat(path: Path, template: ChatTemplate, vocab_size: int, folder: Path) -> dict[str, Any]:
    from .chat.files import write_conversations
    from .chat.rows import read_conversations

    with _progress(source_details(str(path))["bytes"]) as advance:
        return write_conversations(read_conversations(path), template, vocab_size, folder, advance)


def _indexed_file_names(name: str) -> tuple[str, str]:
    return f"{name}.bin", f"{name}.idx"


def _train_tokenizer(args: argparse.Namespace, source: Source) -> Tokenizer:
    vocab_size = args.vocab_size or VOCAB_SIZE
    print(f"training a {args.tokenizer_type} tokenizer with {vocab_size} tokens", flush=True)
    texts = next(_batches(source.documents(), TOKENIZER_TRAINING_CHARACTERS))
    tokenizer = TRAINERS[args.tokenizer_type](texts, vocab_size)
    if tokenizer.vocab_size < vocab_size:
        print(f"the text is too small for {vocab_size} tokens; the vocabulary has {tokenizer.vocab_size}")
    return tokenizer


def _write_texts(source: Source, tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    from .indexed import DocumentWriter

    writer = DocumentWriter(folder, tokenizer.vocab_size)
    longest_first = sorted(filter(None, tokenizer.special_tokens), key=len, reverse=True)
    special_tokens = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    special_counts: Counter[str] = Counter()
    sequences = num_bytes = 0
    with _progress(source.num_bytes) as advance:
        for batch in _batches(source.documents(), ENCODE_BATCH_CHARACTERS):
            for document in filter(None, tokenizer.encode_documents(batch)):
                writer.add(document)
                sequences += len(document)
            special_counts.update(token for text in batch for token in special_tokens.findall(text))
            batch_bytes = sum(len(text.encode()) for text in batch)
            num_bytes += batch_bytes
            advance(batch_bytes)
    return {
        **writer.close(),
        **({"sentences": sequences} if isinstance(tokenizer, WordPieceTokenizer) else {}),
        "bytes": num_bytes,
        "special_tokens": dict(special_counts.most_common()),
    }


@contextlib.contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that reports encoded bytes: as a bar on a terminal, as a line every 5 s elsewhere."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    on_terminal = sys.stdout.isatty()
    done_bytes, next_line_s = 0, time.monotonic() + PROGRESS_INTERVAL_S
    columns = ("encoding", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not on_terminal) as progress:
        task = progress.add_task("encoding", total=total_bytes)

        def advance(num_bytes: int) -> None:
            nonlocal done_bytes, next_line_s
            done_bytes += num_bytes
            progress.advance(task, num_bytes)
            if not on_terminal and time.monotonic() >= next_line_s:
                next_line_s = time.monotonic() + PROGRESS_INTERVAL_S
                shown_mb = min(done_bytes, total_bytes) / 1e6
                print(f"encoding: {shown_mb:.1f} of {total_bytes / 1e6:.1f} MB", flush=True)

        yield advance


def _batches(texts: Iterable[str], batch_characters: int) -> Iterator[list[str]]:
    """Yield lists of texts with at least ``batch_characters`` characters, except for the last list."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= batch_characters:
            yield batch
            batch = []
            num_characters = 0
    if batch:
        yield batch


def _versions() -> dict[str, str]:
    versions = {package: package_version(package) for package in VERSIONED_PACKAGES}
    return {"python": platform.python_version(), **{name: v for name, v in versions.items() if v is not None}}
