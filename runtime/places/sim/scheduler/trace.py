"""The recorder of a run: tiles, copies, waits and signals of every rank, from its memory operations.

Kernels say nothing about themselves. The interpreter's hooks show every store and atomic of every
program with its addresses, and that is enough::

    store into a peer's memory        bytes that leave this rank
    store into the own output         a tile is done
    atomic that writes slots          publish: a chunk has arrived at the rank of each
    atomic that reads slots           wait, from the first poll to the last, for the slot that came last

A program's time is cut where one of these ends, so its spans follow each other without gaps. Streams
add their copies, signals and items. Turned on for a block of code::

    with recording() as recorder:
        interlace.run(fn, 4)
    whole = merge([recorder.recording()])

In ``sim`` the block goes around the run; in ``shm`` inside ``fn``, and each rank hands back its own
part for :func:`~interlace.runtime.places.sim.scheduler.recording.merge`. Compiled kernels are not seen.
"""

import contextvars
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from interlace.kernels.signal import CREDIT_WORDS, HEADER_WORDS
from interlace.runtime.core.accesses import Atomic
from interlace.runtime.core.errors import SourceText
from interlace.runtime.places.sim.interpreter.session import active, active_addresses
from interlace.runtime.places.sim.scheduler import recording as recordings
from interlace.runtime.places.sim.scheduler.observer import Observer
from interlace.runtime.places.sim.scheduler.recording import RecordedSpan, Recording, Signal, Slot
from interlace.runtime.places.sim.scheduler.source_lines import program_lines
from interlace.runtime.places.sim.scheduler.strategies import Task

_HEADER_BYTES, _CREDIT_BYTE = 8 * HEADER_WORDS, 8 * CREDIT_WORDS

# What a kernel's stores are: (into symmetric memory, elsewhere). Any other kernel: a copy, a store.
_STORES = {
    "all_gather_matmul_kernel": ("copy", "tile"),
    "grouped_matmul_kernel": ("copy", "tile"),
    "grouped_matmul_combine_kernel": ("tile", "sum"),
    "combine_kernel": ("copy", "sum"),
    "matmul_reduce_scatter_kernel": ("tile", "sum"),
}


@dataclass
class _Lane:
    """Where one program stands: ``since`` is where its last span ended."""

    since: int
    polled: Slot | None = None
    words: tuple[bytes, Any] | None = (
        None  # addresses that the last poll looked at, and what they had
    )
    last_poll: int = 0
    waited: Slot | None = None
    copied: int = 0
    copied_to: int | None = None
    lines: tuple[SourceText, ...] = ()


