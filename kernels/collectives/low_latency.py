"""One-shot collectives of a few kilobytes: every word carries its own flag, and there is no other signal.

A message is cut into blocks of ``WORDS`` 32-bit words. Program b does only block b, on every rank
(``row_norms.py``: a program does the blocks of a row). A block has its own epoch and words, which no other
block touches. So messages of different lengths may follow each other: if a message does not need a block,
the block skips that op.

Memory of a rank, after the header: an int64 epoch per block, then words (int64) by ``[block][epoch %
2][source][word]``. A word is ``epoch << 32 | payload``: see ``flagged_words.py``. The user's memory is seen
in units of ``UNIT`` bytes: 4, 2 or 1, the most that its address and length allow. The last word of a
message is filled up with zeros. Words are the same whatever the unit, so ranks need not agree.

Ordering, of all kernels here: **in every op a program sends all its words to every other rank, and waits
for at least one word of every other.** No credit is needed, and two sets of words, for even and odd epochs,
are enough::

    rank A writes epoch e + 2 into B's words of epoch e only after its op e + 1 has ended;
    op e + 1 ended because B's word of epoch e + 1 arrived;
    B sent that in its op e + 1, which began after its op e had ended: B has read all words of epoch e.

The flag tells a word of this epoch from older ones. Payload is never taken for a flag: each has its own 32
bits. The flag is the epoch modulo 2**32. A program writes its words in every op, also beyond the end of the
message. So an old word is from two epochs ago, or zero in new memory, and epochs begin with 1. Even after
flags have wrapped around, an old word never has the flag of the current epoch. The comparison is for
equality, because by the proof above no newer word can be there.

A program that has timed out stores its epoch with the sign changed, and does nothing from then on: it
cannot know that the others have read the words that it would overwrite. Nor does it store an output if some
of its words have not arrived.

All ranks add in rank order, in fp32: same bits everywhere, like in ``reduction.py``.
Programs wait for programs of the same number only. So there is progress as long as, on every rank, the
lowest-numbered program that has not ended is resident.

Rejected: credits (this protocol saves a signal per op and peer), one flag per 8 or 16 bytes of a wider
store (only 64 bits are certain to be seen whole), resetting words (a store per word, and a second round),
sending only as many words as the message has (a word that was left out 2**32 times has the right flag).
"""

import triton
import triton.language as tl

from interlace.kernels.arguments import Lot
from interlace.kernels.flagged_words import receive_words, send_words
from interlace.kernels.signal import count_program, peer_pointer


@triton.jit
def block_epoch(peers, epochs_offset, block):
    """Return the pointer to a block's epoch, and the epoch of this op: below 1 after a timeout."""
    pointer = peer_pointer(peers, peers.rank, epochs_offset) + block
    return pointer, tl.load(pointer) + 1


@triton.jit
def _word_bytes(lot, world_size, source, WORDS: tl.constexpr):
    """Return byte offsets of a block's words from ``source``, in every rank's memory."""
    block = lot.block.to(tl.int64)
    # Two sets of words, by even and odd epochs: with one, a rank that is an op ahead would overwrite words
    # that a slower one has not read.
    region = ((block * 2 + lot.epoch % 2) * world_size + source) * WORDS
    return lot.offset + (region + tl.arange(0, WORDS)) * 8


