"""Ranks of test_functional_compiled.py: groups, and with exported programs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace import functional
from interlace.functional import wait
from multi.process_group.backend_ranks import world

SPEC = interlace.GroupSpec("pairs", 2)


def members(x: torch.Tensor, group: Any, tag: str) -> torch.Tensor:
    y = functional.all_gather(x * 1, group=group, tag=tag)
    return y * 1


def eager_and_compiled(function: Callable[..., Any], *args: Any) -> list[list[int]]:
    """The ranks that took part, in their order."""
    torch._dynamo.reset()
    mine = torch.full((1,), interlace.get_rank())
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    return [function(mine, *args).tolist(), compiled(mine, *args).tolist()]


def of_interlace() -> dict[str, list[list[int]]]:
    rank = interlace.get_rank()
    found = {}

    def check(name: str, group: Any, tag: str = "") -> None:
        found[name] = eager_and_compiled(members, group, tag)

    check("None", None)
    check("name", "0")
    check("list", [0, 1, 2, 3])
    check("tuple", (3, 1, 2, 0))
    check("lists", [[0, 2], [1, 3]])
    check("tagged lists", [[0, 2], [1, 3]], "fast")
    check("tagged list", [0, 1, 2, 3], "fast")
    groups = [interlace.new_group([0, 1]), interlace.new_group([2, 3])]
    check("communicator", groups[rank // 2])
    interlace.new_group([0, 1], name="low")
    interlace.new_group([2, 3], name="high")
    check("given name", ("low", "high")[rank // 2])
    SPEC.bind([[0, 1], [2, 3]])
    check("spec", SPEC)
    check("spec without a size", interlace.GroupSpec("pairs"))

    def inside(x: torch.Tensor) -> torch.Tensor:
        return functional.all_gather(x, group=interlace.GroupSpec("pairs", 2)) * 1

    def lists_inside(x: torch.Tensor) -> torch.Tensor:
        return functional.all_gather(x, group=[[0, 2], [1, 3]]) * 1

    found["spec made inside"] = eager_and_compiled(inside)
    found["lists made inside"] = eager_and_compiled(lists_inside)
    return found


def of_torch(path: str, backend: str) -> dict[str, list[list[int]]]:
    found = {}

    def check(name: str, group: Any) -> None:
        found[name] = eager_and_compiled(members, group, "")

    with world(path, backend) as everyone:
        rank = dist.get_rank()
        check("None", None)
        check("world", everyone)
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        check("group", group)
        check("name", group.group_name)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        check("(mesh, 0)", (mesh, 0))
        check("(mesh, 'b')", (mesh, "b"))
        check("mesh", mesh["b"])
        check("lists", [[0, 2], [1, 3]])
    return found


def one_after_another(path: str) -> dict[str, list[list[int]]]:
    """One compiled function called with a group, another one, and the first again."""
    rank = interlace.get_rank()
    mine = torch.full((1,), rank)
    found = {}

    def check(name: str, pairs: Any, columns: Any) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(members, backend="eager", fullgraph=True)
        calls = [compiled(mine, group, "") for group in (pairs, columns, pairs)]
        found[name] = [each.tolist() for each in calls]

    check("lists", [[0, 1], [2, 3]], [[0, 2], [1, 3]])
    pairs = [interlace.new_group([0, 1]), interlace.new_group([2, 3])][rank // 2]
    columns = [interlace.new_group([0, 2]), interlace.new_group([1, 3])][rank % 2]
    check("communicators", pairs, columns)
    specs = interlace.GroupSpec("first", 2), interlace.GroupSpec("second", 2)
    specs[0].bind(pairs)
    specs[1].bind(columns)
    check("specs", *specs)
    for backend in ("gloo", "interlace"):
        with world(path + backend, backend):
            group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
            other = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
            check(f"{backend} groups", group, other)
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            check(f"{backend} mesh dims", (mesh, 1), (mesh, 0))
            check(f"{backend} mesh names", (mesh, "b"), (mesh, "a"))
            check(f"{backend} meshes", mesh["b"], mesh["a"])
    return found


def tags() -> list[bool]:
    """Whether two calls were of the same group: of one list, and of different tags."""
    from interlace.groups.specs import bind, describe

    ranks = [0, 1]
    group, same, fast, slow, again = (
        bind(*describe(ranks, tag)) for tag in ("", "", "fast", "slow", "fast")
    )
    x = torch.ones(2)
    for tag in ("", "fast", "slow"):
        assert functional.all_reduce(x, group=ranks, tag=tag).tolist() == [2.0, 2.0]
    return [group is same, group is fast, fast is slow, fast is again]


class Block(torch.nn.Module):
    """A sequence-parallel MLP between collectives, of a group that is only named."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.first = torch.nn.Parameter(torch.arange(15.0).view(3, 5) / 10)
        self.second = torch.nn.Parameter(torch.arange(15.0).view(5, 3) / 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = functional.all_reduce(x, "avg", group=self.group)
        hidden = functional.all_gather_matmul(x, self.first, group=self.group)
        meanwhile = torch.sin(x)
        y = functional.matmul_reduce_scatter(torch.relu(hidden), self.second, group=self.group)
        whole = functional.all_gather(y, 1, group=self.group)
        mine = functional.reduce_scatter(whole, "max", 1, group=self.group)
        return wait(total), y + meanwhile, mine + 0, whole.cos()


def exported(sized: int | None, strict: bool = False) -> Any:
    """Made in a process without any group; the batch is dynamic."""
    assert not dist.is_initialized()
    block = Block(interlace.GroupSpec("any", sized))
    batch = torch.export.Dim("batch")
    return torch.export.export(
        block, (torch.ones(4, 3),), dynamic_shapes=({0: batch},), strict=strict
    )


def run_exported(path: str) -> None:
    program = torch.export.load(path)
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    sized = "interlace.group_size.default" not in targets
    interlace.GroupSpec("any", 2 if sized else None).bind("0")
    names = [t.split(".")[1] for t in targets if t.startswith(("interlace", "_c10d_functional"))]
    assert [n for n in names if n != "group_size"] == [
        "all_reduce", "all_gather_matmul", "wait_tensor", "matmul_reduce_scatter", "wait_tensor",
        "all_gather", "wait_tensor", "reduce_scatter", "wait_tensor", "wait_tensor",
    ], names  # fmt: skip
    for batch in (4, 6):
        x = torch.arange(batch * 3.0).view(batch, 3) + interlace.get_rank()
        got = program.module()(x)
        for each, right in zip(got, Block(None)(x), strict=True):
            torch.testing.assert_close(each, wait(right))
