"""The backend of torch.distributed: every call, and every rule that a group in Python has to keep."""

from __future__ import annotations

import contextlib
import datetime
import gc
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import interlace
import torch_names
from multi.process_group.tools import Recorder, Tagged, begin, own, values
from ranks import ranks
from tiers import thorough

OPTIONS = torch._C._distributed_c10d
BOTH = [[1.0, 1.0], [2.0, 2.0]]
"""What both ranks have, if each has ``own()``."""


def empty(count: int, size: int = 2) -> list[torch.Tensor]:
    return [torch.empty(size) for _ in range(count)]


@pytest.mark.parametrize("async_op", [False, True])
@ranks(2, backend="interlace")
def test_collectives(async_op: bool) -> None:
    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        work = function(*args, async_op=async_op, **kwargs)
        assert (work is not None) == async_op, function
        if async_op:
            work.wait()
            assert work.is_completed(), function

    rank = dist.get_rank()
    x = own()
    call(dist.all_reduce, x)
    assert x.tolist() == [3.0, 3.0]
    x = own()
    call(dist.all_reduce, x, op=torch_names.premul_sum(0.5))
    assert x.tolist() == [1.5, 1.5]
    x = torch.complex(own(), own())
    call(dist.all_reduce, x)
    assert x.tolist() == [3 + 3j, 3 + 3j]
    x = own()
    call(dist.broadcast, x, 1)
    assert x.tolist() == BOTH[1]
    x = own()
    call(dist.reduce, x, 1, op=dist.ReduceOp.MAX)
    assert x.tolist() == BOTH[rank]
    out = empty(2)
    call(dist.all_gather, out, own())
    assert values(out) == BOTH
    out = [torch.empty(1), torch.empty(2)]
    call(dist.all_gather, out, own(size=1 + rank))
    assert values(out) == [[1.0], [2.0, 2.0]]
    cat, stack, flat = torch.empty(4), torch.empty(2, 2), torch.empty(8)
    call(torch_names.all_gather_single, cat, own())
    assert cat.tolist() == [1.0, 1.0, 2.0, 2.0]
    call(torch_names.all_gather_single, stack, own())
    assert stack.tolist() == BOTH
    call(torch_names.all_gather_single, flat, own(size=4).view(2, 2))
    assert flat.tolist() == [1.0] * 4 + [2.0] * 4
    part, whole = torch.empty(2), [own(), own(10.0)]
    call(dist.reduce_scatter, part, whole)
    assert part.tolist() == [[3.0, 3.0], [21.0, 21.0]][rank]
    part = torch.empty(2)
    call(torch_names.reduce_scatter_single, part, torch.cat(whole))
    assert part.tolist() == [[3.0, 3.0], [21.0, 21.0]][rank]
    out, exchanged = empty(2), [BOTH, [[10.0, 10.0], [11.0, 11.0]]][rank]
    call(dist.all_to_all, out, whole)
    assert values(out) == exchanged
    cat = torch.empty(4)
    call(dist.all_to_all_single, cat, torch.cat(whole))
    assert cat.view(2, 2).tolist() == exchanged
    out = empty(2 * rank)
    call(dist.gather, own(), out or None, dst=1)
    assert values(out) == [[], BOTH][rank]
    part = torch.empty(2)
    call(dist.scatter, part, whole if rank == 1 else None, src=1)
    assert part.tolist() == [[2.0, 2.0], [11.0, 11.0]][rank]
    at = torch.tensor([[0, 1 + rank]])
    sparse = torch.sparse_coo_tensor(at, own(), (5,), check_invariants=True)
    call(dist.all_reduce, sparse)
    assert sparse.to_dense().tolist() == [3.0, 1.0, 2.0, 0.0, 0.0]
    dist.barrier()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


@ranks(2, backend="interlace")
def test_gather_into_one_tensor() -> None:
    """torch 2.14 calls the group in this form from ``dist.gather_single``."""
    group: Any = dist.group.WORLD
    options, output = OPTIONS.GatherOptions(), torch.full((4,), -1.0)
    options.rootRank = 1
    group.gather_single(output, own(), options).wait()
    assert output.tolist() == [[-1.0] * 4, [1.0, 1.0, 2.0, 2.0]][dist.get_rank()]


