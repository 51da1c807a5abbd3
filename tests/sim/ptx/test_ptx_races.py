"""Races between threads of whole kernels, by happens-before: a published word and the data before it."""

import re
from typing import Any

import numpy as np
import pytest
import torch

import interlace
from interlace import verify
from interlace.groups.groups import default_group
from interlace_verify.race_check.agents import Agent
from sim.ptx.ptx_texts import kernel
from sim.verify import test_memory_faults

# thread i stores word i, thread 0 tells of all of them; %rd4 is the flag, behind the 64 words
FLAG = "ld.param.b64 %rd4, [kernel_param_0]; setp.eq.s32 %p1, %r1, 0;"
BARRIER = "bar.sync 0;"
RELEASE = "@%p1 st.release.sys.global.u32 [%rd4+256], 1;"
PUBLISH = [FLAG, "mad.lo.s32 %r2, %r1, 3, 1; st.global.b32 [%rd1], %r2;", BARRIER, RELEASE]
ACQUIRE = """
    @!%p1 bra POLLED;
    POLL: ld.acquire.sys.global.u32 %r3, [%rd4+256];
    setp.eq.s32 %p2, %r3, 0;
    @%p2 bra POLL;
    POLLED:"""
READ = "ld.global.b32 %r4, [%rd1]; st.global.b32 [%rd2], %r4;"
WAIT = [FLAG, ACQUIRE, BARRIER, READ]
# as Triton polls: one thread looks, and tells the others in shared memory
AGAIN, TOLD = "AGAIN: bar.sync 0;", "bar.sync 0; ld.shared.b32 %r6, [%r5];"
TOGETHER = [
    FLAG + "mov.b32 %r5, memory;",
    AGAIN,
    "@%p1 ld.acquire.sys.global.u32 %r3, [%rd4+256]; @%p1 st.shared.b32 [%r5], %r3;",
    TOLD,
    "setp.eq.s32 %p2, %r6, 0; @%p2 bra AGAIN;",
    READ,
]
FENCED = "fence.acq_rel.sys; @%p1 st.relaxed.sys.global.u32 [%rd4+256], 1;"
POLL_RELAXED = ACQUIRE.replace("acquire", "relaxed")
# the word is stored once more, relaxed, by who released it, and somebody waits for that
AGAIN_RELAXED = "@%p1 st.relaxed.sys.global.u32 [%rd4+256], 2;"
RESTORED = RELEASE + AGAIN_RELAXED
ACQUIRE_AGAIN = ACQUIRE.replace("setp.eq.s32 %p2, %r3, 0;", "setp.ne.s32 %p2, %r3, 2;")
WAIT_AGAIN = [FLAG, ACQUIRE_AGAIN, BARRIER, READ]


def without(steps: list[str], one: str, instead: str = "") -> list[str]:
    assert one in steps
    return [instead if step is one else step for step in steps]


def exchanged(publish: list[str], wait: list[str], before: str = "", **options: Any) -> Any:
    """The report of rank 0 publishing in rank 1's memory, and rank 1 reading there.

    ``before``: what rank 0 does in a launch before.
    """

    def on_rank() -> None:
        place = default_group().place
        buffer = place.allocate(512)
        theirs, found = buffer.addresses[1], torch.zeros(64, dtype=torch.int32)
        mine = publish if interlace.get_rank() == 0 else wait
        earlier = [before] if before and interlace.get_rank() == 0 else []
        for body in (*earlier, "\n".join(mine)):
            verify.launch_ptx(kernel(body, threads=64), 1, theirs, found, shared_bytes=256)
        if interlace.get_rank() == 1 and found.tolist() != [3 * i + 1 for i in range(64)]:
            raise AssertionError("wrong words")

    return verify.races(on_rank, 2, arch=80, seeds=options.pop("seeds", 1), **options)


@pytest.mark.parametrize(
    ("publish", "wait"),
    [
        (PUBLISH, WAIT),
        (without(PUBLISH, RELEASE, FENCED), WAIT),
        (PUBLISH, [FLAG, POLL_RELAXED, "fence.acq_rel.sys;", BARRIER, READ]),
        # what a narrow fence does not acquire, a wide one behind it does
        (PUBLISH, [FLAG, POLL_RELAXED, "membar.gl; membar.sys;", BARRIER, READ]),
        (
            without(PUBLISH, RELEASE, FENCED.replace("acq_rel", "release")),
            [FLAG, POLL_RELAXED, "fence.acquire.sys;", BARRIER, READ],
        ),
        (PUBLISH, TOGETHER),
        (without(PUBLISH, RELEASE, RESTORED), WAIT_AGAIN),
        # each its own word: no barrier is needed
        ([FLAG, "@%p1 st.global.b32 [%rd1], 1;", RELEASE], [FLAG, ACQUIRE, "@%p1 " + READ]),
    ],
)
def test_what_orders(publish: list[str], wait: list[str]) -> None:
    report = exchanged(publish, wait)
    assert not report.findings, str(report)


