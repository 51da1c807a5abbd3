"""The one way to put a stand-in, a fault or a limit in the place of what is there, and to take it away."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import pytest

Replacement = tuple[Any, str, Any]
"""An owner, the name of its attribute or key, and the value in its place."""


@contextmanager
def replaced(*replacements: Replacement) -> Iterator[None]:
    """Replace attributes, or values of mappings, until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in replacements:
            change: Any = patch.setitem if isinstance(owner, MutableMapping) else patch.setattr
            change(owner, name, value)
        yield


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Set or remove variables of the environment until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value or "")
            if value is None:
                patch.delenv(name)
        yield
