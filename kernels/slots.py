"""Many slots at once: waits for all of them together, and publishes that share a barrier and a fence.

One after the other, each poll takes a round trip of memory, and each publish waits until all stores so far
have arrived. Here a vector of slots is read, or set, together. The accesses are those in ``signal.py``, and
so is the timeout: bounded by SPIN_LIMIT, at once if the group is aborted, and the first wait that times out
records which rank it waited for.

The waits are for programs without descriptor stores under way. They return how many slots have not arrived.
If that is more than 0, the wait has timed out, and the caller must not read the data.
"""

import triton
import triton.language as tl

from interlace.kernels.signal import (
    CREDIT_WORDS,
    EPOCH_WORD,
    SPIN_LIMIT_WORD,
    counted_epoch,
    current_epoch,
    give_up,
    is_aborted,
    is_mapped,
    is_void,
    linger,
    peer_pointer,
    poll_slots,
    publish_slots,
)

SLOTS_TOGETHER = 32  # a slot for each lane of a warp
_EPOCH = tl.constexpr(EPOCH_WORD)
_SPIN_LIMIT = tl.constexpr(SPIN_LIMIT_WORD)
_CREDIT = tl.constexpr(CREDIT_WORDS)
_TOGETHER = tl.constexpr(SLOTS_TOGETHER)
_POLLS_BETWEEN_ABORT_CHECKS = tl.constexpr(64)


@triton.jit
def wait_slots(peers, sources, slot_bytes, valid, epoch):
    """Poll this rank's slots at ``slot_bytes`` together until all ``valid`` ones have ``epoch``.

    ``sources``: the rank that publishes each.
    """
    pointers = peer_pointer(peers, peers.rank, slot_bytes)
    header = peer_pointer(peers, peers.rank, 0)
    seen = poll_slots(pointers, valid)
    late = (seen < epoch) & valid
    absent = tl.sum(late.to(tl.int32))
    if absent > 0:
        polls_left = tl.load(header + _SPIN_LIMIT)
        while (absent > 0) & (polls_left > 0):
            seen = poll_slots(pointers, valid)
            late = (seen < epoch) & valid
            absent = tl.sum(late.to(tl.int32))
            polls_left -= 1
            if polls_left % _POLLS_BETWEEN_ABORT_CHECKS == 0:
                if is_aborted(header):
                    # As in wait: the variable of a loop keeps its type.
                    polls_left = polls_left * 0
        if absent > 0:
            position = tl.arange(0, valid.shape[0])
            first = position == tl.min(tl.where(late, position, valid.shape[0]))
            source = tl.sum(tl.where(first, sources, 0))
            slot_byte = tl.sum(tl.where(first, slot_bytes, 0))
            give_up(peers, source, slot_byte, epoch, tl.min(tl.where(first, seen, epoch)), False)
    # Each thread has acquired the slot it polled: only after a barrier have all threads seen everything.
    tl.debug_barrier()
    return absent


@triton.jit
def wait_all(peers, slot_byte, slots_per_source, epoch, SLOTS: tl.constexpr):
    """Wait for the slots from ``slot_byte`` on. Every rank publishes ``slots_per_source`` of them."""
    slots = slots_per_source * peers.world_size
    missing = tl.zeros((), tl.int32)
    for first in range(0, slots, SLOTS):
        number = first + tl.arange(0, SLOTS)
        source = number // slots_per_source
        missing += wait_slots(peers, source, slot_byte + number * 8, number < slots, epoch)
    return missing


@triton.jit
def wait_sources(peers, slot_byte, slots_per_source, epoch):
    """Wait for a slot of every rank: of rank 0 at ``slot_byte``, of the next ``slots_per_source`` later."""
    missing = tl.zeros((), tl.int32)
    for first in range(0, peers.world_size, _TOGETHER):
        source = first + tl.arange(0, _TOGETHER)
        slot_bytes = slot_byte + source * slots_per_source * 8
        missing += wait_slots(peers, source, slot_bytes, source < peers.world_size, epoch)
    return missing


@triton.jit
def wait_credits(peers, epoch):
    """Wait until every rank has finished the op before this one, so all buffers may be written again."""
    return wait_sources(peers, _CREDIT * 8, 1, epoch - 1)


@triton.jit
def publish_turn(peers, peer, slot_byte, first, end, programs, epoch):
    """Publish this program's tiles ``first``, ``first + programs`` ... below ``end`` at ``peer``.

    Tile t has the slot at ``slot_byte + t * 8``.
    """
    for begin in range(first, end, programs * _TOGETHER):
        tile = begin + tl.arange(0, _TOGETHER) * programs
        publish_slots(peer_pointer(peers, peer, slot_byte + tile * 8), tile < end, epoch)


@triton.jit
def publish_to_all(peers, slot_byte, epoch):
    """Publish the same slot of every mapped rank, this one included."""
    for first in range(0, peers.world_size, _TOGETHER):
        number = first + tl.arange(0, _TOGETHER)
        # The table has no more lines than ranks.
        peer = tl.minimum(number, peers.world_size - 1)
        valid = (number < peers.world_size) & is_mapped(peers, peer)
        publish_slots(peer_pointer(peers, peer, slot_byte), valid, epoch)


@triton.jit(do_not_specialize=["peers"])
def wait_credits_kernel(peers):
    """Hold a stream until every peer has finished the previous op on this channel.

    Ordering: as wait_kernel. Afterwards all memory of the channel, on every rank, is free to write. Later
    copies cannot see that a wait for a credit has timed out, so the kernel then continues (``linger``)
    until no peer has anything left to read.

    Example: with epoch word 6 the kernel ends once CREDIT of all ranks is at least 6. Suppose rank 1's
    stays 5 and the wait times out. Rank 1 also times out, and its finish_kernel sets it to -6. The kernel
    then ends.
    """
    # In a void channel that epoch is out of reach; the wait counts on ops that peers may still finish.
    if wait_credits(peers, current_epoch(peers)) > 0:
        finished = counted_epoch(peers) - 1
        for peer in range(peers.world_size):
            linger(peers, peer, finished)


@triton.jit(do_not_specialize=["peers"])
def finish_kernel(peers):
    """End an op on this rank: credit to every mapped peer, then the epoch advances in device memory.

    Ordering: last item of the op on its stream. All reads of the channel by this rank have finished, so
    peers may write into it. Only this rank's later ops read the epoch word; the stream or an event orders
    them. In a void channel the op never ends: the epoch stays, and peers are notified.

    Example: with epoch word 6, CREDIT[rank] becomes 7 on every rank and then the own epoch word 7. In a
    void channel CREDIT[rank] becomes -7 and the epoch word stays 6.
    """
    epoch = counted_epoch(peers)
    void = is_void(peers)
    publish_to_all(peers, (_CREDIT + peers.rank) * 8, tl.where(void, -epoch, epoch))
    if not void:
        tl.store(peer_pointer(peers, peers.rank, 0) + _EPOCH, epoch)
