"""Reads of shared memory that nobody has written are findings; what any kind of write put there, not."""

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from interlace import verify
from sim.ptx.ptx_texts import kernel
from sim.verify import test_memory_faults

WHERE = "mov.b32 %r5, memory; shl.b32 %r6, %r1, 4; add.s32 %r7, %r5, %r6;"
BARRIER = "bar.sync 0;"
PUT = "st.shared.v4.b32 [%r7], {%r1, %r1, %r1, %r1};"
GET = "ld.shared.b32 %r3, [%r7]; st.global.b32 [%rd1], %r3;"
GET_ALL = "ld.shared.v4.b32 {%r3, %r4, %r8, %r9}, [%r7];"
GENERIC = "mov.b64 %rd5, memory; cvta.shared.u64 %rd5, %rd5; ld.b32 %r3, [%rd5+8];"
MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r7];"
COPY = "cp.async.cg.shared.global [%r7], [%rd2], 16{size};"
WAIT = "cp.async.commit_group; cp.async.wait_group 0;"
FETCH = COPY.format(size="") + WAIT
ZEROS = COPY.format(size=", 0") + WAIT
COUNT = "atom.shared.add.u32 %r3, [%r7], 1;"
SWAP = "atom.shared.exch.b32 %r3, [%r7], 1;"
ORDERED = "st.relaxed.cta.shared.b32 [%r7], %r1;"
MBARRIER = "mbarrier.init.shared.b64 [%r7], 32;"
CAST = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r7], {%r1, %r1, %r1, %r1};"
HALF = "cvt.u16.u32 %rs1, %r1; st.shared.u16 [%r7], %rs1;"
OTHER_HALF = "st.shared.u16 [%r7+2], %rs1;"
FEW = "setp.lt.u32 %p1, %r1, 16; @%p1 "
OTHERS = "xor.b32 %r6, %r6, 256; add.s32 %r7, %r5, %r6;"


def report_of(*steps: str, seeds: int = 2, grid: int = 1) -> Any:
    text = kernel("\n".join([WHERE, *steps]), words=4, arch=90)

    def on_rank() -> None:
        out, given = torch.zeros(128, dtype=torch.int32), torch.arange(128, dtype=torch.int32)
        verify.launch_ptx(text, grid, out, given, shared_bytes=1024)

    return verify.races(on_rank, 1, seeds=seeds, arch=90)


@pytest.mark.parametrize("get", [GET, GET_ALL, GENERIC, MATRICES, COUNT])
def test_what_nobody_has_written(get: str) -> None:
    assert test_memory_faults.kinds(report_of(get)) == {"uninitialised"}
    assert report_of(PUT, BARRIER, get).clean


@pytest.mark.parametrize(
    ("put", "get"),
    [
        (FETCH, GET_ALL),
        (ZEROS, MATRICES),
        (SWAP, GET),
        (ORDERED, GET),
        (MBARRIER, "ld.shared.b64 %rd5, [%r7];"),
        (CAST, GET_ALL),
        (HALF + OTHER_HALF, GET),
    ],
)
def test_every_kind_of_write_counts(put: str, get: str) -> None:
    report = report_of(put, BARRIER, get)
    assert report.clean, str(report)


@pytest.mark.parametrize(
    ("put", "get"),
    [
        (HALF, GET),
        (ORDERED, GET_ALL),
        (FEW + PUT, GET),
        (FEW + PUT + OTHERS, BARRIER + GET),
        (FEW + COPY.format(size="") + WAIT, MATRICES),
    ],
)
def test_a_part_is_not_enough(put: str, get: str) -> None:
    assert test_memory_faults.kinds(report_of(put, BARRIER, get)) == {"uninitialised"}


def test_the_finding_names_line_bytes_and_all_programs() -> None:
    (finding,) = report_of(FEW + PUT, BARRIER, GET_ALL, grid=3).findings
    assert (finding.offset, finding.count, finding.index) == (256, 64, "64")
    assert re.fullmatch(r"shared memory of rank 0 kernel program \d", finding.memory)
    assert "ld.shared.v4.b32 {%r3" in str(finding) and finding.extent.programs == 3


@triton.jit
def product_kernel(a, b, c, N: tl.constexpr, K: tl.constexpr):
    n, k = tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + n[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + n[:, None] * N + n[None, :], tl.dot(left, right))


def without_stores(name: str, ptx: str) -> str:
    changed = re.sub(r"(st|stmatrix)\S*\.shared\S* [^;]*;", ";", ptx)
    assert changed != ptx
    return changed


@pytest.mark.parametrize("arch", [80, 90])
def test_compiled_code_whose_stores_are_taken_out(arch: int) -> None:
    """``ldmatrix`` reads the factors on sm_80, ``wgmma`` on sm_90."""

    def on_rank() -> None:
        a, b = torch.ones(64, 64, dtype=torch.float16), torch.ones(64, 64, dtype=torch.float16)
        product_kernel[(1,)](a, b, torch.empty(64, 64), N=64, K=64)

    assert verify.races(on_rank, 1, seeds=1, arch=arch).clean
    report = verify.races(on_rank, 1, seeds=1, arch=arch, rewrite=without_stores)
    reads = [each.second.what for each in report.findings if each.kind == "uninitialised"]
    assert {80: "loads", 90: "loads (async)"}[arch] in reads
