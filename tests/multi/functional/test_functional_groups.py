"""Groups of every form in interlace.functional, eager and compiled, and programs exported without one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import interlace
from interlace import functional
from interlace.functional import wait
from ranks import ranks, world
from tiers import thorough

ROWS, COLUMNS = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
SPEC = interlace.GroupSpec("pairs", 2)


def own_of(lists: list[list[int]]) -> list[int]:
    return next(each for each in lists if interlace.get_rank() in each)


def own_group(lists: list[list[int]], make: Callable[[list[int]], Any]) -> Any:
    groups = [make(each) for each in lists]
    return groups[lists.index(own_of(lists))]


def members(x: torch.Tensor, group: Any, tag: str) -> torch.Tensor:
    y = functional.all_gather(x * 1, group=group, tag=tag)
    return y * 1


def check(name: str, right: list[int], group: Any, tag: str = "", function: Any = members) -> None:
    """Compare the ranks that take part, in their order, eager and compiled."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for each in (function, compiled):
        found = each(torch.full((1,), interlace.get_rank()), group, tag)
        assert found.tolist() == right, name


def inside(x: torch.Tensor, group: Any, tag: str) -> torch.Tensor:
    return functional.all_gather(x, group=interlace.GroupSpec("pairs", 2)) * 1


def lists_inside(x: torch.Tensor, group: Any, tag: str) -> torch.Tensor:
    return functional.all_gather(x, group=[[0, 2], [1, 3]]) * 1


@thorough
@ranks(4)
def test_groups_of_every_form() -> None:
    every, pairs, columns = [0, 1, 2, 3], own_of(ROWS), own_of(COLUMNS)
    check("None", every, None)
    check("name", every, "0")
    check("list", every, every)
    check("tuple", [3, 1, 2, 0], (3, 1, 2, 0))
    check("tagged lists", columns, COLUMNS, "fast")
    check("tagged list", every, every, "fast")
    interlace.new_group([0, 1], name="low")
    interlace.new_group([2, 3], name="high")
    check("given name", pairs, ("low", "high")[ROWS.index(pairs)])
    SPEC.bind(ROWS)
    check("spec without a size", pairs, interlace.GroupSpec("pairs"))
    check("spec made inside", pairs, None, function=inside)
    check("lists made inside", columns, None, function=lists_inside)


def check_turns(name: str, pairs: Any, columns: Any) -> None:
    """Call a function, and one compiled from it, with a group, another one, and the first again."""
    torch._dynamo.reset()
    own = torch.full((1,), interlace.get_rank())
    for call in (members, torch.compile(members, backend="eager", fullgraph=True)):
        for group, right in ((pairs, ROWS), (columns, COLUMNS), (pairs, ROWS)):
            assert call(own, group, "").tolist() == own_of(right), name


@thorough
@ranks(4)
def test_another_group_is_another_graph(tmp_path: Path) -> None:
    """A graph of one group must not serve another group of the same size."""
    check_turns("lists", ROWS, COLUMNS)
    pairs, columns = (own_group(each, interlace.new_group) for each in (ROWS, COLUMNS))
    check_turns("communicators", pairs, columns)
    specs = interlace.GroupSpec("first", 2), interlace.GroupSpec("second", 2)
    specs[0].bind(pairs)
    specs[1].bind(columns)
    check_turns("specs", *specs)
    for backend in ("gloo", "interlace"):
        with world(tmp_path / backend, backend):
            check(f"{backend} default", [0, 1, 2, 3], None)
            check(f"{backend} world", [0, 1, 2, 3], dist.group.WORLD)
            check(f"{backend} lists", own_of(COLUMNS), COLUMNS)
            groups = [own_group(each, dist.new_group) for each in (ROWS, COLUMNS)]
            check_turns(f"{backend} groups", *groups)
            check_turns(f"{backend} names", *(each.group_name for each in groups))
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            check_turns(f"{backend} mesh dims", (mesh, 1), (mesh, 0))
            check_turns(f"{backend} mesh names", (mesh, "b"), (mesh, "a"))
            check_turns(f"{backend} meshes", mesh["b"], mesh["a"])


# -- exported without a process group ------------------------------------------------------------------


class SequenceParallelBlock(torch.nn.Module):
    """An MLP between collectives, of a group that is only named."""

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


def export(path: Path, size: int | None, *, strict: bool = False) -> None:
    """Export in a process without any group, with a dynamic batch."""
    assert not dist.is_initialized()
    block = SequenceParallelBlock(interlace.GroupSpec("any", size))
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(block, (torch.ones(4, 3),), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, path)


@ranks()
def run_exported(world_size: int, path: Path) -> None:
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
        right = SequenceParallelBlock(None)(x)
        for each, other in zip(program.module()(x), right, strict=True):
            torch.testing.assert_close(each, wait(other))


def test_exported_programs_run_on_any_number_of_ranks(tmp_path: Path) -> None:
    export(tmp_path / "program.pt2", None)
    for world_size in (1, 2, 3):
        run_exported(world_size=world_size, path=tmp_path / "program.pt2")


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_of_one_size(tmp_path: Path, strict: bool) -> None:
    export(tmp_path / "program.pt2", 2, strict=strict)
    run_exported(world_size=2, path=tmp_path / "program.pt2")
    with pytest.raises(ValueError, match="has size 2, the group has 3"):
        run_exported(world_size=3, path=tmp_path / "program.pt2")
