"""Waiting for many slots at once, where it is not known which of them tells of what is needed.

One after the other, many polls take as long as as many round trips of memory; here a vector of slots is
looked at together. The accesses are ``signal.py``'s. Giving up is as there: bounded by SPIN_LIMIT, at once
if the group is aborted, and the first to give up writes down which rank it waited for.
"""

import triton
import triton.language as tl

from interlace.kernels.signal import SPIN_LIMIT_WORD, give_up, is_aborted, peer_pointer, poll_slots

_SPIN_LIMIT = tl.constexpr(SPIN_LIMIT_WORD)
_POLLS_BETWEEN_ABORT_CHECKS = tl.constexpr(64)


@triton.jit
def wait_all(peers, slot_byte, each, epoch, SLOTS: tl.constexpr):
    """Poll own slots from ``slot_byte`` on until all have ``epoch``; every rank publishes ``each`` of them.

    ``SLOTS`` are looked at together. Returns how many have not come: more than 0 only when the wait was
    given up, and what has come may then not be looked at. For programs without descriptor stores.
    """
    slots = each * peers.world_size
    header = peer_pointer(peers, peers.rank, 0)
    missing = tl.zeros((), tl.int32)
    for first in range(0, slots, SLOTS):
        offsets = first + tl.arange(0, SLOTS)
        pointers = peer_pointer(peers, peers.rank, slot_byte) + offsets
        valid = offsets < slots
        seen = poll_slots(pointers, valid)
        absent = tl.sum(((seen < epoch) & valid).to(tl.int32))
        polls_left = tl.load(header + _SPIN_LIMIT)
        while (absent > 0) & (polls_left > 0):
            seen = poll_slots(pointers, valid)
            absent = tl.sum(((seen < epoch) & valid).to(tl.int32))
            polls_left -= 1
            if polls_left % _POLLS_BETWEEN_ABORT_CHECKS == 0:
                if is_aborted(header):
                    # As in wait: the variable of a loop keeps its type.
                    polls_left = polls_left * 0
        if absent > 0:
            lost = tl.min(tl.where((seen < epoch) & valid, offsets, slots))
            least = tl.min(tl.where(valid, seen, epoch))
            give_up(peers, lost // each, slot_byte + lost * 8, epoch, least, False)
        missing += absent
    # Every thread has acquired what it polled: only behind a barrier have all seen everything.
    tl.debug_barrier()
    return missing


@triton.jit
def first_missing(peers, slot_bytes, valid, epoch):
    """Position of the first of the own ``valid`` slots that is below ``epoch``, or how many there may be.

    Loads after it see what was published in all before, as after ``wait``; it looks once.
    """
    seen = poll_slots(peer_pointer(peers, peers.rank, slot_bytes), valid)
    # As in wait_all.
    tl.debug_barrier()
    position = tl.arange(0, valid.shape[0])
    return tl.min(tl.where(valid & (seen < epoch), position, valid.shape[0]))
