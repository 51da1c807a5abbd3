"""interlace as a torch.distributed backend, against gloo and OpenMPI: the same calls, two groups.

Every op is called as a user calls it, ``dist.all_reduce(tensor, group=...)``. ``bytes`` is the size of the
input tensor on each rank. ``copy_`` is one rank's plain copy of as many bytes, with all ranks copying at
once, and ``streamed copy`` the same past the caches, the fastest copy that we know: no op that writes every
byte once can take less. OpenMPI runs the same ops through mpi4py, before the others on the same machine,
where ``mpirun`` and a Python with mpi4py are found (``MPI_PYTHON`` names it).

Protocol: blocks of back-to-back calls, as many as take about BLOCK_SECONDS, so that the ranks' different
starts do not count; candidates alternate block by block; a block's time per call is that of its slowest
rank; medians over blocks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from measure import Measurement

import interlace
from interlace.runtime.places.shm.machine_code.steps import Copier, available

SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
BLOCK_SECONDS = 0.02
MOST_CALLS = 2000
DISPATCH_BYTES = 4
DISPATCH = "dispatch (world size 1)"


def ops(nbytes: int, world_size: int) -> dict[str, Callable[[dist.ProcessGroup], object]]:
    """The ops on tensors of ``nbytes``, as functions of a group.

    All memory is written first: what never was is one page of zeros, which stays in the cache.
    """
    n = nbytes // 4
    tensor, whole, part, other = (
        torch.full((size,), 0.0) for size in (n, n * world_size, n // world_size, n)
    )
    return {
        "all_reduce": lambda group: dist.all_reduce(tensor, group=group),
        "all_gather": lambda group: dist.all_gather_single(whole, tensor, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_single(part, tensor, group=group),
        "all_to_all": lambda group: dist.all_to_all_single(other, tensor, group=group),
        "broadcast": lambda group: dist.broadcast(tensor, 0, group=group),
    }


def _more_ops() -> dict[str, Callable[[dist.ProcessGroup], object]]:
    """The other ops, of one element in a world of one."""
    tensor, other = torch.full((1,), 0.0), torch.full((1,), 0.0)
    return {
        "reduce": lambda group: dist.reduce(tensor, 0, group=group),
        "all_gather, list": lambda group: dist.all_gather([other], tensor, group=group),
        "reduce_scatter, list": lambda group: dist.reduce_scatter(other, [tensor], group=group),
        "all_to_all, list": lambda group: dist.all_to_all([other], [tensor], group=group),
        "gather": lambda group: dist.gather(tensor, [other], 0, group=group),
        "scatter": lambda group: dist.scatter(other, [tensor], 0, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }


def _copies(nbytes: int) -> dict[str, Callable[[], object]]:
    """Copies of as many bytes by each rank; the streamed one only where there is machine code."""
    source, target = torch.full((nbytes // 4,), 0.0), torch.full((nbytes // 4,), 0.0)
    copies: dict[str, Callable[[], object]] = {"copy_": lambda: target.copy_(source)}
    if available():
        stream, to, start = Copier(past=True), target.data_ptr(), source.data_ptr()
        copies["streamed copy"] = lambda: stream(to, start, nbytes)
    return copies


def _slowest(seconds: float) -> float:
    """The largest of all ranks' ``seconds``."""
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _block(candidate: Callable[[], object], calls: int) -> float:
    """Seconds per call of the slowest rank."""
    interlace.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        candidate()
    return _slowest((time.perf_counter() - start) / calls)


def _blocks(
    candidates: dict[str, Callable[[], object]], repetitions: int, fewest: int = 1
) -> dict[str, float]:
    """Median microseconds per call, by candidate, of blocks of at least ``fewest`` calls."""
    calls = {}
    for name, candidate in candidates.items():
        _block(candidate, 2)  # a first call may allocate
        once = min(_block(candidate, 3), _block(candidate, 3))
        calls[name] = max(fewest, min(MOST_CALLS, int(BLOCK_SECONDS / once)))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repetitions):
        for name, candidate in candidates.items():
            times[name].append(_block(candidate, calls[name]) * 1e6)
    return {name: median(values) for name, values in times.items()}


def on_rank(path: str, repetitions: int) -> list[Measurement]:
    """All measurements of one world size, on one rank."""
    torch.set_num_threads(1)
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    try:
        return _measure(world_size, repetitions)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def _measure(world_size: int, repetitions: int) -> list[Measurement]:
    gloo = dist.group.WORLD
    ours = dist.new_group(backend="interlace")
    assert gloo is not None

    def case(name: str, nbytes: int, candidates: dict[str, Callable[[], object]]) -> Measurement:
        times = _blocks(candidates, repetitions)
        shape: dict[str, int | str] = {"bytes": nbytes, "dtype": "float32"}
        return Measurement(name, world_size, shape, "gloo", times, repetitions)

    if world_size == 1:
        found = []
        shape: dict[str, int | str] = {"bytes": DISPATCH_BYTES, "dtype": "float32"}
        for name, op in {**ops(DISPATCH_BYTES, 1), **_more_ops()}.items():
            candidates: dict[str, Callable[[], object]] = {
                "gloo": lambda op=op: op(gloo),  # type: ignore[misc]
                "interlace": lambda op=op: op(ours),  # type: ignore[misc]
            }
            times = _blocks(candidates, repetitions, MOST_CALLS)
            found.append(Measurement(f"{DISPATCH}: {name}", 1, shape, "gloo", times, repetitions))
        return found
    found = [
        case(
            "barrier",
            0,
            {
                "gloo": lambda: dist.barrier(group=gloo),
                "interlace": lambda: dist.barrier(group=ours),
            },
        )
    ]
    for nbytes in SIZES:
        copies = _copies(nbytes)
        for name, op in ops(nbytes, world_size).items():
            found.append(
                case(
                    name,
                    nbytes,
                    {
                        "gloo": lambda op=op: op(gloo),  # type: ignore[misc]
                        "interlace": lambda op=op: op(ours),  # type: ignore[misc]
                        **copies,
                    },
                )
            )
    return found


def measurements(world_size: int, repetitions: int) -> list[Measurement]:
    """All of one world size, with OpenMPI's times where it is installed."""
    anchor = openmpi(world_size, repetitions) if world_size > 1 else {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = interlace.run(
            on_rank, world_size, f"{folder}/store", repetitions, place="shm", timeout=1200.0
        )
    found: list[Measurement] = ranks[0]
    for each in found:
        time_of = anchor.get(f"{each.op} {each.shape['bytes']}")
        if time_of is not None:
            each.microseconds["OpenMPI"] = time_of
    return found


def openmpi(world_size: int, repetitions: int) -> dict[str, float]:
    """OpenMPI's medians by "op bytes"; empty where it is not installed."""
    python = os.environ.get("MPI_PYTHON", sys.executable)
    if shutil.which("mpirun") is None:
        return {}
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(world_size)]
    script = Path(__file__).with_name("openmpi_ranks.py")
    try:
        answer = subprocess.run(
            [*command, python, str(script), str(repetitions), *map(str, SIZES)],
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        print(f"no figures of OpenMPI: {error}", file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(answer.stdout.strip().splitlines()[-1])
    return found
