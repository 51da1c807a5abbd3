"""Symmetric memory for user code in ``sim``: torch's names, deadlocks, ends.

``multi/symmetric_memory/test_symmetric_memory.py`` has the tests that also run in ``shm``.
"""

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace import symmetric_memory
from interlace.runtime.core.errors import PlaceUnavailableError
from interlace.runtime.places.gpu.process_place import CudaPlace
from interlace.runtime.places.sim.place import SimPlace, run_sim
from interlace.runtime.places.sim.scheduler.observer import Observer
from interlace.runtime.places.sim.scheduler.scheduler import Scheduler
from interlace.symmetric_memory import functions as symmetric_tensors
from interlace.symmetric_memory.functions import SymmetricMemory
from multi.symmetric_memory.test_symmetric_memory import gather, handle_of

NOT_OF_A_HANDLE = {
    "boxed",
    "empty_strided_p2p",
    "get_backend",
    "get_multimem_cft_handle",  # NCCL's, of torch 2.15
    "get_peer_cft_handle",
    "get_mempool_allocator",
    "is_symm_mem_tensor",
    "rendezvous",
    "set_backend",
    "set_group_info",
}


def test_all_names_of_torchs_handle_are_there() -> None:
    theirs = vars(torch._C._distributed_c10d._SymmetricMemory)
    names = {name for name in theirs if not name.startswith("_")} - NOT_OF_A_HANDLE
    assert len(names) > 15
    handles = interlace.run(lambda: handle_of(1)[1], 1)
    assert [name for name in sorted(names) if not hasattr(handles[0], name)] == []
    assert not SymmetricMemory.has_multicast_support("cuda", 0)
    assert not interlace.symmetric_memory.is_nvshmem_available()


def test_without_the_second_barrier_data_is_overwritten() -> None:
    """The tests above do see a buffer that is written too early."""
    barrier = SymmetricMemory.barrier

    def only_first(self: SymmetricMemory, channel: int = 0, timeout_ms: int = 0) -> None:
        if channel != 1:
            barrier(self, channel)

    with mock.patch.object(SymmetricMemory, "barrier", only_first), pytest.raises(AssertionError):
        for seed in range(6):
            interlace.run(gather, 3, 3, seed=seed)


def test_pads_of_own_size() -> None:
    def on_rank() -> None:
        symmetric_memory.set_signal_pad_size(32)
        _, hdl = handle_of(1)
        hdl.barrier(3)
        text = "channel must be within 0..3 for 32 bytes of signal pad and 2 ranks, got 4"
        with pytest.raises(ValueError, match=text):
            hdl.barrier(4)
        assert symmetric_memory.get_signal_pad_size() == hdl.signal_pad_size == 32

    interlace.run(on_rank, 2)
    assert symmetric_memory.get_signal_pad_size() == 9216


# -- misuse and failure -----------------------------------------------------------------------------


def test_memory_of_another_rank_or_run_is_refused() -> None:
    tensors: dict[int, torch.Tensor] = {}

    def check_refused(tensor: torch.Tensor) -> None:
        said = "must be one that interlace.symmetric_memory.empty made on this rank, in this run"
        with pytest.raises(ValueError, match=f"tensor {said}"):
            symmetric_memory.rendezvous(tensor)

    def on_rank() -> None:
        rank = interlace.get_rank()
        first = not tensors.get(rank)
        if first:
            tensors[rank] = torch.ones(1)
            tensors[rank] = interlace.symmetric_memory.empty(4)
        interlace.barrier()
        other = tensors[1 - rank] if len(tensors) == 2 else tensors[rank]
        check_refused(other)

    interlace.run(on_rank, 2)
    interlace.run(check_refused, 2, tensors[0])


def test_signal_that_nobody_sends_is_a_deadlock() -> None:
    def on_rank() -> None:
        _, hdl = handle_of(1)
        if hdl.rank == 0:
            hdl.wait_signal(1, 2)

    with pytest.raises(interlace.DeadlockError, match=r"rank 0 wait_signal_kernel program 0 waits"):
        interlace.run(on_rank, 2)


def test_barrier_that_one_rank_does_not_join_is_a_deadlock() -> None:
    def on_rank() -> None:
        _, hdl = handle_of(1)
        if hdl.rank != 2:
            hdl.barrier()

    with pytest.raises(interlace.DeadlockError, match=r"rank 1 handle_barrier_kernel program 0"):
        interlace.run(on_rank, 3)


