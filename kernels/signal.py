"""Publish and wait: every memory ordering of interlace's kernels is in this file.

A *signal slot* is an int64 in symmetric memory that only grows. A rank that has written data for a peer
*publishes*: it sets a slot in the peer's memory to the op's *epoch*. The peer *waits* until its slot is
at least that epoch, and may then read the data. Slots have no resets and phases. So a captured graph may
replay an op any number of times.

Guarantees
----------
``publish(slot, epoch)``
    A rank that waits for ``slot >= epoch`` sees everything that any thread of this program stored before.
    This needs the barrier in it. Without the barrier one thread releases, and the stores of all other
    threads of the program stay unordered. ``publish_slots`` does the same for many slots.
``wait(...)``
    Loads after it see the published data. It returns the value it saw. A load that must come after it
    should use that value in its address, or be in a loop nested inside; otherwise the pipeliner may move
    the load up. The wait is bounded: after ``SPIN_LIMIT`` polls, or once the group is aborted, it returns a
    smaller value. The first wait that times out writes into the header which rank it waited for.

After a timeout
---------------
After a wait that has timed out, no store into a peer's memory, no signal and no credit may follow. Within a
kernel, the code that waits checks the value of ``wait``. For later work on the stream, ABORT is not 0: the
channel is *void* on this rank, and stays void. A void channel's epoch is one that no slot reaches, so every
kernel that begins there times out before it stores; ``publish_kernel`` sends nothing; ``finish_kernel``
(``slots.py``) gives no credit. It sets CREDIT to a negative number instead. That satisfies no wait, and
tells the peers that this rank takes nothing it reads in the channel as valid.

A copy on a stream cannot check. So a stream's wait for credits, which protects a peer's memory, holds the
stream until the peer's CREDIT is negative, or for ``LINGER_POLLS`` more polls. A peer that is alive and in
the middle of a read has ended it by then, and later reads find the channel void.

Preconditions
-------------
Publish data that was stored with ``tl.store``. A descriptor (TMA) store is complete only after the kernel,
or after ``complete_descriptor_stores``. Call ``fence_descriptor_loads`` between a wait and loads through a
descriptor.

A program stores into a peer's memory only after ``wait_credit`` has returned ``epoch - 1`` or more. A
smaller value means that the wait has timed out, and that the peer may still be reading there.

Words that carry their own flag need no ordering: see ``flagged_words.py``. Their atomics are in this file.

Header of a channel, in int64 words; every rank has its own::

    0 EPOCH       ops finished on this channel; the op that runs now has epoch + 1
    1 ABORT       not 0: all waits return at once
    2 SPIN_LIMIT  polls per wait
    3 CLAIMED     1 once a wait has timed out; 4-8 then describe it
    4 SOURCE      which rank it waited for           5 SLOT      byte offset of the slot
    6 EXPECTED    the epoch it waited for            7 SEEN      the value it saw last
    8 PROGRAM     program id
    64 + r CREDIT rank r has finished this many ops on this channel; negative: it never will again

Flags: the protocol of torch's symmetric memory
-----------------------------------------------
A *flag* is not a slot: it is a 32-bit word of a *signal pad*, goes up and down, and belongs to one pair.
Every rank has a pad. Rank ``source`` raises flag ``channel * world_size + source`` of the pad to signal its
owner on that channel. The protocol is that of ``torch.distributed._symmetric_memory``. So kernels which use
a pad by themselves, and ``put_signal``, ``wait_signal`` and ``barrier`` of the handle, may be mixed like
in torch::

    put    source   0 -> 1, a compare-and-swap with release; waits first while the flag is still up
    wait   owner    1 -> 0, a compare-and-swap with acquire; waits first until it is up

``put_flag``   the program that takes the flag down sees all earlier stores of any thread of this program.
``wait_flag``  loads after it see all stores before the put. ``source`` can raise the flag again only
               after this program took it down.

Between two ranks one put answers one wait, so pads are zero at rest and may be used again at once. Both
are bounded: after ``polls`` polls they return 0 instead of 1.
"""

