"""Threads that store to one address by one instruction: different numbers are a finding, equal ones not."""

from typing import Any

import pytest
import torch

from interlace import verify
from sim.ptx.ptx_texts import kernel
from sim.verify import test_memory_faults

GLOBAL = "ld.param.b64 %rd4, [kernel_param_0]; {value} st.global.b32 [%rd4+8], %r2;"
SHARED = """
    mov.b32 %r5, memory; {value} st.shared.b32 [%r5+8], %r2; bar.sync 0;
    ld.shared.b32 %r3, [%r5+8]; st.global.b32 [%rd1], %r3;"""
BY_COPY = """
    mov.b32 %r5, memory; {value} and.b32 %r2, %r2, 1; mul.wide.u32 %rd5, %r2, 4;
    ld.param.b64 %rd4, [kernel_param_1]; add.s64 %rd4, %rd4, %rd5;
    cp.async.ca.shared.global [%r5], [%rd4], 4;
    cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;"""
VECTOR = """
    ld.param.b64 %rd4, [kernel_param_0]; {value} shr.u32 %r6, %r1, 1; mul.wide.u32 %rd5, %r6, 16;
    add.s64 %rd4, %rd4, %rd5; mov.b32 %r7, 7; st.global.v4.b32 [%rd4], {{%r7, %r7, %r2, %r7}};"""
OWN, ALIKE, ONE = "mov.b32 %r2, %r1;", "mov.b32 %r2, 5;", "setp.eq.u32 %p1, %r1, 3; @%p1"
TWO_WARPS = "shr.u32 %r2, %r1, 5;"


def report_of(text: str, seeds: int = 6) -> Any:
    def on_rank() -> None:
        out, given = torch.zeros(256, dtype=torch.int32), torch.arange(64, dtype=torch.int32)
        verify.launch_ptx(kernel(text, threads=64), 1, out, given, shared_bytes=256)

    return verify.races(on_rank, 1, seeds=seeds, arch=80)


@pytest.mark.parametrize("text", [GLOBAL, SHARED, VECTOR])
@pytest.mark.parametrize("value", [OWN, ALIKE])
def test_different_values_are_found_and_equal_ones_are_not(text: str, value: str) -> None:
    found = test_memory_faults.kinds(report_of(text.format(value=value)))
    assert ("different values" in found) == (value == OWN)
    assert value == OWN or not found


def test_copies_of_different_values() -> None:
    assert "different values" in test_memory_faults.kinds(report_of(BY_COPY.format(value=OWN)))


def test_the_finding_names_line_address_and_two_threads() -> None:
    report = report_of(GLOBAL.format(value=OWN), seeds=1)
    (finding,) = report.findings
    assert (finding.kind, finding.offset, finding.count) == ("different values", 8, 1)
    assert finding.index == "2: thread 0 stores 0x0, thread 1 stores 0x1"
    assert finding.memory.startswith("a int32 tensor") and "st.global.b32" in str(finding)
    (finding,) = report_of(VECTOR.format(value=OWN), seeds=1).findings
    assert (finding.offset, finding.count) == (8, 32)


@pytest.mark.parametrize("text", [GLOBAL, SHARED])
def test_threads_of_different_warps_are_found_in_every_schedule(text: str) -> None:
    """Together it is one instruction, apart a race of two."""
    for seed in range(12):
        report = report_of(text.format(value=TWO_WARPS), seeds=[seed])
        assert {"different values", "write-write"} & test_memory_faults.kinds(report)


@pytest.mark.parametrize("text", [GLOBAL, SHARED])
def test_one_thread_and_other_addresses_are_no_finding(text: str) -> None:
    assert report_of(text.format(value=OWN + ONE)).clean
    for order in ("relaxed.gpu", "release.sys"):  # any of them is there, whole
        assert report_of(GLOBAL.format(value=OWN).replace("st.", f"st.{order}.")).clean
    assert report_of(GLOBAL.format(value=OWN).replace("st.global.b32", "red.global.add.u32")).clean
