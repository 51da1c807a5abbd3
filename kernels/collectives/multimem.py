"""Collectives by the switch: one store that reaches every rank, and one load that sums over all of them.

A *multicast address* names the same byte of every rank's buffer at once. With ``MULTIMEM`` (NVLink switch,
9.0 and later) ``multimem.st`` stores a 16-byte vector to all ranks. ``multimem.ld_reduce`` reads it from
all ranks as one sum, which it adds in fp32, in its own order, and rounds once. Each sum is taken once and
then stored everywhere, so ranks get the same bits, but not the bits of a sum in rank order. So these
kernels run only on request.

Without ``MULTIMEM`` the same protocol runs over the table of peers, one after another, and sums are in rank
order. Interpreted kernels do the same if there is no multicast address. ``sim`` has one: it emulates the
instructions, rank by rank (``python/interlace_verify/ptx/multimem.py``).

The multicast address is a second address of the same memory. Accesses through the two are ordered by the
slots, with release and acquire of system scope, as for any other data, and by a ``fence.proxy.alias``:
without it CUDA promises nothing about a second address within a kernel. So the accesses are relaxed.
"""

import triton
import triton.language as tl

from interlace.kernels.signal import current_epoch, peer_pointer, publish, wait
from interlace.kernels.slots import publish_to_all, publish_turn, wait_credits, wait_sources
from interlace.kernels.transfer import (
    TRANSFER_COLUMNS,
    copy_elements,
    data_pointer,
    region_pointer,
    table_line,
)

PART_COLUMNS = 4
_PART = tl.constexpr(PART_COLUMNS)
_SEND = tl.constexpr(TRANSFER_COLUMNS)


