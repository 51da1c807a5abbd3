"""Plain reduce-scatter and all-reduce: sums over ranks in fp32 and in rank order, whoever arrives first.

The part that a rank owns collects W contributions in its workspace, one region per source rank, and a
slot per (source, block). The owner waits for all sources of a block, then adds source 0, 1, ... W-1: the
result does not depend on timing, and where several ranks compute the same sum they get the same bits.
"""

import triton
import triton.language as tl

from interlace.kernels.signal import current_epoch, wait_credit
from interlace.kernels.slots import (
    SLOTS_TOGETHER,
    publish_to_all,
    publish_turn,
    wait_credits,
    wait_sources,
)
from interlace.kernels.tiling import first_tile
from interlace.kernels.transfer import aligned_pointer, copy_elements, data_pointer, table_line

SEGMENT_COLUMNS = 4
_SEGMENT = tl.constexpr(SEGMENT_COLUMNS)
_TOGETHER = tl.constexpr(SLOTS_TOGETHER)
# Sources whose loads go first. They keep the memory of the program's multiprocessor busy, and their values
# still fit its registers.
_AT_ONCE = tl.constexpr(4)


@triton.jit
def sum_contributions(sources, contribution_ptr, elements_per_source, offsets, mask,
                      AVERAGE: tl.constexpr = False):  # fmt: skip
    """Sum over sources of ``contribution_ptr[source * elements_per_source + offsets]``, fp32.

    Some sources are loaded before the first is added: one after the other, each round would take a full
    memory latency. Where ``mask`` is false the sum is 0.
    """
    total = tl.zeros(offsets.shape, dtype=tl.float32)
    # Rank order, not the order of arrival: fp32 sums depend on it, and ranks must get the same bits.
    for first in range(0, sources, _AT_ONCE):
        for number in tl.static_range(_AT_ONCE):
            source = first + number
            # Beyond the last source zeros are added, which change no bit: a sum that began as +0 is
            # never -0.
            valid = source < sources if mask is None else mask & (source < sources)
            # int64 before the product: all contributions may pass 2**31 elements.
            part_ptr = contribution_ptr + tl.cast(source, tl.int64) * elements_per_source
            total += tl.load(part_ptr + offsets, mask=valid, other=0.0).to(tl.float32)
    if AVERAGE:
        total = total / sources
    return total


@triton.jit
def sum_block(output_ptr, world_size, contribution_ptr, elements, block,
              AVERAGE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sum one block of ``[W, elements]`` contributions: by 16 bytes if all of it is aligned."""
    VECTOR: tl.constexpr = 128 // output_ptr.dtype.element_ty.primitive_bitwidth
    addresses = output_ptr.to(tl.int64) | contribution_ptr.to(tl.int64)
    first = tl.cast(block, tl.int64) * BLOCK
    # Region s begins s * elements later, so all W are aligned only if that is also whole vectors.
    aligned = ((addresses & 15) == 0) & (elements % VECTOR == 0)
    if aligned & (first + BLOCK <= elements):
        offsets = first + tl.arange(0, BLOCK)
        total = sum_contributions(
            world_size,
            aligned_pointer(contribution_ptr),
            # The same number, in a form that tells the compiler what it is a multiple of.
            elements // VECTOR * VECTOR,
            offsets,
            None,
            AVERAGE,
        )
        tl.store(aligned_pointer(output_ptr) + offsets, total.to(output_ptr.dtype.element_ty))
    else:
        offsets = first + tl.arange(0, BLOCK)
        mask = offsets < elements
        total = sum_contributions(world_size, contribution_ptr, elements, offsets, mask, AVERAGE)
        tl.store(output_ptr + offsets, total.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["workspace", "own_elements"])
def reduce_scatter_kernel(
    workspace,
    input_ptr,
    output_ptr,
    segments_ptr,
    own_elements,
    BLOCK: tl.constexpr,
    AVERAGE: tl.constexpr,
):
    """Reduce-scatter of a flat tensor: each rank ends with the sum over ranks of its own segment.

    Legend: ``input`` is ``[sum of segments]``, ``output`` is ``[own_elements]``. ``segments``: a line
    per owner in ``tiling.owner_order``: owner, first element, elements, number of the first block.

    Ordering: every program first stores its blocks into the owners' workspaces (after the owner's
    credit) and publishes a slot per block, of some blocks at once; then it sums its share of the own
    segment, a block when it has arrived from all sources. Producing never waits for a sum of this op, so
    any program order progresses.

    Example: W = 2, 10 elements, BLOCK = 4: segments of 5. Rank 0 stores elements 5-9 as its
    contribution to rank 1 in blocks of 4 and 1, slots 0 and 1 there; rank 1 adds rank 0's and its own.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    for line in range(workspace.world_size):
        owner, first_element, elements, start = table_line(segments_ptr, line, _SEGMENT)
        start = start.to(tl.int32)
        blocks = tl.cdiv(elements, BLOCK).to(tl.int32)
        first = first_tile(start, program, programs)
        # A program that has no block of this owner need not wait for its credit.
        if first < start + blocks:
            # After a timeout nothing is stored or published: the owner may still be reading its workspace.
            if wait_credit(workspace, owner, epoch) >= epoch - 1:
                to_ptr = data_pointer(workspace, owner, input_ptr) + workspace.rank * elements
                slot_byte = workspace.slot_offset + (workspace.rank * blocks - start) * 8
                # A publish waits until all stores so far have arrived, so it is not one per block. Nor one
                # for all: an owner that waits for a late rank sums the blocks that have arrived meanwhile.
                for begin in range(first, start + blocks, programs * _TOGETHER):
                    end = min(begin + programs * _TOGETHER, start + blocks)
                    for number in range(begin, end, programs):
                        element = tl.cast(number - start, tl.int64) * BLOCK
                        count = min(elements - element, BLOCK)
                        from_ptr = input_ptr + first_element + element
                        copy_elements(to_ptr + element, from_ptr, count, BLOCK)
                    publish_turn(workspace, owner, slot_byte, begin, end, programs, epoch)
    # Waits for data begin only here: a program has by now sent everything that others wait for, so no order
    # of programs can block.
    own_ptr = data_pointer(workspace, workspace.rank, input_ptr)
    own_blocks = tl.cdiv(own_elements, BLOCK).to(tl.int32)
    for block in range(program, own_blocks, programs):
        slot_byte = workspace.slot_offset + block * 8
        # Its value is not checked: the sum goes into this rank's own output only, of an op that
        # failed.
        wait_sources(workspace, slot_byte, own_blocks, epoch)
        sum_block(output_ptr, workspace.world_size, own_ptr, own_elements, block, AVERAGE, BLOCK)