import triton
import triton.language as tl

EPOCH_WORD = 0
ABORT_WORD = 1
SPIN_LIMIT_WORD = 2
CLAIMED_WORD = 3
CREDIT_WORDS = 64
MAX_WORLD_SIZE = 64
HEADER_WORDS = CREDIT_WORDS + MAX_WORLD_SIZE
LINGER_POLLS = 1 << 20  # about a second
VOID_EPOCH = 1 << 62  # no slot reaches it

_EPOCH = tl.constexpr(EPOCH_WORD)
_ABORT = tl.constexpr(ABORT_WORD)
_SPIN_LIMIT = tl.constexpr(SPIN_LIMIT_WORD)
_CLAIMED = tl.constexpr(CLAIMED_WORD)
_CREDIT = tl.constexpr(CREDIT_WORDS)
_LINGER = tl.constexpr(LINGER_POLLS)
_VOID = tl.constexpr(VOID_EPOCH)
_POLLS_BETWEEN_ABORT_CHECKS = tl.constexpr(64)


@triton.jit
def peer_pointer(peers, peer, byte_offset):
    """Point to the int64 at ``byte_offset`` of ``peer``'s buffer. ``peers``: see ``arguments.py``."""
    # A table in device memory, not a tuple of pointers: one compilation serves every world size.
    return (tl.load(peers.peers_ptr + peer) + byte_offset).to(tl.pointer_type(tl.int64))


@triton.jit
def is_mapped(peers, peer):
    """True if ``peer``'s memory can be addressed here; a rank of another node is reached by puts."""
    return tl.load(peers.peers_ptr + peer) != 0


@triton.jit
def counted_epoch(peers):
    """Return the epoch of the op that runs now, also in a void channel; constant during the op."""
    # From device memory, not an argument: a captured graph would repeat the argument's value forever.
    return tl.load(peer_pointer(peers, peers.rank, 0) + _EPOCH) + 1


@triton.jit
def is_void(peers):
    """True if a wait of an earlier kernel has timed out; a timeout of this kernel may or may not count."""
    return tl.load(peer_pointer(peers, peers.rank, 0) + _ABORT) != 0


@triton.jit
def current_epoch(peers):
    """Return the epoch of the op that runs now; in a void channel one that is never reached.

    Call it at the start of a kernel. In a void channel waits for this epoch, or for the one before it, time
    out. So nothing is stored that they protect.
    """
    epoch = counted_epoch(peers)
    return tl.where(is_void(peers), _VOID, epoch)


@triton.jit
def publish(slot_ptr, epoch):
    """Set a slot, after all earlier stores of the whole program."""
    # First a barrier of all threads: the release below orders the stores of one thread only.
    tl.debug_barrier()
    tl.atomic_xchg(slot_ptr, epoch, sem="release", scope="sys")


@triton.jit
def publish_slots(slot_ptrs, valid, epoch):
    """Publish the ``valid`` ones of several slots at once: they share one barrier and one fence."""
    # Each thread sets and releases a slot. After the barrier its release covers the stores of all threads.
    tl.debug_barrier()
    tl.atomic_xchg(slot_ptrs, tl.where(valid, epoch, 0), mask=valid, sem="release", scope="sys")


