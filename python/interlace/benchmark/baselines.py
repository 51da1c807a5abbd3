"""Baselines that a measurement is compared with.

=========  ===========================================================================================
gloo       torch.distributed over gloo, after or before ``torch.mm``; on a CPU, one process per rank
nccl       the same over NCCL; one process per GPU
symm_mem   torch's symmetric memory: its fused ops, its collectives; one process per GPU
torch      torch operators on one rank alone: the same copies, sums and ``torch.mm`` on what all
           ranks bring, in its own memory, and nobody waits for anybody. With virtual ranks on one GPU
           that is the unfused sequence, for there the peers' memory is the same; elsewhere it says
           what is left if links and waiting cost nothing
=========  ===========================================================================================
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from interlace.benchmark.kernel import BASELINE, BenchCandidate
from interlace.benchmark.plain import Plain
from interlace.runtime.compat.launchers import local_rank

NAMES = ("torch", "nccl", "gloo", "symm_mem")
ONE_SHOT_BYTES = 256 << 10  # beyond it torch's symmetric memory reduces in two shots here
SYMMETRIC_SETS = 8  # each is a rendezvous


def default(place: str, device: str, *, virtual: bool) -> tuple[str, ...]:
    """The baselines to compare with if nobody says any."""
    if place == "sim":
        return ()
    if virtual:
        return ("torch",)
    return ("nccl",) if device == "cuda" else ("gloo",)


def refuse(name: str, place: str, device: str, *, virtual: bool) -> None:
    """Raise ValueError if ``name`` is no baseline, or none there, saying why and what to do."""
    if name not in NAMES:
        raise ValueError(f"--baseline {name}: known are {', '.join(NAMES)}, and none")
    where = f"--baseline {name}"
    on_gpus = name in ("nccl", "symm_mem")
    if on_gpus and device != "cuda":
        instead = "torch" if place == "sim" else "gloo or torch"
        raise ValueError(
            f"{where} needs a GPU per rank, and place {place} has its tensors on the CPU; use {instead}"
        )
    if on_gpus and virtual:
        raise ValueError(
            f"{where} needs one process per GPU, and virtual ranks are one process on one GPU; "
            "start bench with torchrun, or use torch"
        )
    if name == "gloo" and device != "cpu":
        raise ValueError(f"{where} is for tensors on a CPU; use torch, nccl or symm_mem")
    if name == "gloo" and place == "sim":
        raise ValueError(f"{where} needs a process per rank: --place shm; or use torch")


def torch_backend(names: Sequence[str]) -> str | None:
    """The backend of torch.distributed that these baselines use."""
    if "nccl" in names or "symm_mem" in names:
        return "cpu:gloo,cuda:nccl"
    return "gloo" if "gloo" in names else None


@contextmanager
def joined(backend: str | None, store: str | None, rank: int, world_size: int) -> Iterator[None]:
    """torch.distributed's default group, if it is not there: by the file ``store``, or by torchrun."""
    if backend is None or dist.is_initialized():
        yield
        return
    where: dict[str, Any] = {}
    if store is not None:
        where = {"init_method": f"file://{store}", "rank": rank, "world_size": world_size}
    if "nccl" in backend:
        local = local_rank()
        torch.cuda.set_device(rank if local is None else local)
    dist.init_process_group(backend, timeout=timedelta(seconds=300), **where)
    try:
        yield
    finally:  # no barrier: measuring ends with one, and after an error nobody may come
        dist.destroy_process_group()


def group_name() -> str:
    """The name of torch's default group, for torch's symmetric memory."""
    world = dist.group.WORLD
    assert world is not None
    return str(world.group_name)


def symmetric_collective(op: Plain) -> BenchCandidate:
    """A plain collective through torch's symmetric memory, where its inputs are made: collectively."""
    import torch.distributed._symmetric_memory as symm_mem

    name, ops, group = op.op, torch.ops.symm_mem, group_name()

    def shared(source: torch.Tensor) -> tuple[torch.Tensor]:
        tensor = symm_mem.empty(source.shape, dtype=source.dtype, device=source.device)
        symm_mem.rendezvous(tensor, group)  # type: ignore[arg-type]
        return (tensor.copy_(source),)

    def finished(tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
        return found

    runs: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda x: (
            ops.one_shot_all_reduce(x, "sum", group)
            if op.nbytes <= ONE_SHOT_BYTES
            else ops.two_shot_all_reduce_(x, "sum", group)
        ),
        "all_gather": lambda x: finished(ops._low_contention_all_gather(x, group)),
        "reduce_scatter": lambda x: finished(ops._low_contention_reduce_scatter(x, "sum", group)),
    }
    if name not in runs:
        raise ValueError(
            f"--baseline symm_mem: torch's symmetric memory has no {name}; it has {', '.join(runs)}, "
            "all_gather_matmul and matmul_reduce_scatter"
        )
    count = op.part if name == "all_gather" else op.whole
    return BenchCandidate(
        "symm_mem",
        BASELINE,
        runs[name],
        lambda call: shared(op.of(op.rank, call, count=count)),
        lambda result, call: op.check(result, call, rounds_often=True),
        timed_inputs=lambda call: shared(op.empty(count).zero_()),
        most_sets=SYMMETRIC_SETS,
        copied=False,
    )
