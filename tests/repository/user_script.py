"""A user's script for type checkers; a line that is wrong says so at its end."""

from functools import partial

import torch
from torch import Tensor
from typing_extensions import assert_type

import interlace
from interlace import Work, functional, nn


def fused(x: Tensor, w: Tensor, flag: bool) -> None:
    ws, mean = [w, w], torch.distributed.ReduceOp.AVG
    assert_type(interlace.all_gather_matmul(x, w, gather_dim=1, out_dtype=torch.float32), Tensor)
    assert_type(interlace.all_gather_matmul(x, ws, activation=["relu", None]), list[Tensor])
    pair = interlace.all_gather_matmul(x, w, return_gathered=True, algorithm="pipelined")
    assert_type(pair, tuple[Tensor, Tensor])
    several = interlace.all_gather_matmul(x, ws, return_gathered=True)
    assert_type(several, tuple[Tensor, list[Tensor]])
    assert_type(interlace.all_gather_matmul(x, ws, async_op=True), Work)
    interlace.all_gather_matmul(x, w, return_gathered=flag, async_op=flag)
    assert_type(interlace.matmul_reduce_scatter(x, w, reduce_op="avg", scatter_dim=1), Tensor)
    assert_type(interlace.matmul_all_reduce(x, w, reduce_op=mean, async_op=True), Work)
    assert_type(interlace.all_gather_grouped_matmul(x, w, [1], [2]), tuple[Tensor, Tensor])
    received = interlace.all_to_all_grouped_matmul(x, w, [1], return_received=True)
    assert_type(received, tuple[Tensor, Tensor, Tensor])
    interlace.all_gather_matmul(x, w, activation="reluu")  # wrong
    interlace.all_gather_matmul(x, ws, activation=["relu", "reluu"])  # wrong
    interlace.all_gather_matmul(x, w, bia=x)  # wrong
    interlace.all_gather_matmul("x", w)  # wrong
    assert_type(interlace.matmul_reduce_scatter(x, w, async_op=flag), Tensor | Work)
    interlace.matmul_reduce_scatter(x, w, reduce_op="sume")  # wrong
    interlace.matmul_all_reduce(x, w, group=3)  # wrong
    interlace.matmul_all_reduce(x, w, algorithm="fuse")  # wrong


def functions(x: Tensor, w: Tensor) -> None:
    assert_type(functional.all_gather_matmul(x, w), Tensor)
    several = functional.all_gather_matmul(x, [w, w], 1, return_gathered=True)
    assert_type(several, tuple[Tensor, list[Tensor]])
    assert_type(functional.all_gather_scaled_matmul(x, w, x, x), Tensor)
    assert_type(functional.all_to_all_grouped_matmul(x, w, [1], [1]), Tensor)
    assert_type(functional.matmul_reduce_scatter(x, w, "avg"), Tensor)
    assert_type(functional.all_reduce(x, torch.distributed.ReduceOp.MAX), Tensor)
    functional.all_gather_matmul(x, w, algorithm="fuse")  # wrong
    functional.all_gather_scaled_matmul(x, w, x, x, algorithm="pipelined")  # wrong
    functional.matmul_all_reduce(x, w, "sume")  # wrong
    functional.all_reduce(x, "sume")  # wrong
    functional.matmul_all_reduce(x, w, group=interlace.GroupSpec("tp", 4))


def collectives(x: Tensor, flag: bool = False) -> None:
    assert_type(interlace.all_reduce(x, "max", async_op=True, algorithm="kernel"), Work)
    assert_type(interlace.broadcast(x, 0, async_op=flag), Work | None)
    interlace.all_gather([x, x], x, async_op=True).wait()
    interlace.all_to_all_v(x, x, [1], [1], async_op=True).wait()
    interlace.barrier(async_op=True).wait()
    sent = interlace.P2POp(interlace.isend, x, 1)
    interlace.batch_isend_irecv([sent, torch.distributed.P2POp(torch.distributed.irecv, x, 1)])
    interlace.all_gather_coalesced([x, [x, x]], [x, x])
    interlace.batch_isend_irecv([x])  # wrong
    interlace.all_gather_coalesced([x, "x"], [x, x])  # wrong
    interlace.all_reduce(x).wait()  # wrong
    interlace.reduce(x, "sume", async_op=True)  # wrong
    interlace.reduce_scatter(x, [x, x], "avg")
    nn.SequenceParallelMLP(4, 8, activation=torch.tanh)
    group = interlace.new_group([0, 1], name="tp")
    assert_type(group.rank, int)
    interlace.all_reduce(x, group=group)
    interlace.all_reduce(x, group=[0, 1])
    interlace.all_reduce(x, group="tp")
    interlace.all_reduce(x, group=3)  # wrong
    interlace.all_reduce(x, algorithm="fused")  # wrong
    interlace.all_gather("x", x)  # wrong
    interlace.broadcast(x, 0, algorithm="kernel")  # wrong
    nn.SequenceParallelMLP(4, 8, activation="reluu")  # wrong
    interlace.run(collectives, 2, x, place="gpu")  # wrong


def ranks(x: Tensor, rows: int = 2) -> float:
    assert_type(interlace.run(ranks, 2, x, 3, place="shm"), list[float])
    assert_type(interlace.run(interlace.get_rank, 2, seed=3), list[int])
    assert_type(interlace.run(lambda: x, 2), list[Tensor])
    assert_type(interlace.verify.races(ranks, 2, x, 3, seeds=[4]).clean, bool)
    assert_type(interlace.verify.schedules(ranks, 2, x, rows=3).clean, bool)
    interlace.verify.schedules(lambda: None, 2, n=4, shrink=False)
    interlace.verify.check(partial(ranks, x, rows=3), 2, seeds=3, n=4)
    interlace.run(partial(ranks, rows=3), 2, x, place="shm")
    interlace.run(ranks, 2, x, seed="a")  # wrong
    interlace.run(ranks, 2, "wrong", 5)  # wrong
    interlace.run(ranks, 2, x, row=3)  # wrong
    interlace.run(ranks, 2)  # wrong
    interlace.run(ranks, 2, x)[0].append(1.0)  # wrong
    interlace.verify.check(ranks, 2, x, seed="a")  # wrong
    interlace.verify.check(ranks, 2)  # wrong
    interlace.verify.races(ranks, 2, x, row=3)  # wrong
    interlace.verify.schedules(ranks, 2, x, n="4")  # wrong
    return 0.0


def modules_on_first_use(x: Tensor) -> None:
    assert_type(interlace.functional.all_reduce(x), Tensor)
    assert_type(interlace.nn.SequenceParallelMLP(4, 8), interlace.nn.SequenceParallelMLP)
    assert_type(interlace.verify.races(collectives, 2, x).clean, bool)
    assert_type(interlace.GroupSpec("spec", 2), interlace.GroupSpec)
    print(interlace.tensor.ShardedTensor, interlace.aot.__doc__, interlace.compile.__doc__)
    interlace.nn.SequenceParallelMPL(4, 8)  # wrong
    interlace.tensor.shard_uneven_by(x)  # wrong
    interlace.verify.races(collectives, "2")  # wrong
    interlace.ops.nothing()  # wrong
    print(interlace.modul)  # wrong
