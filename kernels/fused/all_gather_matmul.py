"""Fused all-gather + matmul: ``C = concat(A_0 .. A_{W-1}) @ B`` while the shards travel.

Every rank pushes chunks of its shard into the workspaces of its peers and signals each one; a
persistent matmul takes its own shard first, in place, then chunks in the order in which the peers'
send order makes them arrive. It waits once per chunk, not per tile::

    rank 0  copiers    | chunk 0 -> 1 | chunk 0 -> 2 | chunk 1 -> 1 | chunk 1 -> 2 |
            consumers  | own tiles ........ | wait 2:0, tiles | wait 1:0, tiles | wait 2:1, tiles ...

Who copies is chosen by the host. With ``COPIERS > 0`` the first programs of this kernel do; with 0 the
copy engine does, on its own stream, and this kernel only consumes. Several weights share one gather:
the kernel of the first weight carries the copiers. ``MULTICAST`` copiers send a chunk once, to all ranks,
where a switch can do that (``kernels/collectives/multimem.py``).

What the consumers do between two waits is a plain persistent matmul, so the compiler may overlap the end
of a tile with the beginning of the next (``FLATTEN``), and the tiles may leave by TMA (``OUT_DESCRIPTOR``),
for nobody publishes them.

Why push and not pull: a pushed chunk needs no copy on the sender's side and no "ready" signal before
it; what it needs instead, that the receiver's workspace is free, is the credit of the previous op,
which has nearly always been there for long.
"""

import triton
import triton.language as tl

from interlace.kernels.collectives.multimem import broadcast_chunks
from interlace.kernels.epilogue import emit_tile, output_operand
from interlace.kernels.matmul import columns_operand, multiply_tile, rows_operand
from interlace.kernels.signal import current_epoch, fence_descriptor_loads, wait
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.kernels.transfer import data_pointer, push_chunks

CHUNK_COLUMNS = 6
_CHUNK = tl.constexpr(CHUNK_COLUMNS)