@pytest.mark.parametrize(
    ("publish", "wait", "kind", "hint"),
    [
        (without(PUBLISH, BARRIER), WAIT, "no barrier", "between the first access and the signal, store"),
        (PUBLISH, without(WAIT, BARRIER), "no barrier", "between the wait, load .*, and the second"),
        (without(PUBLISH, BARRIER), without(WAIT, BARRIER), "no barrier",
         "the first access and the signal.*; and call .* between the wait"),
        (without(PUBLISH, RELEASE, RELEASE.replace("release", "relaxed")), WAIT, "weak order",
         r'the signal, store \(relaxed, sys\) at .* or st\.release\.sys$'),
        (PUBLISH, without(WAIT, ACQUIRE, POLL_RELAXED), "weak order",
         r'the wait, load \(relaxed, sys\) at .* or ld\.acquire\.sys$'),
        (without(PUBLISH, RELEASE, RELEASE.replace("sys", "gpu")), WAIT, "narrow scope",
         r'^use scope="sys" for store \(release, gpu\) at [^:]*: [^:]*\[%rd4\+256\], 1$'),
        (without(PUBLISH, RELEASE, FENCED.replace("sys", "gpu")), WAIT, "narrow scope",
         r'^use scope="sys" for store \(relaxed, gpu\) at [^:]*: [^:]*\[%rd4\+256\], 1$'),
        (PUBLISH, [FLAG, POLL_RELAXED, "membar.gl;", BARRIER, READ], "narrow scope",
         r'^use scope="sys" for the fences around store \(release, sys\) at .* and load \(relaxed, sys\)'),
        # half a fence, the other half of it
        (without(PUBLISH, RELEASE, FENCED.replace("acq_rel", "acquire")), WAIT, "weak order",
         r'or st\.release\.sys$'),
        (PUBLISH, [FLAG, POLL_RELAXED, "fence.release.sys;", BARRIER, READ], "weak order",
         r'or ld\.acquire\.sys$'),
        # of a loop that goes round
        (PUBLISH, without(TOGETHER, AGAIN, AGAIN.replace(BARRIER, "")), "read-write",
         "no barrier between them"),
        (PUBLISH, without(TOGETHER, TOLD, TOLD.replace(BARRIER, "")), "no barrier", "the wait"),
        # stored once more by another thread; and of what comes between the two
        ([*PUBLISH, BARRIER, "setp.eq.s32 %p1, %r1, 40;", AGAIN_RELAXED], WAIT_AGAIN, "weak order",
         r'or st\.release\.sys$'),
        ([*PUBLISH, "@%p1 st.global.b32 [%rd1], %r2;", AGAIN_RELAXED], WAIT_AGAIN, "weak order",
         r'or st\.release\.sys$'),
        # behind the release
        ([*without(PUBLISH, RELEASE), RELEASE, "st.global.b32 [%rd1], %r2;"], WAIT, "write-read",
         "no signal that was sent after the first access"),
    ],
)  # fmt: skip
def test_what_does_not(publish: list[str], wait: list[str], kind: str, hint: str) -> None:
    report = exchanged(publish, wait, seeds=3)
    hints = {finding.kind: finding.hint for finding in report.findings}
    assert re.search(hint, hints[kind]), hints


@pytest.mark.parametrize(
    ("publish", "right"), [(PUBLISH, True), (without(PUBLISH, BARRIER), False)]
)
def test_late_stores_show_a_missing_barrier(publish: list[str], right: bool) -> None:
    report = exchanged(publish, WAIT, seeds=6, store_buffers=True)
    assert bool(report.errors) != right, str(report)


READ_NC = READ.replace("ld.global", "ld.global.nc")


@pytest.mark.parametrize(
    ("wait", "kinds"), [(READ, set()), (READ_NC, {"stale load"}), (READ_NC + READ, {"stale load"})]
)
def test_an_incoherent_load_sees_nothing_of_its_time(wait: str, kinds: set[str]) -> None:
    """Whatever orders it behind the store."""
    assert test_memory_faults.kinds(exchanged(PUBLISH, without(WAIT, READ, wait))) == kinds


