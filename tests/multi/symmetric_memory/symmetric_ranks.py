"""Ranks with symmetric memory of their own, in ``sim`` and in ``shm``, and their kernels.

A module of its own, because new processes import it.
"""

import gc

import torch
import triton
import triton.language as tl

import interlace

symm_mem = interlace.symmetric_memory


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
    """What put_signal does, as kernels written for torch do it: spin on a compare-and-swap."""
    table = pad_ptrs.to(tl.pointer_type(tl.uint64))
    pad = tl.load(table + peer).to(tl.pointer_type(tl.uint32))
    flag = pad + channel * world_size + rank
    down = tl.zeros((), tl.uint32)
    while tl.atomic_cas(flag, down, down + 1, sem="release", scope="sys") != 0:
        pass


@triton.jit
def wait_by_swap(pad_ptrs, rank, world_size, channel, peer):
    """What wait_signal does, the same way."""
    table = pad_ptrs.to(tl.pointer_type(tl.uint64))
    pad = tl.load(table + rank).to(tl.pointer_type(tl.uint32))
    flag = pad + channel * world_size + peer
    down = tl.zeros((), tl.uint32)
    while tl.atomic_cas(flag, down + 1, down, sem="acquire", scope="sys") != 1:
        pass


@triton.jit
def send_kernel(buffer_ptrs, pad_ptrs, rank, world_size, peer, value, ORDERED: tl.constexpr):
    """Data and then the flag, from one program."""
    table = buffer_ptrs.to(tl.pointer_type(tl.uint64))
    peer_ptr = tl.load(table + peer).to(tl.pointer_type(tl.float32))
    tl.store(peer_ptr + tl.arange(0, 16), tl.zeros((16,), tl.float32) + value)
    pads = pad_ptrs.to(tl.pointer_type(tl.uint64))
    flag = tl.load(pads + peer).to(tl.pointer_type(tl.uint32)) + rank
    down = tl.zeros((), tl.uint32)
    if ORDERED:
        tl.debug_barrier()
        tl.atomic_cas(flag, down, down + 1, sem="release", scope="sys")
    else:
        tl.atomic_cas(flag, down, down + 1, sem="relaxed", scope="sys")
    # The end of a program writes everything back; it is to come later than the receiver's look.
    for _ in range(30):
        tl.atomic_add(tl.load(pads + rank).to(tl.pointer_type(tl.uint32)) + 512, 1, sem="relaxed")


@triton.jit
def chain_kernel(word_ptr):
    """Program i waits for program i + 1: one after another, as stock Triton runs them, never ends."""
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


# -- right uses -------------------------------------------------------------------------------------


def handle_of(*size: int, dtype=torch.float32, group=None):
    tensor = symm_mem.empty(*size, dtype=dtype)
    return tensor, symm_mem.rendezvous(tensor, group)


def flags_are_down(hdl) -> bool:
    """Whether all pads are as they were; every rank must have finished."""
    interlace.barrier()
    return not any(
        hdl.get_signal_pad(r).view(torch.int32).any().item() for r in range(hdl.world_size)
    )


def gather(rounds: int) -> list:
    """A kernel pushes to all peers, the handle's barrier makes it visible, again and again."""
    world_size = interlace.get_world_size()
    tensor, hdl = handle_of(world_size, 4, 8)
    wrong = []
    for number in range(rounds):
        value = 1000.0 * number + 100 * hdl.rank
        push_kernel[(4,)](hdl.buffer_ptrs_dev, hdl.rank, world_size, value, BLOCK=8, num_warps=1)
        hdl.barrier()
        ranks = torch.arange(world_size)[:, None]
        expected = 1000.0 * number + 100 * ranks + torch.arange(32)
        if not torch.equal(tensor.view(world_size, 32), expected):
            wrong.append(number)
        hdl.barrier(channel=1)  # the buffer may be written again
    return [wrong, flags_are_down(hdl)]


