"""Fused matmul + reduction + norm: ``row_norms.py`` is the tail of both reductions of a product.

``matmul_reduce_scatter_norm_kernel``  rows have owners, who norm them; with ``GATHER`` all ranks get them:
                                       the chain reduce-scatter, norm, all-gather of a sequence-parallel
                                       block, and an all-reduce of many rows
``matmul_all_reduce_norm_kernel``      one-shot: every rank sums and norms all rows, for few of them

Products are made and sent as by the kernels without a norm, whose device functions these are.
"""

import triton
import triton.language as tl

from interlace.kernels.collectives.reduction import SEGMENT_COLUMNS
from interlace.kernels.matmul.matmul_all_reduce import produce_for_all
from interlace.kernels.matmul.matmul_reduce_scatter import produce_for_owners
from interlace.kernels.matmul.row_norms import collect_rows, norm_rows
from interlace.kernels.signal import current_epoch
from interlace.kernels.transfer import data_pointer, table_line

_SEGMENT = tl.constexpr(SEGMENT_COLUMNS)


@triton.jit(do_not_specialize=["workspace", "gathered"])
def matmul_reduce_scatter_norm_kernel(
    workspace,
    input,
    weight,
    epilogue,
    norm,
    gathered,
    output_ptr,
    segments_ptr,
    N,
    K,
    AVERAGE: tl.constexpr,
    TAIL: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[own] = residual + activation(sum over ranks of (input_r @ weight_r)[own] + bias)``, normed.

    Legend: as matmul_reduce_scatter_kernel; ``norm``: the residual of the own rows, weight and bias of the
    norm ``[N]``, where the normed own rows go, of the dtype of the output or float8_e4m3fn, and their
    scales. ``gathered``: whole results, with ``GATHER``: of the rows of owner r from the first row of its
    segment on.

    Ordering: products as there. Then a program waits for all tiles of its slices' rows from all sources;
    with ``GATHER`` it stores the rows at every peer, which has ended the op before this one as its tiles
    have come, and publishes the slot (source, slice) there; last it waits for the slots of all other
    sources and copies their rows out. No phase waits for a later one, so no order of programs blocks.
    finish_kernel gives the credit for reuse.

    Example: W = 2, M = 32, N = 64, 16 x 16 tiles, slices of 4 rows, ``GATHER`` "normed", one program per
    rank. Rank 0 sends tiles 0-3 of rows 16-31 to rank 1, makes its own, waits for slots 0-3 (source 0) and
    4-7 (source 1), norms rows 0-3, stores them here and at rank 1 and publishes slot 8 there, ... 11; then
    it waits for slots 12-15, the slices of rank 1, and copies rows 16-31.
    """
    epoch = current_epoch(workspace)
    produce_for_owners(workspace, input, weight, epilogue, output_ptr, segments_ptr, N, K, epoch,
                       TILES)  # fmt: skip
    # Waits for data begin only here, after everything that others wait for: no order of programs blocks.
    own_ptr = data_pointer(workspace, workspace.rank, output_ptr)
    own = workspace.world_size - 1  # the last line of the table
    _, first_row, rows, _ = table_line(segments_ptr, own, _SEGMENT)
    norm_rows(workspace, own_ptr, epilogue.bias_ptr, norm, gathered, output_ptr, first_row, rows, N,
              epoch, AVERAGE, TAIL, TILES)  # fmt: skip
    if TAIL.GATHER != "":
        collect_rows(workspace, norm, gathered, segments_ptr, N, epoch, TAIL)


@triton.jit(do_not_specialize=["workspace", "M"])
def matmul_all_reduce_norm_kernel(
    workspace,
    input,
    weight,
    bias_ptr,
    norm,
    output_ptr,
    M,
    N,
    K,
    AVERAGE: tl.constexpr,
    TAIL: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[M, N] = residual + activation(sum over ranks of input_r @ weight_r + bias)``, and its norm.

    Legend: as matmul_all_reduce_kernel; ``norm`` as for matmul_reduce_scatter_norm_kernel, of all M rows,
    on every rank.

    Ordering: as matmul_all_reduce_kernel; a slice of rows is summed when the tiles of all its columns have
    arrived from all sources.

    Example: W = 2, 16 x 64, 16 x 16 tiles, slices of 4 rows. Rank 1 stores its four tiles in region 1 of
    both ranks, slots 4-7; then both wait for slots 0-7, and norm rows 0-3, 4-7, 8-11, 12-15.
    """
    epoch = current_epoch(workspace)
    produce_for_all(workspace, input, weight, output_ptr, M, N, K, epoch, TILES)
    # A loop of its own, after all stores: producing waits for no sum, so no order of programs blocks.
    own_ptr = data_pointer(workspace, workspace.rank, output_ptr)
    rows = M + tl.zeros((), tl.int64)
    norm_rows(workspace, own_ptr, bias_ptr, norm, None, output_ptr, 0, rows, N, epoch, AVERAGE, TAIL,
              TILES)  # fmt: skip
