"""One-shot collectives of a few kilobytes: every word carries its own flag, and there is no other signal.

A message is cut into blocks of ``WORDS`` 32-bit words. Program b does block b, on every rank, and nothing
else: it has an epoch of its own, words of its own, and no program of another number ever touches them. So
messages of different lengths may follow each other, and a program that is not needed just misses an op.

Memory of a rank, after the header: an int64 epoch per program, then words (int64) by
``[program][epoch % 2][source][word]``. A word is ``epoch << 32 | payload``: see ``kernels/signal.py``.

Ordering, of all kernels here: **in every op every rank sends at least one word to every other rank, and
waits for one of every other.** No credit is needed, and two sets of words, even epochs and odd ones, do::

    rank A writes epoch e + 2 into B's words of epoch e only after its op e + 1 has ended;
    op e + 1 ended because B's word of epoch e + 1 came;
    B sent that in its op e + 1, which began after its op e had ended: B has read all words of epoch e.

That a word is of this epoch and not of one before follows from the flag, which only grows (modulo 2**32;
words are at most two ops old). It is compared for equality: a newer flag cannot be there, by the above. A
word of a program that missed ops is older still. Fresh memory is zero, and epochs begin with 1.

All ranks add in rank order, in fp32: same bits everywhere, as in ``kernels/reduction.py``. Programs wait
for programs of the same number only, so any residency in which the lowest number still to run is resident
on every rank makes progress.

Rejected: credits (a signal per op and peer, which is what this avoids), one flag per 8 or 16 bytes of a
wider store (only 64 bits are certain to be seen whole), resetting words (a store per word, and a second
round).
"""

import triton
import triton.language as tl

from interlace.kernels.signal import peer_pointer, receive_words, send_words


@triton.jit
def _program_epoch(peers_ptr, rank, epochs_offset):
    """Where this program's epoch is, and the epoch of the op that runs now."""
    pointer = peer_pointer(peers_ptr, rank, epochs_offset) + tl.program_id(0)
    return pointer, tl.load(pointer) + 1


@triton.jit
def _word_bytes(words_offset, world_size, source, epoch, WORDS: tl.constexpr):
    """Byte offsets of this program's words from ``source``, in every rank's memory."""
    program = tl.program_id(0).to(tl.int64)
    region = ((program * 2 + epoch % 2) * world_size + source) * WORDS
    return words_offset + (region + tl.arange(0, WORDS)) * 8


@triton.jit
def _send_to_all(peers_ptr, rank, world_size, words_offset, payload, epoch, valid,
                 WORDS: tl.constexpr, COMPILED: tl.constexpr):  # fmt: skip
    byte_offsets = _word_bytes(words_offset, world_size, rank, epoch, WORDS)
    for step in range(1, world_size):
        peer = (rank + step) % world_size
        send_words(peers_ptr, peer, byte_offsets, payload, epoch, valid, COMPILED)


@triton.jit
def _payload_of(peers_ptr, rank, world_size, source, words_offset, own, epoch, valid,
                WORDS: tl.constexpr, COMPILED: tl.constexpr):  # fmt: skip
    """What ``source`` has sent; of this rank itself, ``own``."""
    payload = own
    if source != rank:
        byte_offsets = _word_bytes(words_offset, world_size, source, epoch, WORDS)
        payload, _ = receive_words(
            peers_ptr, rank, world_size, source, byte_offsets, epoch, valid, COMPILED
        )
    return payload


