"""Symmetric memory for user code in ``sim``: torch's names, kernels on the pointers, signals, misuse.

What ranks do is in ``multi/symmetric_memory/symmetric_ranks.py``, which ``shm`` runs too.
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
from multi.symmetric_memory import symmetric_ranks as ranks

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
    handles = interlace.run(lambda: ranks.handle_of(1)[1], 1)
    assert [name for name in sorted(names) if not hasattr(handles[0], name)] == []
    assert not SymmetricMemory.has_multicast_support("cuda", 0)
    assert not interlace.symmetric_memory.is_nvshmem_available()


@pytest.mark.parametrize("seed", range(6))
def test_kernels_push_through_the_table_and_mix_signals_with_the_hosts(seed: int) -> None:
    """A rank may signal itself."""
    assert interlace.run(ranks.gather, 3, 3, seed=seed) == [[[], True]] * 3
    for world_size in (1, 3):
        found = interlace.run(ranks.ring, world_size, 4, seed=seed)
        assert found == [[[], True]] * world_size


def test_without_the_second_barrier_data_is_overwritten() -> None:
    """The control of the tests above: they do see a buffer that is written too early."""
    barrier = SymmetricMemory.barrier

    def only_first(self: SymmetricMemory, channel: int = 0, timeout_ms: int = 0) -> None:
        if channel != 1:
            barrier(self, channel)

    with mock.patch.object(SymmetricMemory, "barrier", only_first):
        results = [interlace.run(ranks.gather, 3, 3, seed=seed) for seed in range(6)]
    assert any(wrong for result in results for wrong, _ in result)


def with_store_buffers(seed: int, *args: Any) -> list[Any]:
    def on_rank(place: SimPlace) -> Any:
        interlace.groups.groups.install(place)
        return ranks.sends(*args)

    return run_sim(on_rank, 2, scheduler=Scheduler(seed, store_buffers=True))


def test_signals_carry_data_on_weakly_ordered_memory() -> None:
    for seed in range(12):
        assert with_store_buffers(seed, True) == [[], []]


def test_unordered_signals_do_not_carry_data() -> None:
    """The control of the test above."""
    assert any(any(with_store_buffers(seed, False)) for seed in range(12))


def test_barrier_again_and_again() -> None:
    def on_rank() -> None:
        _, hdl = ranks.handle_of(1)
        own, *others = (
            hdl.get_buffer((hdl.rank + r) % 4, (1,), torch.float32) for r in range(hdl.world_size)
        )
        for number in range(60):
            own.fill_(number)
            hdl.barrier(number % 3)
            assert all(float(other) in (number, number + 1) for other in others)

    interlace.run(on_rank, 4, seed=3)


def test_group_of_some_ranks() -> None:
    for seed in range(4):
        first, nothing, second = interlace.run(ranks.in_a_part, 3, seed=seed)
        assert first == [1, 2, False, [2.0] * 4, "2-0", True]
        assert second == [0, 2, False, [0.0] * 4, "2-0", True]
        assert nothing == []


def check_views(found: list[dict[str, Any]], backend: str) -> None:
    """What ``ranks.views`` has to say on every rank; for shm too."""
    for rank, seen in enumerate(found):
        assert seen["same handle"] and seen["by name"] and seen["peer's view"] and seen["tables"]
        assert seen["offset"] == 0, "torch adds storage_offset() itself"
        assert seen["storage"] == (0, True, True)
        peer = (rank + 1) % len(found)
        assert seen["peer's tensor"] == [100 * peer, 100 * peer + 1]
        assert seen["known"] == [True, True, False]
        assert seen["sizes"] == (96, 9216) and seen["multicast"] == (backend == "SIM")
        assert seen["pad"] == (torch.uint32, 2304)
        assert seen["part of pad"] == (2, 3)
        assert (seen["device"], seen["name"]) == ("cpu", "0")
        assert seen["backend"] == (backend, None)


def test_views_and_what_the_handle_says() -> None:
    check_views(interlace.run(ranks.views, 2), "SIM")


def test_empty_is_not_collective() -> None:
    for seed in range(4):
        found = interlace.run(ranks.empty_is_alone, 3, seed=seed)
        assert found == [[[0, 1, 2], rank, 0] for rank in range(3)]


def test_words() -> None:
    for rank, values in enumerate(interlace.run(ranks.words, 3)):
        assert values == [0, *[2**32 - 1] * 3, 0, 0, 2**31 + (rank - 1) % 3, 0]


def test_pads_of_own_size() -> None:
    for size, pad, text in interlace.run(ranks.pads_of_own_size, 2):
        assert size == pad == 32
        assert "channel must be within 0..3 for 32 bytes of signal pad and 2 ranks, got 4" in text
    assert interlace.symmetric_memory.get_signal_pad_size() == 9216


def test_grids_and_programs_that_wait_for_later_ones() -> None:
    for seed in range(3):
        assert interlace.run(ranks.grids, 2, seed=seed) == [[[1, 2, 3, 4, 5, 6], [7] * 4]] * 2


# -- misuse and failure -----------------------------------------------------------------------------

MISUSES = {
    "shape": "ValueError: symmetric_memory.rendezvous: shape of tensor differs between ranks: "
    "(4,) on rank 0, (5,) on rank 1",
    "dtype": "dtype of tensor differs between ranks: torch.float32 on rank 0, torch.float16 on rank 1",
    "size": "bytes in the storage of tensor differs between ranks: 16 on rank 0, 20 on rank 1",
    "foreign": "tensor must be one that interlace.symmetric_memory.empty made, or a view of one; got "
    "a tensor of (4,) in other memory",
    "met": "whether tensor has been here before differs between ranks: True on rank 0, False on rank 1",
    "mixed": "tensor was used before with other tensors than ranks ",
    "no tensor": "TypeError: tensor must be a tensor, got int",
    "group": "ValueError: group: there is no group named 'nobody'",
    "device": "ValueError: device must be None or cpu in place ",
    "negative": "ValueError: size must not be negative, got (4, -1) on rank ",
    "fraction": "TypeError: size must be ints, got (4.0,) on rank ",
    "rank": "ValueError: rank must be within 0..1, got 2",
    "buffer": "ValueError: the buffer has 16 bytes, (4,) of torch.float32 from element 1 on ends at "
    "byte 20",
    "offset": "sizes and storage_offset of a buffer must not be negative, got (4,) and -1",
    "pad": "the signal pad has 9216 bytes, (9216,) of torch.uint8 from element 1 on ends at byte 9217",
    "dst_rank": "ValueError: dst_rank must be within 0..1, got -1",
    "src_rank": "ValueError: src_rank must be within 0..1, got 2",
    "channel": "channel must be within 0..1151 for 9216 bytes of signal pad and 2 ranks, got 1152",
    "timeout": "ValueError: timeout_ms must not be negative, got -1",
    "words": "tensor must be flat, contiguous and torch.uint32, got shape (4,), strides (1,), "
    "torch.float32",
    "count": "offset and count must be within the tensor's 4 elements, got 2 and 3",
    "val": "val must be within 0..4294967295, got 4294967296",
    "pad size": "size must be a positive multiple of 4, got 6",
    "works": "",
}


def check_misuses(found: list[dict[str, str]]) -> None:
    """What ``ranks.misuses`` has to say on two ranks; for shm too."""
    for seen in found:
        assert seen.keys() == MISUSES.keys()
        for name, text in MISUSES.items():
            assert text in seen[name], name
        assert seen["works"] == ""


def test_misuse_is_refused_on_every_rank_and_the_group_goes_on() -> None:
    check_misuses(interlace.run(ranks.misuses, 2))


def test_memory_of_another_rank_or_run_is_refused() -> None:
    tensors: dict[int, torch.Tensor] = {}

    def on_rank() -> str:
        rank = interlace.get_rank()
        first = not tensors.get(rank)
        if first:
            tensors[rank] = torch.ones(1)
            tensors[rank] = interlace.symmetric_memory.empty(4)
        interlace.barrier()
        other = tensors[1 - rank] if len(tensors) == 2 else tensors[rank]
        return ranks.refused(lambda: interlace.symmetric_memory.rendezvous(other))

    expected = (
        "tensor must be one that interlace.symmetric_memory.empty made on this rank, in this run"
    )
    assert all(expected in text for text in interlace.run(on_rank, 2))
    kept = dict(tensors)
    call = lambda: ranks.refused(lambda: interlace.symmetric_memory.rendezvous(kept[0]))  # noqa: E731
    assert all(expected in text for text in interlace.run(call, 2))


def test_signal_that_nobody_sends_is_a_deadlock() -> None:
    def on_rank() -> None:
        _, hdl = ranks.handle_of(1)
        if hdl.rank == 0:
            hdl.wait_signal(1, 2)

    with pytest.raises(interlace.DeadlockError, match=r"rank 0 wait_signal_kernel program 0 waits"):
        interlace.run(on_rank, 2)


def test_barrier_that_one_rank_does_not_join_is_a_deadlock() -> None:
    def on_rank() -> None:
        _, hdl = ranks.handle_of(1)
        if hdl.rank != 2:
            hdl.barrier()

    with pytest.raises(interlace.DeadlockError, match=r"rank 1 handle_barrier_kernel program 0"):
        interlace.run(on_rank, 3)


@mock.patch.object(SimPlace, "poll_limit", lambda self: 1)
@pytest.mark.parametrize("op", ["barrier", "put_signal", "wait_signal"])
def test_wait_that_gives_up_says_whom_it_waited_for(op: str) -> None:
    def on_rank() -> None:
        _, hdl = ranks.handle_of(1)
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


def test_tensors_of_a_handle_outlive_it() -> None:
    assert interlace.run(ranks.outlives, 3) == [[2.0, 0.0, 1.0]] * 3


def test_memory_is_given_back_within_the_run() -> None:
    known = len(symmetric_tensors._allocations)
    alive: list[weakref.ref[Any]] = []

    def on_rank() -> list[int]:
        tensor, hdl = ranks.handle_of(4)
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
    """As ops they wait within pybind11, and a rank that goes on there ends the process."""

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
    """Also while ranks are simulated, where functions stand for these."""
    op = torch.ops.symm_mem.one_shot_all_reduce
    # torch has the second as of 2.13
    asked = [name for name in ("overloads", "op_overloads") if hasattr(type(op), name)]
    assert asked and all(getattr(op, name)() for name in asked)

    def on_rank() -> list[list[Any]]:
        ops = torch.ops.symm_mem
        used = [getattr(ops, name) for name in ops if name == op.__name__]
        return [getattr(each, name)() for each in used for name in asked]

    assert interlace.run(on_rank, 2) == [[[] for _ in asked]] * 2


def test_observers_are_told_of_buffers_and_pads() -> None:
    class Allocations(Observer):
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []
            self.addresses: set[int] = set()
            self.meetings = 0

        def on_allocate(self, rank: int, memory: torch.Tensor, label: str) -> None:
            self.seen.append((rank, memory.nbytes))
            self.addresses.add(memory.data_ptr())

        def on_met(self, task: Any, meeting: Any) -> None:
            self.meetings += 1

    def on_rank(place: SimPlace) -> None:
        interlace.groups.groups.install(place)
        for _ in range(3):
            ranks.handle_of(4)

    observer = Allocations()
    run_sim(on_rank, 2, scheduler=Scheduler(0, observer=observer))
    assert sorted(observer.seen) == sorted([(rank, n) for rank in (0, 1) for n in (16, 9216)] * 3)
    assert len(observer.addresses) == 12, "an address was used twice in one run"
    assert observer.meetings == 6
