"""Words that carry their own flag: data and signal in one store, for the few bytes of a small message.

For a few bytes a signal of its own costs more than the data. ``send_words`` stores 64-bit words whose upper
half is the epoch, and whose lower half is 32 bits of payload; ``receive_words`` polls the words themselves.
A 64-bit store is seen whole or not at all, so nothing has to be ordered, and both sides are relaxed: no
data is read or written but what the word itself holds. In ``signal.py`` whoever polls acquires.

What keeps a word from being overwritten too early is the caller's protocol (``kernels/low_latency.py``).
The words' memory has a header as a channel has (``signal.py``), but its EPOCH counts the programs that have
ended (``count_program``).

Giving up is as in ``signal.py``: bounded by SPIN_LIMIT, at once if the group is aborted, and the first to
give up writes down for whom it waited.
"""

import triton
import triton.language as tl

from interlace.kernels.signal import (
    EPOCH_WORD,
    SPIN_LIMIT_WORD,
    give_up,
    is_aborted,
    peer_pointer,
)

_EPOCH = tl.constexpr(EPOCH_WORD)
_SPIN_LIMIT = tl.constexpr(SPIN_LIMIT_WORD)


@triton.jit
def send_words(peers_ptr, peer, byte_offsets, payload, epoch, COMPILED: tl.constexpr):
    """Store ``payload`` (int32) with the epoch's lower 32 bits to ``peer``."""
    if COMPILED:
        tl.inline_asm_elementwise(
            """{
            .reg .b64 word;
            mov.b64 word, {$2, $3};
            st.relaxed.sys.global.b64 [$1], word;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r",
            [
                tl.load(peers_ptr + peer) + byte_offsets,
                payload,
                (epoch & 0xFFFFFFFF).to(tl.int32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        word = (epoch << 32) | (payload.to(tl.int64) & 0xFFFFFFFF)
        pointers = (tl.load(peers_ptr + peer) + byte_offsets).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(pointers, word, sem="relaxed", scope="sys")


@triton.jit
def _look_for_words(addresses, epoch, valid, COMPILED: tl.constexpr):
    """The payload of own words, and how many of them have not arrived; compiled, after a few polls."""
    flag = (epoch & 0xFFFFFFFF).to(tl.int32)
    if COMPILED:
        payload, absent = tl.inline_asm_elementwise(
            """{
            .reg .pred p, q;
            .reg .b32 flag, left;
            .reg .b64 word;
            mov.b32 $0, 0;
            mov.b32 $1, 0;
            mov.b32 left, 64;
            setp.eq.s32 p, $4, 0;
            @p bra done;
            again:
            ld.relaxed.sys.global.b64 word, [$2];
            mov.b64 {$0, flag}, word;
            setp.eq.s32 p, flag, $3;
            @p bra done;
            sub.s32 left, left, 1;
            setp.gt.s32 q, left, 0;
            @q bra again;
            mov.b32 $1, 1;
            done:
            }""",
            "=&r,=&r,l,r,r",
            [addresses, flag, valid.to(tl.int32)],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        pointers = addresses.to(tl.pointer_type(tl.int64))
        words = tl.atomic_add(
            pointers, tl.zeros(valid.shape, tl.int64), mask=valid, sem="relaxed", scope="sys"
        )
        payload = (words & 0xFFFFFFFF).to(tl.int32)
        absent = (((words >> 32).to(tl.int32) != flag) & valid).to(tl.int32)
    return payload, tl.sum(absent)


@triton.jit
def receive_words(peers_ptr, rank, world_size, source, byte_offsets, epoch, valid,
                  COMPILED: tl.constexpr):  # fmt: skip
    """Poll own words until ``source`` has sent all that are ``valid``; their payload, int32.

    Bounded as ``wait`` is. Returns (payload, how many are missing); in the record of giving up SEEN is
    the epoch before, and SLOT the first word's byte.
    """
    addresses = tl.load(peers_ptr + rank) + byte_offsets
    payload, missing = _look_for_words(addresses, epoch, valid, COMPILED)
    if missing > 0:
        header = peer_pointer(peers_ptr, rank, 0)
        polls_left = tl.load(header + _SPIN_LIMIT)
        while (missing > 0) & (polls_left > 0):
            payload, missing = _look_for_words(addresses, epoch, valid, COMPILED)
            polls_left -= 64 if COMPILED else 1
            if is_aborted(header):
                polls_left = polls_left * 0
        if missing > 0:
            first_byte = tl.min(byte_offsets)
            give_up(peers_ptr, rank, world_size, source, first_byte, epoch, epoch - 1, False)
    return payload, missing


@triton.jit
def count_program(peers_ptr, rank):
    """One more program has ended, whether it gave up or not; the host looks at the count."""
    header = peer_pointer(peers_ptr, rank, 0)
    tl.atomic_add(header + _EPOCH, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu")