@ranks(3, backend="interlace")
def test_messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    first, second, anyone, batched = empty(4)
    works = [dist.isend(own(10.0), right, tag=1), dist.isend(own(20.0), right, tag=2)]
    works += [dist.irecv(second, left, tag=2), dist.irecv(first, left, tag=1)]
    for work in works:
        work.wait()
    work = dist.isend(own(30.0), right)
    assert dist.recv(anyone) == left
    work.wait()
    sent = dist.P2POp(dist.isend, own(40.0), right)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, batched, left)]):
        work.wait()
    received = values([first, second, anyone, batched])
    assert received == [[start + left] * 2 for start in (10.0, 20.0, 30.0, 40.0)]


@ranks(2, backend="interlace")
def test_coalesced_collectives() -> None:
    sums = [own(), own(5.0, 3)]
    with dist._coalescing_manager():
        for each in sums:
            dist.all_reduce(each)
    assert values(sums) == [[3.0] * 2, [11.0] * 3]
    gathered = [torch.empty(4), torch.empty(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        torch_names.all_gather_single(gathered[0], own())
        torch_names.all_gather_single(gathered[1], own(7.0, 1))
    manager.wait()
    assert values(gathered) == [[1.0, 1.0, 2.0, 2.0], [7.0, 8.0]]
    parts = [torch.empty(2), torch.empty(1)]
    with dist._coalescing_manager(async_ops=True) as manager:
        torch_names.reduce_scatter_single(parts[0], own(size=4))
        torch_names.reduce_scatter_single(parts[1], own())
    manager.wait()
    assert values(parts) == [[3.0] * 2, [3.0]]
    again = [own(), own(5.0)]  # with a device, as FSDP
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for each in again:
            dist.all_reduce(each)
    manager.wait()
    assert values(again) == [[3.0] * 2, [11.0] * 2]
    with dist._coalescing_manager(device=torch.device("cpu")):
        pass


@ranks(2, backend="interlace")
def test_every_method_returns_a_work() -> None:
    """If a method returns None, the process ends as soon as C++ asks it to wait."""
    group: Any = dist.group.WORLD
    for asynchronous in (True, False):
        options, barrier = OPTIONS.AllreduceOptions(), OPTIONS.BarrierOptions()
        options.asyncOp = barrier.asyncOp = asynchronous
        work = group.allreduce([own()], options)
        kept = len(work.get_future().wait())  # a synchronous call keeps no tensors
        names = [type(each).__name__ for each in (work, group.barrier(barrier))]
        assert names == ["Work", "Work"] and kept == asynchronous


@ranks(2, backend="interlace")
def test_short_forms_of_methods() -> None:
    group: Any = dist.group.WORLD
    rank = dist.get_rank()
    reduced, listed, sent, root = own(), own(), own(), own()
    group.allreduce(reduced, dist.ReduceOp.MAX).wait()
    group.allreduce([listed], dist.ReduceOp.MAX).wait()
    group.broadcast(sent, 1).wait()
    assert values([reduced, listed, sent]) == [[2.0, 2.0]] * 3
    group.reduce(root, 0, dist.ReduceOp.SUM).wait()
    gathered, at_root = empty(2), empty(2 - 2 * rank)
    group.allgather(gathered, own()).wait()
    assert values(gathered) == BOTH
    group.gather(at_root, own(), 0).wait()
    if rank == 0:
        assert root.tolist() == [3.0, 3.0] and values(at_root) == BOTH
    part, scattered = empty(2)
    group.reduce_scatter(part, [own(), own(5.0)]).wait()
    group.scatter(scattered, [own(), own(5.0)] if rank == 1 else [], 1).wait()
    assert values([part, scattered]) == [[3.0 + 8 * rank] * 2, [2.0 + 4 * rank] * 2]
    group.barrier(timeout=datetime.timedelta(seconds=600)).wait()


# -- dispatch modes and subclasses ------------------------------------------------------------


@ranks(2, backend="interlace")
def test_fake_and_meta_tensors_move_nothing() -> None:
    """Only rank 0 calls: tracing is not collective."""

    def function(y: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(y)
        dist.barrier()
        return y

    if dist.get_rank() == 0:
        with FakeTensorMode():
            x, out = torch.ones(4), torch.empty(8)
            dist.all_reduce(x)
            torch_names.all_gather_single(out, x)
        assert [type(x).__name__, type(out).__name__] == ["FakeTensor"] * 2
        meta = torch.ones(4, device="meta")
        dist.all_reduce(meta)
        assert meta.device.type == "meta" and meta.shape == (4,)
        make_fx(function, tracing_mode="fake")(torch.ones(4))


@ranks(2)
def test_make_fx_keeps_the_collective(tmp_path: Path) -> None:
    """Without the rule the graph has the sum of one call as a constant."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y + 1

    store = dist.FileStore(str(tmp_path / "store"), 2)
    for turn in range(2):
        begin(store)
        if turn and interlace.get_rank() == 1:
            time.sleep(0.3)  # rank 0 looks for its peer among the keys of the turn before
        graph = make_fx(function)(own())
        dist.destroy_process_group()
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert "c10d.allreduce_.default" in called


@ranks(2, backend="interlace")
def test_local_tensor() -> None:
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    if dist.get_rank() == 0:
        with LocalTensorMode(2):
            x = LocalTensor({rank: torch.full((2,), rank + 1.0) for rank in range(2)})
            dist.all_reduce(x)
            sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
            whole = sharded.redistribute(mesh, [Replicate()]).to_local()
        assert values(x._local_tensors.values()) == [[3.0, 3.0]] * 2
        assert type(whole) is LocalTensor
        assert next(iter(whole._local_tensors.values())).tolist() == list(range(8))


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


@ranks(2, backend="interlace")
def test_subclasses() -> None:
    group: Any = dist.group.WORLD
    tagged, wrapper = own().as_subclass(Tagged), Wrapper(own())
    parameter = torch.nn.Parameter(own())
    waiting = functional.all_reduce(own(), "sum", group)
    for each in (tagged, waiting, wrapper, parameter):
        dist.all_reduce(each)
    summed = values([tagged, waiting, wrapper.inner, parameter])
    assert summed == [[3.0, 3.0], [6.0, 6.0], [3.0, 3.0], [3.0, 3.0]]
    assert type(tagged) is Tagged and wrapper.seen == ["c10d.allreduce_.default"]


@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
@ranks(2, backend="interlace")
def test_modes_see_collectives(everywhere: bool) -> None:
    """A mode on one rank must not choose another group than the ranks without a mode."""
    mode, x = Recorder(), own()
    under = everywhere or dist.get_rank() == 0
    with mode if under else contextlib.nullcontext():
        dist.all_reduce(x)
        dist.barrier()
    ops = ["c10d.allreduce_.default", "c10d.barrier.default"]
    assert [name for name in mode.seen if name.startswith("c10d")] == (ops if under else [])
    assert x.tolist() == [3.0, 3.0]


@ranks(2, backend="interlace")
def test_a_mode_on_one_rank() -> None:
    rank = dist.get_rank()
    traded, gathered, scattered, received = *empty(2), *empty(2, 1)
    with Recorder() if rank == 0 else contextlib.nullcontext():
        dist.all_to_all_single(traded, torch.full((2,), float(rank)))
        with dist._coalescing_manager():
            torch_names.all_gather_single(gathered, own(0.0, 1))
        with dist._coalescing_manager():
            torch_names.reduce_scatter_single(scattered, torch.ones(2))
        sending = dist.isend(own(0.0, 1), 1 - rank)
        assert dist.recv(received) == 1 - rank
        sending.wait()
    found = values([traded, gathered, scattered, received])
    assert found == [[0.0, 1.0], [0.0, 1.0], [2.0], [1.0 - rank]]


# -- functional ops, compilation ----------------------------------------------------


@ranks(2, backend="interlace")
def test_functional_ops() -> None:
    gc.collect()  # ops without a wait in earlier tests
    unwaited = torch._C._distributed_c10d._get_work_registry_size
    before = unwaited()
    group: Any = dist.group.WORLD
    ops, rank = torch.ops._c10d_functional, dist.get_rank()
    cat = [1.0, 1.0, 2.0, 2.0]
    summed = functional.all_reduce(own(), "sum", group.group_name)
    part = torch_names.functional_reduce_scatter(own(size=4), "avg", 0, group)
    traded = functional.all_to_all_single(own(), None, None, group)
    sent = functional.broadcast(own(), 1, group)
    permuted = functional.permute_tensor(own(), [1, 0], group)
    assert (summed + 0).tolist() == [3.0] * 2 and (part + 0).tolist() == [1.5] * 2
    assert (traded + 0).tolist() == [1.0, 2.0] and (sent + 0).tolist() == [2.0] * 2
    assert (permuted + 0).tolist() == [2.0 - rank] * 2
    sums = functional.all_reduce_coalesced([own(), own(3.0)], "sum", group)
    assert values(each + 0 for each in sums) == [[3.0] * 2, [7.0] * 2]
    wholes = torch_names.functional_gather_coalesced([own(), own(3.0)], group)
    assert values(each + 0 for each in wholes) == [cat, [3.0, 3.0, 4.0, 4.0]]
    inputs = [own(size=4), own(3.0, 4)]
    parts = torch_names.functional_reduce_scatter_coalesced(inputs, "sum", [0, 0], group)
    assert values(each + 0 for each in parts) == [[3.0] * 2, [7.0] * 2]
    out = torch.empty(4)
    gathered = ops.all_gather_into_tensor_out(own(), 2, group.group_name, out=out)
    assert ops.wait_tensor(gathered).tolist() == out.tolist() == cat
    leaf = own().requires_grad_()
    torch_names.functional_gather_autograd(leaf, 0, group).square().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4.0 * (1 + rank)] * 2  # the gradient is summed over ranks
    del summed, part, traded, sent, permuted, sums, wholes, parts
    assert unwaited() == before


@pytest.mark.parametrize("backend", ["interlace", "gloo"])
@ranks(2, backend="interlace")
def test_kernels_of_functional_ops(backend: str) -> None:
    """These kernels also serve groups of other backends in the same process."""
    name = dist.new_group(backend=backend).group_name
    peer, received, out = 1 - dist.get_rank(), torch.empty(2), torch.empty(4)
    ops = torch.ops._c10d_functional
    if hasattr(ops, "batch_p2p_ops"):
        how = ["isend", "irecv"], [peer, peer], [0, 0]
        for each in (results := ops.batch_p2p_ops(*how, [own(), received], name)):
            ops.wait_tensor(each)
        received = ops.wait_tensor(results[1])
    else:  # torch before 2.13 has no such op
        dist.batch_isend_irecv([dist.P2POp(dist.isend, own(), peer)])
        dist.recv(received, peer)
    gathered = ops.wait_tensor(ops.all_gather_into_tensor_out(own(), 2, name, out=out))
    assert received.tolist() == BOTH[peer] and gathered.tolist() == [1.0, 1.0, 2.0, 2.0]


NEEDS_A_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=[thorough, NEEDS_A_COMPILER])]
)
@ranks(2, backend="interlace")
def test_compiled(compiler: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        out = torch.empty(2 * y.shape[0])
        torch_names.all_gather_single(out, y)
        return out + 1

    torch._dynamo.reset()
    made = torch.compile(function, backend=compiler, fullgraph=True)(own())
    assert made.tolist() == [7.0] * 4


@ranks(2, backend="interlace")
def test_compiled_with_an_async_collective() -> None:
    """The test fails if Dynamo traces into a method of the group."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        z = x + 1
        work.wait()
        return y + z

    torch._dynamo.reset()
    made = torch.compile(function, backend="aot_eager")(own())
    assert made.tolist() == [8.0 + dist.get_rank()] * 2


@ranks(2, backend="interlace")
def test_inference_tensors() -> None:
    for size in (2, 50_000, 500_000):
        with torch.inference_mode():
            x, part = own(1.0, size), torch.empty(size // 2)
        dist.all_reduce(x)
        torch_names.reduce_scatter_single(part, x)
        assert (float(x[-1]), float(part[-1])) == (3.0, 6.0)