def ring(rounds: int) -> list:
    """Torch operators write the next rank's buffer; signals of the handle and of kernels in turn."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    tensor, hdl = handle_of(16, dtype=torch.int64)
    target = hdl.get_buffer(after, (16,), torch.int64)
    pads = hdl.signal_pad_ptrs_dev, rank, world_size
    wrong = []
    for number in range(rounds):
        by_kernel = (number + rank) % 2
        target.fill_(100 * number + rank)
        if by_kernel:
            put_by_swap[(1,)](*pads, 2, after)
            wait_by_swap[(1,)](*pads, 2, before)
        else:
            hdl.put_signal(after, 2)
            hdl.wait_signal(before, 2)
        if not bool((tensor == 100 * number + before).all()):
            wrong.append(number)
        hdl.put_signal(before, 3)
        hdl.wait_signal(after, 3)
    return [wrong, flags_are_down(hdl)]


def sends(ordered: bool) -> list:
    """A kernel sends data and signal to the next rank, whose host waits for it."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    tensor, hdl = handle_of(16)
    wrong = []
    for number in range(1, 4):
        tables = hdl.buffer_ptrs_dev, hdl.signal_pad_ptrs_dev
        send_kernel[(1,)](*tables, rank, world_size, after, 1.0 * number, ORDERED=ordered)
        hdl.wait_signal(before)
        if not bool((tensor == number).all()):
            wrong.append(number)
        hdl.barrier(1)
    return wrong


def in_a_part() -> list:
    """Ranks 2 and 0, in that order, over memory that all ranks share too."""
    rank = interlace.get_rank()
    group = interlace.new_group([2, 0])
    tensor, whole = handle_of(4)
    tensor.fill_(rank)
    result = []
    if rank != 1:
        hdl = symm_mem.rendezvous(tensor, group)
        hdl.barrier(4)
        other = hdl.get_remote_tensor(1 - hdl.rank, (4,), torch.float32)
        result = [hdl.rank, hdl.world_size, hdl is whole, other.tolist(), hdl.group_name]
        same = hdl.buffer_ptrs[hdl.rank] == whole.buffer_ptrs[rank] == tensor.data_ptr()
        result.append(same)
        hdl.barrier(4)
    whole.barrier()
    return result


def views() -> dict:
    """What a handle says of a tensor and of views of it."""
    rank = interlace.get_rank()
    tensor = symm_mem.empty((4, 6), dtype=torch.float32)
    tail = tensor[2:]
    hdl = symm_mem.rendezvous(tail)
    tensor.copy_(torch.arange(24.0).view(4, 6) + 100 * rank)
    hdl.barrier()
    peer = (rank + 1) % hdl.world_size
    theirs = hdl.get_buffer(peer, tail.shape, tail.dtype, tail.storage_offset())
    expected = torch.arange(12.0, 24.0).view(2, 6) + 100 * peer
    return {
        "same handle": symm_mem.rendezvous(tensor) is hdl and symm_mem.rendezvous(tail) is hdl,
        "offset": hdl.offset,
        "storage": (tensor.storage_offset(), tensor._base is None, tensor.is_contiguous()),
        "peer's view": torch.equal(theirs, expected),
        "peer's tensor": hdl.get_remote_tensor(peer, (2,), torch.float32).tolist(),
        "known": [symm_mem.is_symm_mem_tensor(t) for t in (tensor, tail, torch.ones(3))],
        "sizes": (hdl.buffer_size, hdl.signal_pad_size),
        "multicast": hdl.multicast_ptr != 0,
        "pad": (hdl.get_signal_pad(peer).dtype, hdl.get_signal_pad(peer).numel()),
        "part of pad": tuple(hdl.get_signal_pad(peer, (2, 3), torch.int64, 5).shape),
        "tables": read_tables(hdl) == (hdl.buffer_ptrs, hdl.signal_pad_ptrs),
        "device": str(hdl.device),
        "name": hdl.group_name,
        "by name": symm_mem.rendezvous(tensor, "0") is hdl,
        "backend": (symm_mem.get_backend("cpu"), symm_mem.get_backend("cuda:0")),
    }


def read_tables(hdl) -> tuple:
    """The tables for kernels, from their addresses."""
    import ctypes

    kind = ctypes.c_int64 * hdl.world_size
    tables = hdl.buffer_ptrs_dev, hdl.signal_pad_ptrs_dev
    return tuple(list(kind.from_address(address)) for address in tables)


