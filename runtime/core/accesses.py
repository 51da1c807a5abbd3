"""Memory accesses of a program: the interface between an interpreter session and its owner."""

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
"""An array whose element type is known only at run time: addresses, values, thread numbers."""
Lanes = Numbers | None
"""The thread number of each element, flat; None where threads are not distinguished."""
NULL = 4096  # bytes from address 0 on that no process has


class Handle(Protocol):
    """A value in Triton's interpreter: its elements and its Triton type."""

    data: Numbers
    dtype: Any

    def get_element_ty(self) -> Any: ...


Mask = Handle | None
Perform = Callable[..., Any]


def threads_of(pointers: Handle) -> Lanes:
    threads = getattr(pointers, "threads", None)
    if threads is None or threads.shape == pointers.data.shape:
        return None if threads is None else threads.ravel()
    return np.broadcast_to(threads, pointers.data.shape).ravel()


def origin_of(handle: Handle) -> Any:
    """Return the allocation that a pointer comes from; None if that is not known."""
    return getattr(handle.dtype, "origin", None)


def with_origin(kind: Any, origin: Any) -> Any:
    copied_kind = copy.copy(kind)
    copied_kind.origin = origin
    return copied_kind


@dataclass(eq=False, slots=True)
class Atomic:
    """One atomic access, of ``tl.atomic_*`` or of inline assembly.

    ``kind``: "cas", "load", "store" or the name of the read-modify-write ("add", "xchg", ...). ``sem``:
    "relaxed", "acquire", "release", "acq_rel". ``scope``: "cta", "gpu", "sys". ``reads_only``: the access
    is known not to change memory. ``compare``: the handle of the value that a "cas" expects. ``value``: the
    handle of the value that a "store" stores. ``each_thread``: thread i accesses element i (inline assembly
    on a tensor); otherwise one thread does the access and all threads get the result.
    """

    pointers: Any  # a handle; None if a stream does the access
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
        """Whether several threads do it, each for its elements; each then releases only its own stores."""
        return self.each_thread or self.pointers.data.size > 1

    @property
    def looks(self) -> bool:
        """Whether a program may wait for the value: not for a store, nor for an xchg that only signals."""
        return self.kind != "store" and (self.kind != "xchg" or self.sem == "acquire")

    @property
    def acquires(self) -> bool:
        return self.sem in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        return self.sem in ("release", "acq_rel")


class AsyncAccess(NamedTuple):
    """An access of the async proxy: its number in a queue, from 1, and the thread that has started it."""

    queue: Hashable
    time: int
    thread: int


class Hooks(Protocol):
    """Hooks of a session, called for each memory operation of a program.

    ``perform`` does the operation and returns its handle (None for stores). A hook calls it once and
    returns its result; a hook of a poll may call it more than once. If a hook passes another mask,
    ``perform`` leaves out more elements, which read as 0; a compare-and-swap leaves out all.
    """

    def load(self, pointers: Handle, mask: Mask, perform: Perform) -> Any: ...

    def store(self, pointers: Handle, value: object, mask: Mask, perform: Perform) -> Any: ...

    def atomic(self, atomic: Atomic, perform: Perform) -> Any: ...

    def origin(self, address: int) -> Any:
        """Return the origin of a number that becomes a pointer; None if unknown (``session.py``)."""

    def misplaced(self, address: int, align: int, count: int, does: str, memory: str) -> None:
        """Raise an error about ``memory``, where ``count`` accesses are not at multiples of ``align``.

        ``address``, the first of them, may be null.
        """

    def barrier(self, threads: Lanes = None) -> None:
        """Let all threads meet, or only ``threads`` where threads are distinguished."""

    def fence(self, sem: str, scope: str, threads: Lanes = None, *, puts: bool = True) -> None:
        """Fence: ``threads``, where they are distinguished; ``puts``: also the data that they have put."""

    def pause(self) -> None:
        """Let other programs go on while this one sleeps."""

    def launch(
        self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Run ``kernel[grid](**arguments, **options)``, which code inside the session has launched."""
