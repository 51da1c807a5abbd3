"""Symmetric memory for user code in ``sim`` and ``shm``: torch's names, kernels on the pointers, misuse."""

import ctypes
import gc
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import interlace
from interlace.runtime.core.errors import InterlaceError, PeerDiedError
from interlace.runtime.places.shm import place as shm_place
from ranks import ranks
from support import resources, shared_names
from tiers import thorough

symm_mem = interlace.symmetric_memory
both = pytest.mark.parametrize("place", ["sim", "shm"])
seeds = pytest.mark.parametrize(
    ("place", "seed"), [("shm", 0), *[("sim", seed) for seed in range(4)]]
)


def neighbours() -> tuple[int, int, int]:
    """Return this rank, the rank before it and the rank after it."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    return rank, (rank - 1) % world_size, (rank + 1) % world_size


# -- kernels that are not interlace's ---------------------------------------------------------------


@triton.jit
def push_kernel(buffer_ptrs, rank, world_size, value, BLOCK: tl.constexpr):
    """Every program writes its block of every peer's row of this rank."""
    table = buffer_ptrs.to(tl.pointer_type(tl.uint64))
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = rank * tl.num_programs(0) * BLOCK
    for peer in range(world_size):
        peer_ptr = tl.load(table + peer).to(tl.pointer_type(tl.float32))
        tl.store(peer_ptr + row + offsets, value + offsets.to(tl.float32))


@triton.jit
def put_by_swap(pad_ptrs, rank, world_size, channel, peer):
    """Signal as kernels for torch do: spin on a compare-and-swap."""
    table = pad_ptrs.to(tl.pointer_type(tl.uint64))
    pad = tl.load(table + peer).to(tl.pointer_type(tl.uint32))
    flag = pad + channel * world_size + rank
    down = tl.zeros((), tl.uint32)
    while tl.atomic_cas(flag, down, down + 1, sem="release", scope="sys") != 0:
        pass


@triton.jit
def wait_by_swap(pad_ptrs, rank, world_size, channel, peer):
    """Wait for a signal by a compare-and-swap."""
    table = pad_ptrs.to(tl.pointer_type(tl.uint64))
    pad = tl.load(table + rank).to(tl.pointer_type(tl.uint32))
    flag = pad + channel * world_size + peer
    down = tl.zeros((), tl.uint32)
    while tl.atomic_cas(flag, down + 1, down, sem="acquire", scope="sys") != 1:
        pass


@triton.jit
def chain_kernel(word_ptr):
    """Program i waits for program i + 1: stock Triton runs programs one after another, and would hang."""
    mine = tl.program_id(0)
    last = tl.num_programs(0) - 1
    if mine != last:
        while tl.atomic_add(word_ptr + mine + 1, 0, sem="acquire", scope="sys") == 0:
            pass
    tl.atomic_xchg(word_ptr + mine, 1 + mine, sem="release", scope="sys")


@triton.heuristics({"VALUE": lambda arguments: 7})
@triton.jit
def fill_kernel(out_ptr, VALUE: tl.constexpr):
    tl.store(out_ptr + tl.program_id(0), VALUE)


# -- in both places --------------------------------------------------------------------------------


def handle_of(*size: int, dtype: torch.dtype = torch.float32, group: Any = None) -> tuple[Any, Any]:
    tensor = symm_mem.empty(*size, dtype=dtype)
    return tensor, symm_mem.rendezvous(tensor, group)


def check_flags_are_down(hdl: Any) -> None:
    """All pads must be unchanged after every rank has finished."""
    interlace.barrier()
    for rank in range(hdl.world_size):
        assert not hdl.get_signal_pad(rank).view(torch.int32).any()


def gather(rounds: int) -> None:
    """A kernel pushes to all peers, and the handle's barrier makes the data visible, again and again."""
    world_size = interlace.get_world_size()
    tensor, hdl = handle_of(world_size, 4, 8)
    for number in range(rounds):
        value = 1000.0 * number + 100 * hdl.rank
        push_kernel[(4,)](hdl.buffer_ptrs_dev, hdl.rank, world_size, value, BLOCK=8, num_warps=1)
        hdl.barrier()
        sources = torch.arange(world_size)[:, None]
        expected = 1000.0 * number + 100 * sources + torch.arange(32)
        assert torch.equal(tensor.view(world_size, 32), expected)
        hdl.barrier(channel=1)  # the buffer may be written again
    check_flags_are_down(hdl)


