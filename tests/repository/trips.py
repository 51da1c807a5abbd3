"""Trips: the files that a fused op passes on its way to its kernel, and ``dist.all_reduce`` all the way.

Each is a warm call on rank 0 of two. The one with the fewest files of several such calls counts, because a
rank that has to wait for its peer passes more. A file counts if one of its functions is entered. A change
is an entry into another file than the file of the last entry. The way to the kernel ends with the entry of
its launch, which counts. With a gradient the trip continues after the launch, because the call is recorded
there; its backward, in autograd's thread, is not part of it. Calls of the fake GPU's own code do not count.
Needs Python 3.11.
"""

import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu
from stand_ins.fake_driver import install

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = tuple(str(ROOT / folder) for folder in ("kernels", "runtime", "python"))
STAND_INS = ("Plans.lasting_tensors", "Arena.buffers", "Turns._take")
WARM, LOOKS = 4, 40  # calls; a plan is made for each of two workspaces

Trip = list[str]
"""Files in the order in which they were entered; no two neighbours are equal."""


def taken(call: Callable[[], Any], end: str = "", *, beyond: bool = False) -> Trip:
    """Return the trip of ``call`` up to the first entry of this repository's function ``end``.

    With ``beyond`` it goes all the way, without the calls within ``end``.
    """
    trip: Trip = []
    within: list[Any] = []

    def entered(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if within:
            if event == "return" and frame is within[0]:
                within.clear()
            return
        if event != "call" or code.co_qualname.startswith(STAND_INS):
            return
        file = str(pathlib.Path(code.co_filename).resolve())
        if not file.startswith(SOURCES):
            return
        name = str(pathlib.Path(file).relative_to(ROOT))
        if not trip or trip[-1] != name:
            trip.append(name)
        if end and code.co_qualname == end:
            reached.append(name)
            if beyond:
                within.append(frame)
            else:
                sys.setprofile(None)

    reached: Trip = []
    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert reached or not end, f"the call has not come to {end}"
    return trip


def shortest(call: Callable[[], Any], end: str = "", *, beyond: bool = False) -> Trip:
    for _ in range(WARM):
        call()
    found = [taken(call, end, beyond=beyond) for _ in range(LOOKS)]
    return min(found, key=lambda trip: (len(set(trip)), len(trip)))


def fused(end: str, *, gradient: bool = False) -> Trip:
    shard, weight = torch.ones(4, 16), torch.ones(16, 8, requires_grad=gradient)

    def call() -> None:
        interlace.all_gather_matmul(shard, weight, algorithm="fused")

    return shortest(call, end, beyond=gradient)


def all_reduce(file: str) -> Trip:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    store = dist.FileStore(file, size)
    dist.init_process_group("interlace", store=store, rank=rank, world_size=size)
    tensor = torch.ones(1024)
    trip = shortest(lambda: dist.all_reduce(tensor))
    dist.destroy_process_group()
    return trip


def trips() -> dict[str, Trip]:
    found = {
        "all_gather_matmul, shm": interlace.run(fused, 2, "run_interpreted", place="shm")[0],
        "the same with a gradient": interlace.run(
            fused, 2, "run_interpreted", gradient=True, place="shm"
        )[0],
    }
    with pytest.MonkeyPatch.context() as patch:
        install(patch, FakeGpu(3))
        found["all_gather_matmul, planned, cuda"] = fake_host.run(
            lambda: fused("PreparedLaunch.again"), 2
        )[0]
    with tempfile.TemporaryDirectory() as folder:
        found["dist.all_reduce, 4 KiB, shm"] = interlace.run(
            all_reduce, 2, f"{folder}/store", place="shm"
        )[0]
    return found


def report(*, files: bool = False) -> None:
    for name, trip in trips().items():
        print(f"{name:34} {len(set(trip)):3} files, {len(trip) - 1:3} changes of file")
        if files:
            print("\n".join(f"    {file}" for file in trip))
