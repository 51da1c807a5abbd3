"""Fused all-gather + matmul for 9.0 in Gluon: warps with roles, none of which drains at a chunk.

In ``all_gather_matmul.py`` all warps load, multiply and store, so at every chunk they drain the pipeline,
wait together, and fill it anew. Here one warp waits and loads, one stores, and the others multiply
tile after tile; they do not know of chunks::

    loads     | chunk 0: tile | wait 2:0 | tile | tile | wait 1:0 | tile |
    products        | tile      | tile     | tile       | tile   |
    stores                      | tile     | tile       | tile   |

They meet in *rings* of shared memory, at two mbarriers per place: ``full`` (written, may be read) and
``empty`` (read, may be written). Whoever goes round a ring keeps its place and ``phase``, the parity of the
round; a new barrier passes as empty, so who writes begins with the other parity.

Arguments, tables and slots are those of ``all_gather_matmul_kernel``, which stays the reference: this one
runs where it is asked for (``Configuration.warp_roles``), never interpreted, and has not run on a GPU.
Without bias and scales, for which those who multiply would need to know where a tile is.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from interlace.kernels.epilogue import activate
from interlace.kernels.fused.all_gather_matmul import CHUNK_COLUMNS
from interlace.kernels.signal import current_epoch, fence_descriptor_loads, wait
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.kernels.transfer import data_pointer

OUTPUT_PLACES = 2
_OUTPUT = tl.constexpr(OUTPUT_PLACES)
_CHUNK = tl.constexpr(CHUNK_COLUMNS)
# Interpreted, this is looked at only, for its arguments; Gluon's own cannot even be hashed there.
jit = triton.jit if triton.knobs.runtime.interpret else gluon.jit


class Ring(NamedTuple):
    """Tiles of A and B, or of the output, in as many places as there are barriers of each kind."""

    a: Any
    b: Any
    full: Any
    empty: Any


@jit
def _places(COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [COUNT, ROWS, COLUMNS], LAYOUT)


@jit
def _barriers(COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(COUNT):
        mbarrier.init(made.index(place), count=1)
    return made


@jit
def _next(place, phase, PLACES: gl.constexpr):
    place += 1
    around = place == PLACES
    return gl.where(around, 0, place), gl.where(around, phase ^ 1, phase)


@jit
def _share(line, N, TILES: gl.constexpr):
    """A chunk's tiles, by its line: number of the first, tiles_m and tiles_n, this program's first, end."""
    start = gl.load(line + 5).to(gl.int32)
    tiles_m = tl.cdiv(gl.load(line + 2).to(gl.int32), TILES.BLOCK_M)
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    first = first_tile(start, gl.program_id(0), gl.num_programs(0))
    return start, tiles_m, tiles_n, first, start + tiles_m * tiles_n


@jit
def _load_chunk(ring, a, b, line, first_row, N, K, place, phase, TILES: gl.constexpr):
    """Load what the program's tiles of a chunk take; returns where the ring goes on.

    Rows past the chunk's, of a tile at its edge, may not have come: nobody stores what they become.
    """
    BLOCK_K: gl.constexpr = TILES.BLOCK_K
    BITS: gl.constexpr = ring.a.dtype.primitive_bitwidth
    BYTES: gl.constexpr = (TILES.BLOCK_M + TILES.BLOCK_N) * BLOCK_K * BITS // 8
    start, tiles_m, tiles_n, first, end = _share(line, N, TILES)
    for tile in range(first, end, gl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile - start, tiles_m, tiles_n, TILES.GROUP_M)
        row = (first_row + tile_m * TILES.BLOCK_M).to(gl.int32)
        column = tile_n * TILES.BLOCK_N
        for k in range(0, K, BLOCK_K):
            full = ring.full.index(place)
            mbarrier.wait(ring.empty.index(place), phase ^ 1)
            mbarrier.expect(full, BYTES)
            tma.async_copy_global_to_shared(a, [row, k], full, ring.a.index(place))
            if TILES.DESCRIPTORS == "nk":
                tma.async_copy_global_to_shared(b, [column, k], full, ring.b.index(place))
            else:
                tma.async_copy_global_to_shared(b, [k, column], full, ring.b.index(place))
            place, phase = _next(place, phase, ring.full.shape[0])
    return place, phase


@jit
def _load(ring, workspace, input, weight, chunks, extents, N, K, TILES: gl.constexpr):
    """The warp that loads."""
    epoch = current_epoch(workspace)
    A: gl.constexpr = ring.a.type.layout
    B: gl.constexpr = ring.b.type.layout
    BLOCK_K: gl.constexpr = TILES.BLOCK_K
    BLOCK_N: gl.constexpr = TILES.BLOCK_N
    NK: gl.constexpr = TILES.DESCRIPTORS == "nk"
    A_BLOCK: gl.constexpr = [TILES.BLOCK_M, BLOCK_K]
    B_BLOCK: gl.constexpr = [BLOCK_N, BLOCK_K] if NK else [BLOCK_K, BLOCK_N]
    if NK:
        b = tma.make_tensor_descriptor(weight.ptr, [N, K], [weight.stride_n, 1], B_BLOCK, B)
    else:
        b = tma.make_tensor_descriptor(weight.ptr, [K, N], [weight.stride_k, 1], B_BLOCK, B)
    # Of whole buffers, once: one in its place for the next chunk would have to wait until all loads by this
    # one are over.
    rows = extents.own_rows
    own = tma.make_tensor_descriptor(input.ptr, [rows, K], [input.stride, 1], A_BLOCK, A)
    gathered_ptr, rows = data_pointer(workspace, workspace.rank, input.ptr), extents.all_rows
    gathered = tma.make_tensor_descriptor(gathered_ptr, [rows, K], [K, 1], A_BLOCK, A)
    place = 0
    phase = 0
    for chunk in range(chunks.count):
        line = chunks.ptr + chunk * _CHUNK
        source = gl.load(line)
        _, _, _, first, end = _share(line, N, TILES)
        # A program without a tile of this chunk does not wait for it.
        if first < end:
            if source == workspace.rank:
                row = gl.load(line + 1)
                place, phase = _load_chunk(ring, own, b, line, row, N, K, place, phase, TILES)
            else:
                wait(workspace, source, workspace.slot_offset + gl.load(line + 4) * 8, epoch)
                # The wait orders generic loads; TMA reads through another proxy.
                fence_descriptor_loads(TILES.COMPILED)
                row = gl.load(line + 3)
                place, phase = _load_chunk(ring, gathered, b, line, row, N, K, place, phase, TILES)


@jit
def _halves(acc):
    BLOCK_M: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = acc.shape[1]
    return gl.split(gl.permute(gl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@jit
def _multiply(ring, output, tiles, K, TILES: gl.constexpr):
    """The warps that multiply. One wgmma stays in flight from step to step."""
    BLOCK_M: gl.constexpr = TILES.BLOCK_M
    BLOCK_N: gl.constexpr = TILES.BLOCK_N
    PARTS: gl.constexpr = TILES.SUBTILE
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    place = 0
    phase = 0
    output_place = 0
    output_phase = 0
    for _ in range(tiles):
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, ACC)
        before = place
        for k in range(0, K, TILES.BLOCK_K):
            mbarrier.wait(ring.full.index(place), phase)
            b = ring.b.index(place)
            if TILES.DESCRIPTORS == "nk":
                b = b.permute((1, 0))
            acc = hopper.warpgroup_mma(ring.a.index(place), b, acc, use_acc=k > 0, is_async=True)
            # The step before this one is through, so its place may be written again.
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(ring.empty.index(before), count=1, pred=k > 0)
            before = place
            place, phase = _next(place, phase, ring.full.shape[0])
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring.empty.index(before), count=1)
        if PARTS == 1:
            parts = (acc,)
        elif PARTS == 2:
            parts = _halves(acc)
        else:
            left, right = _halves(acc)
            parts = _halves(left) + _halves(right)
        for number in gl.static_range(PARTS):
            part = activate(parts[number], TILES).to(output.a.dtype)
            mbarrier.wait(output.empty.index(output_place), output_phase ^ 1)
            output.a.index(output_place).store(part)
            # Written by ordinary stores, read by TMA: each thread orders its own; arrive meets them all.
            hopper.fence_async_shared()
            mbarrier.arrive(output.full.index(output_place), count=1)
            output_place, output_phase = _next(output_place, output_phase, _OUTPUT)


@jit
def _store(output, output_ptr, chunks, N, TILES: gl.constexpr):
    """The warp that stores."""
    PARTS: gl.constexpr = TILES.SUBTILE
    PART: gl.constexpr = TILES.BLOCK_N // PARTS
    BLOCK: gl.constexpr = [TILES.BLOCK_M, PART]
    LAYOUT: gl.constexpr = output.a.type.layout
    place = 0
    phase = 0
    for chunk in range(chunks.count):
        line = chunks.ptr + chunk * _CHUNK
        start, tiles_m, tiles_n, first, end = _share(line, N, TILES)
        if first < end:
            # The chunk's rows only: what is beyond the edge of its last tile is the next chunk's.
            c_ptr = output_ptr + gl.load(line + 3) * N
            rows = gl.load(line + 2).to(gl.int32)
            c = tma.make_tensor_descriptor(c_ptr, [rows, N], [N, 1], BLOCK, LAYOUT)
            for tile in range(first, end, gl.num_programs(0)):
                tile_m, tile_n = grouped_tile(tile - start, tiles_m, tiles_n, TILES.GROUP_M)
                for number in gl.static_range(PARTS):
                    mbarrier.wait(output.full.index(place), phase)
                    column = tile_n * TILES.BLOCK_N + number * PART
                    row = tile_m * TILES.BLOCK_M
                    tma.async_copy_shared_to_global(c, [row, column], output.a.index(place))
                    # Until it is read; by then the descriptor may be made anew, too.
                    tma.store_wait(0)
                    mbarrier.arrive(output.empty.index(place), count=1)
                    place, phase = _next(place, phase, _OUTPUT)


@jit(do_not_specialize=["workspace", "chunks", "extents"])
def all_gather_matmul_roles_kernel(
    workspace,
    input,
    weight,
    output_ptr,
    chunks,
    extents,
    N,
    K,
    STAGES: gl.constexpr,
    TILES: gl.constexpr,
):
    """``output[M, N] = activation(gathered[M, K] @ weight[K, N])``.

    Legend: that of ``all_gather_matmul_kernel`` with no COPIERS. ``extents``: see ``arguments.py``.
    Program p of P takes the tiles t of all chunks with ``t % P == p``.

    Ordering: the warp that loads waits for a chunk's slot, fences, and loads by TMA; the other roles see of
    a chunk only what mbarriers hand on. Only that wait is for others than this program, and it ends by
    itself, so mbarriers need no bound. Given up, the rest of the chunks are loaded as they are: tiles
    go into this rank's own output, of an op that failed.

    Example: W = 2, one chunk of 128 rows per rank, N = 512, 128 x 256 tiles, grid 2. Program 0 computes
    tiles 0, of the own shard, and 2. When the loads of tile 0 are under way it waits for slot 1 (source
    rank 1); those of tile 2 follow in the ring while tile 0 is multiplied.
    """
    DTYPE: gl.constexpr = input.ptr.dtype.element_ty
    if TILES.DESCRIPTORS == "nk":
        b = _places(STAGES, TILES.BLOCK_N, TILES.BLOCK_K, DTYPE)
    else:
        b = _places(STAGES, TILES.BLOCK_K, TILES.BLOCK_N, DTYPE)
    a = _places(STAGES, TILES.BLOCK_M, TILES.BLOCK_K, DTYPE)
    c = _places(_OUTPUT, TILES.BLOCK_M, TILES.BLOCK_N // TILES.SUBTILE, DTYPE)
    ring = Ring(a, b, _barriers(STAGES), _barriers(STAGES))
    output = Ring(c, c, _barriers(_OUTPUT), _barriers(_OUTPUT))
    # TMA counts at the mbarriers that ordinary stores have just made.
    hopper.fence_async_shared()
    tiles = tl.cdiv(extents.tiles - gl.program_id(0), gl.num_programs(0))
    gl.warp_specialize(
        [
            (_multiply, (ring, output, tiles, K, TILES)),
            (_load, (ring, workspace, input, weight, chunks, extents, N, K, TILES)),
            (_store, (output, output_ptr, chunks, N, TILES)),
        ],
        [1, 1],
        [40, 40],
    )
