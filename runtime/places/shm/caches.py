"""Thresholds of collectives and the size of slots, derived from the caches of the machine.

Data that an op writes should still be in a cache when it is read. Data that will have left all caches
before it is read need not pass through them. So with a second-level cache of 1 MiB, a last-level cache of
32 MiB and 4 ranks::

    medium   256 KiB  a quarter of the second level: data beside messages, whose places are used in turn
    reduced    1 MiB  the second level: data that one rank reads to reduce everything itself
    slot       1 MiB  the same: a slot is read from there, and few ops need several
    outputs    2 MiB  a quarter of a rank's share of the last level: larger outputs are written past the
                      caches, because inputs, rings and outputs of all ranks need the rest
    in_place   4 MiB  half of that share: the same for tensors that are both input and output

With slots of half that size, ops of 1 MiB need two rounds, and took 1.1 to 2.1 times as long on 2 ranks
(broadcast 0.6 to 0.8). With outputs of 4 MiB through the caches, an all_gather of 4 ranks took 1.7 times as
long (EPYC of 2 cores with these caches, torch 2.13, November 2026).

All ranks must have the same sizes of slots and of data beside messages: they use the last rank's sizes.

Rings are written through the caches or past them, whichever was measured to be faster
(:class:`RingWrites`). If ranks share a cache, the others read there what one writes, and data crosses
memory once on the way in and once on the way out. If they have separate caches (other core complexes or
sockets), a line that one has written and another reads goes from cache to cache, one message per line, and
again when it is overwritten. Then memory, to which lines written past the caches go, is several times as
fast. Which case applies depends on where the ranks run, and only measuring tells (2 ranks, broadcast of 64
MiB, through and past: 3.7 and 5.2 ms under one shared cache, 30 and 3.7 ms without; November 2026).

All ranks write in the same way, because one rank's gain depends on the others. The last rank measures and
decides, and the others read its decision. If one reads it too early or too late, one op is done in the
other way, which is not an error.
"""

import functools
import math
import os
import re
import struct
import zlib
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

CORES = Path("/sys/devices/system/cpu")
UNKNOWN = 512 << 10, 8 << 20  # a small machine's sizes, for machines that do not report theirs
PAGE = 4096
_PACKED = struct.Struct("<2q")


class Caches(NamedTuple):
    """The smallest second-level cache of some cores, and the sum of their last levels, in bytes."""

    second: int
    last: int

    def packed(self) -> bytes:
        return _PACKED.pack(*self)

    @classmethod
    def unpacked(cls, message: bytes) -> "Caches":
        return cls(*_PACKED.unpack(message))


class Thresholds(NamedTuple):
    medium: int
    reduced: int
    slot: int
    outputs: int
    in_place: int

    @classmethod
    def of(cls, caches: Caches, world_size: int) -> "Thresholds":
        second, share = caches.second & -PAGE, caches.last // world_size
        return cls(second // 4, second, second, max(second, share // 4), max(second, share // 2))


@functools.cache
def own_caches() -> Caches:
    """Return the caches of the cores that this process may use."""
    return caches(os.sched_getaffinity(0))


def caches(cores: Iterable[int], folder: Path = CORES) -> Caches:
    """Return the caches of ``cores``, or UNKNOWN. Cores that share a last level count once."""
    second, last, left = [], 0, set(cores)
    while left:
        core = min(left)
        found = _of_core(folder / f"cpu{core}" / "cache")
        level, size, sharing = max(found, default=(0, 0, {core}), key=lambda cache: cache[0])
        last += size if level >= 2 else 0
        second += [size for level, size, _ in found if level == 2]
        left -= sharing | {core}
    if not second or min(second) < UNKNOWN[0] // 2 or last < min(second):
        return Caches(*UNKNOWN)
    return Caches(min(second), last)


def _of_core(folder: Path) -> list[tuple[int, int, set[int]]]:
    """Return level, bytes and cores of each cache that holds data."""
    found = []
    for each in folder.glob("index*"):
        try:
            kind, level, size, cores = (
                (each / name).read_text().strip()
                for name in ("type", "level", "size", "shared_cpu_list")
            )
            if kind != "Instruction":
                found.append((int(level), _bytes(size), _parse_list(cores)))
        except (OSError, ValueError):
            continue
    return found


def _bytes(size: str) -> int:
    """Parse a size: "1024K" is 1 MiB."""
    match = re.fullmatch(r"(\d+)([KM]?)", size)
    if match is None:
        raise ValueError(f"not the size of a cache: {size!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]]


def _parse_list(cores: str) -> set[int]:
    """Parse a list: "0-2,8" are 0, 1, 2 and 8."""
    ends = [part.split("-") for part in cores.split(",") if part]
    return {core for each in ends for core in range(int(each[0]), int(each[-1]) + 1)}


FIRST = False, True, True, False, False, True  # whether the first ops write past the caches
KEPT = 3  # times of each way
AGAIN = 64  # ops after which the other way is tried again, because ranks may have moved
SOON = 8  # ops after which it is tried again if times have changed
CHANGED = 1.25  # the factor by which a time must be longer or shorter

Key = tuple[str, int]  # the op, and the bit length of its number of rounds


class RingWrites:
    """A group's decisions, by kind and size of op, in ``table``, which all ranks see."""

    def __init__(self, table: bytearray | memoryview, *, decides: bool) -> None:
        self._table, self._decides = table, decides
        self._places: dict[Key, int] = {}
        self._choices: dict[Key, WriteChoice] = {}

    def past(self, op: str, count: int) -> bool:
        return self._table[self._place((op, count.bit_length()))] != 0

    def took(self, op: str, count: int, past: bool, seconds: float) -> None:
        """Note the time of such an op in this way, from the meeting of the ranks to its end."""
        if self._decides:
            key = op, count.bit_length()
            choice = self._choices.get(key)
            if choice is None:
                choice = self._choices[key] = WriteChoice()
            choice.took(past, seconds / count)
            self._table[self._place(key)] = choice.past()

    def _place(self, key: Key) -> int:
        """Return a kind's place in the table, the same on all ranks. Two kinds may share a place."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = zlib.crc32(repr(key).encode()) % len(self._table)
        return place


class WriteChoice:
    """The choice for ops of one kind and size."""

    def __init__(self) -> None:
        self._ops = 0
        self._times = deque[float](maxlen=KEPT), deque[float](maxlen=KEPT)
        self._then = 0.0  # the time of the better way when the other was tried last

    def past(self) -> bool:
        """Return whether the next op writes past the caches."""
        if self._ops < len(FIRST):
            return FIRST[self._ops]
        best = self._best()
        if self._ops % SOON:
            return best
        now, then = self._typical(best), self._then
        changed = now > CHANGED * then or then > CHANGED * now
        return best != (self._ops % AGAIN == 0 or changed)  # the other way is tried now and then

    def took(self, past: bool, seconds: float) -> None:
        """Note an op that was done in this way."""
        tried = self._ops >= len(FIRST) and past != self._best()
        if tried:
            self._times[past].clear()  # they are out of date
        self._times[past].append(seconds)
        self._ops += 1
        if tried or self._ops == len(FIRST):
            self._then = self._typical(self._best())

    def _best(self) -> bool:
        return self._typical(True) < self._typical(False)

    def _typical(self, past: bool) -> float:
        return median(self._times[past]) if self._times[past] else math.inf
