"""Messages between two ranks, through interlace as a torch.distributed backend, gloo and OpenMPI.

``message_cells.py`` describes the cells. ``bytes`` is the size of one message; the time is for all in
flight. ``copy_`` is a plain copy of as many bytes as a rank receives, by all receivers at once.
"computing" is with a thread in each rank that multiplies matrices meanwhile, in one thread of torch.

The protocol is that in ``torch_backend.py``, with fewer blocks of large messages. Cells that do not fit
into half of the available memory are left out.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cpu.measure import (
    Candidates,
    Case,
    Measurement,
    Shape,
    beside_gloo,
    measure,
    on_ranks,
    openmpi,
)
from cpu.message_cells import MATRIX, SIZES, Cell, cells, computing

import interlace

MOST_MEMORY = 16 << 30


def available_memory() -> int:
    """Half of what this host has left, in bytes; at most MOST_MEMORY."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (left,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min(MOST_MEMORY, left // 2)


def message(cell: Cell, x: torch.Tensor, received: Sequence[torch.Tensor]) -> Callable[[Any], None]:
    rank = interlace.get_rank()
    to, source = cell.peers(rank, interlace.get_world_size())

    def one_way(group: dist.ProcessGroup) -> None:
        if to is not None:
            dist.send(x, to, group=group)
        else:
            dist.recv(received[0], source, group=group)

    def ping_pong(group: dist.ProcessGroup) -> None:
        for sends in (True, False) if rank % 2 == 0 else (False, True):
            if sends:
                dist.send(x, to, group=group)
            else:
                dist.recv(received[0], source, group=group)

    def both(group: dist.ProcessGroup) -> None:
        works = [] if to is None else [dist.isend(x, to, group=group) for _ in received]
        if source is not None:
            works += [dist.irecv(each, source, group=group) for each in received]
        for work in works:
            assert work is not None
            work.wait()

    def batch(group: dist.ProcessGroup) -> None:
        sends = [dist.P2POp(dist.isend, x, to, group) for _ in received]
        receives = [dist.P2POp(dist.irecv, each, source, group) for each in received]
        for work in dist.batch_isend_irecv([*sends, *receives]):
            work.wait()

    if cell.op == "send" and cell.in_flight == 1:
        return one_way
    return {"ping-pong": ping_pong, "batch": batch}.get(cell.op, both)


def multiply() -> Callable[[], object]:
    matrix, product = (torch.zeros(MATRIX, MATRIX) for _ in range(2))
    return lambda: torch.mm(matrix, matrix, out=product)


def on_rank(path: str, repetitions: int, what: Sequence[Cell]) -> list[Measurement]:
    with beside_gloo(path) as both:
        return [_measure(cell, both, repetitions) for cell in what]


def _measure(cell: Cell, both: Callable[[Any], Candidates], repetitions: int) -> Measurement:
    x = torch.full((cell.nbytes,), 1, dtype=torch.uint8)
    received = [torch.full_like(x, 0) for _ in range(cell.in_flight)]
    op = message(cell, x, received)

    def copies() -> None:
        if cell.peers(interlace.get_rank(), interlace.get_world_size())[1] is not None:
            for each in received:
                each.copy_(x)

    shape: Shape = {"bytes": cell.nbytes, "in flight": cell.in_flight, "dtype": "uint8"}
    with computing(multiply()) if cell.computing else contextlib.nullcontext():
        case = Case(cell.name, shape, "gloo", {**both(op), "copy_": copies})
        return measure(case, cell.repetitions(repetitions), calls=None, warm_up=0)


def measurements(
    world_size: int, repetitions: int, sizes: Sequence[int] | None = None
) -> list[Measurement]:
    if world_size % 2:
        return []
    what = cells(world_size, sizes or SIZES, available_memory())
    anchor = openmpi(world_size, "messages", repetitions, [astuple(cell) for cell in what])
    found = on_ranks(on_rank, world_size, repetitions, what)
    for cell, each in zip(what, found, strict=True):
        if cell.key in anchor:
            each.microseconds["OpenMPI"] = anchor[cell.key]
    return found
