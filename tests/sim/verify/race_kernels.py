"""Kernels for test_races.py: two programs on each of three ranks, some of them with a race.

Rank r's buffer has int32 flags from byte 0 on and data from byte 64 on.
"""

import triton
import triton.language as tl

from interlace.kernels.signal import put_flag


@triton.jit
def flag(peers_ptr, rank, index):
    return tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int32)) + index


@triton.jit
def data(peers_ptr, rank):
    return (tl.load(peers_ptr + rank) + 64).to(tl.pointer_type(tl.float32)) + tl.arange(0, 16)


@triton.jit
def all_write_one_place(peers_ptr, rank):
    tl.store(data(peers_ptr, 0), tl.full((16,), 1.0, tl.float32))


@triton.jit
def fence(SCOPE: tl.constexpr):
    tl.inline_asm_elementwise(
        "fence.acq_rel." + SCOPE + "; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_volatile(pointers, value):
    tl.inline_asm_elementwise(
        "st.volatile.global.b32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), value],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def passed(peers_ptr, rank, DATA: tl.constexpr, SIGNAL: tl.constexpr, WAIT: tl.constexpr,
           BEFORE: tl.constexpr = "", AFTER: tl.constexpr = ""):  # fmt: skip
    """Rank 0 stores at rank 1 and raises a flag there; rank 1 waits, and stores what it reads at rank 2.

    ``DATA``: what is stored, and whether a barrier comes behind it. ``SIGNAL`` and ``WAIT``: how, or the
    semantics of an atomic. ``BEFORE`` and ``AFTER``: the scope of a fence before the one, after the other.
    """
    if tl.program_id(0) == 0:
        if rank == 0:
            if DATA == "block":
                tl.store(data(peers_ptr, 1), tl.full((16,), 1.0, tl.float32))
                tl.debug_barrier()
            elif DATA == "volatile":
                store_volatile(data(peers_ptr, 1), tl.full((16,), 1.0, tl.float32))
                tl.debug_barrier()
            elif DATA == "atomics":  # of many threads
                tl.atomic_add(data(peers_ptr, 1), 1.0, sem="relaxed", scope="sys")
            elif DATA == "scalar":  # of one thread
                tl.store(flag(peers_ptr, 1, 8), 5)
            if BEFORE != "":
                fence(BEFORE)
            if SIGNAL == "plain":
                tl.store(flag(peers_ptr, 1, 0), 1)
            elif SIGNAL == "volatile":
                store_volatile(flag(peers_ptr, 1, 0), 1)
            elif SIGNAL == "wide":
                wide = tl.load(peers_ptr + 1).to(tl.pointer_type(tl.int64))
                tl.atomic_xchg(wide, 1, sem="release", scope="sys")
            elif SIGNAL == "several":  # by as many threads as there are flags
                flags = tl.load(peers_ptr + 1 + tl.arange(0, 2) * 0).to(tl.pointer_type(tl.int32))
                tl.atomic_xchg(flags + tl.arange(0, 2), 1, sem="release", scope="sys")
            else:
                tl.atomic_xchg(flag(peers_ptr, 1, 0), 1, sem=SIGNAL, scope="sys")
        if rank == 1:
            awaited = flag(peers_ptr, 1, 1 if SIGNAL == "several" else 0)
            if WAIT == "plain":
                while tl.load(awaited) == 0:
                    pass
            elif WAIT == "volatile":
                while tl.load(awaited, volatile=True) == 0:
                    pass
            else:
                while tl.atomic_add(awaited, 0, sem=WAIT, scope="sys") == 0:
                    pass
            if AFTER != "":
                fence(AFTER)
            if DATA == "scalar":
                tl.store(flag(peers_ptr, 2, 9), tl.load(flag(peers_ptr, 1, 8)))
            elif DATA != "nothing":
                found = tl.load(data(peers_ptr, 1), volatile=DATA == "volatile")
                tl.store(data(peers_ptr, 2), found)


@triton.jit
def fenced_within_a_gpu(peers_ptr, rank, AFTER: tl.constexpr):
    """Program 0 tells program 1 of the same rank."""
    if tl.program_id(0) == 0:
        tl.store(data(peers_ptr, rank), tl.full((16,), 1.0, tl.float32))
        tl.debug_barrier()
        fence("gpu")
        tl.atomic_xchg(flag(peers_ptr, rank, 0), 1, sem="relaxed", scope="gpu")
    else:
        while tl.atomic_add(flag(peers_ptr, rank, 0), 0, sem="relaxed", scope="gpu") == 0:
            pass
        fence(AFTER)
        tl.store(data(peers_ptr, rank), tl.load(data(peers_ptr, rank)) + 1.0)


@triton.jit
def volatile_words_with_flags(peers_ptr, rank):
    """Each element and its flag are one word, whose parts no schedule has apart."""
    if tl.program_id(0) == 0:
        words = tl.load(peers_ptr + 1) + 64 + 8 * tl.arange(0, 16)
        if rank == 0:
            tl.inline_asm_elementwise(
                "st.volatile.global.v2.b32 [$1], {$2, $2}; mov.u32 $0, 0;",
                "=r,l,r",
                [words, tl.full((16,), 1.0, tl.float32)],
                tl.int32,
                is_pure=False,
                pack=1,
            )
        if rank == 1:
            absent = 1
            while absent != 0:
                value, raised = tl.inline_asm_elementwise(
                    "ld.volatile.global.v2.b32 {$0, $1}, [$2];",
                    "=r,=r,l",
                    [words],
                    (tl.float32, tl.int32),
                    is_pure=False,
                    pack=1,
                )
                absent = tl.sum((raised == 0).to(tl.int32))
            tl.store(data(peers_ptr, 2), value)


@triton.jit
def all_look_at_one_flag(peers_ptr, rank):
    """Nobody writes it: scopes that do not include each other harm nobody."""
    tl.atomic_add(flag(peers_ptr, 0, 0), 0, sem="acquire", scope="gpu")


@triton.jit
def passed_on_by_a_third(peers_ptr, rank):
    """Rank 0 tells rank 1, and rank 1 tells rank 2, who reads what rank 0 wrote."""
    if tl.program_id(0) == 0:
        if rank == 0:
            tl.store(data(peers_ptr, 2), tl.full((16,), 1.0, tl.float32))
            tl.debug_barrier()
            tl.atomic_xchg(flag(peers_ptr, 1, 0), 1, sem="release", scope="sys")
        if rank == 1:
            while tl.atomic_add(flag(peers_ptr, 1, 0), 0, sem="acquire", scope="sys") == 0:
                pass
            tl.debug_barrier()
            tl.atomic_xchg(flag(peers_ptr, 2, 0), 1, sem="release", scope="sys")
        if rank == 2:
            while tl.atomic_add(flag(peers_ptr, 2, 0), 0, sem="acquire", scope="sys") == 0:
                pass
            tl.store(data(peers_ptr, 0), tl.load(data(peers_ptr, 2)))


@triton.jit
def own_bytes_of_one_word(peers_ptr, rank):
    """Neighbouring bytes are different memory."""
    byte = tl.load(peers_ptr).to(tl.pointer_type(tl.int8)) + 2 * rank + tl.program_id(0)
    tl.store(byte, 1)


@triton.jit
def same_bytes_of_two_types(peers_ptr, rank):
    """A byte of somebody's int64 is that int64's memory."""
    if rank == 0:
        if tl.program_id(0) == 0:
            tl.store(tl.load(peers_ptr).to(tl.pointer_type(tl.int64)) + 4, 1)
    if rank == 1:
        if tl.program_id(0) == 0:
            tl.store(tl.load(peers_ptr).to(tl.pointer_type(tl.int8)) + 35, 1)


@triton.jit
def poll_fifty_times(flag_ptr, counted_ptr):
    """A wait that gives up by itself."""
    count = 0
    while (tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0) & (count < 50):
        count += 1
    tl.store(counted_ptr, count)


@triton.jit
def poll_in_turn(flags_ptr, count):
    found = 0
    while found == 0:
        for index in range(count):
            found += tl.atomic_add(flags_ptr + index, 0, sem="acquire", scope="sys")


@triton.jit
def wait_plainly(peers_ptr, rank):
    """A spin on a plain load: nothing tells the scheduler that it is one."""
    if tl.program_id(0) == 0:
        if rank == 0:
            while tl.load(flag(peers_ptr, 0, 0)) == 0:
                pass
        else:
            tl.store(flag(peers_ptr, 0, 0), 1)


@triton.jit
def wait_for_one_of_many(peers_ptr, rank, COUNT: tl.constexpr):
    """Polls ever other places; only the last of them is ever set."""
    if tl.program_id(0) == 0:
        if rank == 0:
            found = 0
            index = 0
            while found == 0:
                where = flag(peers_ptr, 0, index % COUNT)
                found = tl.atomic_add(where, 0, sem="acquire", scope="sys")
                index += 1
        else:
            tl.atomic_xchg(flag(peers_ptr, 0, COUNT - 1), 1, sem="release", scope="sys")


@triton.jit
def scalar_load_then_credit(peers_ptr, rank):
    """A scalar is loaded by every thread; the credit comes from one, without a barrier."""
    if tl.program_id(0) == 0:
        if rank == 1:
            seen = tl.load(flag(peers_ptr, 1, 8))
            tl.atomic_xchg(flag(peers_ptr, 0, 0), 1 + seen * 0, sem="release", scope="sys")
        if rank == 0:
            while tl.atomic_add(flag(peers_ptr, 0, 0), 0, sem="acquire", scope="sys") == 0:
                pass
            tl.store(flag(peers_ptr, 1, 8), 7)


@triton.jit
def take_flags_that_are_not_set_yet(peers_ptr, rank):
    """Test-and-set by many programs: a poll that writes what is there."""
    if rank == 0:
        while (
            tl.atomic_xchg(flag(peers_ptr, 0, tl.program_id(0)), 0, sem="acquire", scope="sys") == 0
        ):
            pass
    if rank == 1:
        tl.atomic_xchg(flag(peers_ptr, 0, tl.program_id(0)), 1, sem="release", scope="sys")


@triton.jit
def turned_by_way_of_memory(input_ptr, output_ptr, BLOCK: tl.constexpr, SEVERAL: tl.constexpr):
    """Threads read what others have stored: the second barrier of three is for that, or that alone."""
    offsets = tl.arange(0, BLOCK)
    if SEVERAL:
        tl.debug_barrier()  # 1
    tl.store(output_ptr + offsets, tl.load(input_ptr + offsets))
    tl.debug_barrier()  # 2
    turned = tl.load(output_ptr + BLOCK - 1 - offsets)
    if SEVERAL:
        tl.debug_barrier()  # 3
    tl.store(input_ptr + offsets, turned)


@triton.jit
def raises_a_flag(peers_ptr, rank):
    put_flag(flag(peers_ptr, rank, tl.program_id(0)), 1)


@triton.jit
def counts_for_ever(out_ptr, rounds):
    """With numbers of Python's, if ``rounds`` is below 0."""
    count = 0
    while True:
        count += 1
        if count == rounds:
            break
    tl.store(out_ptr, count)


@triton.jit
def asks_itself_for_ever(out_ptr, rounds):
    count = tl.load(out_ptr)
    while count != rounds:
        count = tl.where(rounds < 0, count % 7 + 1, count + 1)
    tl.store(out_ptr, count)


@triton.jit
def read_meet_write(
    peers_ptr,
    out_ptr,
    rank,
    SEM: tl.constexpr,
    READ: tl.constexpr,
    MEET: tl.constexpr,
    WRITE: tl.constexpr,
):
    """Rank 0 reads, both meet, rank 1 writes what was read: those of the steps in one launch."""
    mine = data(peers_ptr, 0)
    if READ and rank == 0:
        tl.store(out_ptr + tl.arange(0, 16), tl.load(mine))
    tl.debug_barrier()
    if MEET:
        tl.atomic_add(flag(peers_ptr, 1 - rank, 0), 1, sem=SEM, scope="sys")
        while tl.atomic_add(flag(peers_ptr, rank, 0), 0, sem=SEM, scope="sys") == 0:
            pass
    tl.debug_barrier()
    if WRITE and rank == 1:
        tl.store(mine, tl.full((16,), 1.0, tl.float32))


@triton.jit
def reset_signals(peers_ptr, rank, COUNT: tl.constexpr, WAIT: tl.constexpr, SCOPE: tl.constexpr):
    """Two ranks signal each other by words, relaxed, and set them back by a plain store."""
    words = tl.arange(0, COUNT)
    mine = flag(peers_ptr, rank, words)
    tl.atomic_xchg(flag(peers_ptr, 1 - rank, words), 1, sem="relaxed", scope="sys")
    if WAIT:
        while tl.min(tl.atomic_add(mine, 0, sem="acquire", scope=SCOPE), 0) == 0:
            pass
    tl.store(mine, 0)


@triton.jit
def reset_unseen(peers_ptr, rank):
    """Rank 0 signals by word 0 and by word 1; rank 1 waits for word 0, and sets both back."""
    if rank == 0:
        tl.atomic_xchg(flag(peers_ptr, 1, 0), 1, sem="release", scope="sys")
        tl.atomic_xchg(flag(peers_ptr, 1, 1), 1, sem="relaxed", scope="sys")
    else:
        while tl.atomic_add(flag(peers_ptr, 1, 0), 0, sem="acquire", scope="sys") == 0:
            pass
        tl.store(flag(peers_ptr, 1, 0), 0)
        tl.store(flag(peers_ptr, 1, 1), 0)
