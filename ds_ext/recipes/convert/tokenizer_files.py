"""Tokenizer of a converted model: search, check and copy."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..data.blend import parse_data_path
from ..data.tokenizer import load_tokenizer
from ..data.tokenizer_base import Tokenizer

_ONLY_TRANSFORMERS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def find_tokenizer(path: Path | None, state: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer with which a checkpoint's model was trained; None if it is no longer in the data folder.

    Args:
        path: file or folder of the tokenizer; None: search the folder of the training data.
        state: state saved by the training script, with the tokenizer's fingerprint and the words of --data-path.

    Raises:
        ConfigError: if the tokenizer at ``path`` is a different one or cannot be read.
    """
    fingerprint = state.get("tokenizer")
    if path is not None:
        tokenizer = load_tokenizer(path)
        if fingerprint not in (None, tokenizer.fingerprint):
            raise ConfigError(
                f"--tokenizer: the model was trained with the tokenizer {fingerprint} (got {tokenizer.fingerprint} in "
                f"{path}). Use the folder of the training data."
            )
        return tokenizer
    data_path = state.get("data_path")
    if not isinstance(data_path, list) or fingerprint is None:
        return None
    try:
        _, prefixes = parse_data_path([str(word) for word in data_path])
        candidates = [load_tokenizer(prefix.parent) for prefix in prefixes[:1]]
    except ConfigError:
        return None
    return next((tokenizer for tokenizer in candidates if tokenizer.fingerprint == fingerprint), None)


def save_tokenizer(tokenizer: Tokenizer | None, folder: Path, source: Path | None) -> str:
    """Write the tokenizer's files into ``folder`` and return a line for the summary.

    Args:
        tokenizer: tokenizer of the model; None: write nothing.
        folder: folder of the converted model.
        source: value of ``--tokenizer``; the files of a Hugging Face folder that only transformers reads are copied.
    """
    if tokenizer is None:
        return (
            "tokenizer: not copied, because the folder of the training data is unknown or moved. Use --tokenizer "
            "FOLDER, or copy tokenizer.json."
        )
    copied = (
        [] if source is None else [source / name for name in _ONLY_TRANSFORMERS if (source / name).is_file()]
    )
    for path in copied:
        shutil.copyfile(path, folder / path.name)
    names = dict.fromkeys((*tokenizer.save(folder), *(path.name for path in copied)))  # an ordered set
    return f"tokenizer: {', '.join(names)}"


def find_hf_tokenizer(folder: Path) -> tuple[Path, Tokenizer] | None:
    """Return (path for --tokenizer, tokenizer) of a Hugging Face folder; None if it has no usable tokenizer."""
    try:
        return folder, load_tokenizer(folder)
    except ConfigError:
        return None
