"""`python -m ds_ext prepare`: text to `text_document.bin/.idx`, a tokenizer and `meta.json` in one folder.

The pair is Megatron's indexed dataset, written by megatron-core's own builder: with an end-of-document token
after each document (Megatron's `--append-eod`) for GPT, or, with a WordPiece tokenizer, with every sentence a
sequence of its own (`--split-sentences`) for BERT.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ds_ext.data.layout import DATA_NAME, META_NAME, TOKENIZER_NAMES
from ds_ext.data.progress import progress
from ds_ext.data.sources import Source, open_source, source_details
from ds_ext.data.tokenizer import load_gpt2_files, load_tokenizer, train_bpe, train_sentencepiece
from ds_ext.data.tokenizer_base import Tokenizer
from ds_ext.data.wordpiece import VOCAB_NAME, WordPieceTokenizer, train_wordpiece
from ds_ext.errors import ConfigError

FORMAT = 1
ENCODE_BATCH_BYTES = 2_000_000
TOKENIZER_TRAINING_BYTES = 100_000_000
VOCAB_SIZE = 4096
SOURCE_HELP = "the Python standard library, a text file, a .jsonl file or a folder (default: stdlib)"
TRAINERS = {"bpe": train_bpe, "sentencepiece": train_sentencepiece, "wordpiece": train_wordpiece}
TYPE_HELP = (
    "tokenizer to train (default: byte-level BPE); wordpiece makes data for BERT, split into sentences"
)
TOKENIZER_HELP = "use this tokenizer.json, .model, vocab.txt or prepared folder instead of training one"
NEXT_GPT = "train_gpt.py --deepspeed_config configs/bitpipe.json"
NEXT_BERT = "train_bert.py --deepspeed_config configs/bert_bitpipe.json"
VERSIONED_PACKAGES = ("ds_ext", "tokenizers", "sentencepiece", "megatron-core", "numpy", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb `prepare`."""
    parser.add_argument("--source", default="stdlib", metavar="stdlib|PATH", help=SOURCE_HELP)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="default: data/NAME_OF_THE_SOURCE; with _bert behind it for BERT",
    )
    parser.add_argument("--json-key", default="text", help="key of the text in jsonl objects (default: text)")
    parser.add_argument("--tokenizer-type", choices=[*TRAINERS], default="bpe", help=TYPE_HELP)
    parser.add_argument("--vocab-size", type=int, help=f"of a tokenizer trained here (default: {VOCAB_SIZE})")
    parser.add_argument("--tokenizer", metavar="PATH", help=TOKENIZER_HELP)
    parser.add_argument("--vocab-file", help="GPT-2's vocab.json, instead of training a tokenizer")
    parser.add_argument("--merge-file", help="GPT-2's merges.txt that belongs to --vocab-file")
    parser.add_argument("--force", action="store_true", help="prepare again although the folder holds data")


def run(args: argparse.Namespace) -> int:
    """Prepare the data unless the same is there already; returns the exit code 0.

    Raises:
        ConfigError: a source, a tokenizer or a package is missing, or the folder holds other data and not
        --force.
    """
    _check_options(args)
    source_path = Path(args.source).resolve()
    given = _given_tokenizer(args)
    for_bert = isinstance(given, WordPieceTokenizer) or (given is None and args.tokenizer_type == "wordpiece")
    output = args.output or Path("data") / (source_path.stem + ("_bert" if for_bert else ""))
    if source_path.is_dir() and output.resolve().is_relative_to(source_path):
        raise ConfigError(f"--output {output} lies inside --source {args.source}: choose a folder outside it")
    identity = _identity(args)
    meta = None if args.force else _prepared(output, identity)
    if meta is None:
        started_s = time.monotonic()
        meta = _prepare(args, output, identity)
        print(f"wrote {output} in {time.monotonic() - started_s:.0f} s")
    else:
        print(f"{output} is prepared already (--force prepares it again)")
    print(
        f"{meta['documents']} document{'s' if meta['documents'] != 1 else ''}, {meta['tokens']} tokens, "
        f"{meta['bytes'] / meta['tokens']:.2f} bytes a token, vocabulary {meta['vocab_size']}, "
        f"unigram entropy {meta['unigram_entropy_nats']:.3f} nats"
    )
    print(
        f"next: deepspeed --num_gpus 4 {NEXT_BERT if for_bert else NEXT_GPT} --data-path {output} "
        f"--save checkpoints/{output.name}"
    )
    return 0


def _check_options(args: argparse.Namespace) -> None:
    if (args.vocab_file is None) != (args.merge_file is None):
        raise ConfigError(
            "--vocab-file and --merge-file belong together: give both (BERT's vocab.txt goes to --tokenizer)"
        )
    if args.tokenizer and args.vocab_file:
        raise ConfigError("--tokenizer and --vocab-file exclude each other: give one of them")
    if args.vocab_size is not None and (args.tokenizer or args.vocab_file):
        raise ConfigError(
            f"--vocab-size {args.vocab_size} is for a tokenizer that is trained here; the given one has its "
            "own size"
        )