@triton.jit
def load_units(pointer, index, units, UNIT: tl.constexpr):
    """Load words ``index`` of the ``units`` units at ``pointer``; zeros beyond their end."""
    if UNIT == 4:
        words = tl.load(pointer + index, mask=index < units, other=0)
    else:
        words = tl.zeros(index.shape, tl.int32)
        for part in tl.static_range(4 // UNIT):
            # The last word may be in part beyond the end: the mask is per unit.
            unit = index * (4 // UNIT) + part
            value = tl.load(pointer + unit, mask=unit < units, other=0).to(tl.int32)
            # Narrow integers are extended by their sign: without the mask it would set the bits of later
            # units.
            words = words | ((value & ((1 << (8 * UNIT)) - 1)) << (8 * UNIT * part))
    return words


@triton.jit
def store_units(pointer, index, units, words, UNIT: tl.constexpr):
    """Store words like :func:`load_units` loads them."""
    if UNIT == 4:
        tl.store(pointer + index, words, mask=index < units)
    else:
        for part in tl.static_range(4 // UNIT):
            unit = index * (4 // UNIT) + part
            value = (words >> (8 * UNIT * part)).to(pointer.dtype.element_ty)
            tl.store(pointer + unit, value, mask=unit < units)


@triton.jit
def send_to_all(peers, lot, payload, WORDS: tl.constexpr, COMPILED: tl.constexpr):
    byte_offsets = _word_bytes(lot, peers.world_size, peers.rank, WORDS)
    # The next rank first: not all send to the same one at the same time.
    for step in range(1, peers.world_size):
        peer = (peers.rank + step) % peers.world_size
        send_words(peers, peer, byte_offsets, payload, lot.epoch, COMPILED)


@triton.jit
def payload_of(peers, source, lot, own, wanted, WORDS: tl.constexpr, COMPILED: tl.constexpr):
    """Return the words of ``source`` (``own`` if that is this rank), and how many ``wanted`` are
    missing."""
    payload = own
    missing = tl.zeros((), tl.int32)
    # The own words are in registers, and are not sent.
    if source != peers.rank:
        byte_offsets = _word_bytes(lot, peers.world_size, source, WORDS)
        payload, missing = receive_words(peers, source, byte_offsets, lot.epoch, wanted, COMPILED)
    return payload, missing


@triton.jit
def end_block(epoch_ptr, epoch, missing):
    """End a block's op: store its epoch, negated if words are missing."""
    # A plain store: the block's next op is a later kernel of the stream, and no other program reads it.
    tl.store(epoch_ptr, tl.where(missing == 0, epoch, -epoch))


@triton.jit(do_not_specialize=["peers", "units"])
def low_latency_all_gather_kernel(
    peers,
    input_ptr,
    output_ptr,
    units,
    epochs_offset,
    words_offset,
    UNIT: tl.constexpr,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """All-gather of equal shards.

    Legend: ``input`` is ``[units]`` and ``output`` ``[W, units]``, integers of ``UNIT`` bytes whatever they
    stand for; ``input`` may be its own part of ``output``. The grid is ``ceil(words / WORDS)``.

    Ordering: the module's.

    Example: W = 2, 3 words, WORDS = 2, first op: rank 0's program 1 sends ``1 << 32 | input[2]`` and
    ``1 << 32`` to rank 1's words [1][1][0], and polls its own [1][1][1][0] until its upper half is 1.
    """
    epoch_ptr, epoch = block_epoch(peers, epochs_offset, tl.program_id(0))
    # After an earlier timeout this program may not overwrite words again (see the module).
    if epoch > 0:
        index = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        valid = index < tl.cdiv(units * UNIT, 4)
        # All WORDS are sent, beyond the end as zeros: a word that was left out 2**32 times would have the
        # right flag.
        own = load_units(input_ptr, index, units, UNIT)
        lot = Lot(words_offset, epoch, tl.program_id(0))
        send_to_all(peers, lot, own, WORDS, COMPILED)
        missing = tl.zeros((), tl.int32)
        for source in range(peers.world_size):
            payload, lost = payload_of(peers, source, lot, own, valid, WORDS, COMPILED)
            if lost == 0:
                store_units(output_ptr + source * units, index, units, payload, UNIT)
            missing += lost
        end_block(epoch_ptr, epoch, missing)
    # Counted also after a timeout: the launch side waits for programs to end, not to succeed.
    count_program(peers)


@triton.jit
def half_of(word, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Return one of two 16-bit numbers of a word, as fp32."""
    half = (word >> 16) & 0xFFFF if HIGH else word & 0xFFFF
    return half.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _bits(number, DTYPE: tl.constexpr):
    """Return a 16-bit number's bits, in the lower half of a word."""
    return number.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit(do_not_specialize=["peers", "units"])
def low_latency_all_reduce_kernel(
    peers,
    input_ptr,
    output_ptr,
    units,
    epochs_offset,
    words_offset,
    DTYPE: tl.constexpr,
    AVERAGE: tl.constexpr,
    UNIT: tl.constexpr,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """One-shot all-reduce: every rank sends all it has to all, and adds up everything.

    Legend: ``input`` and ``output`` are ``[units]``, integers of ``UNIT`` bytes, and may be one tensor. A
    word is one fp32 number, or two of ``DTYPE`` ("bf16", "fp16"), the lower half first. The grid is
    ``ceil(words / WORDS)``.

    Ordering: the module's. A program has read its part of the input before it stores its sums.

    Example: W = 2, two bf16 numbers, 1 and 2 on rank 0, 3 and 4 on rank 1: one word each. In epoch 1
    rank 0 sends ``1 << 32 | 0x40003f80``, receives ``1 << 32 | 0x40804040`` and stores 4 and 6.
    """
    HALF: tl.constexpr = tl.bfloat16 if DTYPE == "bf16" else tl.float16
    epoch_ptr, epoch = block_epoch(peers, epochs_offset, tl.program_id(0))
    if epoch > 0:
        index = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
        valid = index < tl.cdiv(units * UNIT, 4)
        own = load_units(input_ptr, index, units, UNIT)
        lot = Lot(words_offset, epoch, tl.program_id(0))
        send_to_all(peers, lot, own, WORDS, COMPILED)
        low = tl.zeros((WORDS,), tl.float32)
        high = tl.zeros((WORDS,), tl.float32)
        missing = tl.zeros((), tl.int32)
        # Rank order and fp32, with the own numbers in their place: same bits on all ranks.
        for source in range(peers.world_size):
            payload, lost = payload_of(peers, source, lot, own, valid, WORDS, COMPILED)
            missing += lost
            if DTYPE == "fp32":
                low += payload.to(tl.float32, bitcast=True)
            else:
                low += half_of(payload, False, HALF)
                high += half_of(payload, True, HALF)
        if AVERAGE:
            low = low / peers.world_size
            high = high / peers.world_size
        if DTYPE == "fp32":
            total = low.to(tl.int32, bitcast=True)
        else:
            total = _bits(low, HALF) | (_bits(high, HALF) << 16)
        # A sum must include all ranks: otherwise the output stays as it was.
        if missing == 0:
            store_units(output_ptr, index, units, total, UNIT)
        end_block(epoch_ptr, epoch, missing)
    count_program(peers)


@triton.jit(do_not_specialize=["peers", "units", "root"])
def low_latency_broadcast_kernel(
    peers,
    tensor_ptr,
    units,
    root,
    epochs_offset,
    words_offset,
    UNIT: tl.constexpr,
    WORDS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Broadcast of ``[units]``, integers of ``UNIT`` bytes, from ``root``.

    Ordering: the module's. The other ranks send words without a meaning, and every rank waits for the
    first word of each. So it knows that all have read the words of the op before.

    Example: W = 3, root 1, 2 words, epoch 4: rank 1 sends its words to ranks 0 and 2; rank 0 sends its own
    to ranks 1 and 2, polls two words from rank 1 and one from rank 2, and stores the two.
    """
    epoch_ptr, epoch = block_epoch(peers, epochs_offset, tl.program_id(0))
    if epoch > 0:
        first = tl.program_id(0) * WORDS
        index = first + tl.arange(0, WORDS)
        words = tl.cdiv(units * UNIT, 4)
        own = load_units(tensor_ptr, index, units, UNIT)
        lot = Lot(words_offset, epoch, tl.program_id(0))
        send_to_all(peers, lot, own, WORDS, COMPILED)
        missing = tl.zeros((), tl.int32)
        for source in range(peers.world_size):
            # Also one word of each other rank: it shows that the rank has finished the op before.
            wanted = index < tl.where(source == root, words, first + 1)
            payload, lost = payload_of(peers, source, lot, own, wanted, WORDS, COMPILED)
            if (source == root) & (root != peers.rank) & (lost == 0):
                store_units(tensor_ptr, index, units, payload, UNIT)
            missing += lost
        end_block(epoch_ptr, epoch, missing)
    count_program(peers)
