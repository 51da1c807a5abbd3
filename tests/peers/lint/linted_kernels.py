"""Kernels as other projects write them, each right; ``lint_cases.py`` has an edit or a launch that is not.

They are compiled and never run. What a package would bring is written out here, in its style: Kraken's
flags by inline PTX, Iris' addresses by heap bases, Triton-distributed's wait, notify and tokens.
"""

import triton
import triton.language as tl

# -- Kraken, symm-mem-recipes: tables and tuples of buffers, flags by inline PTX -----------------------


@triton.jit
def take_flag(flag_ptr, AFTER_WAIT: tl.constexpr):
    """Thread 0 turns a flag from 1 to 0 when it is 1."""
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .pred %again;
            .reg .u32 %old;
            mov.u32 $0, %tid.x;
            setp.ne.u32 %again, $0, 0;
            @%again bra over;
        turn:
            atom.global.sys.{AFTER_WAIT}.cas.b32 %old, [$1], 1, 0;
            setp.ne.u32 %again, %old, 1;
            @%again bra turn;
        over:
        }}
        """,
        "=r,l",
        [flag_ptr],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def all_gather_kernel(flags_ptr, buffers_ptr, output_ptr, WORLD_SIZE: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """Every peer's block, when its flag is up."""
    offsets = tl.arange(0, BLOCK)
    for peer in tl.static_range(WORLD_SIZE):
        take_flag(flags_ptr + peer, AFTER_WAIT="acquire")
        tl.debug_barrier()
        theirs = tl.load(buffers_ptr + peer).to(tl.pointer_type(tl.float32))
        tl.store(output_ptr + peer * BLOCK + offsets, tl.load(theirs + offsets))


@triton.jit
def one_shot_kernel(buffers, output_ptr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Everybody's block out of a tuple of buffers, as a share of its sum."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(WORLD_SIZE):
        total += tl.load(buffers[peer] + offsets)
    tl.store(output_ptr + offsets, total / tl.sum(total))


# -- torchcomms: windows of peers, a signal for each source --------------------------------------------


@triton.jit
def wait_signal_from(signals_ptr, source, sources):
    """Until ``source`` has signalled, if it is one of those that do."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %go;
            mov.u32 $0, 0;
            setp.ge.s32 %go, $2, $3;
            @%go bra over;
        again:
            ld.acquire.sys.global.u32 $0, [$1];
            setp.eq.u32 %go, $0, 0;
            @%go bra again;
        over:
            bar.sync 0;
        }
        """,
        "=&r,l,r,r",
        [signals_ptr + source, source, sources],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def window_kernel(window_ptr, signals_ptr, output_ptr, SOURCES: tl.constexpr, BLOCK: tl.constexpr):
    """What peer 0 has put into the window. Of no sources the wait is left out, though the code has it."""
    wait_signal_from(signals_ptr, 0, SOURCES)
    offsets = tl.arange(0, BLOCK)
    tl.store(output_ptr + offsets, tl.load(window_ptr + offsets))


# -- torchtitan's minimal_async_ep: rows of tokens go where they belong ----------------------------------


@triton.jit
def dispatch_rows_kernel(from_ptr, peers_ptr, rows_ptr, table_ptr, flags_ptr, WIDTH: tl.constexpr):
    """A row to the buffer of its expert's rank, with a flag for each row."""
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    peer, to_row = tl.load(peers_ptr + row), tl.load(rows_ptr + row)
    buffer = tl.load(table_ptr + peer).to(tl.pointer_type(tl.bfloat16))
    tl.store(buffer + to_row * WIDTH + columns, tl.load(from_ptr + row * WIDTH + columns))
    flag = tl.load(flags_ptr + peer).to(tl.pointer_type(tl.int32)) + to_row
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


# -- Iris: a pointer of one rank in the heap of another -------------------------------------------------


@triton.jit
def translate(pointer, from_rank, to_rank, heap_bases):
    offset = pointer.to(tl.int64) - tl.load(heap_bases + from_rank)
    return (tl.load(heap_bases + to_rank) + offset).to(pointer.dtype)


@triton.jit
def put_kernel(source_ptr, inbox_ptr, ready_ptr, heap_bases, rank, peer, BLOCK: tl.constexpr):
    """A block into the inbox of a peer, and the word that says so."""
    offsets = tl.arange(0, BLOCK)
    data = tl.load(source_ptr + offsets)
    tl.store(translate(inbox_ptr, rank, peer, heap_bases) + offsets, data)
    tl.debug_barrier()
    ready = translate(ready_ptr, rank, peer, heap_bases)
    tl.atomic_xchg(ready, 1, sem="release", scope="sys")


@triton.jit
def consume_tiles_kernel(
    tiles_ptr, locks_ptr, output_ptr, TILES: tl.constexpr, BLOCK: tl.constexpr
):
    """Tiles in the order of their locks, as a consumer of a fused all-scatter takes them."""
    offsets = tl.arange(0, BLOCK)
    for tile in range(TILES):
        while tl.atomic_cas(locks_ptr + tile, 1, 1, sem="acquire", scope="sys") != 1:
            pass
        here = tile * BLOCK + offsets
        tl.store(output_ptr + here, tl.load(tiles_ptr + here))


# -- Triton-distributed: tiles behind a wait, whose token the pointers consume -----------------------------


@triton.jit
def wait(word_ptr, value):
    """Until a word is ``value``; a token."""
    seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")
    while seen != value:
        seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")
    return seen


@triton.jit
def consume_token(row, token):
    """``row``, and nothing that uses it is before the wait of ``token``."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [row, token], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def complete_bulk_stores():
    """Until the descriptor stores of this thread are written, not only read."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1
    )


