"""Warps with roles for 9.0, in Gluon: the common parts of the kernels whose names end with "roles".

One warp loads, one stores, and the others multiply tile after tile. They do not know the chunk or owner of
a tile, so the pipeline does not drain when that changes. The roles meet in *rings* of shared memory, at two
mbarriers per place: ``full`` (written, may be read) and ``empty`` (read, may be written). A role that uses
a ring keeps its place and ``phase``, the parity of the round. A new barrier passes as empty, so the role
that writes begins with the other parity.

A *part* is ``rows`` of the product, whose tiles are numbered from ``start`` on among those of all parts.
Program p of P takes the tiles t of all parts with ``t % P == p``.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from interlace.kernels.epilogue import activate
from interlace.kernels.tiling import first_tile, grouped_tile

OUTPUT_PLACES = 2
_OUTPUT = tl.constexpr(OUTPUT_PLACES)
# Interpreted, only its arguments are looked at; Gluon's own function cannot even be hashed there.
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
    """Make the ring of operands, and the ring of tiles to store."""
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
    # Not a second name that a loop carries: if that has the value that `place` had at the start of the
    # body, Triton takes it for a name that the loop does not change.
    return gl.where(place == 0, PLACES, place) - 1


@jit
def share(start, rows, N, TILES: gl.constexpr):
    """Return a part's tiles: how many along M and N, this program's first, and the end."""
    tiles_m = tl.cdiv(rows, TILES.BLOCK_M)
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    first = first_tile(start, gl.program_id(0), gl.num_programs(0))
    return tiles_m, tiles_n, first, start + tiles_m * tiles_n


@jit
def weight_operand(ring, weight, N, K, TILES: gl.constexpr):
    """Make a descriptor of the weight."""
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
    """Load the operands of the program's tiles of a part, which is in ``a`` from ``first_row`` on.

    Return the ring's next place and phase. In a tile at the part's edge, rows past the part may not have
    arrived: their results are not stored.
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
    """Run the warps that multiply. One wgmma stays in flight from step to step."""
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
    # Not cleared for each tile: the first product of a tile overwrites it.
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, ACC)
    for _ in range(tiles):
        for k in range(0, K, TILES.BLOCK_K):
            mbarrier.wait(ring.full.index(place), phase)
            b = ring.b.index(place)
            if TILES.DESCRIPTORS == "nk":
                b = b.permute((1, 0))
            acc = hopper.warpgroup_mma(ring.a.index(place), b, acc, use_acc=k > 0, is_async=True)
            # The step before this one has finished, so its place may be written again.
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
            # Written by ordinary stores, read by TMA: each thread orders its own; arrive joins them all.
            hopper.fence_async_shared()
            mbarrier.arrive(output.full.index(output_place), count=1)
            output_place, output_phase = _next(output_place, output_phase, _OUTPUT)


@jit
def store_part(output, c_ptr, start, rows, N, place, phase, free, TILES: gl.constexpr):
    """Store the program's tiles of a part, dense from ``c_ptr`` on; return the ring's next place and phase.

    If it is not ``free``, nothing may be written there, and the tiles are dropped. At return the stores
    have read the tiles, but need not have arrived.
    """
    PARTS: gl.constexpr = TILES.SUBTILE
    COLUMNS: gl.constexpr = TILES.BLOCK_N // PARTS
    BLOCK: gl.constexpr = [TILES.BLOCK_M, COLUMNS]
    # The part's rows only: rows beyond the edge of its last tile belong to the next part.
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
                # Wait until it is read. By then the descriptor may also be made again.
                tma.store_wait(0)
            mbarrier.arrive(output.empty.index(place), count=1)
            place, phase = _next(place, phase, _OUTPUT)
    return place, phase
