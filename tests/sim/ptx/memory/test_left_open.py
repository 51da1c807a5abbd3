"""Results that PTX leaves open: a copy that its own thread does not wait for, a lane that takes no part."""

from typing import Any

import pytest
import torch

from interlace import verify
from sim.ptx.ptx_texts import computed, kernel
from sim.verify import test_memory_faults

START = """
    mov.b32 %r5, memory; shl.b32 %r6, %r1, 4; add.s32 %r7, %r5, %r6;
    st.shared.v4.b32 [%r7+512], {%r1, %r1, %r1, %r1};
    cp.async.cg.shared.global [%r7], [%rd2], 16; cp.async.commit_group;"""
SECOND = "cp.async.cg.shared.global [%r7+1024], [%rd2], 16; cp.async.commit_group;"
WAIT, WAIT_FOR_FIRST = "cp.async.wait_group 0;", "cp.async.wait_group 1;"
GET = "ld.shared.b32 %r3, [%r7+{offset}];"
MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r7];"


def report_of(*steps: str, threads: int = 32) -> Any:
    text = kernel("\n".join(steps), words=4, threads=threads)

    def on_rank() -> None:
        out, given = (torch.zeros(4 * threads, dtype=torch.int32) for _ in range(2))
        verify.launch_ptx(text, 1, out, given, shared_bytes=2048)

    return verify.races(on_rank, 1, seeds=2, arch=80)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([START, GET.format(offset=0)], True),
        ([START, GET.format(offset=12)], True),
        ([START, "ld.shared.v4.b32 {%r3, %r4, %r8, %r9}, [%r7];"], True),
        ([START, MATRICES], True),
        ([START, WAIT, GET.format(offset=0)], False),
        ([START, WAIT, MATRICES], False),
        ([START, GET.format(offset=512)], False),
        ([START, SECOND, WAIT_FOR_FIRST, GET.format(offset=0)], False),
        ([START, SECOND, WAIT_FOR_FIRST, GET.format(offset=1024)], True),
        ([START, SECOND, WAIT, GET.format(offset=1024)], False),
        ([START, "cp.async.wait_all;", GET.format(offset=4)], False),
        ([START, "setp.lt.u32 %p1, %r1, 9; @%p1", WAIT, GET.format(offset=0)], True),
    ],
)
def test_a_copy_that_its_own_thread_has_not_waited_for(steps: list[str], found: bool) -> None:
    report = report_of(*steps)
    assert test_memory_faults.kinds(report) == ({"unfinished copy"} if found else set())


def test_the_finding_names_the_copy() -> None:
    (finding,) = report_of(
        START, "setp.lt.u32 %p1, %r1, 9; @%p1", WAIT, GET.format(offset=4)
    ).findings
    assert (finding.offset, finding.count) == (9 * 16 + 4, 23)
    assert finding.index.startswith("thread 9 has not waited for its 'cp.async.cg.shared.global")
    assert "ld.shared.b32 %r3, [%r7+4]" in str(finding)


EVEN = "and.b32 %r4, %r1, 1; setp.eq.u32 %p1, %r4, 0; mov.b32 %r3, 9;"
TO_ODD = EVEN + "@%p1 shfl.sync.bfly.b32 %r3, %r1, 1, 31, 0x55555555;"
TO_EVEN = EVEN + "@%p1 shfl.sync.bfly.b32 %r3, %r1, 2, 31, 0x55555555;"
FROM_ONE = EVEN + "@%p1 shfl.sync.idx.b32 %r3, %r1, {lane}, 31, 0x55555555;"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TO_ODD, True),
        (TO_EVEN, False),
        (FROM_ONE.format(lane=5), True),
        (FROM_ONE.format(lane=6), False),
        ("shfl.sync.down.b32 %r3, %r1, 3, 31, -1;", False),  # beyond the end it is the own one
    ],
)
def test_a_lane_that_takes_no_part(text: str, found: bool) -> None:
    report = report_of(text, threads=64)
    assert test_memory_faults.kinds(report) == ({"absent lane"} if found else set())


def test_the_finding_names_thread_and_lane_and_a_run_goes_on() -> None:
    (finding,) = report_of(FROM_ONE.format(lane=5)).findings
    assert finding.index == "thread 0 reads lane 5, which takes no part" and finding.count == 16
    assert "shfl.sync.idx.b32" in str(finding) and "  on  " not in str(finding)
    words = computed(TO_ODD + "st.global.b32 [%rd1], %r3;", torch.zeros(32, 1).numpy())
    assert set(words[::2, 0].tolist()) == {0xA5A5A5A5}
