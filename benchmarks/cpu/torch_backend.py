"""interlace as a torch.distributed backend, against gloo and OpenMPI: the same calls, two groups.

``bytes`` is the size of the input tensor on each rank. ``copy_`` is one rank's plain copy of as many bytes,
with all ranks copying at once, and ``streamed copy`` the same past the caches, the fastest copy that we
know: no op that writes every byte once can take less. OpenMPI runs the same ops through mpi4py, before the
others on the same machine, where ``mpirun`` and a Python with mpi4py are found.

Blocks are of back-to-back calls, as many as take about 20 ms, so that the ranks' different starts do not
count.
"""

from collections.abc import Callable, Sequence
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

import interlace
from interlace.runtime.places.shm.machine_code import Copier, available

SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
DISPATCH_BYTES = 4
DISPATCH_CALLS = 2000
DISPATCH = "dispatch (world size 1)"

Op = Callable[[Any], object]


def ops(nbytes: int, world_size: int) -> dict[str, Op]:
    """The ops on ``nbytes``. Memory is written first: otherwise it is one page of zeros in the cache."""
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


def _more_ops() -> dict[str, Op]:
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


def _copies(nbytes: int) -> Candidates:
    """Copies of as many bytes by each rank; the streamed one only where there is machine code."""
    source, target = torch.full((nbytes // 4,), 0.0), torch.full((nbytes // 4,), 0.0)
    copies: Candidates = {"copy_": lambda: target.copy_(source)}
    if available():
        stream, to, start = Copier(past=True), target.data_ptr(), source.data_ptr()
        copies["streamed copy"] = lambda: stream(to, start, nbytes)
    return copies


def on_rank(path: str, repetitions: int, sizes: Sequence[int]) -> list[Measurement]:
    world_size = interlace.get_world_size()
    with beside_gloo(path) as both:

        def case(
            name: str, nbytes: int, op: Op, copies: Candidates, calls: int | None = None
        ) -> Measurement:
            shape: Shape = {"bytes": nbytes, "dtype": "float32"}
            one = Case(name, shape, "gloo", {**both(op), **copies})
            return measure(one, repetitions, calls=calls, warm_up=0 if calls is None else 1)

        if world_size == 1:
            return [
                case(f"{DISPATCH}: {name}", DISPATCH_BYTES, op, {}, DISPATCH_CALLS)
                for name, op in {**ops(DISPATCH_BYTES, 1), **_more_ops()}.items()
            ]
        found = [case("barrier", 0, lambda group: dist.barrier(group=group), {})]
        for nbytes in sizes:
            copies, sized = _copies(nbytes), ops(nbytes, world_size)
            found += [case(name, nbytes, op, copies) for name, op in sized.items()]
        return found


def measurements(
    world_size: int, repetitions: int, sizes: Sequence[int] | None = None
) -> list[Measurement]:
    given = list(sizes or SIZES)
    anchor = openmpi(world_size, "collectives", repetitions, given) if world_size > 1 else {}
    found = on_ranks(on_rank, world_size, repetitions, given)
    for each in found:
        time_of = anchor.get(f"{each.op} {each.shape['bytes']}")
        if time_of is not None:
            each.microseconds["OpenMPI"] = time_of
    return found
