"""Tokenizer of a converted model: search, check and copy."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...hf.folder import CONFIG, GENERATION, read_generation
from ..data.blend import parse_data_path
from ..data.tokenizer import TOKENIZER_CONFIG, declared_token, load_tokenizer
from ..data.tokenizer_base import Tokenizer

_ONLY_TRANSFORMERS = (TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
ORIGIN = _GENERATION, _PATH = "generation", "tokenizer_path"  # keys of a checkpoint's state


def origin_of(model: str | Path | None, tokenizer: str | Path | None) -> dict[str, Any]:
    """Return the part of the state of a checkpoint that :mod:`.to_hf` needs of the model and the tokenizer."""
    generation = {} if model is None else {_GENERATION: read_generation(Path(model))}
    return generation | ({_PATH: os.path.abspath(tokenizer)} if tokenizer else {})


def find_tokenizer(path: Path | None, state: Mapping[str, Any]) -> tuple[Tokenizer, Path] | None:
    """Return the tokenizer with which a checkpoint's model was trained, and its folder; None without one.

    Args:
        path: file or folder of the tokenizer; None: search the folder of ``origin_of``, and that of the training data.
        state: state saved by the training script, with the tokenizer's fingerprint and the words of --data-path.
    """
    fingerprint = state.get("tokenizer")
    if path is not None:
        tokenizer = load_tokenizer(path)
        if fingerprint not in (None, tokenizer.fingerprint):
            raise ConfigError(
                f"--tokenizer: the model was trained with the tokenizer {fingerprint} (got {tokenizer.fingerprint} in "
                f"{path}). Use the folder of the training data."
            )
        return tokenizer, path if path.is_dir() else path.parent
    paths = [Path(state[_PATH])] if _PATH in state else []
    if isinstance(data_path := state.get("data_path"), list):
        with contextlib.suppress(ConfigError):
            paths += [prefix.parent for prefix in parse_data_path([str(word) for word in data_path])[1][:1]]
    for candidate in paths:
        with contextlib.suppress(ConfigError):
            tokenizer = load_tokenizer(candidate)
            if tokenizer.fingerprint == fingerprint:
                return tokenizer, candidate if candidate.is_dir() else candidate.parent
    return None


def find_generation(state: Mapping[str, Any], found: tuple[Tokenizer, Path] | None) -> dict[str, Any]:
    """Return the settings of :func:`.read_generation` for the model of a checkpoint.

    Settings of the model with which training began come first, then those in the folder of the tokenizer.
    """
    if _GENERATION in state or found is None:
        return state.get(_GENERATION, {CONFIG: {}, GENERATION: None})
    tokenizer, folder = found
    if (folder / CONFIG).is_file():
        return read_generation(folder)
    vocabulary: Mapping[str, int] = getattr(tokenizer, "vocab", {})
    names = {f"{key}_id": declared_token(folder, key) or "" for key in ("bos_token", "pad_token")}
    return {
        CONFIG: {key: vocabulary[name] for key, name in names.items() if name in vocabulary},
        GENERATION: None,
    }


def save_tokenizer(found: tuple[Tokenizer, Path] | None, folder: Path) -> str:
    """Write the tokenizer's files into ``folder`` and return a line for the summary.

    ``found`` is the tokenizer and its folder, whose files that only transformers reads are copied.
    """
    if found is None:
        return (
            "tokenizer: not copied, because the folder of the training data is unknown or moved. Use --tokenizer "
            "FOLDER, or copy tokenizer.json."
        )
    tokenizer, source = found
    copied = [name for name in _ONLY_TRANSFORMERS if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, folder / name)
    names = dict.fromkeys((*tokenizer.save(folder), *copied))  # an ordered set
    return f"tokenizer: {', '.join(names)}"


def find_hf_tokenizer(folder: Path) -> tuple[Path, Tokenizer] | None:
    """Return (path for --tokenizer, tokenizer) of a Hugging Face folder; None if it has no usable tokenizer."""
    try:
        return folder, load_tokenizer(folder)
    except ConfigError:
        return None
