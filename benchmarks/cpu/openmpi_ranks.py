"""OpenMPI's collectives and messages through mpi4py; ``measure.py`` runs this under ``mpirun``.

``mpirun -n 2 python -m cpu.openmpi_ranks collectives REPETITIONS "[BYTES, ...]"``, or ``messages`` with a
list of cells, prints one line of JSON: microseconds per call by "op bytes", medians over blocks of
back-to-back calls, of each block's slowest rank. Needs numpy and mpi4py.
"""

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from cpu.message_cells import MATRIX, Cell, computing
from mpi4py import MPI

BLOCK_SECONDS = 0.02
MOST_CALLS = 2000

world = MPI.COMM_WORLD


def block(function: Callable[[], object], calls: int) -> float:
    world.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return float(world.allreduce((time.perf_counter() - start) / calls, op=MPI.MAX))


def measure(function: Callable[[], object], repetitions: int) -> float:
    once = block(function, 1)
    if once < BLOCK_SECONDS:
        once = min(block(function, 3), block(function, 3))
    calls = max(1, min(MOST_CALLS, int(BLOCK_SECONDS / once)))
    return statistics.median(block(function, calls) * 1e6 for _ in range(repetitions))


def ops(nbytes: int) -> dict[str, Callable[[], object]]:
    x = np.full(nbytes // 4, 0, "f4")
    y = np.full(nbytes // 4, 0, "f4")
    whole = np.full(world.size * x.size, 0, "f4")
    part = np.full(x.size // world.size, 0, "f4")
    return {
        "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, x),
        "all_gather": lambda: world.Allgather(x, whole),
        "reduce_scatter": lambda: world.Reduce_scatter_block(x, part),
        "all_to_all": lambda: world.Alltoall(x, y),
        "broadcast": lambda: world.Bcast(x, 0),
    }


def message(cell: Cell) -> Callable[[], object]:
    to, source = cell.peers(world.rank, world.size)
    x = np.full(cell.nbytes, 1, "u1")
    received = [np.full(cell.nbytes, 0, "u1") for _ in range(cell.in_flight)]

    def ping_pong() -> None:
        for sends in (True, False) if world.rank % 2 == 0 else (False, True):
            if sends:
                world.Send(x, to)
            else:
                world.Recv(received[0], source)

    def one_way() -> None:
        if to is not None:
            world.Send(x, to)
        else:
            world.Recv(received[0], source)

    def both() -> None:
        requests = [] if to is None else [world.Isend(x, to) for _ in received]
        requests += [] if source is None else [world.Irecv(each, source) for each in received]
        MPI.Request.Waitall(requests)

    if cell.op == "ping-pong":
        return ping_pong
    return one_way if cell.op == "send" and cell.in_flight == 1 else both


def multiply() -> Callable[[], object]:
    matrix, product = (np.full((MATRIX, MATRIX), 0, "f4") for _ in range(2))
    return lambda: np.matmul(matrix, matrix, out=product)


def main() -> None:
    kind, repetitions, what = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    found = {}
    if kind == "collectives":
        found["barrier 0"] = measure(world.Barrier, repetitions)
        for size in what:
            for name, function in ops(size).items():
                found[f"{name} {size}"] = measure(function, repetitions)
    else:
        for cell in [Cell(*each) for each in what]:
            with computing(multiply()) if cell.computing else contextlib.nullcontext():
                found[cell.key] = measure(message(cell), cell.repetitions(repetitions))
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
