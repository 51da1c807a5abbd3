"""Attributes of Triton's objects, replaced for as long as something runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Replacement = tuple[Any, str, Any]
"""An object, the name of its attribute, and the new value."""


@contextmanager
def replaced(*replacements: Replacement) -> Iterator[None]:
    """Set own attributes in order; afterwards put back, or remove, exactly what was there."""
    missing = object()
    before = []
    try:
        for target, name, value in replacements:
            before.append((target, name, vars(target).get(name, missing)))
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in reversed(before):
            if value is missing:
                delattr(target, name)
            else:
                setattr(target, name, value)