@triton.jit(do_not_specialize=["rank", "world_size", "words"])
def low_latency_all_gather_kernel(
    peers_ptr,
    input_ptr,
    output_ptr,
    words,
    rank,
    world_size,
    epochs_offset,
    words_offset,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """All-gather of equal shards.

    Legend: ``input`` is ``[words]`` and ``output`` ``[W, words]``, int32 whatever they stand for;
    ``input`` may be its own part of ``output``. The grid is ``ceil(words / WORDS)``.

    Ordering: the module's. Every rank sends all its words, at least one per program.

    Example: W = 2, 3 words, WORDS = 2, first op: rank 0's program 1 sends ``1 << 32 | input[2]`` to rank
    1's words [1][1][0][0], and polls its own [1][1][1][0] until its upper half is 1.
    """
    epoch_ptr, epoch = _program_epoch(peers_ptr, rank, epochs_offset)
    offsets = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    valid = offsets < words
    own = tl.load(input_ptr + offsets, mask=valid, other=0)
    _send_to_all(peers_ptr, rank, world_size, words_offset, own, epoch, valid, WORDS, COMPILED)
    for source in range(world_size):
        payload = _payload_of(
            peers_ptr, rank, world_size, source, words_offset, own, epoch, valid, WORDS, COMPILED
        )
        tl.store(output_ptr + source * words + offsets, payload, mask=valid)
    tl.store(epoch_ptr, epoch)


@triton.jit
def _half(word, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """One of two 16-bit numbers of a word, as fp32."""
    half = (word >> 16) & 0xFFFF if HIGH else word & 0xFFFF
    return half.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _bits(number, DTYPE: tl.constexpr):
    """A 16-bit number's bits, in the lower half of a word."""
    return number.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit(do_not_specialize=["rank", "world_size", "words"])
def low_latency_all_reduce_kernel(
    peers_ptr,
    input_ptr,
    output_ptr,
    words,
    rank,
    world_size,
    epochs_offset,
    words_offset,
    DTYPE: tl.constexpr,
    AVERAGE: tl.constexpr,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """One-shot all-reduce: every rank sends all it has to all, and adds up everything.

    Legend: ``input`` and ``output`` are ``[words]``, int32, and may be the same tensor. A word is one
    fp32 number, or two of ``DTYPE`` ("bf16", "fp16"), the lower half first. The grid is
    ``ceil(words / WORDS)``.

    Ordering: the module's. A program has read its part of the input before it stores its sums.

    Example: W = 2, two bf16 numbers, 1 and 2 on rank 0, 3 and 4 on rank 1: one word each. In epoch 1
    rank 0 sends ``1 << 32 | 0x40003f80``, receives ``1 << 32 | 0x40804040`` and stores 4 and 6.
    """
    epoch_ptr, epoch = _program_epoch(peers_ptr, rank, epochs_offset)
    offsets = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    valid = offsets < words
    own = tl.load(input_ptr + offsets, mask=valid, other=0)
    _send_to_all(peers_ptr, rank, world_size, words_offset, own, epoch, valid, WORDS, COMPILED)
    low = tl.zeros((WORDS,), tl.float32)
    high = tl.zeros((WORDS,), tl.float32)
    for source in range(world_size):
        payload = _payload_of(
            peers_ptr, rank, world_size, source, words_offset, own, epoch, valid, WORDS, COMPILED
        )
        if DTYPE == "fp32":
            low += payload.to(tl.float32, bitcast=True)
        elif DTYPE == "bf16":
            low += _half(payload, False, tl.bfloat16)
            high += _half(payload, True, tl.bfloat16)
        else:
            low += _half(payload, False, tl.float16)
            high += _half(payload, True, tl.float16)
    if AVERAGE:
        low = low / world_size
        high = high / world_size
    if DTYPE == "fp32":
        total = low.to(tl.int32, bitcast=True)
    elif DTYPE == "bf16":
        total = _bits(low, tl.bfloat16) | (_bits(high, tl.bfloat16) << 16)
    else:
        total = _bits(low, tl.float16) | (_bits(high, tl.float16) << 16)
    tl.store(output_ptr + offsets, total, mask=valid)
    tl.store(epoch_ptr, epoch)


@triton.jit(do_not_specialize=["rank", "world_size", "words", "root"])
def low_latency_broadcast_kernel(
    peers_ptr,
    tensor_ptr,
    words,
    root,
    rank,
    world_size,
    epochs_offset,
    words_offset,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Broadcast of ``[words]``, int32, from ``root``.

    Ordering: the module's. The root sends its words; every other rank sends one word, of no meaning, to
    every rank, and waits for one of each, so that it knows that all have read what came before.

    Example: W = 3, root 1, 2 words, epoch 4: rank 1 sends two words to ranks 0 and 2; rank 0 sends its
    first word to ranks 1 and 2, polls two words from rank 1 and one from rank 2, and stores the two.
    """
    epoch_ptr, epoch = _program_epoch(peers_ptr, rank, epochs_offset)
    first = tl.program_id(0) * WORDS
    index = tl.arange(0, WORDS)
    left = words - first
    sent = index < tl.where(rank == root, left, 1)
    own = tl.load(tensor_ptr + first + index, mask=sent, other=0)
    _send_to_all(peers_ptr, rank, world_size, words_offset, own, epoch, sent, WORDS, COMPILED)
    for source in range(world_size):
        wanted = index < tl.where(source == root, left, 1)
        payload = _payload_of(
            peers_ptr, rank, world_size, source, words_offset, own, epoch, wanted, WORDS, COMPILED
        )
        if source == root:
            tl.store(tensor_ptr + first + index, payload, mask=wanted)
    tl.store(epoch_ptr, epoch)
