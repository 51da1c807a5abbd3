"""Kernels that each break one law of the device code. Compiled by the tests of this folder, never run.

The line that breaks it ends in ``# faulty:`` and the rules that must name it. Some are named and shaped
as the kernels they are mutants of.
"""

import triton
import triton.language as tl


@triton.jit
def _signal(slot_ptr, epoch):
    tl.atomic_xchg(slot_ptr, epoch, sem="release", scope="sys")  # faulty: inlined


@triton.jit
def helper_kernel(data_ptr, slot_ptr, epoch, BLOCK: tl.constexpr):
    """Law 1, in a function of the kernel's."""
    offsets = tl.arange(0, BLOCK)
    tl.store(data_ptr + offsets, offsets)
    _signal(slot_ptr, epoch)  # faulty: calls


@triton.jit
def wait_kernel(slot_ptr, epoch):
    """Law 3: the poll is volatile, and acquires nothing."""
    while tl.load(slot_ptr, volatile=True) < epoch:  # faulty: weak poll
        pass
    tl.store(slot_ptr + 1, tl.load(slot_ptr + 2))


@triton.jit
def relaxed_kernel(slot_ptr, epoch):
    """Law 3: the poll is relaxed; its value reaches the other threads through shared memory."""
    while tl.atomic_add(slot_ptr, 0, sem="relaxed", scope="sys") < epoch:  # faulty: weak poll
        pass
    tl.store(slot_ptr + 1, tl.load(slot_ptr + 2))


@triton.jit
def assembly_kernel(slot_ptr, data_ptr):
    """Law 3, in inline assembly."""
    address = slot_ptr.to(tl.int64)
    seen = tl.zeros((), tl.int32)
    while seen == 0:
        seen = tl.inline_asm_elementwise(  # faulty: weak poll
            "ld.relaxed.sys.global.s32 $0, [$1];", "=r,l", [address], tl.int32, False, 1
        )
    tl.store(data_ptr, tl.load(data_ptr + 1))


@triton.jit
def fenced_kernel(slot_ptr, data_ptr):
    """Right: a relaxed poll, then an acquire whose value nothing uses, of which SASS keeps what orders."""
    address = slot_ptr.to(tl.int64)
    seen = tl.zeros((), tl.int32)
    while seen == 0:
        seen = tl.inline_asm_elementwise(
            "ld.relaxed.sys.global.s32 $0, [$1];", "=r,l", [address], tl.int32, False, 1
        )
    tl.inline_asm_elementwise(
        "ld.acquire.sys.global.s32 $0, [$1];", "=r,l", [address], tl.int32, False, 1
    )
    tl.debug_barrier()
    tl.store(data_ptr, tl.load(data_ptr + 1))


@triton.jit
def free_kernel(slot_ptr, epoch, data_ptr):
    """Right: a relaxed poll in front of stores only."""
    both = tl.load(data_ptr + 1) + tl.load(data_ptr + 2)
    while tl.atomic_add(slot_ptr, 0, sem="relaxed", scope="sys") < epoch:
        pass
    tl.store(data_ptr, both)


@triton.jit
def plain_kernel(slot_ptr, epoch, data_ptr):
    """Law 3: the poll is an ordinary load, and gone from the SASS."""
    while tl.load(slot_ptr) < epoch:  # faulty: dropped wait
        pass
    tl.store(data_ptr, tl.load(data_ptr + 1))


@triton.jit
def unused_kernel(slot_ptr, data_ptr):
    """Law 3: nothing uses what the acquire reads, so it is gone from the SASS."""
    tl.atomic_add(slot_ptr, 0, sem="acquire", scope="sys")  # faulty: dropped wait
    tl.store(data_ptr, tl.load(data_ptr + 1))


@triton.jit
def narrow_kernel(data_ptr, slot_ptr, epoch, BLOCK: tl.constexpr):
    """Law 1: an atomic of tl has the scope of a GPU by default."""
    offsets = tl.arange(0, BLOCK)
    tl.store(data_ptr + offsets, offsets)
    tl.debug_barrier()
    tl.atomic_xchg(slot_ptr, epoch, sem="release")  # faulty: narrow scope


