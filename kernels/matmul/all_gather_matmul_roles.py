"""Fused all-gather + matmul for 9.0 in Gluon: warps with roles, so no pipeline drains at a chunk.

In ``all_gather_matmul.py`` all warps load, multiply and store, so at every chunk they drain the pipeline,
wait together, and fill it again. Here one warp waits and loads, one stores, and the others multiply
tile after tile (``warp_roles.py``)::

    loads     | chunk 0: tile | wait 2:0 | tile | tile | wait 1:0 | tile |
    products        | tile      | tile     | tile       | tile   |
    stores                      | tile     | tile       | tile   |

Arguments, tables and slots are the same as in ``all_gather_matmul_kernel``, which stays the reference. This
kernel runs only on request (``Configuration.warp_roles``), is never interpreted, and has not run on a GPU.
It has no bias and scales: for them the multiplying warps would need to know where a tile is.
"""

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from interlace.kernels.matmul.all_gather_matmul import CHUNK_COLUMNS
from interlace.kernels.matmul.warp_roles import (
    jit,
    load_part,
    multiply,
    rings,
    share,
    store_part,
    weight_operand,
)
from interlace.kernels.signal import current_epoch, fence_descriptor_loads, wait
from interlace.kernels.transfer import data_pointer

_CHUNK = tl.constexpr(CHUNK_COLUMNS)


@jit
def _load(ring, workspace, input, weight, chunks, extents, N, K, TILES: gl.constexpr):
    """Run the warp that loads."""
    epoch = current_epoch(workspace)
    LAYOUT: gl.constexpr = ring.a.type.layout
    BLOCK: gl.constexpr = [TILES.BLOCK_M, TILES.BLOCK_K]
    b = weight_operand(ring, weight, N, K, TILES)
    # Of whole buffers, once: a new descriptor for the next chunk would have to wait until all loads by this
    # one have finished.
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
def _multiply(ring, output, tiles, K, TILES: gl.constexpr):
    """Run the warps that multiply. A call: lines of another file would be taken for lines of this one."""
    multiply(ring, output, tiles, K, TILES)


@jit
def _store(output, output_ptr, chunks, N, TILES: gl.constexpr):
    """Run the warp that stores."""
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

    Legend: as in ``all_gather_matmul_kernel`` without COPIERS. ``extents``: see ``arguments.py``.

    Ordering: the warp that loads waits for a chunk's slot, fences, and loads by TMA. The other roles see a
    chunk only through mbarriers. Only that wait depends on other programs, and it is bounded, so mbarriers
    need no bound. After a timeout the rest of the chunks are loaded as they are: tiles go into this rank's
    own output, of an op that failed.

    Example: W = 2, one chunk of 128 rows per rank, N = 512, 128 x 256 tiles, grid 2. Program 0 computes
    tiles 0, of the own shard, and 2. When the loads of tile 0 are under way it waits for slot 1 (source
    rank 1); those of tile 2 follow in the ring while tile 0 is multiplied.
    """
    ring, output = rings(input.ptr, output_ptr, STAGES, TILES)
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
