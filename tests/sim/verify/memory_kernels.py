"""Kernels for test_memory_faults.py: right for one argument, and with one fault for another."""

import triton
import triton.language as tl


@triton.jit
def copy(x_ptr, y_ptr, FIRST: tl.constexpr, N: tl.constexpr):
    offsets = FIRST + tl.arange(0, N)
    tl.store(y_ptr + tl.arange(0, N), tl.load(x_ptr + offsets))


@triton.jit
def copy_masked(x_ptr, y_ptr, count, N: tl.constexpr):
    offsets = tl.arange(0, N)
    x = tl.load(x_ptr + offsets, mask=offsets < count, other=-1.0)
    tl.store(y_ptr + offsets, x, mask=offsets < count)


@triton.jit
def fill(x_ptr, FIRST: tl.constexpr, N: tl.constexpr):
    tl.store(x_ptr + FIRST + tl.arange(0, N), tl.full((N,), 7.0, tl.float32))


@triton.jit
def fill_const(x_ptr: tl.const, FIRST: tl.constexpr, N: tl.constexpr):
    fill(x_ptr, FIRST, N)


@triton.jit
def fill_address(address, BY: tl.constexpr, N: tl.constexpr):
    tl.store((address + BY).to(tl.pointer_type(tl.float32)) + tl.arange(0, N), 7.0)


@triton.jit
def fill_each(table_ptr, N: tl.constexpr):
    """At each of the addresses in a table, at once."""
    rows = tl.load(table_ptr + tl.arange(0, N)).to(tl.pointer_type(tl.float32))
    tl.store(rows, tl.full((N,), 7.0, tl.float32))


@triton.jit
def fill_chosen(x_ptr, y_ptr, FIRST: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(tl.where(offsets % 2 == 0, x_ptr + FIRST + offsets, y_ptr + offsets), 7.0)


@triton.jit
def add(x_ptr, FIRST: tl.constexpr, N: tl.constexpr):
    tl.atomic_add(x_ptr + FIRST + tl.arange(0, N), 1.0)


@triton.jit
def swap(x_ptr, FIRST: tl.constexpr, N: tl.constexpr):
    tl.atomic_cas((x_ptr + FIRST + N - 1).to(tl.pointer_type(tl.int32)), 0, 1)


@triton.jit
def fill_by_descriptor(x_ptr, FIRST: tl.constexpr, N: tl.constexpr):
    """A descriptor of more rows than there are is in bounds by itself."""
    whole = tl.make_tensor_descriptor(x_ptr, [1 + FIRST, N], [N, 1], [1, N])
    whole.store([FIRST, 0], tl.full((1, N), 7.0, tl.float32))


@triton.jit
def fill_by_ptx(x_ptr, FIRST: tl.constexpr, N: tl.constexpr):
    tl.inline_asm_elementwise(
        "st.global.f32 [$1], 0f40E00000; mov.u32 $0, 0;",
        "=r,l",
        [(x_ptr + FIRST + N - 1).to(tl.int64)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fill_by_vector(x_ptr, FIRST: tl.constexpr, N: tl.constexpr):
    tl.inline_asm_elementwise(
        "st.global.v4.b32 [$1], {$2, $2, $2, $2}; mov.u32 $0, 0;",
        "=r,l,r",
        [(x_ptr + FIRST).to(tl.int64), tl.full((), 7, tl.int32)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fill_peer(buffers, rank, FIRST: tl.constexpr, N: tl.constexpr):
    table = buffers.to(tl.pointer_type(tl.int64))
    theirs = tl.load(table + 1 - rank).to(tl.pointer_type(tl.float32))
    fill(theirs, FIRST, N)


@triton.jit
def copy_from_peer(buffers, out_ptr, rank, N: tl.constexpr):
    table = buffers.to(tl.pointer_type(tl.int64))
    copy(tl.load(table + 1 - rank).to(tl.pointer_type(tl.float32)), out_ptr, 0, N)


@triton.jit
def poll(flag_ptr, INDEX: tl.constexpr):
    while tl.load(flag_ptr + INDEX, volatile=True) == 0:
        pass


@triton.jit
def raise_peer(flags, rank):
    table = flags.to(tl.pointer_type(tl.int64))
    theirs = tl.load(table + 1 - rank).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs, 1, sem="release", scope="sys")


@triton.jit
def look(flags, rank, HOW: tl.constexpr):
    """Until this rank's flag is raised."""
    own = tl.load(flags.to(tl.pointer_type(tl.int64)) + rank).to(tl.pointer_type(tl.int32))
    seen = 0
    while seen != 1:
        if HOW == "add":
            seen = tl.atomic_add(own, 0, sem="acquire", scope="sys")
        elif HOW == "compare and swap":
            seen = tl.atomic_cas(own, 1, 0, sem="acquire", scope="sys")
        elif HOW == "swap":
            seen = tl.atomic_xchg(own, 1, sem="acquire", scope="sys")
        else:
            seen = tl.load(own, volatile=True)


@triton.jit
def describe(x_ptr, stride, N: tl.constexpr):
    rows = tl.make_tensor_descriptor(x_ptr, [2, N], [stride, 1], [2, N])
    rows.store([0, 0], tl.full((2, N), 7.0, tl.float32))


@triton.jit
def fill_by_switch(address, BY: tl.constexpr):
    tl.inline_asm_elementwise(
        "multimem.st.weak.global.u32 [$1], 7; mov.u32 $0, 0;",
        "=r,l",
        [address + BY],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def state(x_ptr, limit, HOW: tl.constexpr, N: tl.constexpr):
    """Says of its input what is not true if ``limit`` is too small."""
    x = tl.load(x_ptr + tl.arange(0, N))
    if HOW == "masked":
        tl.device_assert(x < limit, "too large", mask=x < 4)
    elif HOW == "device_assert":
        tl.device_assert(x < limit, "too; {large}")
    elif HOW == "assert":
        assert x < limit, "too; {large}"
    elif HOW == "multiple_of":
        tl.multiple_of(limit, 16)
    else:
        tl.assume(limit > 8)