@triton.jit
def matmul_reduce_scatter_kernel(input_ptr, weight_ptr, output_ptr, slots_ptr, epoch, M, N, K,
                                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                                 BLOCK_K: tl.constexpr):  # fmt: skip
    """Law 2: a descriptor store is published."""
    a = tl.make_tensor_descriptor(input_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b = tl.make_tensor_descriptor(weight_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    c = tl.make_tensor_descriptor(output_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    tile = tl.program_id(0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a.load([tile * BLOCK_M, k]), b.load([k, 0]), acc)
    c.store([tile * BLOCK_M, 0], acc.to(tl.bfloat16))
    tl.debug_barrier()
    tl.atomic_xchg(slots_ptr + tile, epoch, sem="release", scope="sys")  # faulty: published


@triton.jit
def all_gather_matmul_kernel(input_ptr, weight_ptr, output_ptr, slots_ptr, epoch, M, N, K,
                             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                             BLOCK_K: tl.constexpr):  # fmt: skip
    """Laws 3 and 4: tiles and k in one loop, no address depends on the wait, and there is no fence.

    Were the tile counted up under the same ``if`` as the wait, its loads would depend on the wait.
    """
    a = tl.make_tensor_descriptor(input_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b = tl.make_tensor_descriptor(weight_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    offs_n = tl.arange(0, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, steps * tl.cdiv(M, BLOCK_M)):
        k = step % steps
        tile = step // steps
        if k == 0:
            while tl.atomic_add(slots_ptr + tile, 0, sem="acquire", scope="sys") < epoch:  # waits
                pass
        chunk = a.load([tile * BLOCK_M, k * BLOCK_K])  # faulty: early load
        acc = tl.dot(chunk, b.load([k * BLOCK_K, 0]), acc)
        if k == steps - 1:
            offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(output_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.bfloat16))
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def flattened_kernel(input_ptr, weight_ptr, output_ptr, slots_ptr, epoch, M, N, K,
                     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                     BLOCK_K: tl.constexpr):  # fmt: skip
    """Right, as far as the wait goes: Triton flattens, and the tile's number comes after the wait."""
    a = tl.make_tensor_descriptor(input_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b = tl.make_tensor_descriptor(weight_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    offs_n = tl.arange(0, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.num_programs(0), flatten=True):
        while tl.atomic_add(slots_ptr + tile, 0, sem="acquire", scope="sys") < epoch:
            pass
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(a.load([tile * BLOCK_M, k]), b.load([k, 0]), acc)
        offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(output_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.bfloat16))


@triton.jit
def pipelined_kernel(input_ptr, weight_ptr, output_ptr, slots_ptr, N, K, BLOCK: tl.constexpr):
    """Law 4 without descriptors: an acquire in the k loop, which is pipelined around it."""
    offsets = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    late = tl.zeros((), tl.int64)
    for k in range(0, K, BLOCK):
        late += tl.atomic_add(slots_ptr + k, 0, sem="acquire", scope="sys")  # acquires
        chunk = tl.load(input_ptr + offsets[:, None] * K + (k + offsets)[None, :])  # faulty: early
        weight = tl.load(weight_ptr + (k + offsets)[:, None] * N + offsets[None, :])
        acc = tl.dot(chunk, weight, acc)
    tl.store(output_ptr + offsets[:, None] * N + offsets[None, :], acc.to(tl.bfloat16))
    tl.store(slots_ptr, late)


@triton.heuristics({"BLOCK": lambda arguments: 256})
@triton.jit
def unrolled_kernel(input_ptr, output_ptr, slots_ptr, rank, WORLD_SIZE: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Right: the load of a round stands before the wait of the next, and need not wait at home."""
    offsets = tl.arange(0, BLOCK)
    for source in tl.static_range(WORLD_SIZE):
        if source != rank:
            while tl.atomic_add(slots_ptr + source, 0, sem="acquire", scope="sys") < 1:
                pass
        part = source * BLOCK + offsets
        tl.store(output_ptr + part, tl.load(input_ptr + part))


@triton.jit
def spilling_kernel(input_ptr, output_ptr, BLOCK: tl.constexpr):
    """More live values than registers."""
    offsets = tl.arange(0, BLOCK)
    values = tl.load(input_ptr + offsets)
    tl.store(output_ptr + offsets, values / tl.sum(values))


@triton.jit
def refused_kernel(data_ptr):
    """No such name."""
    tl.store(data_ptr, undefined_name)  # noqa: F821  # faulty: does not compile


@triton.jit
def window_kernel(window_ptr, signals_ptr, output_ptr, SOURCES: tl.constexpr, BLOCK: tl.constexpr):
    """Law 3: of no sources the wait is left out, though the code has it."""
    tl.inline_asm_elementwise(  # faulty: weakened by ptxas
        """
        {
            .reg .pred %go;
            mov.u32 $0, 0;
            setp.ge.s32 %go, 0, $2;
            @%go bra over;
        again:
            ld.acquire.sys.global.u32 $0, [$1];
            setp.eq.u32 %go, $0, 0;
            @%go bra again;
        over:
            bar.sync 0;
        }
        """,
        "=&r,l,r",
        [signals_ptr, SOURCES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    offsets = tl.arange(0, BLOCK)
    tl.store(output_ptr + offsets, tl.load(window_ptr + offsets))


@triton.jit
def scaled_kernel(a_ptr, b_ptr, scales_ptr, output_ptr, N: tl.constexpr):
    """Chips of 9.0 have no matrix instruction for numbers of fp8 with a scale for every 32 of them."""
    rows, columns = tl.arange(0, N)[:, None] * N, tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + rows + columns), tl.load(b_ptr + rows + columns)
    scales = tl.load(scales_ptr + rows // 32 + tl.arange(0, N // 32)[None, :])
    c = tl.dot_scaled(a, scales, "e4m3", b, scales, "e4m3")  # faulty: no tensor cores
    tl.store(output_ptr + rows + columns, c)
