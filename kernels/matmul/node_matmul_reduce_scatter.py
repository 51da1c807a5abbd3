"""Fused matmul + reduce-scatter between nodes: partial sums of a node leave it while the matmul runs.

Every rank holds a slice of K, so its product is a partial sum of all rows. The contributions of a node's
ranks for an owner on another node are summed within the node first, and travel once. Two kernels run side
by side: one multiplies and one puts. A kernel that puts is linked with NVSHMEM's code, which needs
registers and stack that a matmul must not spend::

    matmul, most SMs   | tiles of node 1's owners | ... own node's | own | add own tiles, all nodes |
                     publish to the summing rank ^  publish to owners
    sums, a few SMs      wait, sum the node's tiles, put to the owner ... wait for puts, publish here |

Tiles of other nodes' owners come first (``order.scatter_order``): they have the longest way. Each tile goes
directly to the rank of this node that sums for the owner, over the fast link. That rank adds the members'
tiles in fp32. It puts the sum as soon as the tile has arrived from all members: one put with its signal per
tile. The receiving rank publishes an arrived sum again by itself. So the matmul, which is not linked with
NVSHMEM, waits for it like for everything else. Then it adds, per tile, the nodes in order: the members'
tiles of its own node, and the sums of the others. So results do not depend on timing. They are rounded once
after the contributions, bias and activation included.

Partial sums lie tile by tile, ``BLOCK_M * BLOCK_N`` numbers each, also at an edge: a put is one contiguous
piece. With 128 x 128 tiles it has 64 KiB.

Rejected: summing and putting in the matmul kernel (see above), and a put for a band of tile rows (no put
could begin before the whole band has arrived from all members).
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Span, Turn
from interlace.kernels.collectives.node_moves import land, put
from interlace.kernels.collectives.node_reduction import float_region, wait_node
from interlace.kernels.collectives.reduction import sum_contributions
from interlace.kernels.epilogue import activate, add_bias, store_tile
from interlace.kernels.matmul.matmul_reduce_scatter import produce_part
from interlace.kernels.products import columns_operand, rows_operand, tile_offsets
from interlace.kernels.signal import current_epoch, peer_pointer, publish, wait_credit
from interlace.kernels.slots import SLOTS_TOGETHER, publish_turn, wait_slots
from interlace.kernels.tiling import first_tile, grouped_tile
from interlace.kernels.transfer import data_pointer

NODE_SEGMENT_COLUMNS = 5
DUTY_COLUMNS = 4
_SEGMENT = tl.constexpr(NODE_SEGMENT_COLUMNS)
_DUTY = tl.constexpr(DUTY_COLUMNS)
_SLICE_ROWS = tl.constexpr(16)
_TOGETHER = tl.constexpr(SLOTS_TOGETHER)


@triton.jit(do_not_specialize=["workspace", "node", "slots", "own_rows"])
def matmul_node_reduce_scatter_kernel(
    workspace,
    input,
    weight,
    epilogue,
    output_ptr,
    segments_ptr,
    node,
    own_rows,
    regions,
    slots,
    N,
    K,
    AVERAGE: tl.constexpr,
    TILES: tl.constexpr,
):
    """``output[own_rows, N] = activation(sum over ranks of (input_r @ weight_r)[own] (+ bias))``.

    Legend: as matmul_reduce_scatter_kernel. ``segments``: a line per owner in ``order.scatter_order``: the
    rank of this node that takes its tiles, first row, rows, number of the first tile, and the taker's
    region for them. A region has a contribution of ``region_stride`` elements and ``slots_each`` slots per
    member of the node. Region 0 is for the taker's own rows. The sums of the own tiles from every other
    node n are at ``landing_offset``, from tile ``n * slots_each`` on, and their slots at ``landed_slot``.

    Ordering: a producer waits for the taker's credit, stores its tiles and publishes the slot (member,
    tile) of each. Producing waits for no sum of this op. The owner waits for the members' slots and for
    the slots of landed sums, which node_sums_kernel, beside this one, publishes here; then it loads. The
    workspace is free again once put_credits_kernel and finish_kernel have given this rank's credit.

    Example: nodes [0, 0, 1, 1], 64 rows each, N = 64, 64 x 64 tiles. Rank 0 computes rows 192-255 for
    rank 3 and stores them in region 1 of rank 1, which sums for rank 3; rows 128-191 for rank 2 into its
    own region 1; rows 64-127 into region 0 of rank 1, rows 0-63 into its own. Then it adds the two
    contributions of its region 0, and the sum that node 1 has put: sum_0 + sum_1.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    stride, slots_each = regions.region_stride, slots.slots_each
    tiles_n = tl.cdiv(N, TILES.BLOCK_N)
    whole = rows_operand(input.ptr, input.stride, K, TILES)
    b = columns_operand(weight.ptr, weight, N, K, TILES)
    for line in range(workspace.world_size):
        segment = segments_ptr + line * _SEGMENT
        taker = tl.load(segment)
        first_row = tl.load(segment + 1)
        rows = tl.load(segment + 2)
        start = tl.load(segment + 3).to(tl.int32)
        # [region of the owner][member]: no two ranks of the node share a place.
        part = tl.load(segment + 4) * node.num_members + node.own_member
        tiles_m = tl.cdiv(rows, TILES.BLOCK_M).to(tl.int32)
        tiles = tiles_m * tiles_n
        first = first_tile(start, program, programs)
        if first < start + tiles:
            # The credit of the rank that takes the tiles: they go into its memory, not the owner's.
            if wait_credit(workspace, taker, epoch) >= epoch - 1:
                to_ptr = data_pointer(workspace, taker, output_ptr) + part * stride
                turn = Turn(first, start, programs)
                produce_part(input, whole, b, weight, epilogue, to_ptr, turn, first_row, rows, N, K,
                             TILES)  # fmt: skip
                # After the products: a publish begins with a barrier, which would end the pipeline.
                slot_byte = workspace.slot_offset + (part * slots_each - start) * 8
                publish_turn(workspace, taker, slot_byte, first, start + tiles, programs, epoch)
    own_ptr = data_pointer(workspace, workspace.rank, output_ptr)
    landed_ptr = float_region(workspace, regions.landing_offset)
    own_tiles_m = tl.cdiv(own_rows, TILES.BLOCK_M)
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    SLICE: tl.constexpr = min(TILES.BLOCK_M, _SLICE_ROWS)
    SLICES: tl.constexpr = TILES.BLOCK_M // SLICE
    for tile in range(program, own_tiles_m * tiles_n, programs):
        tile_m, tile_n = grouped_tile(tile, own_tiles_m, tiles_n, TILES.GROUP_M)
        # All waits before the first load: the loads that they guard are below them all, slice by slice.
        wait_node(workspace, node, workspace.slot_offset + tile * 8, slots_each, epoch)
        for first_node in range(0, node.num_nodes, _TOGETHER):
            other = first_node + tl.arange(0, _TOGETHER)
            valid = (other < node.num_nodes) & (other != node.own_node)
            source = tl.load(node.sums_ptr + 2 * other, mask=valid, other=0)
            slot = slots.landed_slot + other * slots_each + tile
            # Published on this rank by node_sums_kernel: this kernel is not linked with NVSHMEM.
            wait_slots(workspace, source, workspace.slot_offset + slot * 8, valid, epoch)
        offs_n = tile_offsets(tile_n, BLOCK_N)
        for part in range(SLICES):
            slice_m = tile_m * SLICES + part
            offs_m = tile_offsets(slice_m, SLICE)
            mask = (offs_m < own_rows)[:, None] & (offs_n < N)[None, :]
            places = offs_m[:, None] * N + offs_n[None, :]
            within = slice_offsets(part, SLICE, BLOCK_N)
            total = tl.zeros((SLICE, BLOCK_N), tl.float32)
            # Node by node, and within this one rank by rank: bits do not depend on arrival.
            for other in range(node.num_nodes):
                if other == node.own_node:
                    total += sum_contributions(node.num_members, own_ptr, stride, places, mask)
                else:
                    place = other * slots_each + tile
                    from_ptr = landed_ptr + tile_element(place, TILES.BLOCK_M, BLOCK_N)
                    # No mask: partial sums are whole tiles, also at the edge.
                    total += tl.load(from_ptr + within)
            if AVERAGE:
                total = total / workspace.world_size
            total = add_bias(
                total, epilogue.bias_ptr, slice_m, tile_n, own_rows, N, SLICE, BLOCK_N, TILES
            )
            total = activate(total, TILES)
            store_tile(output_ptr, total, slice_m, tile_n, own_rows, N, SLICE, BLOCK_N)


