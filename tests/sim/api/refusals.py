"""Calls that a rank gets wrong: all ranks must be told of it, and the group must go on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import interlace


class ByRank(NamedTuple):
    """An argument with a value for each of the two ranks."""

    first: Any
    second: Any


def both(value: Any) -> ByRank:
    return ByRank(value, value)


def changed(right: dict[str, Any], changes: dict[str, Any], wrong_rank: int = 1) -> dict[str, Any]:
    """Return the right arguments with the changes of ``wrong_rank``."""
    rank, arguments = interlace.get_rank(), dict(right)
    for name, value in changes.items():
        if isinstance(value, ByRank):
            arguments[name] = value[rank]
        elif rank == wrong_rank:
            arguments[name] = value
    return arguments


def check_refused(
    call: Callable[..., Any], right: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    """``call`` raises on this rank, with ``text`` and a rank's number; a right call works afterwards.

    The error is a ValueError, or what ``text`` begins with: "TypeError: ".
    """
    kind = TypeError if text.startswith("TypeError: ") else ValueError
    with pytest.raises((TypeError, ValueError)) as caught:
        call(**changed(right, changes))
    assert isinstance(caught.value, kind), repr(caught.value)
    assert text.removeprefix("TypeError: ") in str(caught.value), caught.value
    assert "rank" in str(caught.value), caught.value
    call(**right)
