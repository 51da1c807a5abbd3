"""All-reduce + norm of a few kilobytes, whose words carry their flags: what decoding a token wants.

The protocol is that of ``kernels/collectives/low_latency.py``, block by block. A norm needs whole rows, so
program r does all blocks of row r: first it sends them all, then it sums them one after another. So many
words are on their way while the first is waited for, and a row's statistics are one program's.
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Lot
from interlace.kernels.collectives.low_latency import (
    block_epoch,
    end_block,
    half_of,
    load_units,
    payload_of,
    send_to_all,
)
from interlace.kernels.matmul.row_norms import store_normed
from interlace.kernels.norms import (
    load_residual,
    no_statistics,
    reciprocal_deviation,
    store_sum,
    with_block,
)
from interlace.kernels.signal import count_program


@triton.jit
def _sum_of_block(peers, lot, own, valid, AVERAGE: tl.constexpr, HALF: tl.constexpr,
                  WORDS: tl.constexpr, COMPILED: tl.constexpr):  # fmt: skip
    """The sum over ranks of a block's numbers in fp32, ``[1, numbers]``; how many words are missing."""
    low = tl.zeros((WORDS,), tl.float32)
    high = tl.zeros((WORDS,), tl.float32)
    missing = tl.zeros((), tl.int32)
    # Rank order and fp32, with the own numbers in their place: same bits on all ranks.
    for source in range(peers.world_size):
        payload, lost = payload_of(peers, source, lot, own, valid, WORDS, COMPILED)
        missing += lost
        if HALF.is_fp32():
            low += payload.to(tl.float32, bitcast=True)
        else:
            low += half_of(payload, False, HALF)
            high += half_of(payload, True, HALF)
    if HALF.is_fp32():
        total = tl.reshape(low, (1, WORDS))
    else:
        # The lower half of a word is the first of its two numbers.
        total = tl.reshape(tl.join(low, high), (1, 2 * WORDS))
    if AVERAGE:
        total = total / peers.world_size
    return total, missing


@triton.jit(do_not_specialize=["peers"])
def low_latency_norm_kernel(
    peers,
    input_ptr,
    bias_ptr,
    norm,
    output_ptr,
    N,
    epochs_offset,
    words_offset,
    BIAS: tl.constexpr,
    AVERAGE: tl.constexpr,
    TAIL: tl.constexpr,
    UNIT: tl.constexpr,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """``output[M, N] = residual + sum over ranks of input_r + bias``, and its norm, everywhere.

    Legend: ``input`` is ``[M, N]``, dense, seen as integers of ``UNIT`` bytes; ``norm`` as for
    matmul_all_reduce_norm_kernel. The grid is M. A row is ``ceil(words / WORDS)`` blocks, row r's are those
    from r times as many on; ``COLUMNS`` of ``TAIL`` is the numbers of a block, ``ROWS`` 1.

    Ordering: the protocol's, for every block. A program has sent all blocks of its row before it waits for
    the first, and of two programs none waits for the other.

    Example: W = 2, M = 1, N = 512 bf16 numbers, WORDS = 128: two blocks. Rank 0 sends 128 words of block 0
    and 128 of block 1 to rank 1; then it polls the words of block 0 from rank 1, adds both ranks' numbers
    and the residual, stores them; the same of block 1; then it norms the row.
    """
    HALF: tl.constexpr = output_ptr.dtype.element_ty
    row = tl.program_id(0)
    blocks = tl.cdiv(N, TAIL.COLUMNS)
    units = N * (output_ptr.dtype.element_ty.primitive_bitwidth // 8) // UNIT
    words = tl.cdiv(units * UNIT, 4)
    row_ptr = input_ptr + row * units
    for number in range(blocks):
        block = row * blocks + number
        epoch_ptr, epoch = block_epoch(peers, epochs_offset, block)
        # A block that was given up before is not sent again: its words may not have been read.
        if epoch > 0:
            index = number * WORDS + tl.arange(0, WORDS)
            own = load_units(row_ptr, index, units, UNIT)
            send_to_all(peers, Lot(words_offset, epoch, block), own, WORDS, COMPILED)
    lost = tl.zeros((), tl.int32)
    mean, squares = no_statistics(TAIL)
    offs_m = row.to(tl.int64) + tl.arange(0, 1)
    for number in range(blocks):
        block = row * blocks + number
        epoch_ptr, epoch = block_epoch(peers, epochs_offset, block)
        if epoch > 0:
            index = number * WORDS + tl.arange(0, WORDS)
            own = load_units(row_ptr, index, units, UNIT)
            lot = Lot(words_offset, epoch, block)
            total, missing = _sum_of_block(
                peers, lot, own, index < words, AVERAGE, HALF, WORDS, COMPILED
            )
            first = number * TAIL.COLUMNS
            offs_n = first + tl.arange(0, TAIL.COLUMNS)
            if BIAS:
                bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
                total += bias.to(tl.float32)[None, :]
            # A sum without a rank is no sum: the output stays as it was.
            mask = (offs_n < N)[None, :] & (missing == 0)
            offsets = offs_m[:, None] * N + offs_n[None, :]
            residual = load_residual(norm, offsets, mask, TAIL)
            x = store_sum(total, residual, output_ptr, offsets, mask, TAIL)
            mean, squares = with_block(mean, squares, x, mask, first, N, TAIL)
            lost += missing
            end_block(epoch_ptr, epoch, missing)
        else:
            lost += 1
    if lost == 0:
        # What one thread has stored another one loads.
        tl.debug_barrier()
        deviation = reciprocal_deviation(squares, N, TAIL)
        store_normed(peers, norm, None, output_ptr, 0, row, row + 1, N, True, mean, deviation, TAIL)
    count_program(peers)
