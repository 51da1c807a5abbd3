"""Thresholds of collectives, and the bytes of slots: they follow from the caches of the machine.

What an op writes should still be in a cache when it is read, and what will have left all caches before
anybody wants it need not pass through them. So with a second-level cache of 1 MiB, a last-level cache of
32 MiB and 4 ranks::

    medium   256 KiB  a quarter of the second level: data beside messages, of which its places are in turn
    reduced    1 MiB  the second level: what one rank reads to reduce everything itself
    slot       1 MiB  the same: a slot is read from there, and few ops need several
    outputs    2 MiB  a quarter of a rank's share of the last level: outputs from here on are written past
                      the caches. Inputs, rings and outputs of all ranks want the rest
    in_place   4 MiB  half of that share: the same for tensors that are input and output

With slots of half as much, in which ops of 1 MiB have two rounds, these took 1.1 to 2.1 times as long on 2
ranks (fastest tenth of blocks, on a busy machine; medians 1.0 to 1.1; but broadcast 0.8 and 0.6 times), and
ops of 4 MiB 0.8 to 1.3 times on 4 ranks. With
outputs of 4 MiB through the caches an all_gather of 4 ranks took 1.7 times as long (EPYC of 2 cores with
these caches, torch 2.13, November 2026).

Of slots and data beside messages all ranks must think alike: they take the last rank's sizes.
"""

import functools
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

CORES = Path("/sys/devices/system/cpu")
UNKNOWN = 512 << 10, 8 << 20  # where a machine does not say: those of a small one
PAGE = 4096
_PACKED = struct.Struct("<2q")


class Caches(NamedTuple):
    """Bytes of the smallest second-level cache of some cores, and of their last levels together."""

    second: int
    last: int

    def packed(self) -> bytes:
        return _PACKED.pack(*self)

    @classmethod
    def unpacked(cls, message: bytes) -> "Caches":
        return cls(*_PACKED.unpack(message))


class Thresholds(NamedTuple):
    """In bytes; see above."""

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
    """Those of the cores that this process may use."""
    return caches(os.sched_getaffinity(0))


def caches(cores: Iterable[int], folder: Path = CORES) -> Caches:
    """Those of ``cores``; UNKNOWN where they do not say. Of those that share a last level one is asked."""
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
    """Level, bytes and cores of each cache that holds data."""
    found = []
    for each in folder.glob("index*"):
        try:
            kind, level, size, cores = (
                (each / name).read_text().strip()
                for name in ("type", "level", "size", "shared_cpu_list")
            )
            if kind != "Instruction":
                found.append((int(level), _bytes(size), _listed(cores)))
        except (OSError, ValueError):
            continue
    return found


def _bytes(size: str) -> int:
    """ "1024K" is 1 MiB."""
    match = re.fullmatch(r"(\d+)([KM]?)", size)
    if match is None:
        raise ValueError(f"not the size of a cache: {size!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]]


def _listed(cores: str) -> set[int]:
    """ "0-2,8" are 0, 1, 2 and 8."""
    ends = [part.split("-") for part in cores.split(",") if part]
    return {core for each in ends for core in range(int(each[0]), int(each[-1]) + 1)}
