"""Warps with roles for 9.0, in Gluon: what the kernels have in common whose name ends with "roles".

One warp loads, one stores, and the others multiply tile after tile; they do not know which chunk or owner
a tile is of, so nothing drains where that changes. The roles meet in *rings* of shared memory, at two
mbarriers per place: ``full`` (written, may be read) and ``empty`` (read, may be written). Whoever goes
round a ring keeps its place and ``phase``, the parity of the round; a new barrier passes as empty, so who
writes begins with the other parity.

A *part* is ``rows`` of the product, whose tiles are numbered from ``start`` on among those of all parts.
Program p of P takes the tiles t of all parts with ``t % P == p``.

Fused all-gather + matmul for 9.0 in Gluon: warps with roles, none of which drains at a chunk.

In ``all_gather_matmul.py`` all warps load, multiply and store, so at every chunk they drain the pipeline,
wait together, and fill it anew. Here one warp waits and loads, one stores, and the others multiply
tile after tile (``warp_roles.py``)::

    loads     | chunk 0: tile | wait 2:0 | tile | tile | wait 1:0 | tile |
    products        | tile      | tile     | tile       | tile   |
    stores                      | tile     | tile       | tile   |

Arguments, tables and slots are those of ``all_gather_matmul_kernel``, which stays the reference: this one
runs where it is asked for (``Configuration.warp_roles``), never interpreted, and has not run on a GPU.
Without bias and scales, for which those who multiply would need to know where a tile is.

Fused matmul + reduce-scatter for 9.0 in Gluon: warps with roles, none of which drains at an owner.

In ``matmul_reduce_scatter.py`` all warps stop after the tiles of an owner: they drain the pipeline, wait
until their stores have arrived, publish, wait for the next owner's credit, and fill the pipeline anew.
Here one warp stores, waits and publishes, while others load and multiply (``warp_roles.py``)::

    loads     | tiles of rank 1 | tiles of rank 2 | own tiles |
    products     | tiles of rank 1 | tiles of rank 2 | own tiles |
    stores    | credit | tiles of rank 1 | publish | credit | tiles of rank 2 | publish | ...

Arguments, tables and slots are those of ``matmul_reduce_scatter_kernel``, which stays the reference: this
one runs where it is asked for (``Configuration.warp_roles``), never interpreted, and has not run on a
GPU. The sums leave their layouts to the compiler, which Gluon does not, so they are the next kernel on the
stream (``sum_tiles_kernel``).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from interlace.kernels.collectives.reduction import SEGMENT_COLUMNS
from interlace.kernels.epilogue import activate
from interlace.kernels.matmul.all_gather_matmul import CHUNK_COLUMNS
from interlace.kernels.signal import (
    complete_descriptor_stores,
    current_epoch,
    fence_descriptor_loads,
    peer_pointer,
    publish_slots,
    wait,
    wait_credit,
)
from interlace.kernels.slots import SLOTS_TOGETHER
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.kernels.transfer import data_pointer

OUTPUT_PLACES = 2
_OUTPUT = tl.constexpr(OUTPUT_PLACES)
# Interpreted, this is looked at only, for its arguments; Gluon's own cannot even be hashed there.
jit = triton.jit if triton.knobs.runtime.interpret else gluon.jit
# Triton 3.8 renames these, and 3.9 has not the old names.
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


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
def rings(input_ptr, output_ptr, STAGES: gl.constexpr, TILES: gl.constexpr):
    """The ring of operands, and that of what is stored."""
    DTYPE: gl.constexpr = input_ptr.dtype.element_ty
    if TILES.DESCRIPTORS == "nk":
        b = _places(STAGES, TILES.BLOCK_N, TILES.BLOCK_K, DTYPE)
    else:
        b = _places(STAGES, TILES.BLOCK_K, TILES.BLOCK_N, DTYPE)
    a = _places(STAGES, TILES.BLOCK_M, TILES.BLOCK_K, DTYPE)
    PART: gl.constexpr = TILES.BLOCK_N // TILES.SUBTILE
    c = _places(_OUTPUT, TILES.BLOCK_M, PART, output_ptr.dtype.element_ty)
    operands = Ring(a, b, _barriers(STAGES), _barriers(STAGES))
    output = Ring(c, c, _barriers(_OUTPUT), _barriers(_OUTPUT))
    # TMA counts at the mbarriers that ordinary stores have just made.
    hopper.fence_async_shared()
    return operands, output


@jit
def _next(place, phase, PLACES: gl.constexpr):
    place += 1
    around = place == PLACES
    return gl.where(around, 0, place), gl.where(around, phase ^ 1, phase)


@jit
def _before(place, PLACES):
    # Not a second name that a loop carries: where that has the value that `place` had at the start of the
    # body, Triton takes it for a name that the loop does not change.
    return gl.where(place == 0, PLACES, place) - 1


@jit
def share(start, rows, N, TILES: gl.constexpr):
    """A part's tiles: how many along M and N, this program's first, and the end."""
    tiles_m = tl.cdiv(rows, TILES.BLOCK_M)
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    first = first_tile(start, gl.program_id(0), gl.num_programs(0))
    return tiles_m, tiles_n, first, start + tiles_m * tiles_n


@jit
def weight_operand(ring, weight, N, K, TILES: gl.constexpr):
    """A descriptor of the weight."""
    LAYOUT: gl.constexpr = ring.b.type.layout
    NK: gl.constexpr = [TILES.BLOCK_N, TILES.BLOCK_K]
    KN: gl.constexpr = [TILES.BLOCK_K, TILES.BLOCK_N]
    if TILES.DESCRIPTORS == "nk":
        b = tma.make_tensor_descriptor(weight.ptr, [N, K], [weight.stride_n, 1], NK, LAYOUT)
    else:
        b = tma.make_tensor_descriptor(weight.ptr, [K, N], [weight.stride_k, 1], KN, LAYOUT)
    return b


@jit
def load_part(ring, a, b, start, rows, first_row, N, K, place, phase, TILES: gl.constexpr):
    """Load what the program's tiles of a part take, which is in ``a`` from ``first_row`` on.

    Returns where the ring goes on. Rows past the part's, of a tile at its edge, may not have come: nobody
    stores what they become.
    """
    BLOCK_K: gl.constexpr = TILES.BLOCK_K
    BITS: gl.constexpr = ring.a.dtype.primitive_bitwidth
    BYTES: gl.constexpr = (TILES.BLOCK_M + TILES.BLOCK_N) * BLOCK_K * BITS // 8
    tiles_m, tiles_n, first, end = share(start, rows, N, TILES)
    for tile in range(first, end, gl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile - start, tiles_m, tiles_n, TILES.GROUP_M)
        row = (first_row + tile_m * TILES.BLOCK_M).to(gl.int32)
        column = tile_n * TILES.BLOCK_N
        for k in range(0, K, BLOCK_K):
            full = ring.full.index(place)
            mbarrier.wait(ring.empty.index(place), phase ^ 1)
            mbarrier.expect(full, BYTES)
            _load_tile(a, [row, k], full, ring.a.index(place))
            if TILES.DESCRIPTORS == "nk":
                _load_tile(b, [column, k], full, ring.b.index(place))
            else:
                _load_tile(b, [k, column], full, ring.b.index(place))
            place, phase = _next(place, phase, ring.full.shape[0])
    return place, phase


@jit
def _halves(acc):
    BLOCK_M: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = acc.shape[1]
    return gl.split(gl.permute(gl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@jit
def multiply(ring, output, tiles, K, TILES: gl.constexpr):
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
    # Not cleared for each tile: what its first product adds to is not looked at.
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, ACC)
    for _ in range(tiles):
        for k in range(0, K, TILES.BLOCK_K):
            mbarrier.wait(ring.full.index(place), phase)
            b = ring.b.index(place)
            if TILES.DESCRIPTORS == "nk":
                b = b.permute((1, 0))
            acc = hopper.warpgroup_mma(ring.a.index(place), b, acc, use_acc=k > 0, is_async=True)
            # The step before this one is through, so its place may be written again.
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            before = _before(place, ring.full.shape[0])
            mbarrier.arrive(ring.empty.index(before), count=1, pred=k > 0)
            place, phase = _next(place, phase, ring.full.shape[0])
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring.empty.index(_before(place, ring.full.shape[0])), count=1)
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
def store_part(output, c_ptr, start, rows, N, place, phase, free, TILES: gl.constexpr):
    """Store the program's tiles of a part, dense from ``c_ptr`` on; returns where the ring goes on.

    Not ``free``: nothing may be written there, and the tiles are dropped. The stores have read what they
    store, but need not have arrived.
    """
    PARTS: gl.constexpr = TILES.SUBTILE
    COLUMNS: gl.constexpr = TILES.BLOCK_N // PARTS
    BLOCK: gl.constexpr = [TILES.BLOCK_M, COLUMNS]
    # The part's rows only: what is beyond the edge of its last tile is the next part's.
    c = tma.make_tensor_descriptor(c_ptr, [rows, N], [N, 1], BLOCK, output.a.type.layout)
    tiles_m, tiles_n, first, end = share(start, rows, N, TILES)
    for tile in range(first, end, gl.num_programs(0)):
        tile_m, tile_n = grouped_tile(tile - start, tiles_m, tiles_n, TILES.GROUP_M)
        for number in gl.static_range(PARTS):
            mbarrier.wait(output.full.index(place), phase)
            if free:
                column = tile_n * TILES.BLOCK_N + number * COLUMNS
                row = tile_m * TILES.BLOCK_M
                _store_tile(c, [row, column], output.a.index(place))
                # Until it is read; by then the descriptor may be made anew, too.
                tma.store_wait(0)
            mbarrier.arrive(output.empty.index(place), count=1)
            place, phase = _next(place, phase, _OUTPUT)
    return place, phase


_CHUNK = tl.constexpr(CHUNK_COLUMNS)


@jit
def _gather_load(ring, workspace, input, weight, chunks, extents, N, K, TILES: gl.constexpr):
    """The warp that loads."""
    epoch = current_epoch(workspace)
    LAYOUT: gl.constexpr = ring.a.type.layout
    BLOCK: gl.constexpr = [TILES.BLOCK_M, TILES.BLOCK_K]
    b = weight_operand(ring, weight, N, K, TILES)
    # Of whole buffers, once: one in its place for the next chunk would have to wait until all loads by this
    # one are over.
    rows = extents.own_rows
    own = tma.make_tensor_descriptor(input.ptr, [rows, K], [input.stride, 1], BLOCK, LAYOUT)
    gathered_ptr, rows = data_pointer(workspace, workspace.rank, input.ptr), extents.all_rows
    gathered = tma.make_tensor_descriptor(gathered_ptr, [rows, K], [K, 1], BLOCK, LAYOUT)
    place = 0
    phase = 0
    for chunk in range(chunks.count):
        line = chunks.ptr + chunk * _CHUNK
        source = gl.load(line)
        rows = gl.load(line + 2).to(gl.int32)
        start = gl.load(line + 5).to(gl.int32)
        _, _, first, end = share(start, rows, N, TILES)
        # A program without a tile of this chunk does not wait for it.
        if first < end:
            if source == workspace.rank:
                row = gl.load(line + 1)
                place, phase = load_part(ring, own, b, start, rows, row, N, K, place, phase, TILES)
            else:
                wait(workspace, source, workspace.slot_offset + gl.load(line + 4) * 8, epoch)
                # The wait orders generic loads; TMA reads through another proxy.
                fence_descriptor_loads(TILES.COMPILED)
                row = gl.load(line + 3)
                place, phase = load_part(ring, gathered, b, start, rows, row, N, K, place, phase,
                                         TILES)  # fmt: skip


@jit
def _gather_multiply(ring, output, tiles, K, TILES: gl.constexpr):
    """The warps that multiply. A call, as lines of another file would be taken for lines of this one."""
    multiply(ring, output, tiles, K, TILES)


@jit
def _gather_store(output, output_ptr, chunks, N, TILES: gl.constexpr):
    """The warp that stores."""
    place = 0
    phase = 0
    for chunk in range(chunks.count):
        line = chunks.ptr + chunk * _CHUNK
        rows = gl.load(line + 2).to(gl.int32)
        start = gl.load(line + 5).to(gl.int32)
        _, _, first, end = share(start, rows, N, TILES)
        if first < end:
            c_ptr = output_ptr + gl.load(line + 3) * N
            place, phase = store_part(output, c_ptr, start, rows, N, place, phase, True, TILES)


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

    Ordering: the warp that loads waits for a chunk's slot, fences, and loads by TMA; the other roles see of
    a chunk only what mbarriers hand on. Only that wait is for others than this program, and it ends by
    itself, so mbarriers need no bound. Given up, the rest of the chunks are loaded as they are: tiles
    go into this rank's own output, of an op that failed.

    Example: W = 2, one chunk of 128 rows per rank, N = 512, 128 x 256 tiles, grid 2. Program 0 computes
    tiles 0, of the own shard, and 2. When the loads of tile 0 are under way it waits for slot 1 (source
    rank 1); those of tile 2 follow in the ring while tile 0 is multiplied.
    """
    ring, output = rings(input.ptr, output_ptr, STAGES, TILES)
    tiles = tl.cdiv(extents.tiles - gl.program_id(0), gl.num_programs(0))
    gl.warp_specialize(
        [
            (_gather_multiply, (ring, output, tiles, K, TILES)),
            (_gather_load, (ring, workspace, input, weight, chunks, extents, N, K, TILES)),
            (_gather_store, (output, output_ptr, chunks, N, TILES)),
        ],
        [1, 1],
        [40, 40],
    )