@mock.patch.object(SimPlace, "poll_limit", lambda self: 1)
@pytest.mark.parametrize("op", ["barrier", "put_signal", "wait_signal"])
def test_wait_that_gives_up_says_whom_it_waited_for(op: str) -> None:
    def on_rank() -> None:
        _, hdl = handle_of(1)
        if hdl.rank == 0 and op == "put_signal":
            hdl.put_signal(1, 7)  # the first goes through, the second finds it still up
        if hdl.rank == 0:
            getattr(hdl, op)(*(() if op == "barrier" else (1,)), channel=7)

    text = rf"rank 0: {op} on channel 7 gave up waiting for rank 1 after 1 polls"
    with pytest.raises(interlace.CollectiveTimeoutError, match=text) as caught:
        interlace.run(on_rank, 2)
    assert caught.value.__cause__.waited_for == (1,)  # type: ignore[union-attr]


def test_place_cuda_points_at_torch() -> None:
    place = object.__new__(CudaPlace)
    with pytest.raises(PlaceUnavailableError, match=r"torch\.distributed\._symmetric_memory"):
        place.new_memory((16,))


# -- memory -----------------------------------------------------------------------------------------


def test_memory_is_given_back_within_the_run() -> None:
    gc.collect()  # memory that errors of earlier tests keep
    known = len(symmetric_tensors._allocations)
    alive: list[weakref.ref[Any]] = []

    def on_rank() -> list[int]:
        tensor, hdl = handle_of(4)
        alive.append(weakref.ref(hdl))
        part = symmetric_tensors._allocations[tensor.data_ptr()].memory.parts[0]
        alive.append(weakref.ref(part))
        del part
        counts = [len([1 for reference in alive if reference() is not None])]
        interlace.barrier()
        del tensor, hdl
        gc.collect()
        interlace.barrier()
        counts.append(len([1 for reference in alive if reference() is not None]))
        return counts

    assert [after for _, after in interlace.run(on_rank, 2)] == [0, 0]
    assert len(symmetric_tensors._allocations) == known


@pytest.mark.parametrize("name", ["one_shot_all_reduce", "two_shot_all_reduce_"])
def test_ops_of_torch_take_turns(name: str) -> None:
    """These ops wait within pybind11; an exception or a switch of ranks there ends the process."""

    def on_rank() -> list[float]:
        tensor = symmetric_memory.empty(8).fill_(interlace.get_rank() + 1.0)
        group = symmetric_memory.rendezvous(tensor).group_name
        op = getattr(torch.ops.symm_mem, name)
        results = [fn(tensor.clone(), "sum", group).tolist() for fn in (op, op.default, op)]
        return [value for result in results for value in result]

    for seed in range(3):
        assert interlace.run(on_rank, 4, seed=seed) == [[10.0] * 24] * 4
    assert isinstance(torch.ops.symm_mem.one_shot_all_reduce, torch._ops.OpOverloadPacket)


def test_torchs_compiler_looks_through_the_ops_that_were_used() -> None:
    op = torch.ops.symm_mem.one_shot_all_reduce
    # torch has the second as of 2.13
    asked = [name for name in ("overloads", "op_overloads") if hasattr(type(op), name)]
    assert asked and all(getattr(op, name)() for name in asked)

    def on_rank() -> list[list[Any]]:
        ops = torch.ops.symm_mem
        used = [getattr(ops, name) for name in ops if name == op.__name__]
        return [getattr(each, name)() for each in used for name in asked]

    assert interlace.run(on_rank, 2) == [[[] for _ in asked]] * 2


def test_an_address_is_used_once_in_an_observed_run() -> None:
    addresses: list[int] = []

    class Allocations(Observer):
        def on_allocate(self, rank: int, memory: torch.Tensor, label: str) -> None:
            addresses.append(memory.data_ptr())

    def on_rank(place: SimPlace) -> None:
        interlace.groups.groups.install(place)
        for _ in range(3):
            handle_of(4)

    run_sim(on_rank, 2, scheduler=Scheduler(0, observer=Allocations()))
    assert len(set(addresses)) == len(addresses) == 12  # each handle has a buffer and a pad
