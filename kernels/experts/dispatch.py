"""Dispatch: every token goes once to each rank that has some of its experts, and is sorted by expert there.

Legend: W ranks with E experts each; a token has ``TOPK`` slots, each with an expert or none. A *row* of the
result is a token in one of its slots. Rows are in the order (expert, source rank, row of the source), and
those that one rank has for one expert are a *segment*.

No rank asks for memory: every source has a region in every rank's workspace, large enough for the rank with
the most tokens. The receiver must know how many tokens and rows arrive; these counts come with them, in
device memory. So neither side waits for its host, and the host needs no count::

    send     counts to all | tokens for rank + 1 | rank + 2 | ... | own
    program 0               ... then waits for all ranks' counts: where does each segment begin?
    receive                 | own: sort by expert | rank - 1 | rank - 2 | ...

A token that has several experts on one rank travels once, with its slots' experts and positions. The
receiver copies it to each sorted row, which uses memory and not a link. The two kernels follow each other
on one stream; the end of the first makes the segments' table visible to all programs of the second.

``senders`` programs send to one rank. Each takes every ``senders``-th block of tokens, and signals once
when it has finished: a slot per source and sender, besides one per source for the counts.

Rejected: asking receivers for places first (a round trip more), one row per slot on the way (a token with 8
experts on 8 ranks travels 5.3 times instead of 8 on average where ranks are hit by chance), and atomic
counters that assign places by arrival (another order of rows in every run).
"""

import triton
import triton.language as tl

from interlace.kernels.signal import current_epoch, peer_pointer, publish, wait, wait_credit
from interlace.kernels.slots import publish_to_all, wait_credits, wait_sources
from interlace.kernels.tiling import first_tile
from interlace.kernels.transfer import copy_elements, region_pointer

SEGMENT_NUMBERS = 3  # a segment: its first row here, its rows, and its first row at home
COUNT_NUMBERS = 2  # before the counts by expert: tokens, and the first row at home
_SEGMENT = tl.constexpr(SEGMENT_NUMBERS)
_COUNT = tl.constexpr(COUNT_NUMBERS)
_AT_ONCE = tl.constexpr(2)  # slots of a token that are looked up together