_SEGMENT = tl.constexpr(SEGMENT_COLUMNS)
_TOGETHER = tl.constexpr(SLOTS_TOGETHER)


@jit
def _reduce_load(ring, world_size, input, weight, segments_ptr, extents, N, K, TILES: gl.constexpr):
    """The warp that loads. It waits for nobody: all operands are this rank's own."""
    LAYOUT: gl.constexpr = ring.a.type.layout
    BLOCK: gl.constexpr = [TILES.BLOCK_M, TILES.BLOCK_K]
    b = weight_operand(ring, weight, N, K, TILES)
    rows = extents.all_rows
    a = tma.make_tensor_descriptor(input.ptr, [rows, K], [input.stride, 1], BLOCK, LAYOUT)
    place = 0
    phase = 0
    for line in range(world_size):
        segment = segments_ptr + line * _SEGMENT
        row = gl.load(segment + 1)
        rows = gl.load(segment + 2).to(gl.int32)
        start = gl.load(segment + 3).to(gl.int32)
        place, phase = load_part(ring, a, b, start, rows, row, N, K, place, phase, TILES)


@jit
def _reduce_multiply(ring, output, tiles, K, TILES: gl.constexpr):
    """The warps that multiply. A call, as lines of another file would be taken for lines of this one."""
    multiply(ring, output, tiles, K, TILES)


