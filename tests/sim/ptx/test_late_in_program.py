"""Stores that come late for other threads of their program, until a barrier or a release of theirs."""

import pytest
import torch

from interlace import verify
from interlace.verify import launch_ptx
from sim.ptx.ptx_texts import kernel

# thread 0 stores 7 in word 0 and then tells, with ``tell``; warp 1 hears, with ``hear``, and loads word 0
PASSED = """
    ld.param.b64 %rd4, [kernel_param_1]; mov.b32 %r5, memory; setp.eq.s32 %p3, %r1, 0;
    setp.lt.u32 %p1, %r1, 32; {before}
    @!%p1 bra HEAR;
    @%p3 st.relaxed.gpu.global.u32 [%rd4], 7;
    {tell}
    bra END;
    HEAR: {hear}
    ld.relaxed.gpu.global.u32 %r4, [%rd4]; st.global.b32 [%rd1], %r4;
    END:"""
BEGUN = "ld.param.b64 %rd4, [kernel_param_1]; setp.lt.u32 %p1, %r1, 32;"
POLL = "LOOK: ld{}.u32 %r3, [{}]; setp.eq.s32 %p2, %r3, 0; @%p2 bra LOOK;"
TELL, HEAR = "@%p3 st{}.global.u32 [%rd4+64], 1;", POLL.format("{}.global", "%rd4+64")
BEGIN = "@%p3 st.shared.u32 [%r5], 0; bar.sync 0;"
INIT = "@%p3 mbarrier.init.shared::cta.b64 [%r5], 1; bar.sync 0;"
AWAIT = "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0; @!%p2 bra AGAIN;"


def seen(
    tell: str, hear: str, before: str = "", arch: int = 80, *, alone: str | None = None
) -> set[int]:
    """What warp 1 loads, over seeds. ``alone``: all that it does."""
    body = PASSED.format(before=before, tell=tell, hear=hear) if alone is None else BEGUN + alone
    text = kernel(body, threads=64, arch=arch)
    values: set[int] = set()

    def on_rank() -> list[int]:
        words, out = torch.zeros(128, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        launch_ptx(text, 1, out, words, shared_bytes=64)
        return out[32:].tolist()  # type: ignore[no-any-return]

    def check(results: list[list[int]]) -> None:
        values.update(*results)

    report = verify.schedules(
        on_rank, 1, n=40, arch=arch, store_buffers=True, workers=1, check=check
    )
    assert report.clean == (len(values) == 1), str(report)  # or they differ
    return values


def test_a_relaxed_store_comes_after_a_later_one() -> None:
    assert seen(TELL.format(".relaxed.gpu"), HEAR.format(".relaxed.gpu")) == {0, 7}


def test_shared_memory_alone_hands_nothing_on() -> None:
    tell, hear = "@%p3 st.volatile.shared.u32 [%r5], 1;", POLL.format(".volatile.shared", "%r5")
    assert seen(tell, hear, BEGIN) == {0, 7}


@pytest.mark.parametrize(
    ("tell", "hear", "before"),
    [
        (TELL.format(".release.cta"), HEAR.format(".acquire.cta"), ""),
        (TELL.format(".release.gpu"), HEAR.format(".acquire.gpu"), ""),
        (
            "@%p3 fence.acq_rel.cta;" + TELL.format(".relaxed.gpu"),
            HEAR.format(".relaxed.gpu") + "fence.acq_rel.cta;",
            "",
        ),
        (
            "@%p3 membar.cta; @%p3 st.volatile.shared.u32 [%r5], 1;",
            POLL.format(".volatile.shared", "%r5") + "membar.cta;",
            BEGIN,
        ),
        (
            "@%p3 atom.release.cta.shared.exch.b32 %r9, [%r5], 1;",
            POLL.format(".acquire.cta.shared", "%r5"),
            BEGIN,
        ),
        ("bar.arrive 1, 64;", "bar.sync 1, 64;", ""),
        ("bar.sync 1, 64;", "bar.sync 1, 64;", ""),
        # those who met are in order also after some of them have met others
        ("bar.sync 1, 64; bar.warp.sync 0xffffffff;", "bar.sync 1, 64;", ""),
    ],
)
def test_what_is_told_of_is_there(tell: str, hear: str, before: str) -> None:
    assert seen(tell, hear, before) == {7}


def test_an_mbarrier_hands_on_what_came_before_the_arrival() -> None:
    tell = "@%p3 mbarrier.arrive.shared::cta.b64 %rd5, [%r5];"
    assert seen(tell, AWAIT, INIT, arch=90) == {7}


EXCHANGE = """
    mul.wide.u32 %rd2, %r1, 4; add.u64 %rd2, %rd4, %rd2; st.relaxed.gpu.global.u32 [%rd2], 7; {between}
    xor.b32 %r6, %r1, {partner}; mul.wide.u32 %rd5, %r6, 4; add.u64 %rd5, %rd4, %rd5;
    ld.relaxed.gpu.global.u32 %r4, [%rd5]; st.global.b32 [%rd1], %r4;"""


@pytest.mark.parametrize("partner", [1, 16])
@pytest.mark.parametrize("between", ["", "bar.warp.sync 0xffffffff;"])
def test_a_thread_sees_at_once_what_it_has_stored_itself_alone(partner: int, between: str) -> None:
    text = EXCHANGE.format(partner=partner, between=between)
    values = {0, 7} if not between else {7}
    assert seen("", "", alone=text) == values


# of 32 threads that have stored and arrived, the last one releases for all of them
ARRIVE = "atom.{}.gpu.global.add.u32 %r9, [%rd4+256], 1; setp.eq.u32 %p6, %r9, 31;"
LAST = """
    @!%p1 bra HEAR;
    mul.wide.u32 %rd5, %r1, 4; add.u64 %rd5, %rd4, %rd5; st.global.u32 [%rd5], 7;
    {arrive} @%p6 st.release.gpu.global.u32 [%rd4+384], 1;
    bra END;
    HEAR: LOOK: ld.acquire.gpu.global.u32 %r3, [%rd4+384]; setp.eq.s32 %p2, %r3, 0; @%p2 bra LOOK;
    sub.u32 %r6, %r1, 32; mul.wide.u32 %rd5, %r6, 4; add.u64 %rd5, %rd4, %rd5;
    ld.global.u32 %r4, [%rd5]; st.global.b32 [%rd1], %r4;
    END:"""
FENCED = "fence.acq_rel.gpu; {} fence.acq_rel.gpu;".format(ARRIVE.format("relaxed"))


@pytest.mark.parametrize(
    ("arrive", "values"),
    [(ARRIVE.format("acq_rel"), {7}), (FENCED, {7}), (ARRIVE.format("relaxed"), {0, 7})],
)
def test_a_later_release_takes_nothing_back(arrive: str, values: set[int]) -> None:
    assert seen("", "", alone=LAST.format(arrive=arrive)) == values