class Recorder(Observer):
    def __init__(self) -> None:
        self._spans: list[RecordedSpan] = []
        self._signals: list[Signal] = []
        self._memory: list[tuple[int, int, Slot]] = []  # begin, end, the slot at the beginning
        self._buffers: Counter[int] = Counter()
        self._steps: Callable[[], int] | None = None
        self._lanes: dict[Task, _Lane] = {}
        self._last = 0

    def recording(self) -> Recording:
        """A recording of everything so far, for :func:`merge`."""
        unit = recordings.MICROSECONDS if self._steps is None else recordings.STEPS
        return Recording(unit, list(self._spans), list(self._signals))

    def now(self) -> int:
        """The time. Strictly increasing in ``sim``, where much can happen within one step."""
        if self._steps is None:
            return time.monotonic_ns()
        self._last = max(self._last + 1, self._steps() * recordings.TICKS)
        return self._last

    def attach(self, steps: Callable[[], int]) -> None:
        self._steps = steps

    def on_allocate(self, rank: int, memory: torch.Tensor, label: str = "") -> None:
        begin = memory.data_ptr()
        self._memory.append((begin, begin + memory.nbytes, Slot(rank, self._buffers[rank], 0)))
        self._buffers[rank] += 1

    def _slot(self, address: int) -> Slot | None:
        for begin, end, first in reversed(self._memory):
            if begin <= address < end:
                return first._replace(byte=address - begin)
        return None

    def on_item(
        self, task: Task, stream: str, label: str, start: int, copied_to: torch.Tensor | None
    ) -> None:
        rank = task.rank
        lane, lines = f"stream {stream}", (task.owner.running,)
        span = RecordedSpan("item", rank, lane, "", start, self.now(), label=label, lines=lines)
        if copied_to is not None:
            to = self._slot(copied_to.data_ptr())
            peer = None if to is None else to.rank
            away = copied_to.nbytes if peer not in (None, rank) else 0
            span = span._replace(kind="copy", peer=peer, nbytes=away)
        self._spans.append(span)

    def on_signal(self, task: Task, slot: torch.Tensor, op: str) -> None:
        self._publish(task.rank, task.who, op, self._slot(slot.data_ptr()), self.now())

    def on_load(self, task: Task, pointers: Any, mask: Any) -> None:
        """A program has begun, if this is the first that is heard of it."""
        if task.program is not None:
            self._lane(task)

    def on_store(self, task: Task, pointers: Any, mask: Any) -> None:
        """A tile, or a piece of a copy."""
        addresses = active_addresses(pointers, mask)
        if task.program is None or not addresses.size:
            return
        place = self._slot(int(addresses[0]))
        if place is not None and place.byte < _HEADER_BYTES:
            return
        inside, elsewhere = _STORES.get(task.program.kernel, ("copy", "store"))
        lane = self._lane(task)
        self._close_wait(task, lane)
        lane.lines = program_lines()
        away = place is not None and place.rank != task.rank
        nbytes = addresses.size * pointers.get_element_ty().primitive_bitwidth // 8 if away else 0
        if place is None:
            self._add(task, lane, elsewhere, self.now(), slot=lane.waited)
        elif inside == "copy":
            lane.copied += nbytes
            lane.copied_to = place.rank
        else:
            self._add(task, lane, inside, self.now(), peer=place.rank, nbytes=nbytes)

    def on_atomic(self, task: Task, atomic: Atomic, result: Any) -> None:
        """A poll, or a publish."""
        addresses = active_addresses(atomic.pointers, atomic.mask)
        slot = self._slot(int(addresses[0])) if addresses.size else None
        if task.program is None or slot is None:
            return
        lane = self._lane(task)
        if atomic.reads_only:
            if slot.byte >= _CREDIT_BYTE:  # else it looks for an abort
                words, values = (
                    addresses.tobytes(),
                    active(result.data, atomic.pointers, atomic.mask),
                )
                before, seen = lane.words or (b"", values)
                if before != words:  # polls of the same slots in a row are one wait
                    self._close_wait(task, lane)
                    lane.polled, lane.lines = slot, program_lines()
                elif (came := np.flatnonzero(values != seen)).size:
                    lane.polled = self._slot(int(addresses[came[-1]]))
                lane.words = words, values
                lane.last_poll = self.now()
            return
        self._close_wait(task, lane)
        if lane.copied_to is not None:
            self._add(task, lane, "copy", self.now(), peer=lane.copied_to, nbytes=lane.copied)
            lane.copied, lane.copied_to = 0, None
        lane.since = self.now()
        for address in addresses.tolist():
            self._publish(task.rank, task.who, task.program.op, self._slot(address), lane.since)

    def _lane(self, task: Task) -> _Lane:
        lane = self._lanes.get(task)
        if lane is None:
            lane = self._lanes[task] = _Lane(self.now())
        return lane

    def _close_wait(self, task: Task, lane: _Lane) -> None:
        slot = lane.polled
        if slot is not None:
            lane.polled = lane.words = None
            credit = (slot.byte - _CREDIT_BYTE) // 8 if slot.byte < _HEADER_BYTES else None
            self._add(task, lane, "wait", lane.last_poll, peer=credit, slot=slot)
            if credit is None:
                lane.waited = slot

    def _add(self, task: Task, lane: _Lane, kind: str, end: int, **details: Any) -> None:
        assert task.program is not None
        op, since, lane.since = task.program.op, lane.since, end
        span = RecordedSpan(kind, task.rank, task.who, op, since, end, lines=lane.lines, **details)
        self._spans.append(span)

    def _publish(self, rank: int, lane: str, op: str, slot: Slot | None, when: int) -> None:
        if slot is not None and slot.byte >= _HEADER_BYTES:
            self._signals.append(Signal(when, rank, lane, op, slot))


_current: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "interlace_recorder", default=None
)
current: Callable[[], Recorder | None] = _current.get
"""What the enclosing :func:`recording` writes to, if there is one."""


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record what runs inside the block; see the module for where to put it."""
    recorder = Recorder()
    token = _current.set(recorder)
    try:
        yield recorder
    finally:
        _current.reset(token)
