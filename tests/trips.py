"""Trips: the files that a fused op passes on its way to its kernel, and ``dist.all_reduce`` all the way.

Each is the second, warm call of its kind on rank 0 of two. A file counts when a function of it is entered,
its ``with`` blocks and generators included; a change is an entry into another file than that of the entry
before. The way to the kernel ends where its launch is entered, which counts.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fake_host
import interlace
from fake_cuda import FakeGpu
from fake_driver import install

ROOT = pathlib.Path(__file__).resolve().parents[1]
N = 4
SOURCES = tuple(str(ROOT / folder) for folder in ("kernels", "runtime", "python"))


@dataclass
class Trip:
    """The files that were entered, in order, each as often as a function of another file came before."""

    files: list[str] = field(default_factory=list)

    @property
    def distinct(self) -> list[str]:
        return list(dict.fromkeys(self.files))

    @property
    def changes(self) -> int:
        return len(self.files) - 1


def taken(call: Callable[[], Any], end: str = "") -> Trip:
    """The trip of ``call``, up to the first entry of the function ``end`` of this repository."""
    trip = Trip()

    def entered(frame: Any, event: str, argument: Any) -> None:
        if event != "call":
            return
        file = str(pathlib.Path(frame.f_code.co_filename).resolve())
        if not file.startswith(SOURCES):
            return
        name = str(pathlib.Path(file).relative_to(ROOT))
        if not trip.files or trip.files[-1] != name:
            trip.files.append(name)
        if end and frame.f_code.co_qualname == end:
            sys.setprofile(None)

    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
    return trip


def _second(call: Callable[[], Any], end: str = "") -> Trip:
    for _ in range(N):  # a plan is made for each of two workspaces
        call()
    return taken(call, end)


def fused_in_shm() -> Trip:
    shard, weight = torch.ones(4, 16), torch.ones(16, 8)
    call = lambda: interlace.all_gather_matmul(shard, weight, algorithm="fused")  # noqa: E731
    return _second(call, "run_interpreted")


def fused_by_a_plan() -> Trip:
    shard, weight = torch.ones(4, 16), torch.ones(16, 8)
    call = lambda: interlace.all_gather_matmul(shard, weight, algorithm="fused")  # noqa: E731
    return _second(call, "Prepared.again")


def all_reduce(file: str) -> Trip:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    dist.init_process_group(
        "interlace", store=dist.FileStore(file, size), rank=rank, world_size=size
    )
    tensor = torch.ones(1024)
    trip = _second(lambda: dist.all_reduce(tensor))
    dist.destroy_process_group()
    return trip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ar = interlace.run(all_reduce, 2, f"{folder}/store", place="shm")[0]
    for name, trip in {
        "fused shm": interlace.run(fused_in_shm, 2, place="shm")[0],
        "all_reduce": ar,
    }.items():
        print(name, len(trip.distinct), trip.changes)
        print("\n".join(trip.files))
    with pytest.MonkeyPatch.context() as patch:
        install(patch, FakeGpu(3))
        trip = fake_host.run(fused_by_a_plan, 2)[0]
        print("plan", len(trip.distinct), trip.changes)
        print("\n".join(trip.files))


if __name__ == "__main__":
    main()
