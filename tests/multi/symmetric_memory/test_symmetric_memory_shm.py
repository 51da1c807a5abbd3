"""Symmetric memory for user code across processes; what every place does is in ``symmetric_ranks.py``."""

import gc
import os
import pathlib
import signal
import time
from typing import Any

import pytest
import torch

import interlace
from interlace.runtime.core.errors import InterlaceError, PeerDiedError, RankError
from interlace.runtime.places.shm import place
from multi.symmetric_memory import symmetric_ranks
from multi.symmetric_memory.symmetric_ranks import handle_of
from ranks import ranks
from sim.api.test_symmetric_memory import check_misuses, check_views
from support import shared_names
from tiers import thorough


def run(function: Any, world_size: int, *args: Any) -> list[Any]:
    return interlace.run(function, world_size, *args, place="shm")


@pytest.mark.parametrize("world_size", [3, 2])
def test_kernel_pushes_through_the_table(world_size: int) -> None:
    assert run(symmetric_ranks.gather, world_size, 12) == [[[], True]] * world_size


@pytest.mark.parametrize("world_size", [3, 2, 1])
def test_signals_of_host_and_kernels_mix(world_size: int) -> None:
    assert run(symmetric_ranks.ring, world_size, 12) == [[[], True]] * world_size


def test_group_of_some_ranks() -> None:
    first, nothing, second = run(symmetric_ranks.in_a_part, 3)
    assert first == [1, 2, False, [2.0] * 4, "2-0", True]
    assert second == [0, 2, False, [0.0] * 4, "2-0", True]
    assert nothing == []


def test_views_and_what_the_handle_says() -> None:
    check_views(run(symmetric_ranks.views, 2), "SHM")


def test_empty_is_not_collective() -> None:
    assert run(symmetric_ranks.empty_is_alone, 3) == [[[0, 1, 2], rank, 0] for rank in range(3)]


def test_words() -> None:
    for rank, values in enumerate(run(symmetric_ranks.words, 2)):
        assert values == [0, *[2**32 - 1] * 3, 0, 0, 2**31 + (rank - 1) % 2, 0]


def test_grids_and_programs_that_wait_for_later_ones() -> None:
    assert run(symmetric_ranks.grids, 2) == [[[1, 2, 3, 4, 5, 6], [7] * 4]] * 2


def test_misuse_is_refused_on_every_rank_and_the_group_goes_on() -> None:
    check_misuses(run(symmetric_ranks.misuses, 2))


def test_tensors_of_a_handle_outlive_it() -> None:
    assert run(symmetric_ranks.outlives, 3) == [[2.0, 0.0, 1.0]] * 3


@ranks(2)
def test_launches_while_async_ops_run() -> None:
    """And signals: the worker may still run kernels of its own."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    tensor, hdl = handle_of(world_size, 8)
    for number in range(4):
        x = torch.full((2, 8), float(rank + number))
        work = interlace.all_gather_matmul(x, torch.eye(8), algorithm="fused", async_op=True)
        launch = symmetric_ranks.push_kernel[(1,)]
        launch(hdl.buffer_ptrs_dev, rank, world_size, 1.0 * number, BLOCK=8)
        hdl.barrier()
        assert tensor[:, 0].tolist() == [number, number]
        assert work.wait()[:, 0].tolist() == [number, number, number + 1, number + 1]
        hdl.barrier()


@ranks(2)
def test_wait_that_passes_its_bound_says_what_it_waited_for() -> None:
    _, hdl = handle_of(4)
    if hdl.rank == 0:
        text = r"rank 0: wait_signal on channel 5 has waited 0.05 s for ranks \[1\]"
        with pytest.raises(interlace.CollectiveTimeoutError, match=text) as caught:
            hdl.wait_signal(1, channel=5, timeout_ms=50)
        assert caught.value.waited_for == (1,)
    interlace.barrier()


@ranks(2)
def test_closed_group_leaves_kernels_to_triton() -> None:
    """What is left of it is memory, but no kernel that waits."""
    tensor, hdl = handle_of(4)
    interlace.barrier()
    assert len(place._open_places()) == 1
    interlace.groups.groups.default_group().close()
    tensor.fill_(3)
    with pytest.raises(InterlaceError, match="closed"):
        hdl.barrier()
    out = torch.zeros(4, dtype=torch.int32)
    symmetric_ranks.fill_kernel[(4,)](out)
    assert out.tolist() == [7] * 4 and not place._open_places()


def resources() -> tuple[int, int]:
    """Open descriptors and mapped segments of this process, after collecting what is not used."""
    gc.collect()
    maps = pathlib.Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:interlace")


@thorough
@ranks(2)
def test_memory_and_descriptors_are_given_back() -> None:
    """In between the handle alone keeps the mappings."""
    named = shared_names()
    for first in (True, False):  # the first use may leave something behind for good
        interlace.barrier()
        before = resources()
        tensor, hdl = handle_of(1 << 14)
        hdl.barrier()
        with_both = resources()
        del tensor
        with_handle = resources()
        interlace.barrier()
        del hdl
        after = resources()
        if not first:
            assert with_both == (before[0] + 1, before[1] + 2)  # one descriptor, to share it again
            assert with_handle == (before[0], before[1] + 2)
            assert after == before
    assert shared_names() <= named


def test_killed_peer_is_named(tmp_path: pathlib.Path) -> None:
    """By who waits in the handle, and by who waits in a kernel of its own."""
    named = shared_names()
    with pytest.raises(RankError, match=r"rank 1: .* exit code -9 \(SIGKILL\)"):
        run(killed_while_waited_for, 3, tmp_path)
    assert "in wait_signal on channel 1" in (tmp_path / "0").read_text()
    assert "wait_by_swap program 0" in (tmp_path / "2").read_text()
    assert shared_names() <= named


def killed_while_waited_for(folder: pathlib.Path) -> None:
    """Rank 0 waits for rank 1 in the handle, rank 2 in a kernel of its own."""
    _, hdl = handle_of(1, dtype=torch.float64)
    if hdl.rank == 1:
        time.sleep(0.1)  # not for order, but so that the others sleep in their wait already
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if hdl.rank == 0:
            hdl.wait_signal(1, 1)
        else:
            wait = symmetric_ranks.wait_by_swap[(1,)]
            wait(hdl.signal_pad_ptrs_dev, hdl.rank, hdl.world_size, 1, 1)
    except PeerDiedError as error:
        assert error.rank == 1
        (folder / str(hdl.rank)).write_text(str(error))
        raise
