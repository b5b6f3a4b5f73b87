"""Flags and "train" keys of a model, generated from the fields of its config. Imports neither torch nor the models."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from inspect import getdoc
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Flag:
    """Flag of a field of a dataclass, in its metadata; see :func:`flag`.

    A field without metadata has a flag with its name, type and default. The help is the description of the field in the
    docstring of the class.

    Args:
        key: name of the flag with underscores, which is also its key in "train"; "": name of the field.
        default: default of the flag; ``...``: that of the field, or None.
        kind: type of the flag; None: that of the field.
        planned: the planner needs the field, so the verbs of ``python -m ds_ext`` have the flag too.
        read: function that returns the field for the value of the flag and all keys; None: they are equal.
        write: function that returns the keys for a field; None: the field is the value of the flag.
        choices: values of the flag; empty: those of a Literal, or any.
        help: help; "": description of the field.
        metavar: name of the value in the help; "": that of the flag.
    """

    key: str = ""
    default: Any = ...
    kind: Any = None
    planned: bool = False
    read: Callable[[Any, Mapping[str, Any]], Any] | None = None
    write: Callable[[Any], Mapping[str, Any]] | None = None
    choices: tuple[Any, ...] = ()
    help: str = ""
    metavar: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``add_argument``."""
        common = {"default": self.default, "help": self.help}
        if self.kind is bool:
            return {"action": "store_true", **common}
        kind = {} if self.kind is str else {"type": self.kind}
        choices = {"choices": list(self.choices)} if self.choices else {}
        return {**kind, **choices, **common, **({"metavar": self.metavar} if self.metavar else {})}


NO_FLAG: Mapping[str, Flag | None] = {"flag": None}  # metadata of a field without a flag


def flag(key: str = "", **settings: Any) -> Mapping[str, Flag | None]:
    """Return the metadata of a field: ``field(metadata=flag("window_size"))``; see :class:`Flag`."""
    return {"flag": Flag(key, **settings)}


def flag_name(key: str) -> str:
    """Return the name of a key on the command line."""
    return f"--{key.replace('_', '-')}"


@cache
def flags_of(config: type) -> Mapping[str, Flag]:
    """Return field -> flag for every field of a dataclass that has one."""
    descriptions, kinds, flags = _descriptions(config), get_type_hints(config), {}
    for one in fields(config):
        own = one.metadata.get("flag", Flag())
        if own is None:
            continue
        hint, choices = kinds[one.name], own.choices
        if get_origin(hint) is Literal:
            choices = get_args(hint)
            hint = type(choices[0])
        default = one.default if own.default is ... else own.default
        flags[one.name] = replace(
            own,
            key=own.key or one.name,
            kind=own.kind or next(iter(get_args(hint)), hint),  # without "| None"
            choices=choices,
            default=None if default is MISSING else default,
            help=own.help or descriptions.get(one.name, ""),
        )
    return flags


def fields_of(config: type, keys: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the fields for the values of flags or for the keys of "train"; without a key, or with None, no field.

    Args:
        config: dataclass with the fields.
        keys: values by key; other keys are ignored.
        names: fields to read; None: all.

    Raises:
        ConfigError: a value cannot be read.
    """
    values = {}
    for name, one in flags_of(config).items():
        value = keys.get(one.key)
        if value is not None and (names is None or name in names):
            values[name] = value if one.read is None else one.read(value, keys)
    return values


def keys_of(config: type, values: Any, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the keys of "train", or the values of the flags, for an instance of a dataclass.

    Args:
        config: dataclass with the fields.
        values: object with their values.
        names: fields to write; None: those without a default, and those that differ from it.
    """
    if names is None:
        names = [one.name for one in fields(config) if getattr(values, one.name) != one.default]
    by_key = {}
    for name, one in flags_of(config).items():
        if name in names:
            value = getattr(values, name)
            by_key |= {one.key: value} if one.write is None else one.write(value)
    return by_key


def add_flags(group: Any, config: type, names: Collection[str], **changes: Any) -> None:
    """Add the flags of some fields to a parser or its group.

    Args:
        group: parser or group of argparse.
        config: dataclass with the fields.
        names: fields to add.
        changes: arguments of ``add_argument`` for all flags, such as a common default.
    """
    for name, one in flags_of(config).items():
        if name in names:
            group.add_argument(flag_name(one.key), **{**one.arguments, **changes})


def _descriptions(config: type) -> dict[str, str]:
    """Return field -> description from the section "Args" of the docstrings of a class and its bases."""
    descriptions = {}
    for one in reversed(config.__mro__[:-1]):
        for names, text in re.findall(
            r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", getdoc(one) or "", re.MULTILINE
        ):
            words = re.sub(r"\s+", " ", text).replace("``", "").replace("%", "%%").removesuffix(".")
            descriptions |= dict.fromkeys(names.split(", "), words)
    return descriptions