@triton.jit
def copy_listed_rows(to_ptr, places, from_ptr, from_rows, mask, words, BLOCK: tl.constexpr,
                     PLACES: tl.constexpr):  # fmt: skip
    """Copy row ``from_rows[i]`` where ``mask[i]`` to its ``PLACES`` places; below 0: skipped.

    ``places``: a tuple of ``PLACES`` tensors. A row of ``words`` is loaded once for all of them.
    """
    for first in range(0, words, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = (columns < words)[None, :]
        pointers = from_ptr + from_rows[:, None] * words + columns[None, :]
        block = tl.load(pointers, mask=mask[:, None] & inside)
        for number in tl.static_range(PLACES):
            place = places[number]
            # int64 before the product: all rows may pass 2**31 words.
            pointers = to_ptr + place.to(tl.int64)[:, None] * words + columns[None, :]
            tl.store(pointers, block, mask=(place >= 0)[:, None] & inside)


@triton.jit
def _region(workspace, peer, byte, like_ptr):
    return region_pointer(workspace, peer, workspace.data_offset + byte, like_ptr)


@triton.jit
def _send_tokens(workspace, rows, tokens_ptr, tokens, peer, sender, regions, sizes,
                 SLOTS: tl.constexpr):  # fmt: skip
    """Send every ``senders``-th block of the ``tokens`` listed by ``tokens_ptr`` to this rank's region."""
    x_ptr = _region(workspace, peer, regions.x_byte, rows.x_ptr)
    facts_ptr = _region(workspace, peer, regions.facts_byte, rows.facts_ptr)
    first_row = tl.cast(workspace.rank, tl.int64) * sizes.most_tokens
    step = sizes.senders * SLOTS.BLOCK_ROWS
    for first in range(sender * SLOTS.BLOCK_ROWS, tokens, step):
        number = first + tl.arange(0, SLOTS.BLOCK_ROWS)
        mask = number < tokens
        listed = tl.load(tokens_ptr + number, mask=mask, other=0)
        # In a tuple, as if a row had several places.
        places = (tl.where(mask, first_row + number, -1),)
        copy_listed_rows(x_ptr, places, rows.x_ptr, listed, mask, rows.x_words,
                         SLOTS.BLOCK_COLUMNS, 1)  # fmt: skip
        if SLOTS.SCALED:
            scales_ptr = _region(workspace, peer, regions.scales_byte, rows.scales_ptr)
            copy_listed_rows(
                scales_ptr, places, rows.scales_ptr, listed, mask, rows.scale_words, 32, 1
            )
        words = 3 * SLOTS.TOPK
        copy_listed_rows(facts_ptr, places, rows.facts_ptr, listed, mask, words, 32, 1)


@triton.jit
def find_segments(workspace, counts_ptr, segments_ptr, sizes, epoch, EXPERTS: tl.constexpr):
    """Wait for all ranks' counts, and write where each segment begins; False if the wait has timed out."""
    experts = tl.arange(0, EXPERTS)
    mask = experts < sizes.experts
    columns = sizes.experts + _COUNT
    complete = wait_sources(workspace, workspace.slot_offset, 1, epoch) == 0
    # Places are computed from counts, so counts that have not arrived must not be used.
    if complete:
        totals = tl.zeros((EXPERTS,), tl.int64)
        for source in range(workspace.world_size):
            totals += tl.load(counts_ptr + source * columns + _COUNT + experts, mask=mask, other=0)
        begin = tl.cumsum(totals, 0) - totals
        if sizes.expert_rows > 0:
            begin = experts.to(tl.int64) * sizes.expert_rows
        for source in range(workspace.world_size):
            line_ptr = counts_ptr + source * columns
            count = tl.load(line_ptr + _COUNT + experts, mask=mask, other=0)
            # The rows that a source has for the experts of one rank are contiguous, in their order.
            home = tl.load(line_ptr + 1) + tl.cumsum(count, 0) - count
            segment_ptr = segments_ptr + (experts * workspace.world_size + source) * _SEGMENT
            tl.store(segment_ptr, begin, mask=mask)
            tl.store(segment_ptr + 1, count, mask=mask)
            tl.store(segment_ptr + 2, home, mask=mask)
            begin += count
    return complete


@triton.jit
def send_counts(workspace, counts_ptr, counts_byte, sizes, epoch):
    """Send every rank its line of ``counts``, int64 ``[W, 2 + E]``; this rank's number selects the slot."""
    columns = sizes.experts + _COUNT
    if wait_credits(workspace, epoch) == 0:
        for step in range(workspace.world_size):
            peer = (workspace.rank + 1 + step) % workspace.world_size
            to_ptr = _region(workspace, peer, counts_byte, counts_ptr)
            copy_elements(
                to_ptr + workspace.rank * columns, counts_ptr + peer * columns, columns, 128
            )
        publish_to_all(workspace, workspace.slot_offset + workspace.rank * 8, epoch)


@triton.jit(do_not_specialize=["workspace", "sizes"])
def dispatch_send_kernel(workspace, rows, tokens_ptr, counts_ptr, segments_ptr, regions, sizes,
                         SLOTS: tl.constexpr):  # fmt: skip
    """Send this rank's tokens to the ranks of their experts; compute the places of their rows here.

    Legend: ``tokens``, int64 ``[W, T]``: for every rank a list of tokens, first the tokens that go there.
    ``counts``, int64 ``[W, 2 + E]``: for every rank the number of tokens that go there, the number of rows
    for ranks before it, and the rows by its experts. ``segments``, int64 ``[E, W, 3]``, is filled.

    Ordering: a sender waits for the receiver's credit, stores, publishes its slot. Program 0 first does so
    with the counts, and waits for the counts of all ranks when it has sent everything. Senders wait only
    for credits, so no order of programs blocks. The next kernel on the stream reads the segments. The
    workspace may be written again after finish_kernel.

    Example: W = 2, E = 1, TOPK = 2, tokens with experts (0, 1) and (1, -): rank 0's ``counts`` are [1, 0,
    1] and [2, 1, 2], ``tokens`` [0, 1] and [0, 1]. Token 0 goes to row 0 of its region on ranks 0 and 1,
    token 1 to row 1 on rank 1. If rank 1 has nothing, ``segments`` is [[0, 1, 0], [1, 0, 0]] on rank 0
    and [[0, 2, 1], [2, 0, 0]] on rank 1.
    """
    epoch = current_epoch(workspace)
    program = tl.program_id(0)
    world_size = workspace.world_size
    columns = sizes.experts + _COUNT
    if program == 0:
        send_counts(workspace, counts_ptr, regions.counts_byte, sizes, epoch)
    for item in range(program, world_size * sizes.senders, tl.num_programs(0)):
        # The next rank first, so that the ranks do not all send to one rank.
        peer = (workspace.rank + 1 + item) % world_size
        sender = item // world_size
        if wait_credit(workspace, peer, epoch) >= epoch - 1:
            listed_ptr = tokens_ptr + tl.cast(peer, tl.int64) * sizes.tokens
            tokens = tl.load(counts_ptr + peer * columns).to(tl.int32)
            _send_tokens(workspace, rows, listed_ptr, tokens, peer, sender, regions, sizes, SLOTS)
            # Also by a sender without a token: the receiver does not know which sender has the last block.
            slot = world_size + workspace.rank * sizes.senders + sender
            publish(peer_pointer(workspace, peer, workspace.slot_offset + slot * 8), epoch)
    if program == 0:
        own_ptr = _region(workspace, workspace.rank, regions.counts_byte, counts_ptr)
        find_segments(workspace, own_ptr, segments_ptr, sizes, epoch, SLOTS.EXPERTS)


@triton.jit
def _place(fact_ptr, mask, source, segments_ptr, workspace, sizes, TOPK: tl.constexpr):
    """Return the result's rows of tokens in the slot at ``fact_ptr``; -1 if its expert is not here."""
    expert = tl.load(fact_ptr, mask=mask, other=-1) - workspace.rank * sizes.experts
    position = tl.load(fact_ptr + TOPK, mask=mask, other=-1)
    here = (expert >= 0) & (expert < sizes.experts) & (position >= 0)
    segment = (expert * workspace.world_size + source) * _SEGMENT
    first = tl.load(segments_ptr + segment, mask=here, other=0)
    # Rows are less than 2**31; a thread has a register for the rows of each slot.
    return tl.where(here, first.to(tl.int32) + position, -1)


@triton.jit
def _sort_tokens(workspace, rows, result, number, mask, source, segments_ptr, regions, sizes,
                 SLOTS: tl.constexpr):  # fmt: skip
    """Copy tokens ``number`` of ``source``'s region to their rows of the result.

    The places of several slots are looked up before the tokens are loaded, once for all of these slots.
    Most slots of a token have their experts on other ranks: one by one, most loads would be masked out.
    """
    TOPK: tl.constexpr = SLOTS.TOPK
    PLACES: tl.constexpr = TOPK if TOPK < _AT_ONCE else _AT_ONCE
    rank = workspace.rank
    x_ptr = _region(workspace, rank, regions.x_byte, rows.x_ptr)
    facts_ptr = _region(workspace, rank, regions.facts_byte, rows.facts_ptr)
    from_rows = tl.cast(source, tl.int64) * sizes.most_tokens + number
    for first in range(0, TOPK, PLACES):
        fact_ptr = facts_ptr + from_rows * (3 * TOPK) + first
        places = (_place(fact_ptr, mask, source, segments_ptr, workspace, sizes, TOPK),)
        some = places[0] >= 0
        for slot in tl.static_range(1, PLACES):
            there = mask & (first + slot < TOPK)
            place = _place(fact_ptr + slot, there, source, segments_ptr, workspace, sizes, TOPK)
            places += (place,)  # type: ignore[assignment]
            some = some | (place >= 0)
        copy_listed_rows(result.rows_ptr, places, x_ptr, from_rows, some, rows.x_words,
                         SLOTS.BLOCK_COLUMNS, PLACES)  # fmt: skip
        if SLOTS.SCALED:
            scales_ptr = _region(workspace, rank, regions.scales_byte, rows.scales_ptr)
            copy_listed_rows(result.row_scales_ptr, places, scales_ptr, from_rows, some,
                             rows.scale_words, 32, PLACES)  # fmt: skip
        if SLOTS.WEIGHTED:
            for slot in tl.static_range(PLACES):
                place = places[slot]
                weight = tl.load(fact_ptr + 2 * TOPK + slot, mask=place >= 0, other=0)
                tl.store(result.row_weights_ptr + place, weight, mask=place >= 0)


@triton.jit(do_not_specialize=["workspace", "sizes"])
def dispatch_receive_kernel(workspace, rows, result, segments_ptr, regions, sizes,
                            SLOTS: tl.constexpr):  # fmt: skip
    """Sort the tokens that arrive by expert: ``result[segment's first row + position] = token``.

    Legend: as in ``dispatch_send_kernel``, which precedes it on the stream and has filled ``segments``; of
    ``rows`` only sizes and types are used. Programs divide the blocks of tokens among themselves.

    Ordering: a program waits for the slot of the sender whose block it takes, and loads in a branch after
    the wait. If the wait has timed out it takes nothing, as the numbers of rows may be wrong. In a void
    channel nothing is read. The workspace may be written again after finish_kernel.

    Example: the same as above. On rank 1 program 0 waits for slot 2 of rank 0's only sender and copies
    tokens 0 and 1 of region 0 to rows 0 and 1: slot 1 of token 0 and slot 0 of token 1 have its expert.
    """
    epoch = current_epoch(workspace)
    world_size = workspace.world_size
    programs = tl.num_programs(0)
    counts_ptr = _region(workspace, workspace.rank, regions.counts_byte, segments_ptr)
    start = tl.zeros((), tl.int32)
    for step in range(world_size):
        source = (workspace.rank + world_size - step) % world_size
        # The first wait for each source: after a timeout the counts are not valid.
        slot_byte = workspace.slot_offset + source * 8
        if wait(workspace, source, slot_byte, epoch) >= epoch:
            tokens = tl.load(counts_ptr + source * (sizes.experts + _COUNT)).to(tl.int32)
            end = start + tl.cdiv(tokens, SLOTS.BLOCK_ROWS)
            for block in range(first_tile(start, tl.program_id(0), programs), end, programs):
                sender = (block - start) % sizes.senders
                slot = world_size + source * sizes.senders + sender
                if wait(workspace, source, workspace.slot_offset + slot * 8, epoch) >= epoch:
                    number = (block - start) * SLOTS.BLOCK_ROWS + tl.arange(0, SLOTS.BLOCK_ROWS)
                    _sort_tokens(workspace, rows, result, number, number < tokens, source,
                                 segments_ptr, regions, sizes, SLOTS)  # fmt: skip
            start = end