@triton.jit
def fence_addresses(MULTIMEM: tl.constexpr):
    """Order accesses by a multicast address with accesses by the normal address of the same memory."""
    if MULTIMEM:
        tl.inline_asm_elementwise(
            "fence.proxy.alias; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def broadcast_vectors(peers, multicast, byte, from_address, valid,
                      MULTIMEM: tl.constexpr):  # fmt: skip
    """Copy 16-byte vectors, from ``from_address`` each, to ``byte`` of every rank's buffer."""
    # One asm call per 16-byte vector: Triton has no elements of that size, so addresses go in and the
    # data stays in registers of the asm. v4.f32 for every dtype: a store only moves bits.
    if MULTIMEM:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .b32 a, b, c, d;
            setp.ne.s32 p, $3, 0;
            @p ld.global.v4.b32 {a, b, c, d}, [$1];
            @p multimem.st.relaxed.sys.global.v4.f32 [$2], {a, b, c, d};
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r",
            [from_address, multicast + byte, valid.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        # By 32-bit words, so that one path serves all dtypes.
        for word in tl.static_range(4):
            source = (from_address + 4 * word).to(tl.pointer_type(tl.int32))
            value = tl.load(source, mask=valid)
            for peer in range(peers.world_size):
                address = tl.load(peers.peers_ptr + peer) + byte + 4 * word
                tl.store(address.to(tl.pointer_type(tl.int32)), value, mask=valid)


@triton.jit
def sum_vectors(peers, multicast, from_byte, to_byte, to_address, valid,
                DTYPE: tl.constexpr, BROADCAST: tl.constexpr, MULTIMEM: tl.constexpr):  # fmt: skip
    """Sum the 16-byte vectors at ``from_byte`` of all ranks' buffers.

    They go to ``to_byte`` of every rank's buffer (``BROADCAST``), or to ``to_address`` here.
    """
    if MULTIMEM:
        fence_addresses(True)
        # acc::f32: sums of 16-bit numbers are taken in fp32 and rounded once. fp32 has no such
        # suffix.
        PAIR: tl.constexpr = "bf16x2" if DTYPE.is_bf16() else "f16x2"
        KIND: tl.constexpr = "v4.f32" if DTYPE.is_fp32() else "acc::f32.v4." + PAIR
        STORE: tl.constexpr = (
            "multimem.st.relaxed.sys.global.v4.f32" if BROADCAST else "st.global.v4.b32"
        )
        target = multicast + to_byte if BROADCAST else to_address
        tl.inline_asm_elementwise(
            "{\n.reg .pred p;\n.reg .b32 a, b, c, d;\nsetp.ne.s32 p, $3, 0;\n"
            "@p multimem.ld_reduce.relaxed.sys.global.add." + KIND + " {a, b, c, d}, [$1];\n"
            "@p " + STORE + " [$2], {a, b, c, d};\nmov.u32 $0, 0;\n}",
            "=r,l,l,r",
            [multicast + from_byte, target, valid.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        fence_addresses(BROADCAST)
    else:
        ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
        for element in tl.static_range(16 // ITEM):
            # Without a switch: fp32, in rank order, rounded once.
            total = tl.zeros(valid.shape, tl.float32)
            for peer in range(peers.world_size):
                address = tl.load(peers.peers_ptr + peer) + from_byte + ITEM * element
                total += tl.load(address.to(tl.pointer_type(DTYPE)), mask=valid).to(tl.float32)
            if BROADCAST:
                for peer in range(peers.world_size):
                    address = tl.load(peers.peers_ptr + peer) + to_byte + ITEM * element
                    tl.store(address.to(tl.pointer_type(DTYPE)), total.to(DTYPE), mask=valid)
            else:
                address = to_address + ITEM * element
                tl.store(address.to(tl.pointer_type(DTYPE)), total.to(DTYPE), mask=valid)


@triton.jit
def broadcast_chunks(workspace, multicast, input, sends, columns, epoch, COPIES: tl.constexpr,
                     row_scale_ptr, scale_offset, SCALED: tl.constexpr):  # fmt: skip
    """Push chunks like ``transfer.push_chunks``, every ``COPIERS``-th, once for all ranks.

    Rows begin at multiples of 16 bytes and are whole vectors. A chunk's sends are neighbours in the
    table, one per peer, which differ in the peer only.
    """
    ITEM: tl.constexpr = input.ptr.dtype.element_ty.primitive_bitwidth // 8
    VECTORS: tl.constexpr = COPIES.COPY_COLUMNS * ITEM // 16
    # A chunk has a send per peer; the first is read. With one rank there is no send: divide by 1.
    others = max(workspace.world_size - 1, 1)
    # All ranks' credits before the first store: a multicast store reaches all of them at once.
    if wait_credits(workspace, epoch) == 0:
        for chunk in range(tl.program_id(0), sends.count // others, COPIES.COPIERS):
            _, first_row, rows, gathered_row, slot = table_line(sends.ptr, chunk * others, _SEND)
            from_address = (input.ptr + first_row * input.stride).to(tl.int64)
            to_byte = workspace.data_offset + gathered_row * columns * ITEM
            for row in range(0, rows, COPIES.COPY_ROWS):
                offs_m = row + tl.arange(0, COPIES.COPY_ROWS).to(tl.int64)
                for vector in range(0, columns * ITEM // 16, VECTORS):
                    offs_v = vector + tl.arange(0, VECTORS)
                    valid = (offs_m < rows)[:, None] & (offs_v < columns * ITEM // 16)[None, :]
                    broadcast_vectors(
                        workspace,
                        multicast,
                        to_byte + offs_m[:, None] * columns * ITEM + offs_v[None, :] * 16,
                        from_address + offs_m[:, None] * input.stride * ITEM + offs_v[None, :] * 16,
                        valid,
                        COPIES.MULTICAST == "multimem",
                    )
            fence_addresses(COPIES.MULTICAST == "multimem")
            if SCALED:
                # Scales are few and need not be 16-byte aligned: they are sent to each peer separately.
                for step in range(1, workspace.world_size):
                    peer = (workspace.rank + step) % workspace.world_size
                    scales_ptr = region_pointer(workspace, peer, scale_offset, row_scale_ptr)
                    copy_elements(scales_ptr + gathered_row, row_scale_ptr + first_row, rows, 128)
            publish_to_all(workspace, workspace.slot_offset + slot * 8, epoch)


@triton.jit
def broadcast_elements(peers, multicast, byte, from_ptr, elements,
                       BLOCK: tl.constexpr, MULTIMEM: tl.constexpr):  # fmt: skip
    """Copy up to ``BLOCK`` elements, 16-byte aligned on both sides, to ``byte`` of all ranks' buffers.

    Elements after the last whole vector go to the ranks one by one.
    """
    ITEM: tl.constexpr = from_ptr.dtype.element_ty.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // ITEM
    offsets = tl.arange(0, BLOCK // VECTOR).to(tl.int64)
    whole = elements // VECTOR
    broadcast_vectors(
        peers,
        multicast,
        byte + offsets * 16,
        from_ptr.to(tl.int64) + offsets * 16,
        offsets < whole,
        MULTIMEM,
    )
    fence_addresses(MULTIMEM)
    # A vector that is not whole would overwrite memory after the part.
    rest = whole * VECTOR + tl.arange(0, VECTOR)
    value = tl.load(from_ptr + rest, mask=rest < elements)
    for peer in range(peers.world_size):
        to_ptr = region_pointer(peers, peer, byte, from_ptr)
        tl.store(to_ptr + rest, value, mask=rest < elements)


@triton.jit(do_not_specialize=["workspace", "multicast"])
def multimem_all_gather_kernel(
    workspace,
    multicast,
    input_ptr,
    output_ptr,
    parts_ptr,
    BLOCK: tl.constexpr,
    MULTIMEM: tl.constexpr,
):
    """All-gather of flat shards, each element sent once for all ranks.

    Legend: ``parts``: a line per rank: first element in the output, elements, byte in the data region
    (a multiple of 16), number of its first block. Blocks are numbered over all ranks, and so
    are their slots. ``input`` is 16-byte aligned.

    Ordering: a program waits for every rank's credit, stores its blocks of the own shard to all ranks,
    publishes the slot of each at every rank; then it takes blocks of all ranks, each after its slot.
    Sending waits for nothing of this op. finish_kernel gives the credit for reuse.

    Example: W = 2, 6 elements each, BLOCK = 4, one program per rank: rank 1 stores its blocks 2 and 3 (4
    and 2 elements) to both ranks and publishes slots 2 and 3 at both; then it copies blocks 0-3.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    ITEM: tl.constexpr = input_ptr.dtype.element_ty.primitive_bitwidth // 8
    own = parts_ptr + workspace.rank * _PART
    own_elements = tl.load(own + 1)
    own_byte = workspace.data_offset + tl.load(own + 2)
    own_block = tl.load(own + 3)
    if wait_credits(workspace, epoch) == 0:
        for block in range(program, tl.cdiv(own_elements, BLOCK), programs):
            element = tl.cast(block, tl.int64) * BLOCK
            broadcast_elements(
                workspace,
                multicast,
                own_byte + element * ITEM,
                input_ptr + element,
                min(own_elements - element, BLOCK),
                BLOCK,
                MULTIMEM,
            )
            slot_byte = workspace.slot_offset + (own_block + block) * 8
            # Also to this rank, whose programs take a block only after its slot.
            publish_to_all(workspace, slot_byte, epoch)
    for source in range(workspace.world_size):
        part = parts_ptr + source * _PART
        first = tl.load(part)
        elements = tl.load(part + 1)
        from_ptr = region_pointer(
            workspace, workspace.rank, workspace.data_offset + tl.load(part + 2), input_ptr
        )
        first_block = tl.load(part + 3)
        for block in range(program, tl.cdiv(elements, BLOCK), programs):
            slot_byte = workspace.slot_offset + (first_block + block) * 8
            wait(workspace, source, slot_byte, epoch)
            element = tl.cast(block, tl.int64) * BLOCK
            count = min(elements - element, BLOCK)
            copy_elements(output_ptr + first + element, from_ptr + element, count, BLOCK)


@triton.jit(do_not_specialize=["workspace", "multicast", "elements", "blocks"])
def multimem_reduce_scatter_kernel(
    workspace,
    multicast,
    input_ptr,
    output_ptr,
    parts_ptr,
    blocks,
    sums_offset,
    BLOCK: tl.constexpr,
    MULTIMEM: tl.constexpr,
):
    """Reduce-scatter of a flat tensor: each rank sums its own part of all inputs, in place.

    Legend: ``parts``: a line per owner: first element in the input, elements, unused, number of its
    first block. Every part begins a new block; there are ``blocks`` of them, and as many slots per
    source. Inputs are staged at ``data_offset``, block b from element ``b * BLOCK`` on; sums of the own
    part at ``sums_offset``.

    Ordering: a program waits for every rank's credit, copies its blocks of the input into the own
    buffer, publishes the slot (source, block) of each at its owner. The owner waits for the slots of all
    sources, then sums. Staging waits for nothing of this op. Peers read this rank's buffer until all
    have finished: a stream waits for every rank's credit before any op writes it again.

    Example: W = 2, 6 elements, BLOCK = 4, parts of 3: blocks 0 and 1. Rank 0 stages elements 0-2 for
    itself, slot 0, and 3-5 for rank 1, slot 1 there; rank 1 sums block 1 of both ranks.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    DTYPE: tl.constexpr = input_ptr.dtype.element_ty
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // ITEM
    staged_ptr = data_pointer(workspace, workspace.rank, input_ptr)
    # All ranks' credits, although only the own buffer is written: every owner reads from it, and must have
    # finished the op before.
    if wait_credits(workspace, epoch) == 0:
        for step in range(workspace.world_size):
            owner = (workspace.rank + 1 + step) % workspace.world_size
            part = parts_ptr + owner * _PART
            from_ptr = input_ptr + tl.load(part)
            elements = tl.load(part + 1)
            first_block = tl.load(part + 3)
            its_blocks = tl.cdiv(elements, BLOCK).to(tl.int32)
            for block in range(program, its_blocks, programs):
                element = tl.cast(block, tl.int64) * BLOCK
                to_ptr = staged_ptr + first_block * BLOCK + element
                copy_elements(to_ptr, from_ptr + element, min(elements - element, BLOCK), BLOCK)
            # All at once: a publish waits until all stores so far have arrived.
            slot_byte = workspace.slot_offset + (workspace.rank * blocks + first_block) * 8
            publish_turn(workspace, owner, slot_byte, program, its_blocks, programs, epoch)
    own = parts_ptr + workspace.rank * _PART
    own_elements = tl.load(own + 1)
    own_block = tl.load(own + 3)
    sums_ptr = region_pointer(workspace, workspace.rank, sums_offset, input_ptr)
    vectors = tl.arange(0, BLOCK // VECTOR).to(tl.int64)
    for block in range(program, tl.cdiv(own_elements, BLOCK), programs):
        slot_byte = workspace.slot_offset + (own_block + block) * 8
        # Not checked: this sum stays on this rank, in the output of an op that failed.
        wait_sources(workspace, slot_byte, blocks, epoch)
        element = tl.cast(block, tl.int64) * BLOCK
        count = min(own_elements - element, BLOCK)
        byte = (own_block * BLOCK + element) * ITEM + vectors * 16
        sum_vectors(
            workspace,
            multicast,
            workspace.data_offset + byte,
            byte,
            (sums_ptr + element).to(tl.int64) + vectors * 16,
            # The sum of the last vector may include memory after the part; `count` numbers are used.
            vectors < tl.cdiv(count, VECTOR),
            DTYPE,
            False,
            MULTIMEM,
        )
        tl.debug_barrier()  # threads read what other threads of this program have stored
        copy_elements(output_ptr + element, sums_ptr + element, count, BLOCK)


@triton.jit(do_not_specialize=["workspace", "multicast", "elements", "blocks"])
def multimem_all_reduce_kernel(
    workspace,
    multicast,
    input_ptr,
    output_ptr,
    elements,
    blocks,
    sums_offset,
    BLOCK: tl.constexpr,
    MULTIMEM: tl.constexpr,
):
    """All-reduce of a flat tensor in two shots: block b is summed by rank ``b % W``, for all ranks.

    Legend: ``input`` and ``output`` are ``[elements]`` and may be the same tensor: a block of the output
    is written only after its sum has come back, which is after it was staged. Slots: (source, block) of
    staged blocks, then one per block for its sum.

    Ordering: as multimem_reduce_scatter_kernel up to the sums; an owner stores each to all ranks and
    publishes its slot at every rank. Every rank then waits for the sums, block by block. Staging waits
    for nothing of this op, and summing only for staging.

    Example: W = 2, 6 elements, BLOCK = 4: both ranks stage blocks 0 and 1, and signal the first to rank 0,
    the second to rank 1; rank 1 stores the sum of elements 4-5 to both ranks and publishes slot 5.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    DTYPE: tl.constexpr = input_ptr.dtype.element_ty
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // ITEM
    staged_ptr = data_pointer(workspace, workspace.rank, input_ptr)
    free = wait_credits(workspace, epoch) == 0
    if free:
        for block in range(program, blocks, programs):
            element = tl.cast(block, tl.int64) * BLOCK
            count = min(elements - element, BLOCK)
            copy_elements(staged_ptr + element, input_ptr + element, count, BLOCK)
            slot_byte = workspace.slot_offset + (workspace.rank * blocks + block) * 8
            publish(peer_pointer(workspace, block % workspace.world_size, slot_byte), epoch)
    vectors = tl.arange(0, BLOCK // VECTOR).to(tl.int64)
    sums_slot = workspace.slot_offset + workspace.world_size * blocks * 8
    # This rank sums blocks b with b % W == rank, and its programs take turns.
    for block in range(
        workspace.rank + program * workspace.world_size, blocks, programs * workspace.world_size
    ):
        slot_byte = workspace.slot_offset + block * 8
        arrived = wait_sources(workspace, slot_byte, blocks, epoch) == 0
        # This sum goes into all ranks' memory: it needs their credits, and inputs that have all
        # arrived.
        if free & arrived:
            element = tl.cast(block, tl.int64) * BLOCK
            count = min(elements - element, BLOCK)
            byte = element * ITEM + vectors * 16
            sum_vectors(
                workspace,
                multicast,
                workspace.data_offset + byte,
                sums_offset + byte,
                byte,
                vectors < tl.cdiv(count, VECTOR),
                DTYPE,
                True,
                MULTIMEM,
            )
            publish_to_all(workspace, sums_slot + block * 8, epoch)
    sums_ptr = region_pointer(workspace, workspace.rank, sums_offset, input_ptr)
    for block in range(program, blocks, programs):
        owner = block % workspace.world_size
        wait(workspace, owner, sums_slot + block * 8, epoch)
        element = tl.cast(block, tl.int64) * BLOCK
        count = min(elements - element, BLOCK)
        copy_elements(output_ptr + element, sums_ptr + element, count, BLOCK)
