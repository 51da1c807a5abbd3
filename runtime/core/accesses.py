"""Memory accesses of a program: what an interpreter session asks and tells its owner."""

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
"""An array whose element type is known at run time only: addresses, values, numbers of threads."""
Lanes = Numbers | None
"""The number of the thread of each element, flat; None where threads are not told apart."""
NULL = 4096  # bytes that no process has


class Handle(Protocol):
    """A value in Triton's interpreter: its elements, and the type that Triton takes them for."""

    data: Numbers
    dtype: Any

    def get_element_ty(self) -> Any: ...


Mask = Handle | None
Perform = Callable[..., Any]


def threads_of(pointers: Handle) -> Lanes:
    """Who does what is done at each of ``pointers``."""
    threads = getattr(pointers, "threads", None)
    if threads is None or threads.shape == pointers.data.shape:
        return None if threads is None else threads.ravel()
    return np.broadcast_to(threads, pointers.data.shape).ravel()


def origin_of(handle: Handle) -> Any:
    """Where a pointer comes from, None if that is not known."""
    return getattr(handle.dtype, "origin", None)


def with_origin(kind: Any, origin: Any) -> Any:
    """The pointer type ``kind`` with this origin, or with none."""
    made = copy.copy(kind)
    made.origin = origin
    return made


@dataclass(eq=False, slots=True)
class Atomic:
    """One atomic access, of ``tl.atomic_*`` or of inline assembly.

    ``kind``: "cas", "load", "store" or the name of the read-modify-write ("add", "xchg", ...). ``sem``:
    "relaxed", "acquire", "release", "acq_rel". ``scope``: "cta", "gpu", "sys". ``reads_only``: known not
    to change memory. ``compare``: the handle of what a "cas" expects. ``each_thread``: thread i does
    element i (inline assembly on a tensor); otherwise one thread does it and all get the result.
    ``value``: the handle of what a "store" stores.
    """

    pointers: Any  # a handle; None where a stream does it
    mask: Mask
    kind: str
    sem: str
    scope: str
    reads_only: bool
    compare: Handle | None = None
    each_thread: bool = False
    value: Any = None

    @property
    def by_lanes(self) -> bool:
        """Several threads do it, each its own elements; so each releases its own stores only."""
        return self.each_thread or self.pointers.data.size > 1

    @property
    def looks(self) -> bool:
        """Whether it may wait for what it finds: a store does not, nor does an xchg that only signals."""
        return self.kind != "store" and (self.kind != "xchg" or self.sem == "acquire")

    @property
    def acquires(self) -> bool:
        return self.sem in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        return self.sem in ("release", "acq_rel")


class AsyncAccess(NamedTuple):
    """An access of the async proxy: its number in a queue, from 1, and the thread that has started it.

    Of a queue it can be seen that all up to a number have ended.
    """

    queue: Hashable
    time: int
    thread: int


class Hooks(Protocol):
    """Hooks of a session, called for each memory operation of a program.

    ``perform`` does the operation and returns its handle (None for stores); a hook calls it once and
    returns what it returned. A poll may perform more than once. Given another mask it leaves out more
    elements, which read as 0; of a compare-and-swap all.
    """

    def load(self, pointers: Handle, mask: Mask, perform: Perform) -> Any: ...

    def store(self, pointers: Handle, value: object, mask: Mask, perform: Perform) -> Any: ...

    def atomic(self, atomic: Atomic, perform: Perform) -> Any: ...

    def origin(self, address: int) -> Any:
        """What a number that becomes a pointer points to, None if unknown; see ``provenance.py``."""

    def misplaced(self, address: int, align: int, count: int, does: str, what: str) -> None:
        """``count`` accesses would begin at null, or at no multiple of ``align``; ``address`` the first.

        Raises an error that says ``what`` it is.
        """

    def barrier(self, threads: Lanes = None) -> None:
        """All threads meet, or ``threads``, where they are told apart."""

    def fence(self, sem: str, scope: str, threads: Lanes = None, *, puts: bool = True) -> None:
        """``threads``: those that fence, where they are told apart; ``puts``: what they have put, too."""

    def pause(self) -> None:
        """A program sleeps: let others go on."""

    def launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Code inside the session launches ``kernel[grid](**arguments, **options)``; run it."""
