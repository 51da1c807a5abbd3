"""Kernels whose threads differ are run as compiled code: right ones are clean, each fault is found.

So are those that name what only the compiler has.
"""

import pathlib
import re
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import interlace
from interlace.runtime.compiler import kept, pool
from interlace.verify import races, schedules
from interlace_verify.machine import compiled
from sim.interpreter import compiled_kernels, thread_kernels as kernels

ALL = 1 << 20


def late_stores(*how: object) -> bool:
    """Return whether some schedule gives wrong values."""
    more = {"store_buffers": True, "workers": 1, "shrink": False}
    return not schedules(kernels.handed_on, 2, *how, n=12, **more).clean


@pytest.mark.parametrize(
    ("who", "before", "after", "num_warps"),
    [
        (1, "program", "program", 4),
        (ALL, "program", "", 4),
        (1, "program", "warp", 1),
        (1, "warp", "program", 1),
        (32, "program", "warp", 1),
    ],
)
def test_what_is_ordered(who: int, before: str, after: str, num_warps: int) -> None:
    how = who, before, after, num_warps
    report = races(kernels.handed_on, 2, *how, seeds=2)
    assert report.clean, str(report)
    assert not late_stores(*how)


@pytest.mark.parametrize(
    ("who", "before", "after", "num_warps"),
    [
        (1, "program", "", 4),  # one thread polls, all load
        (1, "program", "", 1),
        (1, "program", "warp", 4),  # warps of which no thread has polled
        (32, "program", "warp", 4),
        (1, "", "program", 4),  # all store, one thread signals
        (1, "warp", "program", 4),
    ],
)
def test_what_is_not(who: int, before: str, after: str, num_warps: int) -> None:
    how = who, before, after, num_warps
    report = races(kernels.handed_on, 2, *how, seeds=3)
    (line, *_) = {finding.second.lines[0].split()[0] for finding in report.findings}
    assert line.startswith("thread_kernels.py:"), str(report)
    # a write-read race where the load was before the poll's end, which a barrier would have kept it from
    assert {kind for each in report.findings for kind in each.kinds} & {"no barrier", "write-read"}
    assert late_stores(*how)


@pytest.mark.parametrize("num_warps", [1, 2, 8])
def test_threads_are_as_many_as_there_are(num_warps: int) -> None:
    count = 32 * num_warps
    by_all, by_one, told = interlace.run(kernels.numbered, 1, num_warps)[0]
    assert by_all == [*range(count), *[-1] * (256 - count)] and told == count
    assert by_one == [0, *[-1] * 255]  # Triton has thread 0 store scalars


def test_a_pointer_of_a_thread_is_out_of_bounds() -> None:
    report = races(kernels.numbered, 1, 4, 3, seeds=1)
    (finding,) = report.findings
    assert finding.kind == "out of bounds" and finding.count == 128 - 86, str(report)
    assert re.match(r"a int32 tensor of 256 on rank 0", finding.memory), finding.memory
    assert finding.offset == 1032 and finding.second.lines[0].endswith(" in number")


def test_who_waits_in_vain_is_named_with_the_line() -> None:
    where = r"wait_alone program 0 .*thread_kernels\.py:\d+ in poll"
    with pytest.raises(interlace.DeadlockError, match=where):
        interlace.run(kernels.waited_in_vain, 1)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (kernels.put_together, "threads differ by '%tid'.* was not in its code before the launch"),
        (kernels.refused, "unknown: its threads differ .* that failed: .*brkpt"),
        (kernels.nested, "inside: its threads differ .* not at the top level of a file"),
        (
            compiled_kernels.nested,
            r"inside: only the compiler has .*\.smid, .* not at the top level",
        ),
    ],
)
def test_what_cannot_be_told_is_not_checked(fn: object, why: str) -> None:
    report = races(fn, 1, seeds=1)
    assert not report.findings and not report.errors and not report.clean
    ((_, refusal),) = report.refusals
    assert re.search(why, refusal), refusal
    assert re.search(r" at \w+\.py:\d+ in \w+(, called from .*)?$", refusal), refusal
    assert refusal.endswith(schedules(fn, 1, n=2, workers=1).refusal)


def test_another_process_need_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts and values of a compilation are its key, and only whole files are used."""
    asked: list[pathlib.Path] = []

    def file_of(*what: Any) -> pathlib.Path:
        asked.append(kept.file_of(*what))
        return asked[-1]

    monkeypatch.setattr(compiled, "kept", SimpleNamespace(file_of=file_of, read=kept.read))

    def files(threads: Any = kernels.threads) -> pathlib.Path:
        monkeypatch.setattr(compiled, "_measured", weakref.WeakKeyDictionary())
        monkeypatch.setattr(kernels, "threads", threads)
        assert interlace.run(kernels.numbered, 1, 2)[0][2] == 64
        return asked[-1]

    file = files()
    whole = kept.read(file)
    assert whole is not None and ".entry number(" in whole.ptx
    assert files(kernels.thread) != file and kept.read(asked[-1]) is None  # no file has its texts
    monkeypatch.setattr(compiled, "compile_one", None)
    assert files() == file
    for damaged in (
        "",
        "[]",
        "{}",
        file.read_text()[:-9],
        '{"ptx": "", "shared": 0, "scratch": 0}',
    ):
        (other := file.with_suffix(".damaged")).write_text(damaged)
        assert kept.read(other) is None
    other.unlink()


def test_the_compiler_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is loaded by its path may name a folder again."""
    nothing = SimpleNamespace(file_of=lambda *what: None, read=kept.read)
    monkeypatch.setattr(compiled, "kept", nothing)
    servers = []
    for folders in ([], sys.path[:1], ["/elsewhere"]):
        monkeypatch.setattr(sys, "path", [*folders, *sys.path])
        monkeypatch.setattr(compiled, "_measured", weakref.WeakKeyDictionary())
        interlace.run(kernels.numbered, 1, 2)
        servers.append(pool._staying)
    assert servers[0] is servers[1] is not servers[2]


X = torch.arange(1.0, 65.0)


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("bound_at_import", X.rsqrt()),
        ("by_libdevice", X.rsqrt() + X),
        ("of_cuda", X + 128),
        ("of_target", X),
        ("of_aggregates", 4 * X),
        ("of_gluon", X + 1),
        ("tuned", X + 2 * 16),  # the first configuration
        ("pruned", X + 2 * 32),  # the first of the remaining ones
    ],
)
def test_what_only_the_compiler_has(name: str, result: torch.Tensor) -> None:
    report = races(compiled_kernels.launched, 1, name, seeds=1)
    assert report.clean, str(report)
    torch.testing.assert_close(interlace.run(compiled_kernels.launched, 1, name)[0], result)
