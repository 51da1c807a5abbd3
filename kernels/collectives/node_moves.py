"""Moving data between nodes: puts where memory is not mapped, and the kernel that does a list of moves.

The table of peers has two halves here. Entry r is the address where rank r's buffer is mapped, 0 if it is
not mapped. Entry ``world_size + r`` is the target of puts to rank r, and the constexpr ``PUT`` says what it
means::

    "nvshmem"  the rank's number for NVSHMEM, which copies and signals (kernels/node_puts.py)
    "stores"   its address: a put copies at once. For tests, where all memory is in fact mapped
    "late"     its address: a put only signals, and the receiver copies the data when it waits

A network is between the last two: it reads the source some time after the put has begun and before the
receiver is notified. Code that is right for both is right for times in between; ``interlace.verify`` runs
both.

Legend: ``rows`` of ``columns`` elements; workspaces have them densely.
"""

import triton
import triton.language as tl

from interlace.kernels import node_order as order, node_puts as nvshmem
from interlace.kernels.arguments import Span
from interlace.kernels.signal import (
    CREDIT_WORDS,
    counted_epoch,
    current_epoch,
    is_void,
    peer_pointer,
    publish,
    wait,
    wait_credit,
)
from interlace.kernels.transfer import (
    IN_FLIGHT_BYTES,
    copy_chunk,
    copy_elements,
    data_pointer,
)

_COLUMNS = tl.constexpr(order.MOVE_COLUMNS)
_SEND = tl.constexpr(order.SEND)
_FORWARD = tl.constexpr(order.FORWARD)
_PUT = tl.constexpr(order.PUT)
_LAND = tl.constexpr(order.LAND)
_CREDIT = tl.constexpr(CREDIT_WORDS)
_SET = tl.constexpr(nvshmem.SIGNAL_SET)
_GE = tl.constexpr(nvshmem.COMPARE_GE)
_LANES = tl.constexpr(32)
_IN_FLIGHT = tl.constexpr(IN_FLIGHT_BYTES)


@triton.jit
def byte_pointer(peers, entry, byte_offset):
    """Point to byte ``byte_offset`` of the buffer at table entry ``entry``."""
    return (tl.load(peers.peers_ptr + entry) + byte_offset).to(tl.pointer_type(tl.uint8))


@triton.jit
def put(peers, peer, span, slot_byte, epoch, PUT: tl.constexpr, BLOCK: tl.constexpr):
    """Send a ``Span`` of the own buffer to ``peer``'s, then set its slot.

    The put sends the bytes that this program has stored there, or has waited for. The source may be read
    until ``quiet_kernel`` has ended. That is before this rank gives its credit, so no rank overwrites it
    earlier.
    """
    if PUT == "nvshmem":
        # Own addresses on both sides: NVSHMEM translates them into addresses of `pe`, whose buffer has the
        # same layout. One call, by all threads together: it copies, and then sets the slot.
        own = tl.load(peers.peers_ptr + peers.rank)
        pe = tl.load(peers.peers_ptr + peers.world_size + peer)
        nvshmem.put_signal_nbi_block(
            own + span.to_byte, own + span.from_byte, span.nbytes, own + slot_byte, epoch, _SET, pe
        )
    else:
        if PUT == "stores":
            # Other threads of this program have stored what this one copies. NVSHMEM's block put has
            # this barrier in it.
            tl.debug_barrier()
            to_ptr = byte_pointer(peers, peers.world_size + peer, span.to_byte)
            from_ptr = byte_pointer(peers, peers.rank, span.from_byte)
            copy_elements(to_ptr, from_ptr, span.nbytes, BLOCK)
        publish(peer_pointer(peers, peers.world_size + peer, slot_byte), epoch)


