"""Threads that arrive at an mbarrier when their copies are done, as ``cuda::barrier`` has it."""

import pytest
import torch

import interlace
from interlace import verify
from sim.ptx.ptx_texts import kernel

COPIED = """
    .reg .pred wrong; mov.u64 %rd4, {mbarrier}; cvt.u32.u64 %r20, %rd4; mov.u32 %r21, memory;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared.b64 [%r20], {expected};
    bar.sync 0;
    shl.b32 %r22, %r1, 2; add.s32 %r22, %r21, %r22;
    cp.async.ca.shared.global [%r22+64], [%rd2], 4;
    {arrive}
    {wait}
    xor.b32 %r23, %r1, 63; shl.b32 %r23, %r23, 2; add.s32 %r23, %r21, %r23;
    ld.shared.b32 %r3, [%r23+64];
    st.global.b32 [%rd1], %r3;"""
ARRIVE = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r20];"
COUNTED = "cp.async.mbarrier.arrive.shared.b64 [%r20]; mbarrier.arrive.shared.b64 %rd5, [%r20];"
WAIT = "again: mbarrier.test_wait.parity.shared.b64 %p2, [%r20], 0; @!%p2 bra again;"


def text(arrive: str = ARRIVE, wait: str = WAIT) -> str:
    return kernel(COPIED.format(mbarrier=0, expected=64, arrive=arrive, wait=wait), threads=64)


def launched(ptx: str) -> list[int]:
    out = torch.zeros(64, dtype=torch.int32)
    verify.launch_ptx(ptx, 1, out, torch.arange(64, dtype=torch.int32), shared_bytes=512)
    return out.tolist()


@pytest.mark.parametrize("arrive", [ARRIVE, COUNTED])
def test_who_waits_for_the_mbarrier_sees_all_copies(arrive: str) -> None:
    for seed in range(3):
        found = interlace.run(launched, 1, text(arrive), place="ptx", seed=seed)
        assert found == [[63 - i for i in range(64)]]
    report = verify.races(lambda: launched(text(arrive)), 1, seeds=3, arch=80)
    assert report.clean and not report.errors


def test_who_does_not_wait_races_with_the_copies() -> None:
    report = verify.races(lambda: launched(text(wait="")), 1, seeds=3, arch=80)
    assert {"write-read", "read-write"} & {finding.kind for finding in report.findings}


def test_another_arrival_waits_for_no_copy() -> None:
    """What was there before is seen, as nothing has made the copies be done."""
    arrive = "mbarrier.arrive.shared.b64 %rd5, [%r20];"
    (found,) = interlace.run(launched, 1, text(arrive), place="ptx")
    assert found == [0xA5A5A5A5 - 2**32] * 64
