"""Flags of command lines, and those of a model, generated from the fields of its config. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import cache
from inspect import getdoc
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Flag:
    """Flag of a command line; that of a dataclass's field is in the field's metadata, see :func:`flag`.

    A field without metadata has a flag with its name, type and default. The help is the description of the field in the
    docstring of the class.

    Args:
        key: name of the flag with underscores, which is also its key in "train"; "": name of the field.
        kind: type of the value, bool for a switch; None: that of the field.
        metavar: name of the value in the help; "": that of the flag.
        help: "": description of the field.
        default: default of the flag; ``...``: that of the field, or None.
        choices: values of the flag; empty: those of a Literal, or any.
        least: least value of a number that the training scripts accept; None: any.
        nargs: number of values, as in ``add_argument``; None: 0 for a switch, 1 for other flags.
        repeated: the flag may be repeated, and its value is the list of all.
        names: spellings of the flag; empty: that of the key.
        planned: the planner needs the field, so the verbs of ``python -m ds_ext`` have the flag too.
        read: returns the field for the value of the flag and all keys; None: they are equal.
        write: returns the keys for a field; None: the field is the value of the flag.
    """

    key: str = ""
    kind: Any = None
    metavar: str = ""
    help: str = ""
    default: Any = None
    choices: tuple[Any, ...] = ()
    least: int | None = None
    nargs: str | None = None
    repeated: bool = False
    names: tuple[str, ...] = ()
    planned: bool = False
    read: Callable[[Any, Mapping[str, Any]], Any] | None = None
    write: Callable[[Any], Mapping[str, Any]] | None = None

    @property
    def spellings(self) -> tuple[str, ...]:
        return self.names or (flag_name(self.key),)

    @property
    def unset(self) -> Any:
        """Value without the flag: its default, False for a switch, a new list for a flag with several values."""
        if self.nargs or self.repeated:
            return []
        return False if self.kind is bool and self.default is None else self.default

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``add_argument``."""
        common = {"dest": self.key, "default": self.unset, "help": self.help}
        if self.kind is bool:
            return {"action": "store_true", **common}
        optional = {
            "type": None if self.kind is str else self.kind,
            "choices": [*self.choices],
            "metavar": self.metavar,
            "nargs": self.nargs,
            "action": "append" if self.repeated else None,
        }
        return common | {name: value for name, value in optional.items() if value}


NO_FLAG: Mapping[str, Flag | None] = {"flag": None}  # metadata of a field without a flag


def flag(key: str = "", **settings: Any) -> Mapping[str, Flag | None]:
    """Return the metadata of a field: ``field(metadata=flag("window_size"))``; see :class:`Flag`."""
    return {"flag": Flag(key, **{"default": ..., **settings})}


def flag_name(key: str) -> str:
    return f"--{key.replace('_', '-')}"


@cache
def flags_of(config: type) -> Mapping[str, Flag]:
    """Return field -> flag for every field of a dataclass that has one."""
    descriptions = _descriptions(config)
    hints = get_type_hints(config)
    flags: dict[str, Flag] = {}
    for field in fields(config):
        partial = field.metadata.get("flag", Flag(default=...))
        if partial is not None:
            hint = hints[field.name]
            flags[field.name] = replace(
                partial,
                key=partial.key or field.name,
                kind=partial.kind or _value_type(hint),
                choices=get_args(hint) if get_origin(hint) is Literal else partial.choices,
                default=_default(partial, field),
                help=partial.help or descriptions.get(field.name, ""),
            )
    return flags


def _value_type(hint: Any) -> Any:
    """Return the type of a flag for that of its field: a Literal has its values' type, ``X | None`` has X."""
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0])
    alternatives = get_args(hint)
    return alternatives[0] if alternatives else hint


def _default(partial: Flag, field: Field[Any]) -> Any:
    if partial.default is not ...:
        return partial.default
    return None if field.default is MISSING else field.default


def fields_of(config: type, keys: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the fields for the values of flags or for the keys of "train"; without a key, or with None, no field.

    Other keys are ignored. ``names`` are the fields to read; None: all.
    """
    values = {}
    for name, flag in flags_of(config).items():
        value = keys.get(flag.key)
        if value is not None and (names is None or name in names):
            values[name] = value if flag.read is None else flag.read(value, keys)
    return values


def keys_of(config: type, values: Any, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the keys of "train", or the values of the flags, for an instance of a dataclass.

    ``names`` are the fields to write; None: those without a default, and those that differ from it.
    """
    if names is None:
        names = [field.name for field in fields(config) if getattr(values, field.name) != field.default]
    keys: dict[str, Any] = {}
    for name, flag in flags_of(config).items():
        if name in names:
            value = getattr(values, name)
            keys |= {flag.key: value} if flag.write is None else flag.write(value)
    return keys


def add_flags(group: Any, flags: Iterable[Flag], **changes: Any) -> None:
    """Add flags to a parser or a group. ``changes`` are arguments of ``add_argument`` for all of them."""
    for flag in flags:
        group.add_argument(*flag.spellings, **{**flag.arguments, **changes})


def _descriptions(config: type) -> dict[str, str]:
    """Return field -> description from the section "Args" of the docstrings of a class and its bases."""
    descriptions = {}
    for base in reversed(config.__mro__[:-1]):
        for names, text in re.findall(
            r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", getdoc(base) or "", re.MULTILINE
        ):
            words = re.sub(r"\s+", " ", text).replace("``", "").replace("%", "%%").removesuffix(".")
            descriptions |= dict.fromkeys(names.split(", "), words)
    return descriptions
