"""Fused all-gather + matmul: ``C = concat(A_0 .. A_{W-1}) @ B`` while the shards travel.

Every rank pushes chunks of its shard into the workspaces of its peers and signals each one. A persistent
matmul takes its own shard first, in place, then chunks in the order in which they arrive by the peers'
send order. It waits once per chunk, not per tile::

    rank 0  copiers    | chunk 0 -> 1 | chunk 0 -> 2 | chunk 1 -> 1 | chunk 1 -> 2 | wait 1:1, tiles
            consumers  | own tiles ........ | wait 2:0, tiles | wait 1:0, tiles | wait 2:1, tiles ...

The launch chooses how chunks are copied. With ``COPIERS > 0`` the first programs of this kernel copy, and
take tiles of the last chunks when they have sent everything. With 0 the copy engine does, on its own
stream, and this kernel only consumes. Several weights share one gather: the kernel of the first weight has
the copiers. ``MULTICAST`` copiers send a chunk once, to all ranks, if a switch can do that
(``kernels/collectives/multimem.py``).

Between two waits the consumers run a plain persistent matmul. So the compiler may overlap the end of a tile
with the beginning of the next (``FLATTEN``), and tiles may be stored by TMA (``OUT_DESCRIPTOR``), because
they are not published. This rank's shard is one chunk, as there is nothing to wait for between its tiles.

Why push and not pull: a pushed chunk needs no copy on the sender's side and no "ready" signal before it.
The receiver's workspace must be free instead. The credit of the previous op shows this, and has nearly
always arrived long before.
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Epilogue
from interlace.kernels.collectives.multimem import broadcast_chunks
from interlace.kernels.epilogue import emit_tile, output_operand, part_of_output
from interlace.kernels.products import columns_operand, multiply_tile, part_of_rows, rows_operand
from interlace.kernels.signal import current_epoch, fence_descriptor_loads, wait
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.kernels.transfer import push_chunks, region_pointer

CHUNK_COLUMNS = 6
_CHUNK = tl.constexpr(CHUNK_COLUMNS)


@triton.jit(do_not_specialize=["workspace", "multicast", "sends", "chunks"])
def all_gather_matmul_kernel(
    workspace,
    multicast,
    input,
    weight,
    epilogue,
    output_ptr,
    sends,
    chunks,
    N,
    K,
    scale_offset,
    COPIES: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[M, N] = activation(gathered[M, K] @ weight[K, N] (+ bias[N]))``, M all ranks' rows.

    Legend: ``input`` is this rank's shard ``[M_r, K]``, the ``output`` is contiguous. ``sends``: see
    ``kernels/transfer.py``. ``chunks``: one line per chunk in the order of consumption: source, first
    row in the shard, rows, first row in the output, slot, number of the first tile. Tiles are numbered over
    all chunks; program p of the P that take part in a chunk takes tiles t with ``t % P == p``: all programs
    in the last COPIERS chunks, only consumers before. ``SCALES`` "tensor": the scales are one number each;
    the rows' scale is the same on all ranks. "row": ``row_scale`` is ``[M_r]`` and is gathered with the
    rows, into the workspace from byte ``scale_offset`` on; ``column_scale`` is ``[N]``. ``multicast``: the
    address that stands for all ranks' buffers.

    Ordering: copiers wait for the receiver's credit, store, publish the chunk's slot. Consumers wait
    for the slot and load the chunk in a loop nested below the wait. The workspace may be rewritten
    after finish_kernel, which follows this kernel on the stream, has given the credit. Copiers have
    the lowest program ids, and wait for chunks only when they have sent all of theirs. So the grid makes
    progress if the copiers of every rank are resident together, with one consumer each.

    Example: W = 2, one chunk of 64 rows per rank, N = 128, 64 x 64 tiles, COPIERS = 1, grid 3. Program
    0 of rank 0 copies its rows to rank 1 and publishes slot 0 there. Programs 1 and 2 compute tiles 0
    and 1 from the own shard. Program 2, and 0 when it has sent, wait for slot 1 (source rank 1), then
    compute tiles 2 and 3.
    """
    # Before anything else: in a void channel it holds back all stores to peers.
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    first_chunk = tl.zeros((), tl.int32)
    # The last chunks, as many as a rank sends at a time, arrive when this rank has sent its own last. The
    # first is this rank's shard, which keeps consumers busy until then.
    shared_chunk = tl.maximum(chunks.count - COPIES.COPIERS, 1).to(tl.int32)
    # Copiers come first: whatever is resident, the programs that others wait for have begun.
    if COPIES.COPIERS > 0:
        if program < COPIES.COPIERS:
            SCALED: tl.constexpr = TILES.SCALES == "row"
            scale_ptr = epilogue.row_scale_ptr
            if COPIES.MULTICAST == "":
                push_chunks(
                    workspace, input, sends, K, epoch, COPIES, scale_ptr, scale_offset, SCALED
                )
            else:
                broadcast_chunks(workspace, multicast, input, sends, K, epoch, COPIES,
                                 scale_ptr, scale_offset, SCALED)  # fmt: skip
            # The waits for credits guarded no load; but nothing that follows a wait goes unfenced.
            fence_descriptor_loads(TILES.COMPILED and TILES.DESCRIPTORS != "")
            first_chunk = shared_chunk
    gathered_address = tl.load(workspace.peers_ptr + workspace.rank) + workspace.data_offset
    # This rank's shard and the gathered rows become one pointer below: as integers, so that the alignment
    # that the compiler knows of one does not apply to both.
    input_address = input.ptr.to(tl.int64)
    element_bytes = input.ptr.dtype.element_ty.primitive_bitwidth // 8
    COMPILED_STORES: tl.constexpr = TILES.OUT_DESCRIPTOR and TILES.COMPILED
    VECTOR: tl.constexpr = 128 // input.ptr.dtype.element_ty.primitive_bitwidth
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    # Once per program: making a descriptor costs a write and a fence.
    own = rows_operand(input.ptr, input.stride, K, TILES)
    gathered = rows_operand(gathered_address.to(input.ptr.dtype), K, K, TILES)
    b = columns_operand(weight.ptr, weight, N, K, TILES)
    whole_c = output_operand(output_ptr, N, TILES)
    for chunk in range(first_chunk, chunks.count):
        line = chunks.ptr + chunk * _CHUNK
        source = tl.load(line)
        first_row = tl.load(line + 1)
        rows = tl.load(line + 2).to(tl.int32)
        output_row = tl.load(line + 3)
        slot = tl.load(line + 4)
        # Tiles are numbered over all chunks, so programs without a tile of one chunk begin with the
        # next.
        start = tl.load(line + 5).to(tl.int32)
        # Programs that take part count from 0: each tile number must belong to one of them.
        absent = tl.where(chunk < shared_chunk, COPIES.COPIERS, 0)
        programs = tl.num_programs(0) - absent
        tiles_m = tl.cdiv(rows, TILES.BLOCK_M)
        end = start + tiles_m * tiles_n
        first = first_tile(start, program - absent, programs)
        # A program without a tile of this chunk does not wait for it: others of this grid do.
        if first < end:
            address = input_address + first_row * input.stride * element_bytes
            # int64 in both branches: a variable that a branch assigns keeps its type, and the stride
            # may have been compiled in as a plain 1.
            stride = input.stride + tl.zeros((), tl.int64)
            row_scale_ptr = epilogue.row_scale_ptr
            if TILES.SCALES == "row":
                row_scale_ptr += first_row
            whole = own
            whole_row = first_row
            if source != workspace.rank:
                # Once per chunk, outside the tile loop. Its value is not checked: tiles go into this rank's
                # own output, of an op that failed.
                slot_byte = workspace.slot_offset + slot * 8
                wait(workspace, source, slot_byte, epoch, COMPILED_STORES)
                if TILES.DESCRIPTORS != "":
                    # The wait orders generic loads; TMA reads through another proxy.
                    fence_descriptor_loads(TILES.COMPILED)
                address = gathered_address + output_row * K * element_bytes
                stride = K + tl.zeros((), tl.int64)
                if TILES.SCALES == "row":
                    row_scale_ptr = region_pointer(
                        workspace, workspace.rank, scale_offset, epilogue.row_scale_ptr
                    )
                    row_scale_ptr += output_row
                whole = gathered
                whole_row = output_row
            a_ptr = address.to(input.ptr.dtype)
            # The launch has checked both places that `address` may be; the compiler sees a number.
            if TILES.ALIGNED:
                a_ptr = tl.multiple_of(a_ptr, 16)
                stride = tl.multiple_of(stride, VECTOR)
            a, a_row = part_of_rows(whole, a_ptr, stride, whole_row, rows, K, TILES)
            c_ptr = output_ptr + output_row * N
            c, c_row = part_of_output(whole_c, c_ptr, output_row, rows, N, TILES)
            of_chunk = Epilogue(epilogue.bias_ptr, row_scale_ptr, epilogue.column_scale_ptr)
            # No wait in this loop, so the compiler may flatten it and pipeline across tiles (law 4).
            for tile in tl.range(
                first, end, programs, flatten=TILES.FLATTEN, warp_specialize=TILES.WARP_SPECIALIZE
            ):
                tile_m, tile_n = grouped_tile(tile - start, tiles_m, tiles_n, TILES.GROUP_M)
                acc = multiply_tile(a, stride, rows, weight, b, N, K, tile_m, tile_n, TILES,
                                    a_row, a_ptr, weight.ptr)  # fmt: skip
                emit_tile(c, acc, of_chunk, tile_m, tile_n, rows, N, TILES, False, c_row)