def empty_is_alone() -> list:
    """Ranks make tensors in different numbers and orders, before and after each other's."""
    rank = interlace.get_rank()
    spare = [symm_mem.empty(rank + 1, dtype=torch.int8) for _ in range(2 * rank)]
    first = symm_mem.empty(8, dtype=torch.int32)
    interlace.all_reduce(torch.ones(3))
    second = symm_mem.empty(0)
    assert first.shape == (8,) and second.shape == (0,)
    nothing, hdl = symm_mem.rendezvous(second), symm_mem.rendezvous(first)
    first.fill_(rank)
    hdl.barrier()
    values = [int(hdl.get_buffer(r, (8,), torch.int32)[7]) for r in range(hdl.world_size)]
    nothing.barrier()
    return [values, len(spare) // 2, nothing.buffer_size]


def words() -> list:
    """memset32 and stream_write_value32, on the own memory and on a peer's."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    tensor, hdl = handle_of(8, dtype=torch.uint32)
    tensor.zero_()
    assert hdl.memset32(tensor, 1, 2**32 - 1, 3) is tensor
    hdl.barrier()
    peer = (rank + 1) % world_size
    theirs = hdl.get_buffer(peer, (8,), torch.uint32)
    assert hdl.stream_write_value32(theirs, 6, 2**31 + rank) is theirs
    hdl.barrier()
    return tensor.tolist()


def pads_of_own_size() -> list:
    symm_mem.set_signal_pad_size(16 * interlace.get_world_size())
    _, hdl = handle_of(1)
    hdl.barrier(3)
    text = refused(lambda: hdl.barrier(4))
    return [symm_mem.get_signal_pad_size(), hdl.signal_pad_size, text]


def grids() -> list:
    """Grids as Triton has them; programs that wait for later ones; a kernel behind heuristics."""
    tensor, _ = handle_of(6, dtype=torch.int32)
    chain_kernel[lambda arguments: (tensor.numel(),)](tensor)
    out = torch.zeros(4, dtype=torch.int32)
    fill_kernel[(4, 1)](out)
    return [tensor.tolist(), out.tolist()]


# -- misuse -----------------------------------------------------------------------------------------


def refused(call) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def misuses() -> dict:
    """What is refused, by what it is; each on every rank, and the group goes on."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    tensor, hdl = handle_of(4)
    other, _ = handle_of(4)
    flat = torch.zeros(4, dtype=torch.uint32)
    odd = rank == 1
    return {
        "shape": refused(lambda: handle_of(4 + odd)),
        "dtype": refused(lambda: handle_of(4, dtype=torch.float16 if odd else torch.float32)),
        "size": refused(lambda: symm_mem.rendezvous(symm_mem.empty(4 + odd)[:2])),
        "foreign": refused(lambda: symm_mem.rendezvous(torch.ones(4) if odd else tensor)),
        "met": refused(lambda: symm_mem.rendezvous(symm_mem.empty(4) if odd else tensor)),
        "mixed": refused(lambda: symm_mem.rendezvous(other if odd else tensor)),
        "no tensor": refused(lambda: symm_mem.rendezvous(4)),
        "group": refused(lambda: symm_mem.rendezvous(tensor, "nobody")),
        "device": refused(lambda: symm_mem.empty(4, device="cuda:0")),
        "negative": refused(lambda: symm_mem.empty(4, -1)),
        "fraction": refused(lambda: symm_mem.empty(4.0)),
        "rank": refused(lambda: hdl.get_buffer(world_size, (4,), torch.float32)),
        "buffer": refused(lambda: hdl.get_buffer(0, (4,), torch.float32, 1)),
        "offset": refused(lambda: hdl.get_buffer(0, (4,), torch.float32, -1)),
        "pad": refused(lambda: hdl.get_signal_pad(0, (9216,), torch.uint8, 1)),
        "dst_rank": refused(lambda: hdl.put_signal(-1)),
        "src_rank": refused(lambda: hdl.wait_signal(world_size)),
        "channel": refused(lambda: hdl.put_signal(0, 9216 // 4 // world_size)),
        "timeout": refused(lambda: hdl.barrier(0, -1)),
        "words": refused(lambda: hdl.memset32(torch.zeros(4), 0, 1)),
        "count": refused(lambda: hdl.memset32(flat, 2, 1, 3)),
        "val": refused(lambda: hdl.stream_write_value32(flat, 0, 1 << 32)),
        "pad size": refused(lambda: symm_mem.set_signal_pad_size(6)),
        "works": "" if hdl.barrier() is None else "no",
    }


# -- how long memory lives --------------------------------------------------------------------------


def outlives() -> list:
    """A tensor over a peer's memory works when tensor and handle are gone, on all ranks."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    tensor, hdl = handle_of(4)
    views = [hdl.get_buffer(r, (4,), torch.float32) for r in range(world_size)]
    del tensor, hdl
    gc.collect()
    views[(rank + 1) % world_size].fill_(rank)
    interlace.barrier()
    return [float(view[3]) for view in views]
