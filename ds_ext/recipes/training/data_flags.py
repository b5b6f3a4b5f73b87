"""Flags that decide the samples and their order, which a resumed run may have changed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from ...model.field_flags import flag_name
from ..data.blend import parse_data_path, parse_split

# Flag of the samples or their order -> effect of a change on a resumed run.
_REORDERED = "a different order of the samples: this epoch repeats some and skips others"
_DATA_FLAGS = {
    "data_path": "consumed samples are skipped, also in new data",
    "split": "validation documents may have been trained on, so the validation loss may be too low",
    "reset_position_ids": "different positions in packed samples: the model has to adapt",
    "reset_attention_mask": "different attention in packed samples: the model has to adapt",
    "eod_mask_loss": "other labels count: losses are not comparable with earlier ones",
    "seq_length": f"a different sample length and {_REORDERED}",
    "seed": _REORDERED,
    "mask_prob": "a different share of predicted tokens: losses are not comparable with earlier ones",
    "short_seq_prob": f"different samples and {_REORDERED}",
}


def data_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags that decide the samples and their order, in normal form.

    Paths are absolute, with the sizes of their files. The shares of a split and the weights of a blend add up to 1.
    """
    flags = {name: getattr(args, name) for name in _DATA_FLAGS if hasattr(args, name)}
    if "split" in flags:
        flags["split"] = ",".join(f"{share:.6g}" for share in parse_split(flags["split"]))
    if "data_path" in flags:
        weights, prefixes = parse_data_path(flags["data_path"])
        paths = [f"{path.absolute()} ({os.path.getsize(f'{path}.bin')} bytes)" for path in prefixes]
        if len(paths) > 1:
            shares = [f"{float(weight / sum(weights)):.6g}" for weight in weights]
            paths = [f"{share} {path}" for share, path in zip(shares, paths, strict=True)]
        flags["data_path"] = " ".join(paths)
    return flags


def changed_data(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a line for each data flag that a resumed run has changed; both are from :func:`data_flags`.

    Flags missing on one side are ignored.
    """
    return [
        f"note: {flag_name(name)} was {saved[name]}, is {current[name]}: {effect}"
        for name, effect in _DATA_FLAGS.items()
        if name in saved and name in current and saved[name] != current[name]
    ]
