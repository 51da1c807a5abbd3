"""Who meets at a barrier: by predicate, by number, by mask, by count, and without those who have left."""

import numpy as np
import pytest
import torch

from interlace import verify
from interlace.verify import launch_ptx
from sim.ptx.ptx_texts import computed, kernel

# thread i stores word i of shared memory, reads one whose number differs in a bit; %p1: of the first warp
EXCHANGE = """
    mov.b32 %r5, memory; shl.b32 %r6, %r1, 2; add.s32 %r7, %r5, %r6; setp.lt.u32 %p1, %r1, 32;
    and.b32 %r9, %r1, 31; setp.lt.u32 %p3, %r9, 16; shr.u32 %r10, %r1, 5; add.s32 %r10, %r10, 1;
    {before}
    st.shared.b32 [%r7], %r1;
    {barrier}
    xor.b32 %r8, %r6, {distance}; add.s32 %r7, %r5, %r8; ld.shared.b32 %r3, [%r7];
    st.global.b32 [%rd1], %r3;
    LEFT:"""
WARP, HALF, LANE = 128, 64, 4  # bytes to the word of another one
MASK = "selp.b32 %r11, 0xffff, 0xffff0000, %p3; bar.warp.sync %r11;"
EITHER = "@%p1 bar.sync {}; @!%p1 bar.sync {};"


def found(
    barrier: str, distance: int, before: str = "", threads: int = 64, arch: int = 80
) -> set[str]:
    """The kinds of findings, and the errors."""
    body = EXCHANGE.format(barrier=barrier, distance=distance, before=before)
    text = kernel(body, threads=threads).replace("sm_80", f"sm_{arch}")

    def on_rank() -> None:
        words = torch.zeros(threads, dtype=torch.int32)
        launch_ptx(text, 1, words, words, shared_bytes=4 * threads)

    report = verify.races(on_rank, 1, arch=arch, seeds=4)
    told = {*map(str, report.errors), *map(str, report.refusals)}
    return {each.kind for each in report.findings} | told


@pytest.mark.parametrize(
    ("barrier", "distance"),
    [
        (EITHER.format(0, 0), WARP),
        (EITHER.format("1, 64", "1, 64"), WARP),
        ("bar.sync 3, 64;", WARP),
        ("bar.sync %r10, 32;", LANE),
        ("bar.sync 1, 32;", LANE),
        (MASK, LANE),
        ("@%p3 bar.warp.sync 0xffff; @!%p3 bar.warp.sync 0xffff0000;", LANE),
    ],
)
def test_those_who_meet_are_in_order(barrier: str, distance: int) -> None:
    assert found(barrier, distance) == set()


@pytest.mark.parametrize(
    ("barrier", "distance"),
    [
        ("@%p1 bar.arrive 1, 64; @!%p1 bar.sync 1, 64;", WARP),  # the first warp hears nothing
        ("bar.sync %r10, 32;", WARP),  # each warp at one of its own
        ("bar.sync 1, 32;", WARP),  # each warp at the same, in turn
        (EITHER.format("1, 32", "2, 32"), WARP),
        ("@%p1 bar.warp.sync -1;", WARP),
        (MASK, HALF),
    ],
)
def test_those_who_do_not_meet_are_found(barrier: str, distance: int) -> None:
    assert found(barrier, distance) == {"write-read"}


def test_a_predicated_barrier_is_for_those_who_come() -> None:
    """The others go on, and everybody waits at the next."""
    (error,) = found("@%p1 bar.sync 0; bar.sync 2;", 0)
    assert (
        "threads of a program of kernel wait for each other, at @%p1 bar.sync 0; bar.sync 2"
        in error
    )


@pytest.mark.parametrize(
    ("barrier", "problem"),
    [
        ("bar.sync 16;", "barrier 16 of 0 threads: there are 16, of whole warps"),
        ("mov.b32 %r9, 33; bar.sync 1, %r9;", "barrier 1 of 33 threads"),
        ("bar.warp.sync 0xffff;", "the members that thread 16 names are without its own lane"),
        ("shfl.sync.idx.b32 %r9, %r1, 0, 31, 0xfffe;", "that thread 0 names are without its own"),
    ],
)
def test_barriers_that_no_gpu_has_are_errors(barrier: str, problem: str) -> None:
    (error,) = found(barrier, 0)
    assert problem in error


def test_a_lane_that_takes_no_part_gives_nothing() -> None:
    """Lanes 0 to 15 shuffle; the others have their number in the register, and are not named."""
    body = """
    setp.lt.u32 %p1, %r1, 16; mov.b32 %r3, 0;
    @%p1 shfl.sync.bfly.b32 %r3, %r1, {}, 31, 0xffff;
    st.global.b32 [%rd1], %r3;"""
    assert computed(body.format(8), np.zeros(32))[:16, 0].tolist() == [i ^ 8 for i in range(16)]
    assert set(computed(body.format(16), np.zeros(32))[:16, 0].tolist()) == {0xA5A5A5A5}


@pytest.mark.parametrize("leave", ["@!%p1 ret;", "@!%p1 bra LEFT;"])
def test_nobody_waits_for_those_who_have_left(leave: str) -> None:
    """And nobody has met them: what they have stored is in no order with the others' reads."""
    assert found("bar.sync 0;", LANE, before=leave) == set()
    stores = f"st.shared.b32 [%r7], %r1; {leave}"
    assert found("bar.sync 0;", WARP, before=stores) == {"write-read"}


@pytest.mark.parametrize(
    ("before", "barrier", "kinds"),
    [
        ("", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", set()),
        ("", "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", set()),
        ("", "barrier.cluster.arrive.relaxed; barrier.cluster.wait;", {"write-read"}),
        ("barrier.cluster.arrive;", "barrier.cluster.wait;", {"write-read"}),
    ],
)
def test_a_barrier_of_a_cluster_orders_what_was_before_its_arrival(
    before: str, barrier: str, kinds: set[str]
) -> None:
    assert found(barrier, WARP, before=before, arch=90) == kinds
