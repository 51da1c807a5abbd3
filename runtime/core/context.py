"""The context of a call: what an op takes from the ``with`` blocks around it, beside its arguments.

One context variable holds it, so a worker that copies its caller's variables has its caller's context.
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
    """The algorithms that one op has chosen: ranges in a profile, in whichever thread it does so."""

    def __init__(self, op: str) -> None:
        self._op, self._open = op, contextlib.ExitStack()
        self.names: list[str] = []

    def begin(self, algorithm: str) -> None:
        """By ``algorithm`` until the launch side ends."""
        self.names.append(f"{self._op}:{algorithm}")
        self._open.enter_context(profile_range(self.names[-1]))

    def around(self, start: Start) -> Any:
        """``start``, the launch side of the op."""
        with context_with(op_ranges=self), self._open:
            return start()


@dataclass(frozen=True, eq=False)
class CallContext:
    """What the blocks around a call have set: never changed, and hashed by identity, which is fast.

    Attributes
    ----------
    needs : for which arguments' gradients the backward of the op communicates, in words; None if that is
        unknown. ``UNTOLD`` fits to all: compiled graphs do not know it, and ranks may compile differently.
    beside : terms that ranks compare beside the op's own, where both have them: compiled graphs have none.
    bound_seconds : seconds that bound each wait of the op, instead of its group's timeout.
    overrides : what ``configuration.override`` has set, sorted, to be compared; () for nothing.
    op_ranges : of the op whose launch side runs here, while a profile is taken.
    """

    needs: str | None = None
    beside: Terms = ()
    bound_seconds: float | None = None
    overrides: Overrides = ()
    op_ranges: OpRanges | None = None

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """The part of it that decides what ranks agree on and what they launch."""
        return self.needs, self.beside, self.overrides

    @functools.cached_property
    def terms(self) -> tuple[Terms, Terms]:
        """What ranks compare of it before and behind an op's own terms.

        The gradients: a rank that alone needs one would wait for others in backward; and the configuration.
        """
        more = [each for each in ((NEEDED, self.needs), (BESIDE, self.beside)) if each[1]]
        return tuple(more), (("configuration", self.overrides),)


_OUTSIDE = CallContext()
_held: ContextVar[CallContext] = ContextVar("interlace_call_context", default=_OUTSIDE)
current, set_context = _held.get, _held.set
"""The context of the ops that are called here, and what replaces it."""


@contextlib.contextmanager
def context_with(**fields: Any) -> Iterator[None]:
    """Within it the context has these fields. It restores only them: generators end blocks in any order."""
    before = current()
    set_context(replace(before, **fields))
    try:
        yield
    finally:
        set_context(replace(current(), **{name: getattr(before, name) for name in fields}))


@functools.lru_cache(maxsize=16)
def _with_needs(context: CallContext, needs: str) -> CallContext:
    return replace(context, needs=needs)  # which takes as long as a small op


class needing:
    """Within it ops need these arguments' gradients. A class, because a generator takes a microsecond."""

    def __init__(self, what: str) -> None:
        self._context = _with_needs(current(), what)

    def __enter__(self) -> None:
        self._token = set_context(self._context)

    def __exit__(self, *_: object) -> None:
        _held.reset(self._token)


def comparing(*terms: tuple[str, object]) -> contextlib.AbstractContextManager[None]:
    """Within it ranks compare these terms beside those of whatever op is called."""
    return context_with(beside=(*current().beside, *terms))


def with_context(terms: Terms) -> Terms:
    """Add to an op's own ``terms`` those of the context."""
    before, behind = current().terms
    return *before, *terms, *behind


def name_algorithm(algorithm: str) -> None:
    """Name the algorithm that the op runs from here on, for the profile, if one is taken."""
    if op_ranges := current().op_ranges:
        op_ranges.begin(algorithm)


def profile_range(what: str) -> contextlib.AbstractContextManager[object]:
    return profiler.record_function(f"interlace:{what}")
