"""interlace.functional under torch.compile on ranks: ops, groups, graphs, memory, exported programs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
from multi.functional import (
    functional_ranks,
    functional_ranks_compiled as ranks,
    functional_ranks_groups as groups,
)
from multi.functional.functional_ranks_cases import CASES
from tiers import few, thorough

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")


def on_ranks(function: Any, world_size: int, *args: Any) -> list[Any]:
    return interlace.run(function, world_size, *args, place="shm")


# -- every op ------------------------------------------------------------------------------------------

ONCE = [  # every op, every reduction, every position of the dimension; the rest has the same graphs
    "all_reduce sum", "all_reduce max", "all_reduce product", "reduce_scatter avg 0",
    "reduce_scatter min 1", "reduce_scatter sum -1", "all_gather 1", "all_gather 0-dim", "all_to_all",
    "broadcast", "reduce avg", "permute", "gather -1", "scatter 1", "all_gather_matmul 0",
    "all_gather_matmul 1 save_gathered=False, no bias", "all_gather_matmul -1 several",
    "matmul_reduce_scatter sum 0", "matmul_reduce_scatter avg -1", "matmul_all_reduce avg",
    "matmul_reduce_scatter sum 0 uneven", "matmul_reduce_scatter avg -1 uneven",
]  # fmt: skip
ONE_OF_EACH_KIND = ["all_reduce sum", "reduce_scatter min 1", "all_to_all", "all_gather_matmul 0",
                    "matmul_reduce_scatter_norm rms gathered uneven"]  # fmt: skip


def test_one_op_of_each_kind_in_one_graph() -> None:
    """Forward and backward, with fullgraph: waits that are written."""
    on_ranks(ranks.in_one_graph, 2, "aot_eager", True, ONE_OF_EACH_KIND)


def test_a_rank_with_a_graph_and_one_without_go_on() -> None:
    """A graph does not say what needs a gradient, and Dynamo may give a function up on some ranks only."""
    assert on_ranks(ranks.a_graph_on_one_rank, 2) == [[20.0, 8.0, 8.0], [20.0, 16.0, 16.0]]


@thorough
@pytest.mark.parametrize("explicit", [False, True])
def test_every_op_in_one_graph(explicit: bool) -> None:
    """The same of all, and with waits at the first use."""
    names = ONCE if explicit else [name for name in CASES if name not in ONCE[:-2]]
    on_ranks(ranks.in_one_graph, 2, "aot_eager", explicit, names)


@thorough
def test_every_op_in_one_graph_of_inductor() -> None:
    names = [name for name in ONCE if "product" not in name and "min" not in name]
    on_ranks(ranks.in_one_graph, 2, "inductor", False, names)
    empty = "matmul_reduce_scatter sum 1 uneven"  # on the last rank, which does not wait for it
    assert on_ranks(functional_ranks.every_case, 2, empty, "inductor") == [[empty]] * 2


@pytest.mark.parametrize(
    "kind", few(["all_reduce avg", "matmul_reduce_scatter avg", "1 several"], "1 several")
)
def test_results_that_leave_a_graph_unwaited(kind: str) -> None:
    """With gradients through them."""
    expected = [name for name in CASES if kind in name]
    assert (
        on_ranks(functional_ranks.every_case, 2, kind, "aot_eager") == [expected] * 2 and expected
    )


def test_results_of_which_a_loss_uses_one() -> None:
    """Of the others torch has a plain tensor of zeros."""
    on_ranks(ranks.some_results_used, 2, "aot_eager")


# -- graphs --------------------------------------------------------------------------------------------


def test_start_and_wait_are_a_pair_around_the_work_between_them() -> None:
    for forward, backward in on_ranks(ranks.pairs, 2):
        forward = [name for name in forward if name != "detach"]
        assert forward == ["all_gather", "relu", "mm", "wait_tensor", "cos", "mm"]
        assert backward[-2:] == ["reduce_scatter", "wait_tensor"]


@thorough
def test_unwaited_results_and_arguments_of_graphs() -> None:
    for rank, found in enumerate(on_ranks(ranks.unwaited_results, 2)):
        fours = [4.0, 4.0]
        assert found == [
            [["mul", "all_gather", "add"]], True, True,
            [["wait_tensor", "sum", "add"]], [14.0 + rank] * 2,
            [6.0, 6.0], [*fours, 8.0, 8.0], [6.0, 6.0],
            [9.0, 9.0],  # of the sum, on both elements of both ranks, and of the 1
            *[fours] * 5,
        ]  # fmt: skip


@pytest.mark.parametrize("uneven", [False, True])
def test_one_graph_for_all_batches(uneven: bool) -> None:
    assert on_ranks(ranks.dynamic_batch, 2, "aot_eager", uneven) == [1, 1]


@pytest.mark.parametrize("above_autograd", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str, above_autograd: bool) -> None:
    expected = ["interlace.all_reduce.default", "aten.add.Tensor",
                "_c10d_functional.wait_tensor.default", "aten.mul.Tensor",
                "interlace.all_gather.default", "_c10d_functional.wait_tensor.default"]  # fmt: skip
    assert on_ranks(ranks.traced_with_make_fx, 2, mode, above_autograd) == [expected] * 2


def test_out_and_ops_in_place() -> None:
    expected = ([4.0, 4.0], [4.0, 4.0], [3.0, 3.0])
    assert on_ranks(ranks.in_place_in_graphs, 2) == [expected] * 2


# -- Inductor ------------------------------------------------------------------------------------------


@thorough
@pytest.mark.parametrize("cache", [False, True])
def test_inductor_reduces_in_place(cache: bool) -> None:
    """What nobody needs any more is not copied; without the lowering it is an op out of place."""
    for code in on_ranks(ranks.generated, 2, cache):
        call = code[code.index("def call") :]
        (buffer,) = re.findall(r"interlace\.all_reduce_\.default\((buf\d+), 'sum', 2, '0'\)", call)
        assert f"wait_tensor.default({buffer})" in call
        assert "interlace.all_reduce.default" not in call
        before = call[: call.index("all_reduce_")]
        assert before.count("empty_strided") == 1, "a copy was made"


@thorough
def test_inductor_keeps_work_between_start_and_wait() -> None:
    """``reorder_for_locality`` would put it behind the wait."""
    for code in on_ranks(ranks.generated_overlap, 2):
        call = code[code.index("def call") :]
        start = call.index("interlace.all_gather.default")
        wait = call.index("wait_tensor.default")
        between = call[start:wait].count("extern_kernels")
        assert between >= 1, call


@thorough
def test_inductor_leaves_memory_in_flight_alone() -> None:
    on_ranks(ranks.memory_in_flight, 2)


@thorough
def test_inductor_leaves_what_is_exchanged_alone() -> None:
    for code in on_ranks(ranks.work_behind_a_start, 2):
        (sent,) = re.findall(r"interlace\.matmul_all_to_all\.default\((buf\d+),", code)
        assert f"del {sent}  # reuse" not in code


@thorough
def test_inductor_has_ops_of_more_results_than_inputs() -> None:
    on_ranks(ranks.more_results_than_inputs, 2)


# -- groups --------------------------------------------------------------------------------------------


@thorough
def test_groups_of_every_form() -> None:
    for rank, found in enumerate(on_ranks(groups.of_interlace, 4)):
        pairs, columns = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        every = [0, 1, 2, 3]
        right = {
            "None": every, "name": every, "list": every, "tuple": [3, 1, 2, 0], "lists": columns,
            "tagged lists": columns, "tagged list": every, "communicator": pairs, "given name": pairs,
            "spec": pairs, "spec without a size": pairs,
            "spec made inside": pairs, "lists made inside": columns,
        }  # fmt: skip
        assert found == {name: [members] * 2 for name, members in right.items()}


@pytest.mark.parametrize("backend", few(["gloo", "interlace"], "interlace"))
def test_groups_of_torch(tmp_path: Path, backend: str) -> None:
    for rank, found in enumerate(on_ranks(groups.of_torch, 4, str(tmp_path / "store"), backend)):
        pairs, columns = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        right = {
            "None": [0, 1, 2, 3], "world": [0, 1, 2, 3], "group": pairs, "name": pairs,
            "(mesh, 0)": columns, "(mesh, 'b')": pairs, "mesh": pairs, "lists": columns,
        }  # fmt: skip
        assert found == {name: [members] * 2 for name, members in right.items()}


@thorough
def test_another_group_is_another_graph(tmp_path: Path) -> None:
    """A graph made for one group must not be taken for another one of the same size."""
    for rank, found in enumerate(on_ranks(groups.one_after_another, 4, str(tmp_path / "store"))):
        pairs, columns = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        for name, members in found.items():
            assert members == [pairs, columns, pairs], name


def test_tags_are_different_groups() -> None:
    assert on_ranks(groups.tags, 2) == [[True, False, False, True]] * 2


# -- exported without a process group ------------------------------------------------------------------


def test_exported_programs_run_on_any_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    torch.export.save(groups.exported(sized=None), path)
    for world_size in (1, 2, 3):
        on_ranks(groups.run_exported, world_size, str(path))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_of_one_size(tmp_path: Path, strict: bool) -> None:
    path = tmp_path / "program.pt2"
    torch.export.save(groups.exported(sized=2, strict=strict), path)
    on_ranks(groups.run_exported, 2, str(path))
    with pytest.raises(ValueError, match="has size 2, the group 3"):
        on_ranks(groups.run_exported, 3, str(path))
