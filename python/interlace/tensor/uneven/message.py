"""The one small message in which ranks say what the others cannot know: shapes, dtypes, lengths.

It goes over the host, before any tensor moves, and is the only thing that is sent besides the tensors.
What does not fit together is an error on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interlace.ops.simulated_backward import in_rank
from interlace.runtime.core.call import Call, Terms
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.engine import Engine

Check = Callable[[list[Any]], None]


def exchange(
    communicator: Communicator, op: str, terms: Terms, part: Any, check: Check | None = None
) -> list[Any]:
    """Every rank's ``part``, by rank. Collective.

    ``terms``, pairs of a name and a value, are equal on all ranks, else ValueError, or TypeError if the
    name begins with "dtype". ``check`` is called with all parts, and raises the same on every rank.
    """
    call = Call(op, terms, part=part)
    parts: list[Any] = []

    def start(engine: Engine) -> None:
        parts.extend(engine.parts(call))
        if check is not None:
            check(parts)

    in_rank(lambda: communicator.collective(call, start, async_op=False))
    return parts
