"""Replacement of attributes of DeepSpeed's objects for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def set_attribute(target: object, name: str, value: object) -> Iterator[None]:
    """Context in which ``target.name`` is ``value``; a class attribute is hidden, not changed."""
    is_own, original = name in vars(target), getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(target, name, original)
        else:
            delattr(target, name)