@pytest.mark.parametrize(
    ("does", "kinds"),
    [
        ("", set()),
        ("st.global.b32 [%rd1], %r1;", {"stale load"}),
        ("red.global.add.u32 [%rd1], 1;", {"stale load"}),
        ("ld.relaxed.gpu.global.b32 %r5, [%rd1];", set()),
    ],
)
def test_an_incoherent_load_is_of_what_was_there_before_the_launch(
    does: str, kinds: set[str]
) -> None:
    """Of torch's, and of launches before; not of what its own program does first."""

    def on_rank() -> None:
        first, second = torch.ones(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
        verify.launch_ptx(kernel(does + READ_NC, threads=64), 1, first, second)
        verify.launch_ptx(kernel(READ_NC, threads=64), 1, second, first)

    assert test_memory_faults.kinds(verify.races(on_rank, 1, arch=80, seeds=1)) == kinds


@pytest.mark.parametrize("fence", ["", "fence.acq_rel.gpu;"])
@pytest.mark.parametrize(("behind", "right"), [("", True), (PUBLISH[1], False)])
def test_a_narrow_fence_takes_nothing_from_what_a_launch_has_handed_on(
    fence: str, behind: str, right: bool
) -> None:
    """Of stores of the launch before; those behind the fence are not published."""
    publish = [FLAG, fence + behind + "@%p1 st.relaxed.sys.global.u32 [%rd4+256], 1;"]
    report = exchanged(publish, WAIT, before=PUBLISH[1])
    assert bool(report.findings) != right, str(report)


SHARED = """
    mov.b32 %r5, memory; shl.b32 %r6, %r1, 2; add.s32 %r7, %r5, %r6;
    st.shared.b32 [%r7], %r1;
    {barrier}
    xor.b32 %r8, %r6, {distance}; add.s32 %r7, %r5, %r8; ld.shared.b32 %r3, [%r7];"""


@pytest.mark.parametrize(("barrier", "right"), [(BARRIER, True), ("", False)])
def test_warps_go_apart(barrier: str, right: bool) -> None:
    """Without a barrier some schedule shows what another warp has not yet stored."""
    text = SHARED.format(barrier=barrier, distance=128) + "st.global.b32 [%rd1], %r3;"

    def on_rank() -> list[int]:
        found = torch.zeros(64, dtype=torch.int32)
        verify.launch_ptx(kernel(text, threads=64), 1, found, shared_bytes=256)
        return found.tolist()

    report = verify.schedules(on_rank, 1, n=24, arch=80, workers=1, shrink=False)
    if right:
        assert report.clean, str(report)
        assert interlace.run(on_rank, 1, place="ptx") == [[i ^ 32 for i in range(64)]]
    else:
        assert report.failure is not None and report.failure.kind == "different results"


def test_threads_that_have_met_are_equally_far() -> None:
    """One mark stands for several threads' loads: with the time of one, which some may not have come to."""
    agent = Agent(0, 0, 0, "a program", 64)
    agent.begin(agent.clock)
    warp = np.arange(32)
    agent.has_released(warp[:1], all_threads=False)
    latest = agent.own[0, 0]
    agent.barrier(warp)
    assert set(agent.acquired[5][:32]) == {latest} and set(agent.own[0, warp]) == {latest + 1}
    agent.barrier()
    assert set(agent.clock[:64]) == {latest + 1}


@pytest.mark.parametrize(
    ("looks", "offset"),
    [
        ("ld.relaxed.sys.global.b32 %r3, [%rd4];\n" * 2, 0),
        ("ld.relaxed.sys.global.b32 %r3, [%rd4]; ld.relaxed.sys.global.b64 %rd5, [%rd4];", 4),
    ],
)
def test_a_look_is_another_one_in_another_line_or_of_another_size(looks: str, offset: int) -> None:
    """Only the same poll again is left out, and by whatever rules one asks for the cause."""
    roles = "ld.param.b64 %rd4, [kernel_param_0]; mov.u32 %r9, %ctaid.x; setp.ne.s32 %p1, %r9, 0;"
    body = f"{roles} @%p1 bra OTHER; {looks} bra END; OTHER: st.global.b32 [%rd4+{offset}], 1; END:"

    def on_rank() -> None:
        words = torch.zeros(32, dtype=torch.int32)
        verify.launch_ptx(kernel(body), 2, words, torch.zeros_like(words))

    findings = verify.races(on_rank, 1, seeds=4, arch=80).findings
    assert findings and {each.kind for each in findings} == {"mixed access"}, findings