@jit
def _reduce_store(output, workspace, output_ptr, segments_ptr, N, TILES: gl.constexpr):
    """The warp that stores, and all that peers see of this kernel."""
    epoch = current_epoch(workspace)
    rank = workspace.rank
    programs = gl.num_programs(0)
    # As ``slots.publish_turn``, which leaves its layout to the compiler.
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    turn = gl.arange(0, _TOGETHER, LANES) * programs
    place = 0
    phase = 0
    for line in range(workspace.world_size):
        segment = segments_ptr + line * _SEGMENT
        owner = gl.load(segment)
        rows = gl.load(segment + 2).to(gl.int32)
        start = gl.load(segment + 3).to(gl.int32)
        tiles_m, tiles_n, first, end = share(start, rows, N, TILES)
        # A program without a tile of this owner waits for no credit and publishes nothing.
        if first < end:
            # Given up: the owner may still be reading what this op would overwrite.
            free = wait_credit(workspace, owner, epoch) >= epoch - 1
            # Region [rank] of the owner: every source has its own, so none overwrites another.
            to_ptr = data_pointer(workspace, owner, output_ptr) + gl.load(segment + 2) * rank * N
            place, phase = store_part(output, to_ptr, start, rows, N, place, phase, free, TILES)
            # A release does not order what TMA has under way.
            complete_descriptor_stores(TILES.COMPILED)
            if free:
                for begin in range(first, end, programs * _TOGETHER):
                    tile = begin + turn
                    slot_bytes = (rank * tiles_m * tiles_n + tile - start) * 8
                    slot_bytes += workspace.slot_offset
                    publish_slots(peer_pointer(workspace, owner, slot_bytes), tile < end, epoch)