@pytest.mark.parametrize("world_size", [3, 2])
@ranks()
def test_kernel_pushes_through_the_table(world_size: int) -> None:
    gather(12)


@pytest.mark.parametrize("seed", range(6))
@ranks(3, place="sim")
def test_kernel_pushes_in_any_schedule(seed: int) -> None:
    gather(3)


@pytest.mark.parametrize("world_size", [3, 2, 1])
@seeds
@ranks()
def test_signals_of_host_and_kernels_mix(place: str, seed: int, world_size: int) -> None:
    rank, before, after = neighbours()
    tensor, hdl = handle_of(16, dtype=torch.int64)
    target = hdl.get_buffer(after, (16,), torch.int64)
    pads = hdl.signal_pad_ptrs_dev, rank, world_size
    for number in range(12 if place == "shm" else 4):
        target.fill_(100 * number + rank)
        if (number + rank) % 2:
            put_by_swap[(1,)](*pads, 2, after)
            wait_by_swap[(1,)](*pads, 2, before)
        else:
            hdl.put_signal(after, 2)
            hdl.wait_signal(before, 2)
        assert bool((tensor == 100 * number + before).all())
        hdl.put_signal(before, 3)
        hdl.wait_signal(after, 3)
    check_flags_are_down(hdl)


@seeds
@ranks(3)
def test_group_of_some_ranks(place: str, seed: int) -> None:
    rank = interlace.get_rank()
    group = interlace.new_group([2, 0])
    tensor, whole = handle_of(4)
    tensor.fill_(rank)
    if rank != 1:
        hdl = symm_mem.rendezvous(tensor, group)
        hdl.barrier(4)
        other = hdl.get_remote_tensor(1 - hdl.rank, (4,), torch.float32)
        assert (hdl.rank, hdl.world_size, hdl.group_name) == (int(rank == 0), 2, "2-0")
        assert hdl is not whole and other.tolist() == [2.0 - rank] * 4
        assert hdl.buffer_ptrs[hdl.rank] == whole.buffer_ptrs[rank] == tensor.data_ptr()
        hdl.barrier(4)
    whole.barrier()


@both
@ranks(2)
def test_views_and_what_the_handle_says(place: str) -> None:
    rank, _, peer = neighbours()
    tensor = symm_mem.empty((4, 6), dtype=torch.float32)
    tail = tensor[2:]
    hdl = symm_mem.rendezvous(tail)
    tensor.copy_(torch.arange(24.0).view(4, 6) + 100 * rank)
    hdl.barrier()
    theirs = hdl.get_buffer(peer, tail.shape, tail.dtype, tail.storage_offset())
    assert torch.equal(theirs, torch.arange(12.0, 24.0).view(2, 6) + 100 * peer)
    assert hdl.get_remote_tensor(peer, (2,), torch.float32).tolist() == [100 * peer, 100 * peer + 1]
    for each in (symm_mem.rendezvous(tensor), symm_mem.rendezvous(tail)):
        assert each is hdl
    assert symm_mem.rendezvous(tensor, "0") is hdl and hdl.group_name == "0"
    assert hdl.offset == 0, "torch adds storage_offset() itself"
    assert tensor.storage_offset() == 0 and tensor._base is None and tensor.is_contiguous()
    known = [symm_mem.is_symm_mem_tensor(each) for each in (tensor, tail, torch.ones(3))]
    assert known == [True, True, False]
    assert (hdl.buffer_size, hdl.signal_pad_size) == (96, 9216)
    assert (hdl.multicast_ptr != 0) == (place == "sim") and str(hdl.device) == "cpu"
    pad = hdl.get_signal_pad(peer)
    assert pad.dtype == torch.uint32 and pad.numel() == 2304
    assert hdl.get_signal_pad(peer, (2, 3), torch.int64, 5).shape == (2, 3)
    table = ctypes.c_int64 * hdl.world_size
    assert list(table.from_address(hdl.buffer_ptrs_dev)) == hdl.buffer_ptrs
    assert list(table.from_address(hdl.signal_pad_ptrs_dev)) == hdl.signal_pad_ptrs
    backends = symm_mem.get_backend("cpu"), symm_mem.get_backend("cuda:0")
    assert backends == (place.upper(), None)


