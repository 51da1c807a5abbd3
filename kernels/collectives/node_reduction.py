"""Reduce-scatter over several nodes: sums within each node first, then one partial sum per node travels.

Between two nodes only partial sums travel: the bytes of the parts of one node, once, instead of one
contribution per rank. For owner 2 of four ranks on two nodes::

    node 0   0 --contribution--> 0 (sums for node 0)  --put partial-->  2
             1 --contribution--> 0
    node 1   2, 3 --contribution--> 2                                   2 adds both sums

Partial sums are always fp32, so a result is rounded once. The sum is taken by nodes, and within a node by
ranks: deterministic, and the same on all ranks that need it. Its bits differ from a sum over all ranks in
order: for that, every contribution would have to travel.
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Span
from interlace.kernels.collectives.node_moves import land, put
from interlace.kernels.collectives.reduction import sum_contributions
from interlace.kernels.signal import current_epoch, peer_pointer, publish, wait_credit
from interlace.kernels.slots import SLOTS_TOGETHER, wait_slots
from interlace.kernels.tiling import first_tile
from interlace.kernels.transfer import copy_elements, data_pointer, table_line

PART_COLUMNS = 5
_PART = tl.constexpr(PART_COLUMNS)
_TOGETHER = tl.constexpr(SLOTS_TOGETHER)


@triton.jit
def float_region(peers, byte_offset):
    """Point to the own buffer at ``byte_offset``, a multiple of 256, as float32."""
    address = (tl.load(peers.peers_ptr + peers.rank) + byte_offset).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(address, 16)


@triton.jit
def wait_node(peers, node, slot_byte, slots_each, epoch):
    """Wait for the contribution of every rank of the node; return how many are missing after a timeout.

    ``slot_byte`` is the first member's slot; member i has it ``i * slots_each`` later.
    """
    missing = tl.zeros((), tl.int32)
    for first in range(0, node.num_members, _TOGETHER):
        member = first + tl.arange(0, _TOGETHER)
        valid = member < node.num_members
        source = tl.load(node.members_ptr + member, mask=valid, other=0)
        missing += wait_slots(peers, source, slot_byte + member * slots_each * 8, valid, epoch)
    return missing


@triton.jit
def sum_nodes(
    contributions_ptr,
    landed_ptr,
    stride,
    node,
    world_size,
    offsets,
    mask,
    BLOCK: tl.constexpr,
    AVERAGE: tl.constexpr,
):
    """Sum over nodes, in order: the members' contributions of this node, and the sums of the others."""
    total = tl.zeros((BLOCK,), tl.float32)
    for other in range(node.num_nodes):
        # The contributions of this node are here, so no partial sum of it is stored.
        if other == node.own_node:
            total += sum_contributions(node.num_members, contributions_ptr, stride, offsets, mask)
        else:
            total += tl.load(landed_ptr + other * stride + offsets, mask=mask)
    if AVERAGE:
        total = total / world_size
    return total