@triton.jit(do_not_specialize=["workspace", "elements"])
def all_reduce_kernel(
    workspace,
    input_ptr,
    output_ptr,
    elements,
    BLOCK: tl.constexpr,
    AVERAGE: tl.constexpr,
):
    """One-shot all-reduce of a flat tensor: every rank sends all to all and sums everything itself.

    Legend: ``input`` and ``output`` are ``[elements]`` and may be the same tensor: a program has sent
    a block to all before it stores its sum, and no other program touches that block.

    Ordering: as reduce_scatter_kernel, with every rank the owner of everything: a program waits for the
    credits of all, stores a block at all, and publishes it to all at once. All ranks add the same numbers
    in the same order, so results are bitwise equal.

    Example: W = 2, 6 elements, BLOCK = 4, one program per rank: blocks 0-3 and 4-5 go into region
    [rank] of both workspaces, slots 2 * rank and 2 * rank + 1; then each rank adds regions 0 and 1.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    blocks = tl.cdiv(elements, BLOCK).to(tl.int32)
    # int64 before the product: rank * elements may pass 2**31.
    region = workspace.rank * (elements + tl.zeros((), tl.int64))
    # After a timeout nothing is stored or published: a peer may still be reading its workspace.
    if wait_credits(workspace, epoch) == 0:
        for block in range(program, blocks, programs):
            # tl.cast, as a loop's variable has no .to() in the interpreter, where it is a Python number.
            element = tl.cast(block, tl.int64) * BLOCK
            count = min(elements - element, BLOCK)
            # The next rank first, so that no rank is the target of all others at once; this rank itself
            # is last.
            for step in range(workspace.world_size):
                peer = (workspace.rank + 1 + step) % workspace.world_size
                to_ptr = data_pointer(workspace, peer, input_ptr) + region
                copy_elements(to_ptr + element, input_ptr + element, count, BLOCK)
            slot_byte = workspace.slot_offset + (workspace.rank * blocks + block) * 8
            publish_to_all(workspace, slot_byte, epoch)
    # A separate loop, after all sends: see reduce_scatter_kernel.
    own_ptr = data_pointer(workspace, workspace.rank, input_ptr)
    for block in range(program, blocks, programs):
        slot_byte = workspace.slot_offset + block * 8
        wait_sources(workspace, slot_byte, blocks, epoch)
        sum_block(output_ptr, workspace.world_size, own_ptr, elements, block, AVERAGE, BLOCK)
