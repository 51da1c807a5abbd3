"""Memory and descriptors that run out: an error on every rank that names the one without, no crash."""

import contextlib
import ctypes
import os
import pathlib
import re
import resource
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from faults.crew import crew, repeated, sum_is_right, tried
from faults.rows import NotHere, Plan, Row, Trial
from interlace.groups import groups

RANKS = 4
POOR = 1
"""The rank that has nothing left."""
MIB = 1 << 20
SPARE, WANTED = 64 * MIB, 512 * MIB
_libc = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNTS, _PRIVATE = 0x20000, 1 << 18 | 1 << 14


def lowered(limit: int, value: int) -> None:
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def as_before(limit: int) -> None:
    resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)


class OfFiles:
    """No file, and therefore no shared memory, may be larger than 64 MiB."""

    said = r"cannot allocate \d+ bytes of shared memory"

    def __enter__(self) -> None:
        lowered(resource.RLIMIT_FSIZE, SPARE)

    def __exit__(self, *_: object) -> None:
        as_before(resource.RLIMIT_FSIZE)


class OfAddresses:
    """64 MiB of addresses are left."""

    said = r"cannot map \d+ bytes"

    def __enter__(self) -> None:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        lowered(resource.RLIMIT_AS, pages * resource.getpagesize() + SPARE)

    def __exit__(self, *_: object) -> None:
        as_before(resource.RLIMIT_AS)


def allocating(join: Any, end: Any, limit: Callable[[], Any], times: int, broken: bool) -> None:
    """All ranks allocate, but one has no memory; report the error, and whether the ranks continue.

    In the control it has memory, so that nothing fails.
    """
    api = join()
    place = groups.default_group().place
    for _ in range(times):
        poor = api.get_rank() == POOR and not broken
        with limit() if poor else contextlib.nullcontext():
            said = tried(partial(place.allocate, WANTED))
        end.send((said, tried(partial(sum_is_right, api))))


def judged(text: str, found: list[Any]) -> Trial:
    """All ranks must report an error that names the same rank, and continue."""
    begun = max(said.begun for said, _ in found)
    wrong = [
        str(pair)
        for pair in found
        if not re.search(text, pair[0].text) or f"rank {POOR}" not in pair[0].text
        or pair[1].text != "True"
    ]  # fmt: skip
    return Trial(not wrong, [1e3 * (said.ended - begun) for said, _ in found], "; ".join(wrong))


def making_groups(join: Any, end: Any, times: int, broken: bool) -> None:
    """Make groups until one rank has no descriptors left.

    The control makes 40 groups. At first the rank has fewer descriptors, so that it fails at each point of
    a new group's start.
    """
    api = join()
    for spare in range(times):
        made: list[Any] = []
        if api.get_rank() == POOR and not broken:
            lowered(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + spare)

        def make(into: list[Any] = made) -> None:
            while len(into) < 40:
                into.append(api.new_group())

        said = tried(make)
        as_before(resource.RLIMIT_NOFILE)
        for group in made:
            group.close()
        end.send((said, tried(partial(sum_is_right, api))))


def with_full_folder(join: Any, end: Any, broken: bool) -> None:
    """Join and sum with a full /dev/shm; the control keeps memory there."""
    if _libc.unshare(_NEW_MOUNTS) or _libc.mount(None, b"/", None, _PRIVATE, None):
        raise NotHere("needs root, for a /dev/shm of its own")
    assert _libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=4096") == 0
    pathlib.Path("/dev/shm/full").write_bytes(bytes(4096))
    if broken:
        named = pathlib.Path(f"/dev/shm/interlace-{os.getpid()}")
        os.memfd_create = lambda *_: os.open(named, os.O_RDWR | os.O_CREAT)  # type: ignore[assignment]
    end.send(tried(lambda: sum_is_right(join(), 2 * MIB)))


def full_folder(plan: Plan) -> Iterator[Trial]:
    for _ in range(plan.trials):
        with crew("shm", RANKS, with_full_folder, plan.broken) as team:
            said = team.reports()
        right = all(each.text == "True" for each in said)
        yield Trial(right, [1e3 * (each.ended - each.begun) for each in said], str(said))


def without(what: str, on_rank: Any, text: str, many: int, few: int, *arguments: Any) -> Row:
    def measure(plan: Plan) -> Iterator[Trial]:
        return repeated("shm", RANKS, on_rank, partial(judged, text), plan, *arguments)

    return Row(f"no {what}", "shm", measure, many, few)


DESCRIPTORS = without("descriptors", making_groups, "[Tt]oo many (open )?files", 20, 1)


def rows() -> list[Row]:
    return [
        Row("/dev/shm is full", "shm", full_folder, 5, 1),
        without("memory: the largest file", allocating, OfFiles.said, 20, 3, OfFiles),
        without("memory: addresses", allocating, OfAddresses.said, 20, 3, OfAddresses),
        DESCRIPTORS,
    ]