def _identity(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the result: options, and for a path what its files looked like."""
    given = _given_tokenizer(args)
    if given is not None:
        tokenizer = {"fingerprint": given.fingerprint}
    else:
        tokenizer = {"type": args.tokenizer_type, "vocab_size": args.vocab_size or VOCAB_SIZE}
    return {
        "source": args.source,
        "json_key": args.json_key,
        "tokenizer": tokenizer,
        "source_details": source_details(args.source),
    }


def _prepared(output: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """meta.json of finished data made from the same arguments; None when there is no finished data."""
    path = output / META_NAME
    names = (f"{DATA_NAME}.bin", f"{DATA_NAME}.idx")
    if not path.exists() or not all((output / name).exists() for name in names):
        return None
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    found = meta.get("arguments", {})
    changed = [key for key, value in identity.items() if found.get(key) != value]
    if changed:
        differences = "; ".join(f"{key}: there {found.get(key)}, now {identity[key]}" for key in changed)
        raise ConfigError(
            f"{output} holds data prepared otherwise ({differences}). Choose another --output, or --force to "
            "replace it."
        )
    return meta


def _prepare(args: argparse.Namespace, output: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Build everything under a temporary name in `output` and move it into place, meta.json last."""
    print(f"reading {args.source}", flush=True)
    source = open_source(args.source, args.json_key)
    _import_builder()
    with _made(output), tempfile.TemporaryDirectory(prefix=".partial-", dir=output) as folder:
        partial = Path(folder)
        tokenizer = _make_tokenizer(args, source)
        tokenizer_files = tokenizer.save(partial)
        counts = _write_tokens(source, tokenizer, partial / DATA_NAME)
        meta = {
            "format": FORMAT,
            "arguments": identity,
            "source": {"name": source.name, **source.details},
            **counts,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
            "tokenizer": tokenizer_files[0],
            "tokenizer_fingerprint": tokenizer.fingerprint,
            "versions": _versions(),
        }
        (partial / META_NAME).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        # While the files are exchanged there is no meta.json: a run that is cut here is seen as unfinished.
        for name in (META_NAME, *TOKENIZER_NAMES, VOCAB_NAME):
            (output / name).unlink(missing_ok=True)
        for name in (*tokenizer_files, f"{DATA_NAME}.bin", f"{DATA_NAME}.idx", META_NAME):
            os.replace(partial / name, output / name)
    return meta


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Have ``folder``; if what follows fails, remove it and its parents again as far as they were not there before."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder}: the folder cannot be made ({error.strerror}).") from None
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # something of another's is in it
            for path in new:
                path.rmdir()
        raise


def _given_tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer that the user names, None when one is to be trained."""
    if args.tokenizer:
        return load_tokenizer(args.tokenizer)
    if args.vocab_file:
        return load_gpt2_files(args.vocab_file, args.merge_file)
    return None


def _make_tokenizer(args: argparse.Namespace, source: Source) -> Tokenizer:
    given = _given_tokenizer(args)
    if given is not None:
        return given
    wanted = args.vocab_size or VOCAB_SIZE
    print(f"training a {args.tokenizer_type} tokenizer with {wanted} tokens", flush=True)
    result = TRAINERS[args.tokenizer_type](_first_bytes(source.documents(), TOKENIZER_TRAINING_BYTES), wanted)
    if result.vocab_size < wanted:
        print(f"the text gives only {result.vocab_size} tokens")
    return result


def _write_tokens(source: Source, tokenizer: Tokenizer, prefix: Path) -> dict[str, Any]:
    """Encode all documents into `prefix.bin/.idx`; returns the counts for meta.json."""
    import numpy as np

    # Megatron's rule: two bytes a token where they hold every id.
    dtype = np.uint16 if tokenizer.vocab_size < 65500 else np.int32
    builder = _import_builder()(str(prefix) + ".bin", dtype=dtype)
    frequencies = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    documents = sequences = num_bytes = 0
    with progress("encoding", source.num_bytes) as advance:
        for batch in _batches(source.documents(), ENCODE_BATCH_BYTES):
            for document in filter(None, tokenizer.encode_documents(batch)):
                tokens = np.concatenate([np.array(sequence, dtype) for sequence in document])
                builder.add_document(tokens, [len(sequence) for sequence in document])
                frequencies += np.bincount(tokens, minlength=len(frequencies))
                documents += 1
                sequences += len(document)
            batch_bytes = sum(len(text.encode()) for text in batch)
            num_bytes += batch_bytes
            advance(batch_bytes)
    builder.finalize(str(prefix) + ".idx")
    shares = frequencies[frequencies > 0] / frequencies.sum()
    return {
        "documents": documents,
        **({"sentences": sequences} if isinstance(tokenizer, WordPieceTokenizer) else {}),
        "tokens": int(frequencies.sum()),
        "bytes": num_bytes,
        "max_token_id": int(np.flatnonzero(frequencies).max()),
        "unigram_entropy_nats": float(-(shares * np.log(shares)).sum()),
    }


def _import_builder() -> Any:
    """megatron-core's IndexedDatasetBuilder; the import takes seconds, so only this verb does it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
        try:
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"preparing data needs megatron-core ({error}): pip install 'ds_ext[data]'"
            ) from error
    return IndexedDatasetBuilder


def _batches(texts: Iterable[str], batch_characters: int) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= batch_characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        limit -= len(text)
        yield text


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in VERSIONED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