@triton.jit
def _consume(
    peers_ptr,
    input_ptr,
    input_stride,
    row_scale_ptr,
    weight_ptr,
    weight_stride_k,
    weight_stride_n,
    column_scale_ptr,
    bias_ptr,
    output_ptr,
    chunks_ptr,
    num_chunks,
    N,
    K,
    rank,
    world_size,
    slot_offset,
    data_offset,
    scale_offset,
    epoch,
    consumer,
    consumers,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    ALIGNED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    FAST_ACCUM: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    SUBTILE: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """The tiles of one consumer, chunk by chunk: wait for the chunk, then multiply."""
    gathered_address = tl.load(peers_ptr + rank) + data_offset
    input_address = input_ptr.to(tl.int64)
    element_bytes = input_ptr.dtype.element_ty.primitive_bitwidth // 8
    COMPILED_STORES: tl.constexpr = OUT_DESCRIPTOR and COMPILED
    VECTOR: tl.constexpr = 128 // input_ptr.dtype.element_ty.primitive_bitwidth
    tiles_n = tl.cdiv(N, BLOCK_N)
    b = columns_operand(
        weight_ptr, weight_stride_k, weight_stride_n, N, K, BLOCK_N, BLOCK_K, DESCRIPTORS
    )
    for chunk in range(num_chunks):
        line = chunks_ptr + chunk * _CHUNK
        source = tl.load(line)
        first_row = tl.load(line + 1)
        rows = tl.load(line + 2).to(tl.int32)
        output_row = tl.load(line + 3)
        slot = tl.load(line + 4)
        start = tl.load(line + 5).to(tl.int32)
        tiles_m = tl.cdiv(rows, BLOCK_M)
        end = start + tiles_m * tiles_n
        first = first_tile(start, consumer, consumers)
        if first < end:
            address = input_address + first_row * input_stride * element_bytes
            stride = input_stride + tl.zeros((), tl.int64)
            scale_ptr = row_scale_ptr
            if SCALES == "row":
                scale_ptr += first_row
            if source != rank:
                slot_byte = slot_offset + slot * 8
                wait(peers_ptr, rank, world_size, source, slot_byte, epoch, COMPILED_STORES)
                if DESCRIPTORS != "":
                    fence_descriptor_loads(COMPILED)
                address = gathered_address + output_row * K * element_bytes
                stride = K + tl.zeros((), tl.int64)
                if SCALES == "row":
                    scale_ptr = data_pointer(peers_ptr, rank, scale_offset, row_scale_ptr)
                    scale_ptr += output_row
            a_ptr = address.to(input_ptr.dtype)
            if ALIGNED:
                a_ptr = tl.multiple_of(a_ptr, 16)
                stride = tl.multiple_of(stride, VECTOR)
            a = rows_operand(a_ptr, stride, rows, K, BLOCK_M, BLOCK_K, DESCRIPTORS)
            c_ptr = output_ptr + output_row * N
            c = output_operand(c_ptr, N, rows, N, BLOCK_M, BLOCK_N, SUBTILE, OUT_DESCRIPTOR)
            for tile in tl.range(
                first, end, consumers, flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE
            ):
                tile_m, tile_n = grouped_tile(tile - start, tiles_m, tiles_n, GROUP_M)
                acc = multiply_tile(
                    a,
                    stride,
                    rows,
                    b,
                    weight_stride_k,
                    weight_stride_n,
                    N,
                    K,
                    tile_m,
                    tile_n,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    DESCRIPTORS,
                    INPUT_PRECISION,
                    FAST_ACCUM,
                )
                emit_tile(
                    c,
                    N,
                    acc,
                    bias_ptr,
                    scale_ptr,
                    column_scale_ptr,
                    tile_m,
                    tile_n,
                    rows,
                    N,
                    BLOCK_M,
                    BLOCK_N,
                    BIAS,
                    ACTIVATION,
                    SCALES,
                    SUBTILE,
                    OUT_DESCRIPTOR,
                )


@triton.jit(
    do_not_specialize=[
        "rank",
        "world_size",
        "num_sends",
        "num_chunks",
        "slot_offset",
        "multicast",
    ]
)
def all_gather_matmul_kernel(
    peers_ptr,
    multicast,
    input_ptr,
    input_stride,
    row_scale_ptr,
    weight_ptr,
    weight_stride_k,
    weight_stride_n,
    column_scale_ptr,
    bias_ptr,
    output_ptr,
    sends_ptr,
    num_sends,
    chunks_ptr,
    num_chunks,
    N,
    K,
    rank,
    world_size,
    slot_offset,
    data_offset,
    scale_offset,
    COPIERS: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    COPY_COLUMNS: tl.constexpr,
    MULTICAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALES: tl.constexpr,
    ALIGNED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    FAST_ACCUM: tl.constexpr,
    FLATTEN: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    SUBTILE: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """``output[M, N] = activation(gathered[M, K] @ weight[K, N] (+ bias[N]))``, M all ranks' rows.

    Legend: ``input`` is this rank's shard ``[M_r, K]``, rows ``input_stride`` apart; ``output`` is
    contiguous. ``sends``: see ``kernels/transfer.py``. ``chunks``: one line per chunk in the order of
    consumption: source, first row in the shard, rows, first row in the output, slot, number of the
    first tile. Tiles are numbered through; consumer p of P takes tiles t with ``t % P == p``.
    ``SCALES`` "tensor": ``row_scale`` and ``column_scale`` are one number each, the former the same on
    all ranks. "row": ``row_scale`` is ``[M_r]`` and is gathered with the rows, into the workspace from
    byte ``scale_offset`` on; ``column_scale`` is ``[N]``. ``MULTICAST``: copiers send each chunk once for
    all ranks, through the address ``multicast`` ("multimem") or, to try that, one by one ("peers").

    Ordering: copiers wait for the receiver's credit, store, publish the chunk's slot. Consumers wait
    for the slot and load the chunk in a loop nested below the wait. The workspace may be rewritten
    after finish_kernel, which follows this kernel on the stream, has given the credit. Copiers have
    the lowest program ids and wait for no consumer, so the grid makes progress in any residency that
    admits one program per rank.

    Example: W = 2, one chunk of 64 rows per rank, N = 128, 64 x 64 tiles, COPIERS = 1, grid 3. Program
    0 of rank 0 copies its rows to rank 1 and publishes slot 0 there. Programs 1 and 2 compute tiles 0
    and 1 from the own shard, wait for slot 1 (source rank 1), then compute tiles 2 and 3.
    """
    epoch = current_epoch(peers_ptr, rank)
    program = tl.program_id(0)
    consumes = True
    if COPIERS > 0:
        consumes = program >= COPIERS
        if program < COPIERS:
            if MULTICAST == "":
                push_chunks(
                    peers_ptr,
                    input_ptr,
                    input_stride,
                    sends_ptr,
                    num_sends,
                    K,
                    rank,
                    world_size,
                    slot_offset,
                    data_offset,
                    epoch,
                    program,
                    COPIERS,
                    COPY_ROWS,
                    COPY_COLUMNS,
                    row_scale_ptr,
                    scale_offset,
                    SCALES == "row",
                )
            else:
                broadcast_chunks(
                    peers_ptr,
                    multicast,
                    input_ptr,
                    input_stride,
                    sends_ptr,
                    num_sends,
                    K,
                    rank,
                    world_size,
                    slot_offset,
                    data_offset,
                    epoch,
                    program,
                    COPIERS,
                    COPY_ROWS,
                    COPY_COLUMNS,
                    row_scale_ptr,
                    scale_offset,
                    SCALES == "row",
                    MULTICAST == "multimem",
                )
    if consumes:
        _consume(
            peers_ptr,
            input_ptr,
            input_stride,
            row_scale_ptr,
            weight_ptr,
            weight_stride_k,
            weight_stride_n,
            column_scale_ptr,
            bias_ptr,
            output_ptr,
            chunks_ptr,
            num_chunks,
            N,
            K,
            rank,
            world_size,
            slot_offset,
            data_offset,
            scale_offset,
            epoch,
            program - COPIERS,
            tl.num_programs(0) - COPIERS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            GROUP_M,
            DESCRIPTORS,
            BIAS,
            ACTIVATION,
            SCALES,
            ALIGNED,
            INPUT_PRECISION,
            FAST_ACCUM,
            FLATTEN,
            WARP_SPECIALIZE,
            SUBTILE,
            OUT_DESCRIPTOR,
            COMPILED,
        )
