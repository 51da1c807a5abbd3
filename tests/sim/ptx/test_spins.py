"""Loops in PTX that wait for what others write, by any kind of load, and loops that never end."""

from contextlib import nullcontext

import pytest
import torch

import interlace
from interlace import DeadlockError
from interlace.verify import launch_ptx
from interlace_verify.machine import machine
from interlace_verify.machine.module import read
from sim.ptx.ptx_texts import kernel
from tiers import thorough

WORD = "ld.param.b64 %rd4, [kernel_param_0];"
SHARED = "mov.b32 %r5, memory; st.shared.b32 [%r5], 0; bar.sync 0;"


def poll(load: str, label: str = "AGAIN") -> str:
    return f"{label}: {load}; setp.eq.s32 %p2, %r3, 0; @%p2 bra {label};"


def roles(one: str, other: str) -> str:
    return (
        f"setp.eq.s32 %p1, %r1, 0; @!%p1 bra OTHER; {one} bra MET; OTHER: {other} MET: bar.sync 0;"
    )


def launched(body: str, threads: int = 256) -> None:
    def on_rank() -> None:
        words = torch.zeros(threads, dtype=torch.int32)
        launch_ptx(kernel(body, threads=threads), 1, words, words, shared_bytes=16)

    interlace.run(on_rank, 1, place="ptx", seed=3)


EACH = "ld.global.b32 %r3, [%rd1]"
ONE = "ld.volatile.global.b32 %r3, [%rd4]"
MOVES = "bar.sync 0; st.shared.b32 [%r5], 1; bar.sync 0; st.shared.b32 [%r5], 0"
COUNTED = "add.s32 %r9, %r9, 1; " + EACH


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (poll(EACH), "byte 0 and 255 more words"),  # warps apart, plain
        (poll("ld.relaxed.sys.global.u32 %r3, [%rd1]"), "byte 0 and 255 more words"),
        (WORD + poll(ONE), "byte 0, seen 0"),
        (WORD + roles(poll(ONE), poll(EACH, "TOO")), "byte 4 and 255 more words"),
        (WORD + roles(poll("ld.global.b32 %r3, [%rd4]"), ""), "byte 0, seen 0"),
        (WORD + poll(f"{ONE}; ld.global.b32 %r4, [%rd4+8]"), "byte 0 and byte 8"),
        (WORD + "mov.b32 %r3, 0; " + poll("atom.global.exch.b32 %r3, [%rd4], 0"), "byte 0, seen 0"),
        (roles(poll(COUNTED), ""), "byte 0, seen 0"),
        pytest.param(WORD + SHARED + poll(f"{ONE}; {MOVES}"), "byte 0, seen 0", marks=thorough),
    ],
)
def test_a_spin_waits_for_the_words_that_it_reads(body: str, words: str) -> None:
    with pytest.raises(interlace.DeadlockError, match=f"tensor of 256 on rank 0, {words}"):
        launched(body)


@pytest.mark.parametrize(
    "body",
    [
        WORD + roles(poll(EACH), "st.global.b32 [%rd4], 1;"),
        SHARED + roles(poll("ld.shared.b32 %r3, [%r5]"), "st.shared.b32 [%r5], 1;"),
        # a sum of the same word is no wait
        "AGAIN: add.s32 %r9, %r9, 1; ld.global.b32 %r3, [%rd1]; setp.lt.s32 %p2, %r9, 900; @%p2 bra AGAIN;",
    ],
)
def test_what_ends_is_no_deadlock(body: str) -> None:
    launched(body, threads=64)


RELAXED = "ld.relaxed.sys.global.u32 %r3, [%rd1]"
LONG = "AGAIN: {}; add.s32 %r9, %r9, 1; setp.lt.s32 %p2, %r9, 4000; @%p2 bra AGAIN;"
PROGRAMS = "mov.u32 %r6, %ctaid.x; setp.eq.s32 %p1, %r6, 0;"
LOOKS = "; atom.global.add.u32 %r7, [%rd4+4], 1"


