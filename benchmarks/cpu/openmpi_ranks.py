"""OpenMPI's collectives through mpi4py: torch_backend.py runs this under ``mpirun``. Needs numpy, mpi4py.

``mpirun -n 2 python openmpi_ranks.py REPETITIONS BYTES...`` prints one line of JSON: microseconds per call
by "op bytes", medians over blocks of back-to-back calls, of each block's slowest rank.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

BLOCK_SECONDS = 0.02
MOST_CALLS = 2000

world = MPI.COMM_WORLD
repetitions, sizes = int(sys.argv[1]), [int(size) for size in sys.argv[2:]]


def block(function: Callable[[], object], calls: int) -> float:
    world.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return float(world.allreduce((time.perf_counter() - start) / calls, op=MPI.MAX))


def measure(function: Callable[[], object]) -> float:
    block(function, 2)
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


found = {"barrier 0": measure(world.Barrier)}
for size in sizes:
    for name, function in ops(size).items():
        found[f"{name} {size}"] = measure(function)
if world.rank == 0:
    print(json.dumps(found))
