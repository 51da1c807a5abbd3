"""The context of a call: the settings that an op takes from the ``with`` blocks around it.

One context variable holds it. A worker that copies its caller's variables has its caller's context.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch.autograd import profiler

from interlace.runtime.core.call import BESIDE, NEEDED, Start, Terms

Overrides = tuple[tuple[str, int | bool], ...]


class OpRanges:
    """The algorithms that one op has chosen, as ranges in a profile of the thread that runs it."""

    def __init__(self, op: str) -> None:
        self._op, self._open = op, contextlib.ExitStack()
        self.names: list[str] = []

    def begin(self, algorithm: str) -> None:
        """Open the range of ``algorithm``, which lasts until the launch side ends."""
        self.names.append(f"{self._op}:{algorithm}")
        self._open.enter_context(profile_range(self.names[-1]))

    def around(self, start: Start) -> Any:
        """Run ``start``, the launch side of the op, with these ranges."""
        with context_with(op_ranges=self), self._open:
            return start()


@dataclass(frozen=True, eq=False)
class CallContext:
    """The settings of the blocks around a call: never changed, and hashed by identity, which is fast.

    Attributes
    ----------
    needs : the arguments for whose gradients the op's backward communicates, in words; None if unknown.
        ``UNTOLD`` matches all: compiled graphs do not know it, and ranks may compile differently.
    beside : terms that ranks compare in addition to the op's own, if both have them: compiled graphs have
        none.
    bound_seconds : seconds that bound each wait of the op, instead of its group's timeout.
    overrides : the settings of ``configuration.override``, sorted, to be compared; () for none.
    op_ranges : the ranges of the op whose launch side runs here, while a profile is taken.
    """

    needs: str | None = None
    beside: Terms = ()
    bound_seconds: float | None = None
    overrides: Overrides = ()
    op_ranges: OpRanges | None = None

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """The part of it that decides the ranks' agreement and their launches."""
        return self.needs, self.beside, self.overrides

    @functools.cached_property
    def terms(self) -> tuple[Terms, Terms]:
        """The terms that ranks compare before and after an op's own terms.

        They are the configuration, and the gradients: a rank that alone needs one would wait in backward.
        """
        more = [each for each in ((NEEDED, self.needs), (BESIDE, self.beside)) if each[1]]
        return tuple(more), (("configuration", self.overrides),)


_OUTSIDE = CallContext()
_held: ContextVar[CallContext] = ContextVar("interlace_call_context", default=_OUTSIDE)
current, set_context = _held.get, _held.set
"""Return the context of the ops that are called here; replace it."""


@contextlib.contextmanager
def context_with(**fields: Any) -> Iterator[None]:
    """Set these fields of the context. At the end restore only them: generators end blocks in any order."""
    before = current()
    set_context(replace(before, **fields))
    try:
        yield
    finally:
        set_context(replace(current(), **{name: getattr(before, name) for name in fields}))


@functools.lru_cache(maxsize=16)
def _with_needs(context: CallContext, needs: str) -> CallContext:
    return replace(context, needs=needs)  # this takes as long as a small op


class needing:
    """A block whose ops need the gradients of these arguments. A generator takes a microsecond longer."""

    def __init__(self, names: str) -> None:
        self._context = _with_needs(current(), names)

    def __enter__(self) -> None:
        self._token = set_context(self._context)

    def __exit__(self, *_: object) -> None:
        _held.reset(self._token)


def comparing(*terms: tuple[str, object]) -> contextlib.AbstractContextManager[None]:
    """Let ranks compare these terms in addition to the terms of each op that is called in the block."""
    return context_with(beside=(*current().beside, *terms))


def with_context(terms: Terms) -> Terms:
    """Add the context's terms to an op's own ``terms``."""
    before, behind = current().terms
    return *before, *terms, *behind


def name_algorithm(algorithm: str) -> None:
    """Name the algorithm that the op runs from here on, for the profile, if one is taken."""
    if op_ranges := current().op_ranges:
        op_ranges.begin(algorithm)


def profile_range(name: str) -> contextlib.AbstractContextManager[object]:
    return profiler.record_function(f"interlace:{name}")