@triton.jit
def complete_descriptor_stores(COMPILED: tl.constexpr):
    """Wait until the descriptor (TMA) stores of this program are in memory, and not only read."""
    if COMPILED:
        tl.inline_asm_elementwise(
            # Not `.read`, which only says that the source may be written again. An inline asm must have a
            # result, hence the mov. The result is unused, and `is_pure=False` keeps the asm in the code.
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def give_up(peers, source, slot_byte, epoch, seen, COMPILED_STORES: tl.constexpr):
    """Record which rank was waited for, if this is the first timeout, and abort all ranks' channels."""
    complete_descriptor_stores(COMPILED_STORES)
    header = peer_pointer(peers, peers.rank, 0)
    # tl.atomic_cas converts nothing: a plain 0 and 1 would be int32, for a word of 64 bits.
    unclaimed = tl.cast(0, tl.int64)
    claim = unclaimed + 1
    # Many programs may time out at once; one writes, so a record is never a mixture of two.
    if tl.atomic_cas(header + _CLAIMED, unclaimed, claim, sem="acq_rel", scope="sys") == 0:
        # If ABORT was set before, this wait ended because of it and is not the cause that a user needs.
        if tl.atomic_add(header + _ABORT, 0, sem="acquire", scope="sys") == 0:
            tl.store(header + _CLAIMED + 1, source)
            tl.store(header + _CLAIMED + 2, slot_byte)
            tl.store(header + _CLAIMED + 3, epoch)
            tl.store(header + _CLAIMED + 4, seen)
            tl.store(header + _CLAIMED + 5, tl.program_id(0))
            # After the record: a rank that finds ABORT set finds the record complete.
            for peer in range(peers.world_size):
                if is_mapped(peers, peer):
                    publish(peer_pointer(peers, peer, 0) + _ABORT, epoch)


@triton.jit
def is_aborted(header):
    """True if ABORT of ``header``, this rank's own, is set by now."""
    return tl.atomic_add(header + _ABORT, 0, sem="acquire", scope="sys") != 0


@triton.jit
def wait(peers, source, slot_byte, epoch, COMPILED_STORES: tl.constexpr = False):
    """Poll this rank's slot at ``slot_byte`` until it is at least ``epoch``; ``source`` publishes it.

    Return the value seen, smaller than ``epoch`` only if the wait has timed out. ``COMPILED_STORES``: this
    program may have descriptor stores under way, in a compiled kernel. No publish may overtake them, and a
    timeout publishes.
    """
    slot_ptr = peer_pointer(peers, peers.rank, slot_byte)
    # An atomic, as a poll by tl.load orders nothing, volatile or not; its result reaches all threads.
    seen = tl.atomic_add(slot_ptr, 0, sem="acquire", scope="sys")
    if seen < epoch:
        header = peer_pointer(peers, peers.rank, 0)
        polls_left = tl.load(header + _SPIN_LIMIT)
        while (seen < epoch) & (polls_left > 0):
            seen = tl.atomic_add(slot_ptr, 0, sem="acquire", scope="sys")
            polls_left -= 1
            # ABORT is another word, and another acquire: it is not read at every poll.
            if polls_left % _POLLS_BETWEEN_ABORT_CHECKS == 0:
                if is_aborted(header):
                    # A plain 0 is int32, and a variable that a loop carries keeps its type.
                    polls_left = polls_left * 0
        if seen < epoch:
            give_up(peers, source, slot_byte, epoch, seen, COMPILED_STORES)
    return seen


@triton.jit
def poll_slots(slot_ptrs, valid):
    """Return the values of this rank's slots; each thread acquires the slot it polls (``slots.py``)."""
    nothing = tl.zeros(valid.shape, tl.int64)
    return tl.atomic_add(slot_ptrs, nothing, mask=valid, sem="acquire", scope="sys")


@triton.jit
def wait_credit(peers, peer, epoch):
    """Wait until ``peer`` has finished the op before this one, so its buffer may be written again."""
    return wait(peers, peer, (peer + _CREDIT) * 8, epoch - 1)


@triton.jit
def linger(peers, peer, finished):
    """After the wait for ``peer``'s credit has timed out: wait until no copy on this stream can do harm.

    Ends when ``peer`` has finished ``finished`` ops or never will; LINGER_POLLS or SPIN_LIMIT bound it.
    """
    credit_ptr = peer_pointer(peers, peers.rank, (peer + _CREDIT) * 8)
    polls_left = tl.minimum(tl.load(peer_pointer(peers, peers.rank, 0) + _SPIN_LIMIT), _LINGER)
    seen = tl.atomic_add(credit_ptr, 0, sem="acquire", scope="sys")
    # Negative: the peer has also timed out, and takes nothing that it reads here as valid any more.
    while (seen >= 0) & (seen < finished) & (polls_left > 0):
        seen = tl.atomic_add(credit_ptr, 0, sem="acquire", scope="sys")
        polls_left -= 1


@triton.jit
def fence_descriptor_loads(COMPILED: tl.constexpr):
    """Order descriptor (TMA) loads of this program after a wait, which orders loads of another proxy."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def store_words(addresses, payload, epoch, COMPILED: tl.constexpr):
    """Store 64-bit words: the epoch's lower 32 bits above ``payload`` (int32); each is seen whole."""
    if COMPILED:
        tl.inline_asm_elementwise(
            """{
            .reg .b64 word;
            mov.b64 word, {$2, $3};
            st.relaxed.sys.global.b64 [$1], word;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r",
            [addresses, payload, (epoch & 0xFFFFFFFF).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        word = (epoch << 32) | (payload.to(tl.int64) & 0xFFFFFFFF)
        pointers = addresses.to(tl.pointer_type(tl.int64))
        # An atomic: a plain store of the interpreter is a race with the poll, and may be seen in part.
        tl.atomic_xchg(pointers, word, sem="relaxed", scope="sys")


@triton.jit
def look_for_words(addresses, epoch, valid, COMPILED: tl.constexpr):
    """Return the payload of this rank's words (``flagged_words.py``), and how many have not arrived.

    Relaxed, like :func:`store_words`: data and flag are one 64-bit word, so no ordering is needed.
    """
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
            # &: results are written before the operands are read for the last time, so they need registers
            # of their own. 64 polls at most: the caller looks at ABORT in between.
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
def count_program(peers):
    """Count a program that has ended, also after a timeout; the launch side reads the count."""
    header = peer_pointer(peers, peers.rank, 0)
    tl.atomic_add(header + _EPOCH, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["peers", "peer", "slot_byte"])
def publish_kernel(peers, peer, slot_byte):
    """Publish one slot of ``peer``: a kernel that follows a copy on the same stream.

    Ordering: runs after the copies that precede it on its stream, so the kernel boundary has already
    made them visible; the release carries them to ``peer``. In a void channel nothing is published.

    Example: rank 2 has copied its chunk 1 to rank 0 and runs ``publish_kernel[(1,)](Peers(table, 2, 4), 0,
    1064)``: the int64 at byte 1064 of rank 0's buffer becomes the current epoch, say 7.
    """
    if not is_void(peers):
        publish(peer_pointer(peers, peer, slot_byte), counted_epoch(peers))


@triton.jit(do_not_specialize=["peers", "source", "slot_byte"])
def wait_kernel(peers, source, slot_byte):
    """Hold a stream until this rank's slot has the current epoch.

    Ordering: one program, alone; the end of the kernel orders everything later on the stream after it.
    If it times out, the stream goes on and the channel is void. Later work may fill this rank's own memory,
    and kernels that would signal do not.

    Example: with epoch word 6, ``wait_kernel[(1,)](Peers(table, 0, 4), 2, 1064)`` ends once the int64 at
    byte 1064 of rank 0's buffer is at least 7; the error names rank 2 if it never is.
    """
    wait(peers, source, slot_byte, current_epoch(peers))


@triton.jit
def flag_pointer(pads_ptr, owner, world_size, channel, source):
    """Point to the flag that ``source`` raises for ``owner``. ``pads_ptr``: table of the pads'
    addresses."""
    pad = tl.load(pads_ptr + owner).to(tl.pointer_type(tl.int32))
    return pad + (channel * world_size + source)


@triton.jit
def put_flag(flag_ptr, polls):
    """Raise a flag, after all earlier stores of the whole program; 0 if it never came down, otherwise 1."""
    # As in publish: the release orders the stores of one thread only.
    tl.debug_barrier()
    down = tl.zeros((), tl.int32)
    up = down + 1
    seen = up
    while (seen != 0) & (polls > 0):
        # Look before the swap: that keeps the cache line shared, and lets a simulated program sleep.
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        if seen == 0:
            seen = tl.atomic_cas(flag_ptr, down, up, sem="release", scope="sys")
        polls -= 1
    return 1 - seen


@triton.jit
def wait_flag(flag_ptr, polls):
    """Take a flag down once it is up; 0 if it never was, otherwise 1."""
    down = tl.zeros((), tl.int32)
    up = down + 1
    seen = down
    while (seen != 1) & (polls > 0):
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        if seen == 1:
            seen = tl.atomic_cas(flag_ptr, up, down, sem="acquire", scope="sys")
        polls -= 1
    return seen


@triton.jit(do_not_specialize=["rank", "world_size", "channel", "peer", "polls"])
def put_signal_kernel(pads_ptr, status_ptr, rank, world_size, channel, peer, polls):
    """Raise this rank's flag at ``peer``; ``status_ptr`` is 1 + peer until that is done, then 0.

    Ordering: one program, alone. The rank that takes the flag down sees all earlier work on this stream.

    Example: with 4 ranks, ``put_signal_kernel[(1,)](pads, status, 2, 4, 1, 0, 1 << 62)`` turns word
    1 * 4 + 2 = 6 of rank 0's pad from 0 to 1.
    """
    # Set before the wait: if the kernel hangs or times out, this word names the rank.
    tl.store(status_ptr, peer + 1)
    if put_flag(flag_pointer(pads_ptr, peer, world_size, channel, rank), polls) != 0:
        tl.store(status_ptr, 0)


@triton.jit(do_not_specialize=["rank", "world_size", "channel", "peer", "polls"])
def wait_signal_kernel(pads_ptr, status_ptr, rank, world_size, channel, peer, polls):
    """Take down ``peer``'s flag here; ``status_ptr`` is 1 + peer until that is done, then 0.

    Ordering: one program, alone; the end of the kernel orders all later work on its stream.

    Example: with 4 ranks, ``wait_signal_kernel[(1,)](pads, status, 0, 4, 1, 2, 1 << 62)`` waits until
    word 1 * 4 + 2 = 6 of rank 0's pad is 1 and turns it to 0.
    """
    tl.store(status_ptr, peer + 1)
    if wait_flag(flag_pointer(pads_ptr, rank, world_size, channel, peer), polls) != 0:
        tl.store(status_ptr, 0)


@triton.jit(do_not_specialize=["rank", "world_size", "channel", "polls"])
def handle_barrier_kernel(pads_ptr, status_ptr, rank, world_size, channel, polls):
    """Raise a flag at every other rank, then take theirs down. ``status_ptr``: like in the kernels above.

    Ordering: one program, alone, ordered with everything else on its stream. Every rank publishes to every
    other, and waits for every other. So all that precedes it on any rank is visible to all that follows it
    on any rank. A flag is raised again only after its owner took it down, so a rank cannot run ahead by two
    barriers.

    Example: rank 1 of 3 on channel 2 raises word 2 * 3 + 1 = 7 at ranks 0 and 2, then waits for words
    6 and 8 of its own pad. All are 0 afterwards.
    """
    done = tl.zeros((), tl.int32) + 1
    # All flags go up before the first wait: ranks that waited first would wait for each other.
    for peer in range(world_size):
        if (peer != rank) & (done != 0):
            tl.store(status_ptr, peer + 1)
            done = put_flag(flag_pointer(pads_ptr, peer, world_size, channel, rank), polls)
    for peer in range(world_size):
        if (peer != rank) & (done != 0):
            tl.store(status_ptr, peer + 1)
            done = wait_flag(flag_pointer(pads_ptr, rank, world_size, channel, peer), polls)
    if done != 0:
        tl.store(status_ptr, 0)


@triton.jit(do_not_specialize=["value"])
def write_value_kernel(word_ptr, value):
    """Set a 32-bit word: a kernel that follows a copy on the same stream.

    Ordering: like publish_kernel, for a rank that acquires the word.

    Example: ``write_value_kernel[(1,)](progress[3:], 1)`` sets progress[3] to 1 after earlier copies.
    """
    publish(word_ptr, value)