@pytest.mark.parametrize(
    "read",
    [
        "ld.relaxed.gpu.global.b32 %r4, [%rd2]",
        "ld.global.b32 %r4, [%rd2]",
        f"ld.relaxed.gpu.global.b32 %r4, [%rd2]; {MOVES}",
    ],
)
@pytest.mark.parametrize("looks", ["", LOOKS])
def test_a_counted_loop_ends_though_others_poll(read: str, looks: str) -> None:
    """It reads the same words again and again, and then tells the program that waits."""
    polls = poll("ld.acquire.gpu.global.u32 %r3, [%rd4]" + looks)
    reads = LONG.format(read) + "st.release.gpu.global.u32 [%rd4], 1;"
    body = (
        WORD
        + SHARED
        + PROGRAMS
        + f"@!%p1 bra OTHER; {polls.replace('AGAIN', 'POLL')} bra MET; OTHER: {reads} MET:"
    )

    def on_rank() -> None:
        words, others = torch.zeros(64, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
        launch_ptx(kernel(body), 2, words, others, shared_bytes=16)

    interlace.run(on_rank, 1, place="ptx", seed=3)


COUNTS = "red.relaxed.sys.global.add.u32 [%rd6+64], 1; ld.relaxed.sys.global.b32 %r3, [%rd4+128]"
BOTH_COUNT = f"""{WORD} mov.u32 %r6, %ctaid.x; setp.eq.s32 %p1, %r6, 0; mul.wide.u32 %rd5, %r6, 4;
    add.s64 %rd6, %rd4, %rd5; selp.b32 %r8, 100, 80, %p1; mov.b32 %r9, 0;
    VAIN: add.s32 %r9, %r9, 1; {COUNTS}; setp.lt.s32 %p2, %r9, %r8; @%p2 bra VAIN; @!%p1 bra WAIT;
    mov.b32 %r9, 0;
    WORK: add.s32 %r9, %r9, 1; st.global.b32 [%rd4+32], %r9; setp.lt.s32 %p2, %r9, 1000; @%p2 bra WORK;
    st.release.sys.global.b32 [%rd4+192], 1; bra END;
    WAIT: add.s32 %r9, %r9, 1; ld.acquire.sys.global.b32 %r3, [%rd4+192]; setp.eq.s32 %p2, %r3, 0;
    @%p2 bra WAIT; END:"""


@pytest.mark.parametrize("seed", range(3))
def test_programs_that_count_in_memory_before_one_waits(seed: int) -> None:
    """Polls in vain are many before anybody has been taken for one that waits."""

    def on_rank() -> None:
        words, others = torch.zeros(64, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
        launch_ptx(kernel(BOTH_COUNT, threads=1), 2, words, others)

    interlace.run(on_rank, 1, place="ptx", seed=seed)


@pytest.mark.parametrize(("programs", "deadlock"), [(1, False), (4, True)])
def test_programs_that_count_their_polls_share_the_last_rounds(
    programs: int, deadlock: bool
) -> None:
    """A deadlock is told in seconds, by however many programs; one that only counts gets to its end."""

    def on_rank() -> None:
        words, others = torch.zeros(64, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
        launch_ptx(kernel(LONG.format(RELAXED)), programs, words, others)

    told = pytest.raises(DeadlockError, match="program 3") if deadlock else nullcontext()
    with told:
        interlace.run(on_rank, 1, place="ptx", seed=3)


@pytest.mark.parametrize(
    ("body", "polls"),
    [
        (poll(RELAXED), [1]),
        (poll(f"{RELAXED}; ld.acquire.gpu.global.u32 %r4, [%rd1]"), [2]),
        (poll(f"{RELAXED}; add.s32 %r4, %r3, 1"), [1]),
        (poll(f"{RELAXED}; add.s32 %r4, %r4, 1"), []),  # a round is not as the last
        (poll(f"{RELAXED}; @%p1 mov.b32 %r4, 0"), []),
        (poll(f"{RELAXED}; mov.u32 %r4, %clock"), []),
        (poll(f"{RELAXED}; st.global.b32 [%rd1], %r3"), []),
        (poll("ld.global.b32 %r3, [%rd1]"), []),
    ],
)
def test_rounds_that_are_alike_are_known_beforehand(body: str, polls: list[int]) -> None:
    assert list(read(kernel(body)).polling.values()) == polls


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "AGAIN: setp.eq.s32 %p2, %r1, %r1; @%p2 bra AGAIN;",
            "neither memory nor registers change",
        ),
        (SHARED + poll("ld.shared.b32 %r3, [%r5]"), "neither memory nor registers change"),
        (
            roles("AGAIN: add.s32 %r9, %r9, 1; setp.eq.s32 %p2, %r1, %r1; @%p2 bra AGAIN;", ""),
            "5000 instructions without an access of global memory",
        ),
    ],
)
def test_a_loop_that_never_ends_is_told(
    body: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "IDLE_STEPS", 5000)
    with pytest.raises(
        interlace.InterlaceError, match=f"never ends: {why}; .* back: @%p2 bra AGAIN"
    ):
        launched(body)
