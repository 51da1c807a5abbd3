"""Groups of the backend: how many, over which ranks, their names, their start and their end."""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import interlace
import torch_names
from multi.process_group.tools import Tagged, begin, own, values
from ranks import ranks
from support import free_port
from tiers import few, thorough

ROOT = Path(__file__).parents[3]


@ranks(4, backend="interlace")
def test_meshes_and_subgroups() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    sums = []
    for group in (mesh.get_group("rows"), mesh.get_group("columns"), pairs):
        x = torch.full((1,), 10.0**rank)
        dist.all_reduce(x, group=group)
        sums.append(int(x))
    expected = [[101, 11, 1001], [1010, 11, 110], [101, 1100, 110], [1010, 1100, 1001]]
    assert sums == expected[rank]
    # only new torch can be told not to sort
    kept = {"sort_ranks": False} if torch_names.NEW_GROUP_SORTS else {}
    order = [3.0, 1.0] if torch_names.NEW_GROUP_SORTS else [1.0, 3.0]
    turned = dist.new_group([3, 1], **kept)
    if rank in order:
        out = torch.empty(2)
        torch_names.all_gather_single(out, torch.tensor([float(rank)]), group=turned)
        assert out.tolist() == order and order[dist.get_rank(turned)] == rank
        interlace.all_reduce(x, group=turned)
        assert float(x) == 1111.0
    else:
        assert turned == dist.GroupMember.NON_GROUP_MEMBER


@ranks(2)
def test_init_after_destroy_with_the_same_store(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    for start in (0.0, 100.0, 200.0):
        begin(store)
        group, x = dist.group.WORLD, own(start, 1)
        dist.all_reduce(x)
        assert float(x) == 2 * start + 1
        dist.destroy_process_group()
    text = f"^rank {interlace.get_rank()}: process group '0' was destroyed$"
    with pytest.raises(interlace.InterlaceError, match=text):
        group.allreduce([own()])  # type: ignore[union-attr]


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@ranks(3)
def test_again_on_the_same_port(address: str) -> None:
    terms: dict[str, Any] = {"rank": interlace.get_rank(), "timeout": timedelta(seconds=600)}
    for _ in range(3):
        dist.init_process_group("interlace", init_method=address, world_size=3, **terms)
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group()
        assert float(x) == 3


@ranks(2, backend="interlace")
def test_names() -> None:
    group: Any = dist.group.WORLD
    dist.all_reduce(own())
    dist.barrier()
    second = dist.new_group(group_desc="for names")
    assert group.name() == dist.get_backend() == "interlace"
    assert second.group_desc == "for names" and "" != second.group_name != group.group_name
    assert group._get_sequence_number_for_group() == 2
    assert dist.distributed_c10d._get_object_coll_device(group) == "cpu"


@ranks(2, backend="interlace")
def test_tensors_on_another_device_go_through_the_host() -> None:
    def tagged(*numbers: float) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32).as_subclass(Tagged)

    group: Any = dist.group.WORLD
    rank, place = dist.get_rank(), SimpleNamespace(device=torch.device("cuda"))
    with mock.patch.object(group, "_place", place):
        reduced, gathered, sent = tagged(rank, 1.0), tagged(0.0, 0.0), tagged(rank)
        dist.all_reduce(reduced)
        torch_names.all_gather_single(gathered, sent)
        pieces = [tagged(0.0), tagged(0.0)]
        dist.all_gather(pieces, sent, async_op=True).wait()
        scattered = tagged(0.0)
        torch_names.reduce_scatter_single(scattered, tagged(0.0, 1.0))
        text = "send needs a tensor on cuda"
        with pytest.raises(interlace.PlaceUnavailableError, match=text):
            dist.send(sent, 1 - rank)
    assert values([reduced, gathered]) == [[1.0, 2.0], [0.0, 1.0]]
    assert values(pieces) == [[0.0], [1.0]]
    assert values([scattered, sent]) == [[2.0 * rank], [float(rank)]]


@pytest.mark.parametrize("backend", few(["interlace", "gloo"], "interlace"))
@pytest.mark.parametrize("kind", ["collective", "messages", "large messages"])
@ranks(2)
def test_what_is_under_way_when_a_group_is_destroyed_ends_well(kind: str, backend: str) -> None:
    count = 3_000_000 if kind == "large messages" else 1000
    rank = dist.get_rank()
    x, y = torch.full((count,), float(rank + 1)), torch.zeros(count)
    if rank == 1:
        time.sleep(0.7)  # the other waits for this one by then, or has destroyed its group
    works: list[Any] = []
    if kind == "collective":
        works.append(dist.all_reduce(x, async_op=True))
        y = x
    else:
        works += [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank)]
    dist.destroy_process_group()
    for work in works:
        work.wait()
    assert all(work.is_completed() for work in works)
    assert bool((y == (3.0 if kind == "collective" else 2.0 - rank)).all())


@ranks(2)
def test_torchs_next_default_group_is_found(tmp_path: Path) -> None:
    rank, groups = interlace.get_rank(), interlace.groups.groups
    groups._default.set(None)
    kept, groups._of_run = groups._of_run, None
    try:
        for turn, own_rank in enumerate((rank, 1 - rank)):
            store = dist.FileStore(str(tmp_path / f"store{turn}"), 2)
            dist.init_process_group("gloo", store=store, rank=own_rank, world_size=2)
            x = torch.tensor([interlace.get_rank()])
            interlace.broadcast(x, 1)
            assert interlace.get_rank() == own_rank and int(x) == 1
            dist.barrier()
            dist.destroy_process_group()
        with pytest.raises(interlace.InterlaceError, match="destroyed"):
            interlace.get_rank()
    finally:
        groups._of_run = kept
        if kept is not None:
            groups._default.set(kept)


@ranks(2)
def test_more_tensors_than_a_message_can_name() -> None:
    tensors = [torch.full((1,), float(number)) for number in range(1500)]
    interlace.all_reduce_coalesced(tensors)
    assert values(tensors) == [[2.0 * number] for number in range(1500)]


@ranks(2)
def test_the_default_group_is_that_of_all_threads() -> None:
    x = torch.ones(1)
    thread = threading.Thread(target=interlace.all_reduce, args=(x,))
    thread.start()
    thread.join()
    assert float(x) == 2.0


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
    """torch finds the backend by its entry point, and imports nothing of it before its first use."""
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