@triton.jit
def land(peers, source, span, slot_byte, epoch, PUT: tl.constexpr, BLOCK: tl.constexpr):
    """Wait for the data that ``source`` has put with the same span; later loads of this program see it.

    Returns the value of the slot, like ``wait``. One program per put: with ``"late"`` it copies.
    """
    seen = wait(peers, source, slot_byte, epoch)
    if seen >= epoch:
        if PUT == "nvshmem":
            # The slot is set, so this returns. On some machines data put by a network card may arrive
            # after its signal, and NVSHMEM then reads back from the card.
            nvshmem.wait_until(tl.load(peers.peers_ptr + peers.rank) + slot_byte, _GE, epoch)
        if PUT == "late":
            from_ptr = byte_pointer(peers, peers.world_size + source, span.from_byte)
            to_ptr = byte_pointer(peers, peers.rank, span.to_byte)
            copy_elements(to_ptr, from_ptr, span.nbytes, BLOCK)
            # Other threads of this program load what this one has copied.
            tl.debug_barrier()
    return seen


@triton.jit(do_not_specialize=["workspace", "moves"])
def move_kernel(
    workspace,
    input,
    moves,
    columns,
    PUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Do the moves of a rank: ``moves`` as ``order.py`` describes them, rows of ``columns`` elements.

    ``BLOCK_ROWS`` 0: a flat tensor, of which rows are elements and which is copied ``BLOCK_COLUMNS`` at
    a time. ``quiet_kernel`` follows on the stream.

    Ordering: rows go to a peer after its credit. SEND publishes the slot after its stores. FORWARD and
    PUT wait for their slot first, so they pass on the rows that its publisher had stored. A put sets the
    landing slot, for which LAND waits, and LAND publishes the slot for which readers wait. So the stores of
    one rank, a put, and the loads of another are ordered by three releases and three acquires. Nothing is
    passed on after a timeout.

    Example: 2 nodes of 2 ranks, a chunk of 2 rows each, rank 0. Line 0 copies input rows 0-1 into the
    own workspace and publishes own slot 0; line 1 waits for that slot and puts the rows to rank 2, slot
    4 there; line 2 copies them to rank 1, slot 0 there. Line 3 waits for own slot 6, which rank 2's put
    sets, and publishes own slot 2; line 4 waits for that and copies rows 4-5 to rank 1, slot 2 there.
    """
    FLAT: tl.constexpr = BLOCK_ROWS == 0
    AT_ONCE: tl.constexpr = BLOCK_COLUMNS if FLAT else BLOCK_ROWS * BLOCK_COLUMNS // 2
    epoch = current_epoch(workspace)
    element_bytes = tl.cdiv(input.ptr.dtype.element_ty.primitive_bitwidth, 8)
    own_ptr = data_pointer(workspace, workspace.rank, input.ptr)
    for number in range(tl.program_id(0), moves.count, tl.num_programs(0)):
        line = moves.ptr + number * _COLUMNS
        kind = tl.load(line)
        peer = tl.load(line + 1)
        source = tl.load(line + 2)
        from_row = tl.load(line + 3)
        to_row = tl.load(line + 4)
        rows = tl.load(line + 5)
        slot_byte = workspace.slot_offset + tl.load(line + 7) * 8
        elements = rows * columns
        from_byte = workspace.data_offset + from_row * columns * element_bytes
        to_byte = workspace.data_offset + to_row * columns * element_bytes
        # + 1: a credit is good from epoch - 1 on, a slot from epoch on, so one comparison does for both.
        # For LAND the peer is this rank itself, whose credit is always there, unless the channel is
        # void.
        ready = wait_credit(workspace, peer, epoch) + 1
        # The rows of this line must have arrived before. Earlier lines never wait for this line or a
        # later one (see order.py), so any number of programs makes progress.
        waited = tl.load(line + 6)
        if waited >= 0:
            waited_byte = workspace.slot_offset + waited * 8
            if kind == _LAND:
                span = Span(from_byte, to_byte, elements * element_bytes)
                seen = land(workspace, source, span, waited_byte, epoch, PUT, BLOCK_COLUMNS)
            else:
                seen = wait(workspace, source, waited_byte, epoch)
            ready = tl.minimum(ready, seen)
        # Not after a timeout: the peer's memory may be in use, and there may be nothing to
        # pass on.
        if ready >= epoch:
            if kind == _PUT:
                span = Span(from_byte, to_byte, elements * element_bytes)
                put(workspace, peer, span, slot_byte, epoch, PUT, BLOCK_COLUMNS)
            else:
                to_ptr = data_pointer(workspace, peer, input.ptr) + to_row * columns
                if kind == _FORWARD:
                    from_ptr = own_ptr + from_row * columns
                    copy_elements(to_ptr, from_ptr, elements, AT_ONCE, _IN_FLIGHT)
                elif kind == _SEND:
                    from_ptr = input.ptr + from_row * input.stride
                    if FLAT:
                        copy_elements(to_ptr, from_ptr, elements, BLOCK_COLUMNS, _IN_FLIGHT)
                    else:
                        copy_chunk(to_ptr, from_ptr, input.stride, rows, columns,
                                   BLOCK_ROWS, BLOCK_COLUMNS)  # fmt: skip
                # LAND copies nothing here: it signals this rank's own readers, which need not know about
                # puts.
                publish(peer_pointer(workspace, peer, slot_byte), epoch)


@triton.jit(do_not_specialize=["workspace", "partners", "slot"])
def quiet_kernel(workspace, partners, slot, PUT: tl.constexpr):
    """Hold a stream until all earlier puts of this rank have been read, and have arrived.

    ``partners`` are the ranks of other nodes that put to this one or to which it puts. Slots ``slot + r``
    are for ``"late"`` puts alone: rank r has read all its arrived puts.

    Ordering: one program, after the kernels that put and land. Afterwards, so when this rank gives its
    credits, nothing of its workspace is still to be read, and its peers may write into it.

    Example: rank 0 has put to rank 2 and ends in ``quiet_kernel``, which returns when all the data is in
    rank 2's memory, whether rank 2 has looked at it or not.
    """
    if PUT == "nvshmem":
        nvshmem.quiet()
    if PUT == "late":
        epoch = current_epoch(workspace)
        if not is_void(workspace):
            # All signals before the first wait: partners that waited first would wait for each other.
            for number in range(partners.count):
                partner = tl.load(partners.ptr + number)
                slot_byte = workspace.slot_offset + (slot + workspace.rank) * 8
                publish(peer_pointer(workspace, workspace.world_size + partner, slot_byte), epoch)
        for number in range(partners.count):
            partner = tl.load(partners.ptr + number)
            slot_byte = workspace.slot_offset + (slot + partner) * 8
            wait(workspace, partner, slot_byte, epoch)


@triton.jit(do_not_specialize=["workspace", "partners"])
def put_credits_kernel(workspace, partners, PUT: tl.constexpr):
    """Give this op's credit to ``partners``, the ranks of other nodes that this one exchanges puts with.

    ``finish_kernel`` comes next on the stream: it gives the credits of this node and ends the op.

    Ordering: as finish_kernel. All reads of the channel by this rank have finished, the kernel boundary
    has ordered them before the signals, which carry no data. One warp, one signal per lane. In a void
    channel there is no credit, and partners are notified as by finish_kernel.

    Example: with epoch word 6, partners [2] and rank 0, word CREDIT[0] of rank 2 becomes 7.
    """
    epoch = counted_epoch(workspace)
    credit = tl.where(is_void(workspace), -epoch, epoch)
    # This rank's credit word, at the same place in every rank's header.
    word_byte = (_CREDIT + workspace.rank) * 8
    if PUT == "nvshmem":
        word = tl.load(workspace.peers_ptr + workspace.rank) + word_byte
        for first in range(0, partners.count, _LANES):
            # spare lanes repeat the last partner
            number = tl.minimum(first + tl.arange(0, _LANES), partners.count - 1)
            pe = tl.load(
                workspace.peers_ptr + workspace.world_size + tl.load(partners.ptr + number)
            )
            nvshmem.signal(word, credit, _SET, pe)
    else:
        for number in range(partners.count):
            partner = tl.load(partners.ptr + number)
            publish(peer_pointer(workspace, workspace.world_size + partner, word_byte), credit)
