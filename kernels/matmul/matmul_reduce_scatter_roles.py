"""Fused matmul + reduce-scatter for 9.0 in Gluon: warps with roles, so no pipeline drains at an owner.

In ``matmul_reduce_scatter.py`` all warps stop after the tiles of an owner: they drain the pipeline, wait
until their stores have arrived, publish, wait for the next owner's credit, and fill the pipeline again.
Here one warp stores, waits and publishes, while others load and multiply (``warp_roles.py``)::

    loads     | tiles of rank 1 | tiles of rank 2 | own tiles |
    products     | tiles of rank 1 | tiles of rank 2 | own tiles |
    stores    | credit | tiles of rank 1 | publish | credit | tiles of rank 2 | publish | ...

Arguments, tables and slots are the same as in ``matmul_reduce_scatter_kernel``, which stays the reference.
This kernel runs only on request (``Configuration.warp_roles``), is never interpreted, and has not run on a
GPU. The sums leave their layouts to the compiler, which Gluon does not allow. So they are the next kernel
on the stream (``sum_tiles_kernel``).
"""

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from interlace.kernels.collectives.reduction import SEGMENT_COLUMNS
from interlace.kernels.matmul.warp_roles import (
    jit,
    load_part,
    multiply,
    rings,
    share,
    store_part,
    weight_operand,
)
from interlace.kernels.signal import (
    complete_descriptor_stores,
    current_epoch,
    peer_pointer,
    publish_slots,
    wait_credit,
)
from interlace.kernels.slots import SLOTS_TOGETHER
from interlace.kernels.transfer import data_pointer

_SEGMENT = tl.constexpr(SEGMENT_COLUMNS)
_TOGETHER = tl.constexpr(SLOTS_TOGETHER)


@jit
def _load(ring, world_size, input, weight, segments_ptr, extents, N, K, TILES: gl.constexpr):
    """Run the warp that loads. It does not wait: all operands are this rank's own."""
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
def _multiply(ring, output, tiles, K, TILES: gl.constexpr):
    """Run the warps that multiply. A call: lines of another file would be taken for lines of this one."""
    multiply(ring, output, tiles, K, TILES)


@jit
def _store(output, workspace, output_ptr, segments_ptr, N, TILES: gl.constexpr):
    """Run the warp that stores, and all accesses of this kernel that peers see."""
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
            # After a timeout the owner may still be reading memory that this op would overwrite.
            free = wait_credit(workspace, owner, epoch) >= epoch - 1
            # Region [rank] of the owner: every source has its own, so sources do not overwrite each other.
            to_ptr = data_pointer(workspace, owner, output_ptr) + gl.load(segment + 2) * rank * N
            place, phase = store_part(output, to_ptr, start, rows, N, place, phase, free, TILES)
            # A release does not order TMA stores under way.
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

    Legend: as in ``matmul_reduce_scatter_kernel``, without scales; ``TILES`` is without the operations on a
    sum, and ``output`` only has the dtype. ``extents``: see ``arguments.py``.

    Ordering: as in ``matmul_reduce_scatter_kernel``, by the warp that stores. It waits for the owner's
    credit, stores tiles by TMA when mbarriers hand them over, waits until they have arrived, and publishes.
    After a timeout it drops the owner's tiles, so that the other roles end. Only that wait depends on other
    programs, and it is bounded, so mbarriers need no bound.

    Example: W = 2, M = 256, N = 512, 128 x 256 tiles, grid 2. Program 0 of rank 0 computes tile 0, of rank
    1's rows, and tile 2, of its own. While it multiplies tile 2, tile 0 is stored into region 0 of rank 1
    and its slot 0 is published.
    """
    ring, output = rings(input.ptr, output_ptr, STAGES, TILES)
    tiles = tl.cdiv(extents.tiles - gl.program_id(0), gl.num_programs(0))
    gl.warp_specialize(
        [
            (_multiply, (ring, output, tiles, K, TILES)),
            (
                _load,
                (ring, workspace.world_size, input, weight, segments_ptr, extents, N, K, TILES),
            ),
            (_store, (output, workspace, output_ptr, segments_ptr, N, TILES)),
        ],
        [1, 1],
        [40, 40],
    )