@seeds
@ranks(3)
def test_empty_is_not_collective(place: str, seed: int) -> None:
    rank = interlace.get_rank()
    spare = [symm_mem.empty(rank + 1, dtype=torch.int8) for _ in range(2 * rank)]
    first = symm_mem.empty(8, dtype=torch.int32)
    interlace.all_reduce(torch.ones(3))
    second = symm_mem.empty(0)
    assert first.shape == (8,) and second.shape == (0,) and len(spare) == 2 * rank
    nothing, hdl = symm_mem.rendezvous(second), symm_mem.rendezvous(first)
    first.fill_(rank)
    hdl.barrier()
    values = [int(hdl.get_buffer(r, (8,), torch.int32)[7]) for r in range(hdl.world_size)]
    nothing.barrier()
    assert values == [0, 1, 2] and nothing.buffer_size == 0


@both
@ranks(3)
def test_words(place: str) -> None:
    rank, before, after = neighbours()
    tensor, hdl = handle_of(8, dtype=torch.uint32)
    tensor.zero_()
    assert hdl.memset32(tensor, 1, 2**32 - 1, 3) is tensor
    hdl.barrier()
    theirs = hdl.get_buffer(after, (8,), torch.uint32)
    assert hdl.stream_write_value32(theirs, 6, 2**31 + rank) is theirs
    hdl.barrier()
    assert tensor.tolist() == [0, *[2**32 - 1] * 3, 0, 0, 2**31 + before, 0]


@seeds
@ranks(2)
def test_grids_and_programs_that_wait_for_later_ones(place: str, seed: int) -> None:
    tensor, _ = handle_of(6, dtype=torch.int32)
    chain_kernel[lambda arguments: (tensor.numel(),)](tensor)
    out = torch.zeros(4, dtype=torch.int32)
    fill_kernel[(4, 1)](out)
    assert tensor.tolist() == [1, 2, 3, 4, 5, 6] and out.tolist() == [7] * 4


@both
@ranks(3)
def test_tensors_of_a_handle_outlive_it(place: str) -> None:
    rank, _, after = neighbours()
    tensor, hdl = handle_of(4)
    views = [hdl.get_buffer(r, (4,), torch.float32) for r in range(3)]
    del tensor, hdl
    gc.collect()
    views[after].fill_(rank)
    interlace.barrier()
    assert [float(view[3]) for view in views] == [2.0, 0.0, 1.0]


