"""All ops by name, and as ``interlace.functional`` has them, for callers that know neither.

Both bring torch's compilers along, so they are imported when somebody first asks.
"""

import functools
from collections.abc import Callable
from typing import Any

OPS: dict[str, Any] = {}
"""An ``Op`` by name; ``ops/library.py`` puts them here."""
FACES: dict[str, Callable[..., Any]] = {}
"""``functional`` imports ``interlace.functional``; ``interlace`` itself puts it here. ``call`` is that of
``calls.py``, which does."""


def op(name: str) -> Any:
    """The ``Op`` of that name."""
    if not OPS:
        FACES["functional"]()
    return OPS[name]


def functional(name: str) -> Callable[..., Any]:
    """The function of that name in ``interlace.functional``."""
    made: Callable[..., Any] = getattr(FACES["functional"](), name)
    return made


class Ops:
    """The ops as attributes, as ``torch.ops.interlace`` has them, for what is written in terms of these."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(FACES["call"], name)
