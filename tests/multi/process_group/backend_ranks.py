"""Ranks of test_backend.py. A module of its own, because new processes import it."""

from __future__ import annotations

import contextlib
import datetime
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import interlace
import torch_names

OPTIONS = torch._C._distributed_c10d


@contextlib.contextmanager
def world(path: str, backend: str = "interlace") -> Iterator[Any]:
    """The default group of torch.distributed over all ranks, which meet in the file ``path``."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    store = dist.FileStore(path, world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def gather_of_one_tensor(path: str) -> list[float]:
    with world(path) as group:
        options, output = OPTIONS.GatherOptions(), torch.full((4,), -1.0)
        options.rootRank = 1
        group.gather_single(output, own(), options).wait()
        return output.tolist()


def own(value: float = 1.0, size: int = 2) -> torch.Tensor:
    return torch.full((size,), value + interlace.get_rank())


# -- collectives ------------------------------------------------------------------------------


def every_collective(path: str, async_op: bool) -> dict[str, Any]:
    """The results of all functions of torch.distributed that move tensors, by name."""
    with world(path):
        rank, size = dist.get_rank(), dist.get_world_size()
        results: dict[str, Any] = {}

        def call(name: str, function: Any, *args: Any, give: Any, **kwargs: Any) -> None:
            work = function(*args, async_op=async_op, **kwargs)
            assert (work is not None) == async_op, name
            if async_op:
                work.wait()
                assert work.is_completed(), name
            results[name] = give

        x = own()
        call("all_reduce", dist.all_reduce, x, give=x)
        x = own()
        call("premul_sum", dist.all_reduce, x, op=torch_names.premul_sum(0.5), give=x)
        x = torch.complex(own(), own())
        call("complex", dist.all_reduce, x, give=x)
        x = own()
        call("broadcast", dist.broadcast, x, 1, give=x)
        x = own()
        call("reduce", dist.reduce, x, 1, op=dist.ReduceOp.MAX, give=x)
        out = [torch.empty(2) for _ in range(size)]
        call("all_gather", dist.all_gather, out, own(), give=out)
        out = [torch.empty(1 + r) for r in range(size)]
        call("uneven", dist.all_gather, out, own(size=1 + rank), give=out)
        cat, stack = torch.empty(2 * size), torch.empty(size, 2)
        call("cat", torch_names.all_gather_single, cat, own(), give=cat)
        call("stack", torch_names.all_gather_single, stack, own(), give=stack)
        flat = torch.empty(4 * size)
        call("flat", torch_names.all_gather_single, flat, own(size=4).view(2, 2), give=flat)
        part = torch.empty(2)
        whole = [own(10.0 * r) for r in range(size)]
        call("reduce_scatter", dist.reduce_scatter, part, whole, give=part)
        part = torch.empty(2)
        call(
            "reduce_scatter_single",
            torch_names.reduce_scatter_single,
            part,
            torch.cat(whole),
            give=part,
        )
        out = [torch.empty(2) for _ in range(size)]
        call("all_to_all", dist.all_to_all, out, whole, give=out)
        cat = torch.empty(2 * size)
        call("all_to_all_single", dist.all_to_all_single, cat, torch.cat(whole), give=cat)
        out = [torch.empty(2) for _ in range(size)] if rank == 1 else None
        call("gather", dist.gather, own(), out, dst=1, give=out)
        part = torch.empty(2)
        call("scatter", dist.scatter, part, whole if rank == 1 else None, src=1, give=part)
        sparse = torch.sparse_coo_tensor(
            torch.tensor([[0, 1 + rank]]), own(), (5,), check_invariants=True
        )
        call("sparse", dist.all_reduce, sparse, give=sparse.to_dense)
        results["sparse"] = sparse.to_dense()
        dist.barrier()
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        results["objects"] = objects
        return results


def messages(path: str) -> list[Any]:
    """A ring of messages with tags, one from any source, and a batch."""
    with world(path):
        rank, size = dist.get_rank(), dist.get_world_size()
        right, left = (rank + 1) % size, (rank - 1) % size
        first, second = torch.empty(2), torch.empty(2)
        works = [dist.isend(own(10.0), right, tag=1), dist.isend(own(20.0), right, tag=2)]
        works += [dist.irecv(second, left, tag=2), dist.irecv(first, left, tag=1)]
        for work in works:
            work.wait()
        anyone = torch.empty(2)
        work = dist.isend(own(30.0), right)
        source = dist.recv(anyone)
        work.wait()
        batched = torch.empty(2)
        operations = [
            dist.P2POp(dist.isend, own(40.0), right),
            dist.P2POp(dist.irecv, batched, left),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [first, second, anyone, source, batched]


def coalesced(path: str) -> list[torch.Tensor]:
    """Several small collectives as one."""
    with world(path):
        size = dist.get_world_size()
        sums = [own(), own(5.0, 3)]
        with dist._coalescing_manager():
            for each in sums:
                dist.all_reduce(each)
        gathered = [torch.empty(2 * size), torch.empty(size)]
        with dist._coalescing_manager(async_ops=True) as manager:
            torch_names.all_gather_single(gathered[0], own())
            torch_names.all_gather_single(gathered[1], own(7.0, 1))
        manager.wait()
        parts = [torch.empty(2), torch.empty(1)]
        with dist._coalescing_manager(async_ops=True) as manager:
            torch_names.reduce_scatter_single(parts[0], own(size=2 * size))
            torch_names.reduce_scatter_single(parts[1], own(size=size))
        manager.wait()
        again = [own(), own(5.0)]  # with a device, as FSDP
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            for each in again:
                dist.all_reduce(each)
        manager.wait()
        with dist._coalescing_manager(device=torch.device("cpu")):
            pass
        return [*sums, *gathered, *parts, *again]


def works_of_methods(path: str) -> list[str]:
    """The types of what the methods return for sync and async options; C++ code crashes on None."""
    with world(path) as group:
        kinds = []
        for asynchronous in (True, False):
            options = OPTIONS.AllreduceOptions()
            options.asyncOp = asynchronous
            work = group.allreduce([own()], options)
            kinds.append(type(work).__name__)
            values = work.get_future().wait()
            kinds.append(len(values))
            barrier = OPTIONS.BarrierOptions()
            barrier.asyncOp = asynchronous
            kinds.append(type(group.barrier(barrier)).__name__)
        return kinds


def short_forms(path: str) -> list[Any]:
    """Methods of the group called with tensors, ops and roots in place of lists and options."""
    with world(path) as group:
        size, rank = dist.get_world_size(), dist.get_rank()
        reduced, listed, sent, root = own(), own(), own(), own()
        group.allreduce(reduced, dist.ReduceOp.MAX).wait()
        group.allreduce([listed], dist.ReduceOp.MAX).wait()
        group.broadcast(sent, 1).wait()
        group.reduce(root, 0, dist.ReduceOp.SUM).wait()
        gathered = [torch.empty(2) for _ in range(size)]
        group.allgather(gathered, own()).wait()
        at_root = [torch.empty(2) for _ in range(size)]
        group.gather(at_root if rank == 0 else [], own(), 0).wait()
        part, scattered = torch.empty(2), torch.empty(2)
        group.reduce_scatter(part, [own(), own(5.0)]).wait()
        group.scatter(scattered, [own(), own(5.0)] if rank == 1 else [], 1).wait()
        group.barrier(timeout=datetime.timedelta(seconds=600)).wait()
        return [reduced, listed, sent, root, gathered, at_root, part, scattered]


# -- dispatch modes and subclasses ------------------------------------------------------------


def fake(path: str) -> list[Any]:
    """Nothing moves, and only rank 0 calls: tracing is not collective."""
    with world(path):
        if dist.get_rank() == 0:
            with FakeTensorMode():
                x, out = torch.ones(4), torch.empty(4 * dist.get_world_size())
                dist.all_reduce(x)
                torch_names.all_gather_single(out, x)
            meta = torch.ones(4, device="meta")
            dist.all_reduce(meta)

            def function(y: torch.Tensor) -> torch.Tensor:
                dist.all_reduce(y)
                dist.barrier()
                return y

            make_fx(function, tracing_mode="fake")(torch.ones(4))
            return [type(x).__name__, type(out).__name__, meta.device.type, meta.shape]
        return []


def traced(path: str, times: int) -> list[str]:
    """The ops in the graph of a function with a collective, made in several groups with one store."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    store = dist.FileStore(path, world_size)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y + 1

    for turn in range(times):
        dist.init_process_group("interlace", store=store, rank=rank, world_size=world_size)
        if turn and rank == 1:
            time.sleep(0.3)  # rank 0 looks for its peer among the keys of the turn before
        graph = make_fx(function)(own())
        dist.destroy_process_group()
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def simulated(path: str) -> tuple[list[float], str, list[float]]:
    """LocalTensor: rank 0 plays all ranks, by itself and under a DTensor."""
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with world(path):
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        if dist.get_rank() != 0:
            return [], "", []
        with LocalTensorMode(size):
            x = LocalTensor({r: torch.full((2,), r + 1.0) for r in range(size)})
            dist.all_reduce(x)
            summed = [float(shard[0]) for shard in x._local_tensors.values()]
            sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
            whole = sharded.redistribute(mesh, [Replicate()]).to_local()
            name = type(whole).__name__
            first = next(iter(whole._local_tensors.values()))
        return summed, name, first.tolist()