@both
@ranks(2)
def test_misuse_is_refused_on_every_rank_and_the_group_goes_on(place: str) -> None:
    number: Any = 4.0  # no tensor, and no int
    odd = interlace.get_rank() == 1
    tensor, hdl = handle_of(4)
    other, _ = handle_of(4)
    flat = torch.zeros(4, dtype=torch.uint32)
    wrong: list[tuple[type[Exception], Callable[[], Any], str]] = [
        (ValueError, lambda: handle_of(4 + odd), "(4,) on rank 0, (5,) on rank 1"),
        (ValueError, lambda: handle_of(4, dtype=torch.float16 if odd else torch.float32),
         "torch.float32 on rank 0, torch.float16 on rank 1"),
        (ValueError, lambda: symm_mem.rendezvous(symm_mem.empty(4 + odd)[:2]),
         "bytes in the storage of tensor differs between ranks: 16 on rank 0, 20 on rank 1"),
        (ValueError, lambda: symm_mem.rendezvous(torch.ones(4) if odd else tensor),
         "that interlace.symmetric_memory.empty made, or a view of one; got a tensor of (4,)"),
        (ValueError, lambda: symm_mem.rendezvous(symm_mem.empty(4) if odd else tensor),
         "tensor has been here before differs between ranks: True on rank 0, False on rank 1"),
        (ValueError, lambda: symm_mem.rendezvous(other if odd else tensor),
         "tensor was used before with other tensors than ranks "),
        (TypeError, lambda: symm_mem.rendezvous(number), "tensor must be a tensor, got float"),
        (ValueError, lambda: symm_mem.rendezvous(tensor, "nobody"), "no group named 'nobody'"),
        (ValueError, lambda: symm_mem.empty(4, device="cuda:0"), "device must be None or cpu in"),
        (ValueError, lambda: symm_mem.empty(4, -1), "size must not be negative, got (4, -1) on"),
        (TypeError, lambda: symm_mem.empty(number), "size must be ints, got (4.0,) on rank "),
        (ValueError, lambda: hdl.get_buffer(2, (4,), torch.float32), "within 0..1, got 2"),
        (ValueError, lambda: hdl.get_buffer(0, (4,), torch.float32, 1),
         "the buffer has 16 bytes, (4,) of torch.float32 from element 1 on ends at byte 20"),
        (ValueError, lambda: hdl.get_buffer(0, (4,), torch.float32, -1),
         "sizes and storage_offset of a buffer must not be negative, got (4,) and -1"),
        (ValueError, lambda: hdl.get_signal_pad(0, (9216,), torch.uint8, 1), "ends at byte 9217"),
        (ValueError, lambda: hdl.put_signal(-1), "dst_rank must be within 0..1, got -1"),
        (ValueError, lambda: hdl.wait_signal(2), "src_rank must be within 0..1, got 2"),
        (ValueError, lambda: hdl.put_signal(0, 9216 // 4 // 2), "channel must be within 0..1151"),
        (ValueError, lambda: hdl.barrier(0, -1), "timeout_ms must not be negative, got -1"),
        (ValueError, lambda: hdl.memset32(torch.zeros(4), 0, 1),
         "must be flat, contiguous and torch.uint32, got shape (4,), strides (1,), torch.float32"),
        (ValueError, lambda: hdl.memset32(flat, 2, 1, 3), "the tensor's 4 elements, got 2 and 3"),
        (ValueError, lambda: hdl.stream_write_value32(flat, 0, 1 << 32), "within 0..4294967295"),
        (ValueError, lambda: symm_mem.set_signal_pad_size(6), "a positive multiple of 4, got 6"),
    ]  # fmt: skip
    for kind, call, text in wrong:
        with pytest.raises(kind, match=re.escape(text)):
            call()
    hdl.barrier()


# -- on processes ----------------------------------------------------------------------------------


@ranks(2)
def test_launches_while_async_ops_run() -> None:
    """The worker may still run kernels of interlace at that time."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    tensor, hdl = handle_of(world_size, 8)
    for number in range(4):
        x = torch.full((2, 8), float(rank + number))
        work = interlace.all_gather_matmul(x, torch.eye(8), algorithm="fused", async_op=True)
        launch = push_kernel[(1,)]
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
    tensor, hdl = handle_of(4)
    interlace.barrier()
    assert len(shm_place._open_places()) == 1
    interlace.groups.groups.default_group().close()
    tensor.fill_(3)
    with pytest.raises(InterlaceError, match="closed"):
        hdl.barrier()
    out = torch.zeros(4, dtype=torch.int32)
    fill_kernel[(4,)](out)
    assert out.tolist() == [7] * 4 and not shm_place._open_places()


@thorough
@ranks(2)
def test_memory_and_descriptors_are_given_back() -> None:
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


@ranks(3, gone=[1])
def test_killed_peer_is_named() -> None:
    _, hdl = handle_of(1, dtype=torch.float64)
    if hdl.rank == 1:
        time.sleep(0.1)  # not for order, but so that the others sleep in their wait already
        os.kill(os.getpid(), signal.SIGKILL)
    said = "wait_by_swap program 0" if hdl.rank else "in wait_signal on channel 1"
    with pytest.raises(PeerDiedError, match=said) as caught:
        if hdl.rank == 0:
            hdl.wait_signal(1, 1)
        else:
            wait_by_swap[(1,)](hdl.signal_pad_ptrs_dev, hdl.rank, hdl.world_size, 1, 1)
    assert caught.value.rank == 1