@triton.jit
def tile_element(number, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first element of tile ``number`` among partial sums."""
    return tl.cast(number, tl.int64) * (BLOCK_M * BLOCK_N)


@triton.jit
def slice_offsets(part, SLICE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return offsets of rows ``part * SLICE`` and on within a tile of partial sums."""
    rows = part * SLICE + tl.arange(0, SLICE)
    return rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]


@triton.jit(do_not_specialize=["workspace", "duties", "node", "slots", "own_rows"])
def node_sums_kernel(
    workspace,
    contribution_ptr,
    duties,
    node,
    own_rows,
    regions,
    slots,
    N,
    PUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum this node's tiles of other nodes' owners and put them; publish the sums that arrive here.

    Legend: as matmul_node_reduce_scatter_kernel, beside which it runs. ``contribution_ptr`` only has the
    dtype of the contributions. ``duties``: a line per owner for whom this rank sums: owner,
    region, rows, number of the first tile.
    Partial sums of duty d are at ``partial_offset`` from tile ``d * slots_each`` on; a put of tile t lands
    at ``landing_offset``, tile ``node * slots_each + t``, and sets that slot from ``landing_slot`` on.
    ``BLOCK``: bytes that emulated puts copy at a time. ``quiet_kernel`` follows on the stream.

    Ordering: a program takes its tiles of all duties first: it waits for the owner's credit and for all
    members' slots, stores the sum, and puts it; that waits for no sum. Then its own tiles of every other
    node: it waits until they have landed and publishes the slot that the matmul waits for. Nothing is put
    or published after a wait that has timed out.

    Example: as above. Rank 1 adds the contributions of ranks 0 and 1 to rank 3 in its region 1, and puts
    the sum to landing tile 0 of rank 3. Then it waits for the sum that rank 3 has put to its own landing
    tile 1, and publishes own landed slot 1.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    stride, slots_each = regions.region_stride, slots.slots_each
    tiles_n = tl.cdiv(N, BLOCK_N)
    TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * 4
    SLICE: tl.constexpr = min(BLOCK_M, _SLICE_ROWS)
    own_ptr = data_pointer(workspace, workspace.rank, contribution_ptr)
    partials_ptr = float_region(workspace, regions.partial_offset)
    # Sums for other nodes before the own tiles: they still have to travel, and wait for no other sum.
    for number in range(duties.count):
        line = duties.ptr + number * _DUTY
        owner = tl.load(line)
        first_part = tl.load(line + 1) * node.num_members
        rows = tl.load(line + 2)
        start = tl.load(line + 3).to(tl.int32)
        tiles_m = tl.cdiv(rows, BLOCK_M).to(tl.int32)
        end = start + tiles_m * tiles_n
        for each in range(first_tile(start, program, programs), end, programs):
            tile = each - start
            slot_byte = workspace.slot_offset + (first_part * slots_each + tile) * 8
            # The owner's credit, as the sum is put into its memory.
            ready = wait_credit(workspace, owner, epoch)
            missing = wait_node(workspace, node, slot_byte, slots_each, epoch)
            if (ready >= epoch - 1) & (missing == 0):
                tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
                offs_n = tile_offsets(tile_n, BLOCK_N)
                place = number * slots_each + tile
                for part in range(BLOCK_M // SLICE):
                    offs_m = tile_offsets(tile_m * (BLOCK_M // SLICE) + part, SLICE)
                    total = sum_contributions(
                        node.num_members,
                        own_ptr + first_part * stride,
                        stride,
                        offs_m[:, None] * N + offs_n[None, :],
                        (offs_m < rows)[:, None] & (offs_n < N)[None, :],
                    )
                    to_ptr = partials_ptr + tile_element(place, BLOCK_M, BLOCK_N)
                    # A whole tile, also at the edge: beyond it the sums are 0, which the receiver loads
                    # and does not store.
                    tl.store(to_ptr + slice_offsets(part, SLICE, BLOCK_N), total)
                landing = node.own_node * slots_each + tile
                span = Span(
                    regions.partial_offset + tl.cast(place, tl.int64) * TILE_BYTES,
                    regions.landing_offset + tl.cast(landing, tl.int64) * TILE_BYTES,
                    TILE_BYTES,
                )
                landing_byte = workspace.slot_offset + (slots.landing_slot + landing) * 8
                put(workspace, owner, span, landing_byte, epoch, PUT, BLOCK)
    own_tiles = tl.cdiv(own_rows, BLOCK_M) * tiles_n
    for tile in range(program, own_tiles, programs):
        # One program per landed tile, as `land` copies if puts are late; no other program may publish it.
        for other in range(node.num_nodes):
            if other != node.own_node:
                source = tl.load(node.sums_ptr + 2 * other)
                place = tl.load(node.sums_ptr + 2 * other + 1) * slots_each + tile
                landing = other * slots_each + tile
                span = Span(
                    regions.partial_offset + tl.cast(place, tl.int64) * TILE_BYTES,
                    regions.landing_offset + tl.cast(landing, tl.int64) * TILE_BYTES,
                    TILE_BYTES,
                )
                landing_byte = workspace.slot_offset + (slots.landing_slot + landing) * 8
                seen = land(workspace, source, span, landing_byte, epoch, PUT, BLOCK)
                # After a timeout the matmul's wait for this slot also times out.
                if seen >= epoch:
                    slot_byte = workspace.slot_offset + (slots.landed_slot + landing) * 8
                    publish(peer_pointer(workspace, workspace.rank, slot_byte), epoch)
