"""Words that carry their own flag: data and signal in one store, for the few bytes of a small message.

For a few bytes a separate signal costs more than the data. ``send_words`` stores 64-bit words whose upper
half is the epoch, and whose lower half is 32 bits of payload; ``receive_words`` polls the words themselves.
A 64-bit store is seen whole or not at all, and the word holds all data. So nothing has to be ordered, and
both sides are relaxed. The accesses themselves are in ``signal.py``.

The caller's protocol ensures that no word is overwritten too early
(``kernels/collectives/low_latency.py``). The words' memory has a header like a channel (``signal.py``),
but its EPOCH counts the programs that have ended (``signal.count_program``).

Timeouts are as in ``signal.py``: bounded by SPIN_LIMIT, at once if the group is aborted, and the first wait
that times out records which rank it waited for.
"""

import triton
import triton.language as tl

from interlace.kernels.signal import (
    SPIN_LIMIT_WORD,
    give_up,
    is_aborted,
    look_for_words,
    peer_pointer,
    store_words,
)

_SPIN_LIMIT = tl.constexpr(SPIN_LIMIT_WORD)


@triton.jit
def send_words(peers, peer, byte_offsets, payload, epoch, COMPILED: tl.constexpr):
    """Store ``payload`` (int32) with the epoch's lower 32 bits to ``peer``."""
    store_words(tl.load(peers.peers_ptr + peer) + byte_offsets, payload, epoch, COMPILED)


@triton.jit
def receive_words(peers, source, byte_offsets, epoch, valid,
                  COMPILED: tl.constexpr):  # fmt: skip
    """Poll own words until ``source`` has sent all that are ``valid``.

    Bounded like ``wait``. Return (payload, int32; how many words are missing). The record of a timeout
    has the first word's byte as SLOT, and the epoch before as SEEN.
    """
    addresses = tl.load(peers.peers_ptr + peers.rank) + byte_offsets
    payload, missing = look_for_words(addresses, epoch, valid, COMPILED)
    if missing > 0:
        header = peer_pointer(peers, peers.rank, 0)
        polls_left = tl.load(header + _SPIN_LIMIT)
        while (missing > 0) & (polls_left > 0):
            payload, missing = look_for_words(addresses, epoch, valid, COMPILED)
            # Compiled, look_for_words polls up to 64 times: ABORT is read as often as by `wait`.
            polls_left -= 64 if COMPILED else 1
            if is_aborted(header):
                # times 0: the variable of a loop keeps its type
                polls_left = polls_left * 0
        if missing > 0:
            first_byte = tl.min(byte_offsets)
            # Kernels of words have no descriptor stores, hence False.
            give_up(peers, source, first_byte, epoch, epoch - 1, False)
    return payload, missing