class Tagged(torch.Tensor):
    """A subclass that only changes what functions return."""


class Wrapper(torch.Tensor):
    """A subclass that holds a tensor and sees every op."""

    inner: torch.Tensor
    seen: list[str]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner, wrapper.seen = inner, []
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def opened(value: Any) -> Any:
            if isinstance(value, Wrapper):
                value.seen.append(str(func))
                return value.inner
            return value

        args = torch.utils._pytree.tree_map(opened, args)
        return func(*args, **(kwargs or {}))


def subclasses(path: str) -> list[Any]:
    with world(path) as group:
        tagged = own().as_subclass(Tagged)
        dist.all_reduce(tagged)
        waiting = functional.all_reduce(own(), "sum", group)
        dist.all_reduce(waiting)
        wrapper = Wrapper(own())
        dist.all_reduce(wrapper)
        parameter = torch.nn.Parameter(own())
        dist.all_reduce(parameter)
        return [
            tagged.tolist(),
            type(tagged).__name__,
            waiting.tolist(),
            wrapper.inner.tolist(),
            wrapper.seen,
            parameter.tolist(),
        ]


class Recorder(TorchDispatchMode):
    """What profilers and counters of flops are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def recorded(path: str, everywhere: bool) -> tuple[list[float], list[str]]:
    """Under a dispatch mode on all ranks, or on rank 0 alone: what it saw, and the right sum."""
    with world(path):
        mode = Recorder()
        under = everywhere or dist.get_rank() == 0
        with mode if under else contextlib.nullcontext():
            x = own()
            dist.all_reduce(x)
            dist.barrier()
        return x.tolist(), [name for name in mode.seen if name.startswith("c10d")]


# -- functional ops, compilation, profiler ----------------------------------------------------


def functional_ops(path: str) -> list[torch.Tensor]:
    gc.collect()  # what earlier tests of this process have started and not waited for
    unwaited = torch._C._distributed_c10d._get_work_registry_size
    before = unwaited()
    with world(path) as group:
        name, size = group.group_name, dist.get_world_size()
        ops = torch.ops._c10d_functional
        leaf = own().requires_grad_()
        torch_names.functional_gather_autograd(leaf, 0, group).square().sum().backward()
        out = torch.empty(2 * size)
        gathered = ops.wait_tensor(ops.all_gather_into_tensor_out(own(), size, name, out=out))
        permuted = functional.permute_tensor(own(), [1, 0], group)
        results = [
            functional.all_reduce(own(), "sum", name) + 0,
            torch_names.functional_reduce_scatter(own(size=2 * size), "avg", 0, group) + 0,
            functional.all_to_all_single(own(size=size), None, None, group) + 0,
            functional.broadcast(own(), 1, group) + 0,
            *[
                each + 0
                for each in functional.all_reduce_coalesced([own(), own(3.0)], "sum", group)
            ],
            *[
                each + 0
                for each in torch_names.functional_gather_coalesced([own(), own(3.0)], group)
            ],
            *[
                each + 0
                for each in torch_names.functional_reduce_scatter_coalesced(
                    [own(size=2 * size), own(3.0, 2 * size)], "sum", [0, 0], group
                )
            ],
            permuted + 0,
            gathered,
            out,
            leaf.grad,
        ]
        assert unwaited() == before
        return results


def exchanged_by_op(path: str, backend: str) -> torch.Tensor:
    """``batch_p2p_ops`` between two ranks of a group of ``backend``, beside one of interlace."""
    with world(path):
        group = dist.new_group(backend=backend)
        peer, received = 1 - dist.get_rank(), torch.empty(2)
        ops = torch.ops._c10d_functional
        if hasattr(ops, "batch_p2p_ops"):
            results = ops.batch_p2p_ops(
                ["isend", "irecv"], [peer, peer], [0, 0], [own(), received], group.group_name
            )
            for each in results:
                ops.wait_tensor(each)
            received = ops.wait_tensor(results[1])
        else:  # torch before 2.13 has no such op
            dist.batch_isend_irecv([dist.P2POp(dist.isend, own(), peer)])
            dist.recv(received, peer)
        out = torch.empty(4)
        return received, ops.wait_tensor(
            ops.all_gather_into_tensor_out(own(), 2, group.group_name, out=out)
        )


def compiled(path: str, compiler: str, breaks: bool) -> torch.Tensor:
    """Compiled whole; or, with ``breaks``, with an async collective that Dynamo leaves to Python."""

    def whole(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        out = torch.empty(2 * y.shape[0])
        torch_names.all_gather_single(out, y)
        return out + 1

    def asynchronous(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        z = x + 1
        work.wait()
        return y + z

    with world(path):
        torch._dynamo.reset()
        function = asynchronous if breaks else whole
        return torch.compile(function, backend=compiler, fullgraph=not breaks)(own())


def profiled(path: str) -> list[str]:
    with world(path), torch.profiler.profile() as profiler:
        dist.all_reduce(own())
        dist.barrier()
    return [event.name for event in profiler.events() if event.name.startswith("interlace:")]
