"""The backend of torch.distributed: every call, every rule a group in Python has to keep, groups, names.

Each test of a rule fails without the rule; what happened then is in the docstrings of the rules' modules.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
import torch_names
from multi.process_group import backend_group_ranks, backend_ranks
from tiers import few, thorough

ROOT = Path(__file__).parents[3]


def on_ranks(function: Any, world_size: int, path: Path, *args: Any) -> list[Any]:
    """``function`` on ``world_size`` ranks, which meet in a file of the folder ``path``."""
    return interlace.run(function, world_size, str(path / "store"), *args, place="shm")


def same(value: Any, expected: Any) -> bool:
    """Equal, with tensors in the expected value given as lists of numbers."""
    if isinstance(value, torch.Tensor):
        return torch.equal(value, torch.tensor(expected, dtype=value.dtype))
    if isinstance(value, (list, tuple)):
        pairs = zip(value, expected, strict=True)
        return all(same(each, other) for each, other in pairs)
    return bool(value == expected)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("async_op", [False, True])
def test_collectives(tmp_path: Path, async_op: bool) -> None:
    results = on_ranks(backend_ranks.every_collective, 2, tmp_path, async_op)
    for rank, result in enumerate(results):
        mine = [[10.0 * rank + sender] * 2 for sender in range(2)]
        expected = {
            "all_reduce": [3.0, 3.0],
            "premul_sum": [1.5, 1.5],
            "complex": [3 + 3j, 3 + 3j],
            "broadcast": [2.0, 2.0],
            "reduce": [[1.0, 1.0], [2.0, 2.0]][rank],
            "all_gather": [[1.0, 1.0], [2.0, 2.0]],
            "uneven": [[1.0], [2.0, 2.0]],
            "cat": [1.0, 1.0, 2.0, 2.0],
            "stack": [[1.0, 1.0], [2.0, 2.0]],
            "flat": [1.0] * 4 + [2.0] * 4,
            "reduce_scatter": [20.0 * rank + 1] * 2,
            "reduce_scatter_single": [20.0 * rank + 1] * 2,
            "all_to_all": mine,
            "all_to_all_single": mine[0] + mine[1],
            "gather": [None, [[1.0, 1.0], [2.0, 2.0]]][rank],
            "scatter": [10.0 * rank + 1] * 2,
            "sparse": [3.0, 1.0, 2.0, 0.0, 0.0],
            "objects": [{"rank": 0}, {"rank": 1}],
        }
        assert result.keys() == expected.keys()
        wrong = {name: result[name] for name in expected if not same(result[name], expected[name])}
        assert not wrong, f"rank {rank}"


def test_gather_into_one_tensor(tmp_path: Path) -> None:
    """As ``dist.gather_single`` of torch 2.14 calls the group."""
    results = on_ranks(backend_ranks.gather_of_one_tensor, 2, tmp_path)
    assert results == [[-1.0] * 4, [1.0, 1.0, 2.0, 2.0]]


def test_messages(tmp_path: Path) -> None:
    for rank, result in enumerate(on_ranks(backend_ranks.messages, 3, tmp_path)):
        left = (rank - 1) % 3
        first, second, anyone, source, batched = result
        assert source == left
        for start, got in enumerate((first, second, anyone, batched), 1):
            assert same(got, [10.0 * start + left] * 2)


def test_coalesced_collectives(tmp_path: Path) -> None:
    for result in on_ranks(backend_ranks.coalesced, 2, tmp_path):
        expected = [[3.0] * 2, [11.0] * 3, [1.0, 1.0, 2.0, 2.0], [7.0, 8.0], [3.0] * 2, [3.0]]
        expected += [[3.0] * 2, [11.0] * 2]
        assert same(result, expected)


def test_every_method_returns_a_work(tmp_path: Path) -> None:
    """None from a method ends the process when C++ asks it to wait."""
    expected = [["Work", 1, "Work", "Work", 0, "Work"]] * 2  # a synchronous call keeps no tensors
    assert on_ranks(backend_ranks.works_of_methods, 2, tmp_path) == expected


def test_short_forms_of_methods(tmp_path: Path) -> None:
    for rank, result in enumerate(on_ranks(backend_ranks.short_forms, 2, tmp_path)):
        reduced, listed, sent, root, gathered, at_root, part, scattered = result
        both = [[1.0, 1.0], [2.0, 2.0]]
        assert same([reduced, listed, sent], [[2.0, 2.0]] * 3)
        assert same(gathered, both)
        assert same(part, [3.0 + 8 * rank] * 2) and same(scattered, [2.0 + 4 * rank] * 2)
        if rank == 0:
            assert same(root, [3.0, 3.0]) and same(at_root, both)


# -- dispatch modes and subclasses ------------------------------------------------------------


def test_fake_and_meta_tensors_move_nothing(tmp_path: Path) -> None:
    results = on_ranks(backend_ranks.fake, 2, tmp_path)
    assert results == [["FakeTensor", "FakeTensor", "meta", torch.Size([4])], []]


def test_make_fx_keeps_the_collective(tmp_path: Path) -> None:
    """Without the rule the graph holds the sum of one call as a constant."""
    for targets in on_ranks(backend_ranks.traced, 2, tmp_path, 2):
        assert "c10d.allreduce_.default" in targets


def test_local_tensor(tmp_path: Path) -> None:
    summed, name, whole = on_ranks(backend_ranks.simulated, 2, tmp_path)[0]
    assert summed == [3.0, 3.0] and name == "LocalTensor"
    assert whole == list(range(8))


def test_subclasses(tmp_path: Path) -> None:
    for result in on_ranks(backend_ranks.subclasses, 2, tmp_path):
        tagged, name, waiting, wrapped, seen, parameter = result
        assert tagged == wrapped == parameter == [3.0, 3.0]
        assert name == "Tagged" and seen == ["c10d.allreduce_.default"]
        assert waiting == [6.0, 6.0]


@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
def test_modes_see_collectives(tmp_path: Path, everywhere: bool) -> None:
    """A mode on one rank must not take it to another group than the ranks without one."""
    results = on_ranks(backend_ranks.recorded, 2, tmp_path, everywhere)
    ops = ["c10d.allreduce_.default", "c10d.barrier.default"]
    assert [total for total, _ in results] == [[3.0, 3.0]] * 2
    assert [seen for _, seen in results] == [ops, ops if everywhere else []]


# -- functional ops, compilation, profiler ----------------------------------------------------


def test_functional_ops(tmp_path: Path) -> None:
    for rank, result in enumerate(on_ranks(backend_ranks.functional_ops, 2, tmp_path)):
        expected = [
            [3.0] * 2,
            [1.5] * 2,
            [1.0, 2.0],
            [2.0] * 2,
            *([3.0] * 2, [7.0] * 2),
            *([1.0, 1.0, 2.0, 2.0], [3.0, 3.0, 4.0, 4.0]),
            *([3.0] * 2, [7.0] * 2),
            [2.0 - rank] * 2,
            *([1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]),
            [4.0 * (1 + rank)] * 2,  # the gradient is summed over ranks
        ]
        assert same(result, expected)


@pytest.mark.parametrize("backend", ["interlace", "gloo"])
def test_kernels_of_functional_ops(tmp_path: Path, backend: str) -> None:
    """Ours serve groups of other backends in the same process too."""
    results = on_ranks(backend_ranks.exchanged_by_op, 2, tmp_path, backend)
    for rank, (received, gathered) in enumerate(results):
        assert same(received, [2.0 - rank] * 2)
        assert same(gathered, [1.0, 1.0, 2.0, 2.0])


def test_compiled(tmp_path: Path) -> None:
    results = on_ranks(backend_ranks.compiled, 2, tmp_path, "aot_eager", False)
    assert all(same(result, [7.0] * 4) for result in results)


def test_compiled_with_an_async_collective(tmp_path: Path) -> None:
    """Fails in Dynamo if it traces into a method of the group."""
    results = on_ranks(backend_ranks.compiled, 2, tmp_path, "aot_eager", True)
    assert all(same(result, [8.0 + rank] * 2) for rank, result in enumerate(results))


def test_profiler_shows_collectives(tmp_path: Path) -> None:
    expected = [
        f"interlace:{op}{more}"
        for op in ("all_reduce", "barrier")
        for more in (" on 0-1", ":message")
    ]
    assert on_ranks(backend_ranks.profiled, 2, tmp_path) == [expected] * 2


# -- groups and their end ---------------------------------------------------------------------


def test_64_groups_at_once(tmp_path: Path) -> None:
    assert on_ranks(backend_group_ranks.many_groups, 2, tmp_path, 64) == [(1.0, 64)] * 2


def test_meshes_and_subgroups(tmp_path: Path) -> None:
    results = on_ranks(backend_group_ranks.meshes, 4, tmp_path)
    assert [result[0] for result in results] == [
        [101.0, 11.0, 1001.0],
        [1010.0, 11.0, 110.0],
        [101.0, 1100.0, 110.0],
        [1010.0, 1100.0, 1001.0],
    ]
    order = (
        [3, 1] if torch_names.NEW_GROUP_SORTS else [1, 3]
    )  # only new torch can be told not to sort
    for place, rank in enumerate(order):
        assert results[rank][1:] == [place, [float(each) for each in order], 1111.0]


def test_init_after_destroy_with_the_same_store(tmp_path: Path) -> None:
    """Keys of the first group are still in the store when the second is made."""
    for rank, (sums, error) in enumerate(on_ranks(backend_group_ranks.again, 2, tmp_path, 3)):
        assert sums == [1.0, 201.0, 401.0]
        assert error == f"rank {rank}: process group '0' was destroyed"


def test_names(tmp_path: Path) -> None:
    expected = ["interlace", "interlace", True, "for names", True, 2, "cpu"]
    assert on_ranks(backend_group_ranks.names, 2, tmp_path) == [expected] * 2


def test_tensors_on_another_device_go_through_the_host(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(backend_group_ranks.elsewhere, 2, tmp_path)):
        *tensors, refused = found
        assert tensors == [[1.0, 2.0], [0.0, 1.0], [0.0, 1.0], [2.0 * rank], [float(rank)]]
        assert "send needs a tensor on cuda" in refused


def test_abort_ends_waits(tmp_path: Path) -> None:
    waiting, aborting = on_ranks(backend_group_ranks.aborted, 2, tmp_path)
    assert "rank 1 aborted" in waiting and aborting == "aborted"


# -- processes of their own -------------------------------------------------------------------

SCRIPT = """
import sys
import torch
import torch.distributed as dist
assert "interlace" not in sys.modules and "triton" not in sys.modules
dist.init_process_group("interlace")
x = torch.ones(2)
dist.all_reduce(x)
assert x.tolist() == [dist.get_world_size()] * 2
import interlace
interlace.all_reduce(x)
assert x.tolist() == [dist.get_world_size() ** 2] * 2
assert interlace.groups.groups.default_group() is dist.group.WORLD.interlace_communicator
dist.destroy_process_group()
"""


@thorough
def test_entry_point_under_torchrun(tmp_path: Path) -> None:
    """torch finds the backend by its entry point, and loads nothing of it before it is used.

    The rank that serves the store leaves as soon as it can.
    """
    distribution = tmp_path / "found-0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: found\nVersion: 0\n")
    entry = "[torch.backends]\ninterlace_for_test = interlace_backend:register\n"
    (distribution / "entry_points.txt").write_text(entry)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT / "python"), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("backend", few(["interlace", "gloo"], "interlace"))
@pytest.mark.parametrize("kind", ["collective", "messages", "large messages"])
def test_what_is_under_way_when_a_group_is_destroyed_ends_well(
    tmp_path: Path, kind: str, backend: str
) -> None:
    found = on_ranks(backend_group_ranks.destroyed_before_wait, 2, tmp_path, kind, backend)
    assert found == ([[3.0, 3.0]] * 2 if kind == "collective" else [[2.0, 2.0], [1.0, 1.0]])
