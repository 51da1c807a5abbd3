"""Items of the fake GPU, and what they hold: points in streams, leases of memory, captures; its errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class CudaError(RuntimeError):
    """An error that CUDA returns."""


class DeviceHang(RuntimeError):
    """No enqueued item can continue."""


class UseAfterFree(RuntimeError):
    """An item used memory that its owner had freed."""


Steps = Callable[[], Iterator[Callable[[], bool]]]
"""An item: makes a generator, which yields conditions to wait for."""


@dataclass
class Item:
    label: str
    steps: Steps
    marker: Marker | None = None
    running: Iterator[Callable[[], bool]] | None = None
    condition: Callable[[], bool] | None = None
    programs: int = 0

    @property
    def blocks(self) -> bool:
        """Return whether a hardware queue stops until this item has ended."""
        return self.label.startswith("wait for")


@dataclass(eq=False)
class Lease:
    """The memory of an item, which was made on stream ``owner``; it is held until a free is safe.

    A free is safe when the owner stream comes after the item.
    """

    owner: int
    references: list[StorageWeakRef]
    held: list[Any] = field(default_factory=list)
    over: bool = False  # the item has ended, and does not run again

    def secure(self) -> None:
        if not self.over:
            self.held = [storage_of(each) for each in self.references if not each.expired()]


@dataclass(eq=False)
class Marker:
    """A point in a stream, or in the recorded stream of a capture. It comes after the ``leases``."""

    capture: int = 0
    reached: bool = False
    leases: frozenset[Lease] = frozenset()


@dataclass(eq=False)
class Capture:
    number: int
    origin: int
    streams: dict[int, list[Item]] = field(default_factory=dict)
    items: list[tuple[int, Item]] = field(default_factory=list)  # in the order of the calls
    joined: set[int] = field(default_factory=set)
    thread: int = field(default_factory=threading.get_ident)


def storage_of(reference: StorageWeakRef) -> Any:
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # type: ignore[attr-defined]
