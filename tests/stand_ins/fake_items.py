"""Items of the fake GPU, and what they hold: points in streams, leases of memory, captures; its errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class CudaError(RuntimeError):
    """What CUDA refuses."""


class DeviceHang(RuntimeError):
    """Nothing that was enqueued can go on."""


class UseAfterFree(RuntimeError):
    """An item used memory that its owner had given back."""


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
        """Whether a hardware queue stands still until this is over."""
        return self.label.startswith("wait for")


@dataclass(eq=False)
class Lease:
    """The memory that an item uses, which was made on stream ``owner``; held where that is safe.

    It is once the owner comes after the item: who frees it then, frees it for what comes later still.
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
    """A point in a stream; in a capture, of the recorded stream. It comes after the ``leases``."""

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