@jit(do_not_specialize=["workspace", "extents"])
def matmul_reduce_scatter_roles_kernel(
    workspace,
    input,
    weight,
    output_ptr,
    segments_ptr,
    extents,
    N,
    K,
    STAGES: gl.constexpr,
    TILES: gl.constexpr,
):
    """``region [rank] of every owner = input[the owner's rows] @ weight``.

    Legend: that of ``matmul_reduce_scatter_kernel``, without scales; ``TILES`` is without what is done to a
    sum, and ``output`` is looked at for its dtype. ``extents``: see ``arguments.py``.

    Ordering: that of ``matmul_reduce_scatter_kernel``, by the warp that stores. It waits for the owner's
    credit, stores by TMA what mbarriers hand on to it, waits until that has arrived, and publishes. Where
    the wait was given up it drops the owner's tiles, so that the other roles come to an end. Only that
    wait is for others than this program, and it ends by itself, so mbarriers need no bound.

    Example: W = 2, M = 256, N = 512, 128 x 256 tiles, grid 2. Program 0 of rank 0 computes tile 0, of rank
    1's rows, and tile 2, of its own. While it multiplies tile 2, tile 0 is stored into region 0 of rank 1
    and its slot 0 is published.
    """
    ring, output = rings(input.ptr, output_ptr, STAGES, TILES)
    tiles = tl.cdiv(extents.tiles - gl.program_id(0), gl.num_programs(0))
    gl.warp_specialize(
        [
            (_reduce_multiply, (ring, output, tiles, K, TILES)),
            (
                _reduce_load,
                (ring, workspace.world_size, input, weight, segments_ptr, extents, N, K, TILES),
            ),
            (_reduce_store, (output, workspace, output_ptr, segments_ptr, N, TILES)),
        ],
        [1, 1],
        [40, 40],
    )