@triton.jit
def fence_async():
    """What has been acquired is there for descriptor loads, too."""
    tl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def gemm_rs_kernel(a_ptr, b_ptr, scatter_ptr, signal_ptr, M, N, K, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The producer of a reduce-scatter: a tile by a descriptor, and its signal."""
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    scatter = tl.make_tensor_descriptor(scatter_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    tile = tl.program_id(0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a.load([tile * BLOCK_M, k]), b.load([k, 0]), acc)
    scatter.store([tile * BLOCK_M, 0], acc.to(tl.bfloat16))
    complete_bulk_stores()
    tl.debug_barrier()
    tl.atomic_xchg(signal_ptr + tile, 1, sem="release", scope="sys")


@triton.jit
def ag_gemm_kernel(a_ptr, b_ptr, output_ptr, ready_ptr, M, N, K, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The consumer of an all-gather, by descriptors: a tile of rows when it has come."""
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    tile = tl.program_id(0)
    row = consume_token(tile * BLOCK_M, wait(ready_ptr + tile, 1))
    fence_async()
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a.load([row, k]), b.load([k, 0]), acc)
    rows, columns = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    tl.store(output_ptr + rows[:, None] * N + columns[None, :], acc.to(tl.bfloat16))


@triton.jit
def persistent_ag_gemm_kernel(a_ptr, b_ptr, output_ptr, ready_ptr, M, N, K, BLOCK_M: tl.constexpr,
                              BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The same, persistent: tiles and k in one loop, which is pipelined."""
    offs_m, offs_n, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    steps = tl.cdiv(K, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    row = 0
    for step in range(0, steps * tl.cdiv(M, BLOCK_M)):
        k = step % steps
        tile = step // steps
        if k == 0:
            token = wait(ready_ptr + tile, 1)
            row = consume_token(tile * BLOCK_M, token)
        a = tl.load(a_ptr + (row + offs_m)[:, None] * K + (k * BLOCK_K + offs_k)[None, :])
        b = tl.load(b_ptr + (k * BLOCK_K + offs_k)[:, None] * N + offs_n[None, :])
        acc = tl.dot(a, b, acc)
        if k == steps - 1:
            rows = tile * BLOCK_M + offs_m
            tl.store(output_ptr + rows[:, None] * N + offs_n[None, :], acc.to(tl.bfloat16))
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def scaled_ag_gemm_kernel(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, output_ptr, ready_ptr, M: tl.constexpr,
                          N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Rows of fp8 with a scale for every 32 of them, when they have come."""
    wait(ready_ptr, 1)
    offs_m, offs_n, offs_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    scales = tl.arange(0, K // 32)
    a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :])
    b = tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :])
    of_a = tl.load(a_scale_ptr + offs_m[:, None] * (K // 32) + scales[None, :])
    of_b = tl.load(b_scale_ptr + offs_n[:, None] * (K // 32) + scales[None, :])
    c = tl.dot_scaled(a, of_a, "e4m3", b, of_b, "e4m3")
    tl.store(output_ptr + offs_m[:, None] * N + offs_n[None, :], c)
