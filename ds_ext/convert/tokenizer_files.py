"""The tokenizer of a model that is converted: found, checked, and copied beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.blend import parse_data_path
from ..data.tokenizer import load_tokenizer
from ..data.tokenizer_base import Tokenizer
from ..data.wordpiece import VOCAB_NAME
from ..errors import ConfigError


def tokenizer_of(given: Path | None, state: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer that a checkpoint's model was trained with; None when it is not where the data were.

    Args:
        given: a tokenizer's file, or a folder that holds it.
        state: what the training script has saved: the tokenizer's fingerprint, and the words of --data-path.

    Raises:
        ConfigError: the given one is another, or cannot be read.
    """
    fingerprint = state.get("tokenizer")
    if given is not None:
        tokenizer = load_tokenizer(given)
        if fingerprint not in (None, tokenizer.fingerprint):
            raise ConfigError(
                f"--tokenizer {given} is not the one that the model was trained with: its fingerprint is "
                f"{tokenizer.fingerprint}, and that of the training data {fingerprint}. Give the folder of those data."
            )
        return tokenizer
    words = state.get("data_path")
    if not isinstance(words, list) or fingerprint is None:
        return None
    try:
        _, prefixes = parse_data_path([str(word) for word in words])
        found = [load_tokenizer(prefix.parent) for prefix in prefixes[:1]]
    except ConfigError:
        return None
    return next((tokenizer for tokenizer in found if tokenizer.fingerprint == fingerprint), None)


def save_tokenizer(tokenizer: Tokenizer | None, folder: Path) -> str:
    """Write the tokenizer's files into ``folder``. Returns a line that says so, or what is missing."""
    if tokenizer is None:
        return (
            "the tokenizer is not copied: it is not known here. Give --tokenizer FOLDER_OF_THE_DATA, or copy the "
            "tokenizer.json from there."
        )
    return f"with the tokenizer: {', '.join(tokenizer.save(folder))}"


def tokenizer_beside(folder: Path) -> tuple[Path, Tokenizer] | None:
    """The tokenizer in a folder of transformers', and what to give as --tokenizer; None when we can use none there."""
    for path in (folder, folder / VOCAB_NAME):
        try:
            return path, load_tokenizer(path)
        except ConfigError:
            continue
    return None
