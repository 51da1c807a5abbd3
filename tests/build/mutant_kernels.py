"""Kernels that each break one law of the device code. Compiled by test_build.py, never run.

They are named and shaped as what they are mutants of, because rules depend on the kernel.
"""

import triton
import triton.language as tl


@triton.jit
def publish_kernel(data_ptr, slot_ptr, epoch, BLOCK: tl.constexpr):
    """Law 1: the barrier is missing."""
    offsets = tl.arange(0, BLOCK)
    tl.store(data_ptr + offsets, offsets)
    tl.atomic_xchg(slot_ptr, epoch, sem="release", scope="sys")


@triton.jit
def wait_kernel(slot_ptr, epoch):
    """Law 3: the poll is volatile, and acquires nothing."""
    while tl.load(slot_ptr, volatile=True) < epoch:
        pass


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
    tl.atomic_xchg(slots_ptr + tile, epoch, sem="release", scope="sys")


@triton.jit
def all_gather_matmul_kernel(input_ptr, weight_ptr, output_ptr, slots_ptr, epoch, M, N, K,
                             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                             BLOCK_K: tl.constexpr):  # fmt: skip
    """Laws 3 and 4: no fence after the wait, and the k loop is flattened into the tile loop."""
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
