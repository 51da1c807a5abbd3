"""Baselines that a measurement is compared with; ``docs/how-to/gpu/bench.md`` describes them.

For "torch" the data that other ranks would send is computed before. For an op of rows, the code of all
ranks is run up to their first collective, whose inputs are then known. With its results the code is run up
to the second, and so on.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from interlace.benchmark.kernel import BASELINE, BenchCandidate
from interlace.benchmark.plain import AllGather, Plain, ReduceScatter, Tensors, torchs
from interlace.runtime.compat.launchers import local_rank

NAMES = ("torch", "nccl", "gloo", "symm_mem")
ONE_SHOT_BYTES = 256 << 10  # beyond it torch's symmetric memory reduces in two shots here
SYMMETRIC_SETS = 8  # each needs a rendezvous


def default(place: str, device: str, *, virtual: bool) -> tuple[str, ...]:
    if place == "sim":
        return ()
    if virtual:
        return ("torch",)
    return ("nccl",) if device == "cuda" else ("gloo",)


def refuse(name: str, place: str, device: str, *, virtual: bool) -> None:
    """Raise ValueError if ``name`` is unknown or not available here; say why and what to do."""
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
    if "nccl" in names or "symm_mem" in names:
        return "cpu:gloo,cuda:nccl"
    return "gloo" if "gloo" in names else None


@contextmanager
def join_default_group(
    backend: str | None, store: str | None, rank: int, world_size: int
) -> Iterator[None]:
    """Initialize torch.distributed's default group if needed: by the file ``store``, or by torchrun."""
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
    finally:  # no barrier: measuring ends with one, and after an error other ranks may not come
        dist.destroy_process_group()


def group_name() -> str:
    """Return the name of torch's default group, for torch's symmetric memory."""
    world = dist.group.WORLD
    assert world is not None
    return str(world.group_name)


def symmetric_collective(op: Plain) -> BenchCandidate:
    """Return a plain collective through torch's symmetric memory, with inputs there. Collective."""
    import torch.distributed._symmetric_memory as symm_mem

    name, ops, group = op.op, torch.ops.symm_mem, group_name()

    def share(source: torch.Tensor) -> tuple[torch.Tensor]:
        tensor = symm_mem.empty(source.shape, dtype=source.dtype, device=source.device)
        symm_mem.rendezvous(tensor, group)  # type: ignore[arg-type]
        return (tensor.copy_(source),)

    def finish(tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
        return found

    runs: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda x: (
            ops.one_shot_all_reduce(x, "sum", group)
            if op.nbytes <= ONE_SHOT_BYTES
            else ops.two_shot_all_reduce_(x, "sum", group)
        ),
        "all_gather": lambda x: finish(ops._low_contention_all_gather(x, group)),
        "reduce_scatter": lambda x: finish(ops._low_contention_reduce_scatter(x, "sum", group)),
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
        lambda call: share(op.of(op.rank, call, count=count)),
        lambda result, call: op.check(result, call, rounds_often=True),
        timed_inputs=lambda call: share(op.empty(count).zero_()),
        most_sets=SYMMETRIC_SETS,
        copied=False,
    )


def symmetric_product(op: str) -> Callable[..., Any]:
    """Return torch's own fused op, over symmetric memory. Raise ValueError if torch has none."""
    ops, group = torch.ops.symm_mem, group_name()
    if op == "all_gather_matmul":
        fused = ops.fused_all_gather_matmul
        return lambda input, weight, buffer: fused(input, [weight], 0, group)[1][0]
    if op == "matmul_reduce_scatter":
        fused = ops.fused_matmul_reduce_scatter
        return lambda input, weight, buffer: fused(input, weight, "sum", 0, group)
    raise ValueError(f"--baseline symm_mem: torch has no fused {op}")


class TorchCollectives:
    """Collectives of torch.distributed's default group; they return the tensor that they fill."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        torchs(AllGather)(output, input)
        return output

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        torchs(ReduceScatter)(output, input)
        return output

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(output, input)
        return output


TORCH = TorchCollectives()


class _NotArrivedError(Exception):
    """A collective whose data has not arrived yet: its name and its input."""


class LoneCollectives(TorchCollectives):
    """Collectives of a lone rank; ``arrived`` has the data that each receives, in their order."""

    def __init__(self, rank: int, arrived: Sequence[Any]) -> None:
        self._rank, self._arrived = rank, iter(arrived)

    def _brought(self, name: str, input: torch.Tensor) -> Any:
        for each in self._arrived:
            return each
        raise _NotArrivedError(name, input)

    def _sum(self, parts: torch.Tensor, input: torch.Tensor, output: torch.Tensor) -> None:
        parts[self._rank] = input.reshape(parts.shape)[self._rank]
        torch.sum(parts, 0, dtype=parts.dtype, out=output)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        return output.copy_(self._brought("all_gather", input))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        self._sum(self._brought("reduce_scatter", input), input, output.view(-1))
        return output

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum the own part here, and copy the other sums."""
        parts, sums = self._brought("all_reduce", tensor)
        output = torch.empty_like(tensor).copy_(sums)
        self._sum(parts, tensor, output.view(parts.shape)[self._rank])
        return output

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        return output.copy_(self._brought("all_to_all", input))


def _arriving(name: str, inputs: Sequence[torch.Tensor], rank: int) -> Any:
    """Return the data that ``rank`` receives in a collective, from all ranks' inputs."""
    if name == "all_gather":
        return torch.cat(list(inputs))
    if name == "all_to_all":
        return torch.cat([each.chunk(len(inputs))[rank] for each in inputs])
    parts = torch.stack([each.reshape(len(inputs), -1)[rank] for each in inputs])
    return parts if name == "reduce_scatter" else (parts, sum(inputs))


class Alone:
    """``op``, with these ``sizes`` and ``settings``, on one rank."""

    def __init__(self, op: Any, sizes: Sequence[int], settings: Mapping[str, Any]) -> None:
        self._op, self._sizes, self._settings = copy.copy(op), sizes, settings

    def _of(self, rank: int) -> Any:
        op = self._op
        place = SimpleNamespace(rank=rank, world_size=op.world_size, device=op.device)
        return type(op)(place, op.dtype, *self._sizes, **self._settings)

    def alone_inputs(self, call: int) -> Tensors:
        """Return the op's inputs, and the data that its collectives receive."""
        ranks = [self._of(rank) for rank in range(self._op.world_size)]
        arrived: list[list[Any]] = [[] for _ in ranks]

        def stop(rank: int) -> tuple[Any, ...]:
            """Return the next collective without data, and its input; () if all have data."""
            op = ranks[rank]
            op.collectives = LoneCollectives(rank, arrived[rank])
            try:
                op.theirs(*op.inputs(call))
            except _NotArrivedError as collective:
                return collective.args
            return ()

        while first := stop(self._op.rank):
            sent = [stop(rank)[1] for rank in range(len(ranks))]
            for rank, known in enumerate(arrived):
                known.append(_arriving(first[0], sent, rank))
        return self._op.inputs(call), arrived[self._op.rank]

    def alone(self, tensors: Tensors, arrived: Sequence[Any]) -> Any:
        self._op.collectives = LoneCollectives(self._op.rank, arrived)
        return self._op.theirs(*tensors)