# `regions` and `piece` are specialized: they are the same on all ranks and whole blocks, so the compiler
# knows that sums begin at 16 bytes.
@triton.jit(do_not_specialize=["workspace", "parts", "duties", "node", "slots", "own_elements"])
def node_reduce_scatter_kernel(
    workspace,
    input_ptr,
    output_ptr,
    parts,
    duties,
    node,
    own_elements,
    piece,
    regions,
    slots,
    PUT: tl.constexpr,
    BLOCK: tl.constexpr,
    AVERAGE: tl.constexpr,
):
    """Reduce-scatter of a flat tensor over nodes: each rank ends with the sum of its own part.

    Legend: ``input`` is ``[sum of parts]``, ``output`` ``[own_elements]``; a part is cut in pieces of
    ``piece`` elements, at most ``slots_each``. ``parts``: a line per owner in ``order.scatter_order``: the
    rank of this node that sums it, the number of its region, first element, elements, number of the first
    piece. This launch does ``count`` of them, from ``first`` on; a launch without duties and own
    elements does nothing else. ``duties``: the same with the owner first, for owners on other nodes whose
    parts this rank sums. Contributions ``[region][member]`` are at ``data_offset``, own partial sums
    ``[region]`` at ``partial_offset``, partial sums of other nodes ``[node]`` at ``landing_offset``, their
    slots from ``landing_slot`` on. ``quiet_kernel`` follows on the stream.

    Ordering: every program first stores its pieces of all parts, each after the credit of the rank that
    sums it, and publishes a slot per piece. Then it sums its pieces for other nodes: it waits for all
    members' slots and for the credit of the owner, stores the sum and puts it. Last it sums its own
    pieces: it waits for the members' slots and for the puts of other nodes. A step waits only for earlier
    steps of other ranks, so any number of programs makes progress. Nothing is put after a timeout.

    Example: nodes [0, 0, 1, 1], parts of 4 elements, one piece each. Rank 0 stores elements 12-15 in
    region 1 of rank 1, 8-11 in its own region 1, 4-7 in region 0 of rank 1, 0-3 in its own region 0.
    It adds both contributions of its region 1 and puts the sum to landing place 0 of rank 2. It adds
    region 0, then the sum that rank 2 has put to its own landing place 1.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    stride, slots_each = regions.region_stride, slots.slots_each
    num_members, own_member = node.num_members, node.own_member
    region_slots = num_members * slots_each
    own_ptr = data_pointer(workspace, workspace.rank, input_ptr)
    region = num_members * stride
    # Other nodes' parts come first in the table, as they have the longest way.
    for number in range(parts.first, parts.first + parts.count):
        summing, place, first_element, elements, start = table_line(parts.ptr, number, _PART)
        start = start.to(tl.int32)
        end = start + tl.cdiv(elements, piece).to(tl.int32)
        first = first_tile(start, program, programs)
        # A program without a piece of this part waits for no credit.
        if first < end:
            # The credit of the rank that sums the part: the contribution goes into its memory, not the
            # owner's.
            if wait_credit(workspace, summing, epoch) >= epoch - 1:
                to_ptr = data_pointer(workspace, summing, input_ptr)
                # [region of the owner][member]: each contribution has its own place, which no other rank
                # uses.
                to_ptr += place * region + own_member * stride
                for each in range(first, end, programs):
                    element = tl.cast(each - start, tl.int64) * piece
                    count = tl.minimum(elements - element, piece)
                    from_ptr = input_ptr + first_element + element
                    copy_elements(to_ptr + element, from_ptr, count, BLOCK)
                    slot = place * region_slots + own_member * slots_each + (each - start)
                    publish(
                        peer_pointer(workspace, summing, workspace.slot_offset + slot * 8), epoch
                    )
    # Waits for data begin here. A sum for another node waits for contributions only, and those are stored
    # above by every program before it waits: no order of programs can block.
    partials_ptr = float_region(workspace, regions.partial_offset)
    for number in range(duties.count):
        owner, place, _, elements, start = table_line(duties.ptr, number, _PART)
        start = start.to(tl.int32)
        end = start + tl.cdiv(elements, piece).to(tl.int32)
        for each in range(first_tile(start, program, programs), end, programs):
            element = tl.cast(each - start, tl.int64) * piece
            count = tl.minimum(elements - element, piece)
            slot_byte = workspace.slot_offset + (place * region_slots + (each - start)) * 8
            # The owner's credit, as the sum is put into its memory.
            ready = wait_credit(workspace, owner, epoch)
            missing = wait_node(workspace, node, slot_byte, slots_each, epoch)
            if (ready >= epoch - 1) & (missing == 0):
                contributions_ptr = own_ptr + place * region + element
                partial_ptr = partials_ptr + place * stride + element
                # Whole blocks without a mask, so that they are loaded and stored by 16 bytes.
                whole = count // BLOCK * BLOCK
                for begin in range(0, whole, BLOCK):
                    offsets = begin + tl.arange(0, BLOCK)
                    total = sum_contributions(num_members, contributions_ptr, stride, offsets, None)
                    tl.store(partial_ptr + offsets, total)
                for begin in range(whole, count, BLOCK):
                    offsets = begin + tl.arange(0, BLOCK)
                    mask = offsets < count
                    total = sum_contributions(num_members, contributions_ptr, stride, offsets, mask)
                    tl.store(partial_ptr + offsets, total, mask=mask)
                # One put per piece, as soon as it is summed. `* 4`: partial sums are fp32, whatever the
                # dtype.
                span = Span(
                    regions.partial_offset + (place * stride + element) * 4,
                    regions.landing_offset + (node.own_node * stride + element) * 4,
                    count * 4,
                )
                landing = slots.landing_slot + node.own_node * slots_each + (each - start)
                landing_byte = workspace.slot_offset + landing * 8
                put(workspace, owner, span, landing_byte, epoch, PUT, BLOCK)
    # Own pieces last: that gives the sums of other nodes the most time to arrive.
    world_size = workspace.world_size
    landed_ptr = float_region(workspace, regions.landing_offset)
    own_pieces = tl.cdiv(own_elements, piece).to(tl.int32)
    for each in range(program, own_pieces, programs):
        element = tl.cast(each, tl.int64) * piece
        count = tl.minimum(own_elements - element, piece)
        for other in range(node.num_nodes):
            if other == node.own_node:
                slot_byte = workspace.slot_offset + each * 8
                wait_node(workspace, node, slot_byte, slots_each, epoch)
            else:
                # The values of these waits are not checked: the sum stays on this rank, in an op that
                # failed.
                source = tl.load(node.sums_ptr + 2 * other)
                place = tl.load(node.sums_ptr + 2 * other + 1)
                span = Span(
                    regions.partial_offset + (place * stride + element) * 4,
                    regions.landing_offset + (other * stride + element) * 4,
                    count * 4,
                )
                landing = slots.landing_slot + other * slots_each + each
                landing_byte = workspace.slot_offset + landing * 8
                land(workspace, source, span, landing_byte, epoch, PUT, BLOCK)
        # Below all waits of the piece: its loads cannot be moved above them.
        to_ptr = output_ptr + element
        whole = count // BLOCK * BLOCK
        own = own_ptr + element
        landed = landed_ptr + element
        for begin in range(0, whole, BLOCK):
            offsets = begin + tl.arange(0, BLOCK)
            total = sum_nodes(own, landed, stride, node, world_size, offsets, None, BLOCK, AVERAGE)
            tl.store(to_ptr + offsets, total.to(output_ptr.dtype.element_ty))
        for begin in range(whole, count, BLOCK):
            offsets = begin + tl.arange(0, BLOCK)
            mask = offsets < count
            total = sum_nodes(own, landed, stride, node, world_size, offsets, mask, BLOCK, AVERAGE)
            tl.store(to_ptr + offsets, total.to(output_ptr.dtype.element_ty), mask=mask)
