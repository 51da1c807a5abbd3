"""Eager ops import none of torch's compilers, whose import takes longer than all the rest of a process.

One op of each kind runs on two ranks, in a process per place that has imported nothing else. The ranks look
at ``sys.modules`` after each op, so that a failure names the op.
"""

import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import interlace
from interlace import functional
from tiers import thorough

COMPILERS = (
    "networkx",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
)
Ops = dict[str, Callable[[], Any]]
Found = dict[str, list[str]]


def loaded() -> list[str]:
    """Return the imported modules of ``COMPILERS``."""
    return [name for name in COMPILERS if name in sys.modules]


def plain_ops() -> Ops:
    rank, one, two = interlace.get_rank(), torch.ones(1), torch.ones(2)
    parts, objects = [torch.ones(1), torch.ones(1)], [None, None]
    memory, peer = interlace.symmetric_memory, 1 - rank
    return {
        "all_reduce": lambda: interlace.all_reduce(two),
        "all_reduce, async": lambda: interlace.all_reduce(two, async_op=True).wait(),
        "all_gather": lambda: interlace.all_gather_single(two, one),
        "reduce_scatter": lambda: interlace.reduce_scatter(one, two),
        "all_to_all": lambda: interlace.all_to_all_single(torch.ones(2), two),
        "broadcast": lambda: interlace.broadcast(two, 0),
        "gather": lambda: interlace.gather(one, None if rank else parts),
        "uneven": lambda: interlace.all_gather_v(parts, one),
        "coalesced": lambda: interlace.all_reduce_coalesced([one, two]),
        "objects": lambda: interlace.all_gather_object(objects, rank),
        "barrier": interlace.barrier,
        "point to point": lambda: interlace.recv(one, peer) if rank else interlace.send(one, peer),
        "new group": lambda: interlace.all_reduce(one, group=interlace.new_group([0, 1])),
        "symmetric memory": lambda: memory.rendezvous(memory.empty(4)).barrier(),
    }


def fused_ops() -> Ops:
    input, weight, experts = torch.ones(2, 4), torch.ones(4, 2), torch.ones(1, 4, 2)
    norm, chosen = interlace.RMSNorm(torch.ones(2), 0.0), torch.tensor([[0, 1]])
    scale, fp8 = torch.tensor(0.5), torch.ones(2, 32).to(torch.float8_e4m3fn)
    scaled_weight = torch.ones(16, 32).to(torch.float8_e4m3fn).t()
    heads, of_experts = torch.zeros(1, 2, 1, 4), interlace.experts
    attention = interlace.nn.functional.context_parallel_attention

    def recorded() -> None:
        rows = torch.ones(2, 4, requires_grad=True)
        interlace.all_gather_matmul(rows, weight).sum().backward()

    def moved() -> None:
        received, handle = of_experts.dispatch(torch.ones(1, 2), chosen, None, 2)
        of_experts.combine(received.x, handle)

    return {
        "all_gather_matmul": lambda: interlace.all_gather_matmul(input, weight),
        "matmul_reduce_scatter": lambda: interlace.matmul_reduce_scatter(input, weight),
        "matmul_all_reduce": lambda: interlace.matmul_all_reduce(input, weight),
        "gradients": recorded,
        "norm": lambda: interlace.all_reduce_norm(torch.ones(1, 2), norm=norm),
        "scaled": lambda: functional.all_gather_scaled_matmul(fp8, scaled_weight, scale, scale),
        "grouped": lambda: interlace.all_gather_grouped_matmul(input, experts, [2]),
        "grouped, combined": lambda: interlace.grouped_matmul_combine(
            input, experts, [1, 1], chosen, torch.ones(1, 2)
        ),
        "experts": moved,
        "head exchange": lambda: functional.matmul_all_to_all(torch.ones(1, 2), torch.ones(2, 4)),
        "attention": lambda: attention(heads, heads, heads, causal=True),
        "decoding": lambda: interlace.distributed_decode(torch.zeros(1, 2, 4), (heads, heads)),
    }


def functional_ops() -> Ops:
    torch.manual_seed(0)
    one, layer = torch.ones(2, requires_grad=True), interlace.nn.ColumnParallelLinear(4, 2)
    wait = functional.wait
    return {
        "functional": lambda: wait(functional.all_reduce(one.detach())),
        "functional, gradients": lambda: wait(functional.all_reduce(one)).sum().backward(),
        "functional, of ranks": lambda: wait(functional.all_gather(one, group=[0, 1])),
        "layer": lambda: layer(torch.ones(2, 4)).sum().backward(),
    }


def backend_ops() -> Ops:
    one = torch.ones(2)
    return {
        "backend": lambda: dist.all_reduce(one),
        "backend, async": lambda: dist.all_reduce(one, async_op=True).wait(),
    }


def imported_by(*kinds: Callable[[], Ops]) -> Found:
    """Return the imported modules of ``COMPILERS`` after each op, by the first op that imports them."""
    found: Found = {}
    known: list[str] = []
    for kind in kinds:
        for name, op in kind().items():
            op()
            if new := [each for each in loaded() if each not in known]:
                found[name] = new
                known += new
    return found


def on_rank() -> Found:
    return imported_by(plain_ops, fused_ops, functional_ops)


def in_process(path: str) -> Found:
    """Run on a rank that is a process, also through torch.distributed."""
    found = on_rank()
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    store = dist.FileStore(path, world_size)
    dist.init_process_group("interlace", store=store, rank=rank, world_size=world_size)
    try:
        return found | imported_by(backend_ops)
    finally:
        dist.destroy_process_group()


def ops_of_torch() -> Found:
    """Use ops that torch defines at their first use."""
    names = interlace.symmetric_memory.functions.TAKEN_OVER
    ops = {name: functools.partial(getattr, torch.ops.symm_mem, name) for name in names}
    return imported_by(lambda: ops)


def checked_for_races() -> Found:
    def copied() -> None:
        interlace.all_reduce(torch.ones(2), algorithm="copy")

    def checked() -> None:
        assert interlace.verify.races(copied, 2, seeds=1).clean

    return imported_by(lambda: {"races": checked})


def compiled() -> list[str]:
    """Return the calls that Dynamo, imported only now, leaves in a graph."""
    calls: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        calls.extend(target.__name__ for target in called)
        return graph.forward

    def waited(x: torch.Tensor) -> torch.Tensor:
        return functional.wait(functional.all_reduce(x))

    assert "torch._dynamo" not in sys.modules
    result = torch.compile(waited, backend=keep, fullgraph=True)(torch.ones(2))
    assert result.tolist() == [1.0, 1.0]
    return calls


def in_place(place: str) -> list[Any]:
    if place == "shm":
        with tempfile.TemporaryDirectory() as folder:
            return interlace.run(in_process, 2, f"{folder}/store", place="shm")
    if place == "ptx":
        return interlace.run(on_rank, 2, place="ptx", arch=90)
    if place == "compiled":
        return interlace.run(compiled, 1)
    return [ops_of_torch(), *interlace.run(on_rank, 2), checked_for_races()]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("sim", [{}, {}, {}, {}]),
        pytest.param("compiled", [["all_reduce", "wait"]], marks=thorough),
        pytest.param("shm", [{}, {}], marks=thorough),
        pytest.param("ptx", [{}, {}], marks=thorough),
    ],
)
def test_eager_ops_import_no_compiler(place: str, expected: list[Any]) -> None:
    code = f"from sim.compat.test_imports import in_place; print(in_place({place!r}))"
    folder = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str(expected)
