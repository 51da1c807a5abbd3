"""Verdicts on kernels in PTX, by the tables of ``verdicts.txt``, and what their findings name."""

import pathlib
import re
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from interlace import verify
from sim.ptx.ptx_texts import computed, kernel
from sim.verify import test_memory_faults

_HEAD, *_TABLES = pathlib.Path(__file__).with_name("verdicts.txt").read_text().split("\n\n## ")
TEXTS = dict(text.split("\n", 1) for text in re.split(r"\n\n(?=\$)", _HEAD)[1:])


def written_out(text: str) -> str:
    return re.sub(r"\$[a-z_]\w*", lambda name: written_out(TEXTS[name[0]]), text)


class LaunchedText(NamedTuple):
    """A body of a kernel, and how it is launched."""

    body: str
    threads: int = 64
    words: int = 1
    arch: int = 80
    seeds: int = 2
    grid: int = 1
    late: int = 0

    def races(self, **options: Any) -> verify.RaceReport:
        text = kernel(self.body, threads=self.threads, words=self.words, arch=self.arch)

        def on_rank() -> None:
            out, given = torch.zeros(256, dtype=torch.int32), torch.arange(256, dtype=torch.int32)
            verify.launch_ptx(text, self.grid, out, given, shared_bytes=2048)

        return verify.races(on_rank, 1, arch=self.arch, **{"seeds": self.seeds, **options})

    def seen(self) -> set[int]:
        """Return the words that the second warp stores, over schedules with late stores."""
        text, values = kernel(self.body, threads=self.threads, arch=self.arch), set[int]()

        def on_rank() -> list[int]:
            words, out = torch.zeros(128, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
            verify.launch_ptx(text, 1, out, words, shared_bytes=64)
            return out[32:].tolist()  # type: ignore[no-any-return]

        def check(results: list[list[int]]) -> None:
            values.update(*results)

        options: dict[str, Any] = {"store_buffers": True, "workers": 1, "check": check}
        report = verify.schedules(on_rank, 1, n=40, arch=self.arch, **options)
        assert report.clean == (len(values) == 1), str(report)  # or they differ
        return values


def rows(*, late: bool) -> list[Any]:
    found = []
    for table in _TABLES:
        title, options, frame = table.split("\n", 2)
        frame, _, lines = frame.partition("\n--\n")
        if options.startswith("late") != late:
            continue
        named = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", options)}
        for line in lines.splitlines():
            *cells, verdict = line.split(" | ")
            body = frame
            for number, cell in enumerate(cells, 1):
                body = written_out(body.replace(f"${number}", cell))
            name = f"{title}: {', '.join(filter(None, cells))}"
            found.append(pytest.param(LaunchedText(body, **named), verdict, id=name))
    return found


@pytest.mark.parametrize(("program", "verdict"), rows(late=False))
def test_verdicts(program: LaunchedText, verdict: str) -> None:
    report = program.races()
    told = [*map(str, report.errors), *map(str, report.refusals)]
    if verdict.startswith("! "):
        (error,) = told
        assert verdict[2:] in error
    else:
        expected = set() if verdict == "clean" else set(verdict.split(", "))
        assert test_memory_faults.kinds(report) >= expected and not told
        assert {each.kind for each in report.findings} == expected, str(report)


@pytest.mark.parametrize(("program", "values"), rows(late=True))
def test_late_stores(program: LaunchedText, values: str) -> None:
    assert program.seen() == set(map(int, values.split(", ")))


# -- what findings name ----------------------------------------------------------------------------


def test_a_copy_that_is_unfinished() -> None:
    body = "$start setp.lt.u32 %p1, %r1, 9; @%p1 cp.async.wait_group 0; ld.shared.b32 %r3, [%r7+4];"
    (finding,) = LaunchedText(written_out(body), threads=32, words=4).races().findings
    assert (finding.offset, finding.count) == (9 * 16 + 4, 23)
    assert finding.index.startswith("thread 9 has not waited for its 'cp.async.cg.shared.global")
    assert "ld.shared.b32 %r3, [%r7+4]" in str(finding)


def test_thread_and_lane_and_a_run_goes_on() -> None:
    shuffle = "@%p1 shfl.sync.{} 31, 0x55555555;"
    body = written_out("$of_even ")
    from_one = body + shuffle.format("idx.b32 %r3, %r1, 5,")
    (finding,) = LaunchedText(from_one, threads=32, words=4).races().findings
    assert finding.index == "thread 0 reads lane 5, which takes no part" and finding.count == 16
    assert "shfl.sync.idx.b32" in str(finding) and "  on  " not in str(finding)
    to_odd = body + shuffle.format("bfly.b32 %r3, %r1, 1,") + "st.global.b32 [%rd1], %r3;"
    words = computed(to_odd, torch.zeros(32, 1).numpy())
    assert set(words[::2, 0].tolist()) == {0xA5A5A5A5}


def test_line_address_and_two_threads_of_one_instruction() -> None:
    bodies = (
        written_out(name).replace("$2", "mov.b32 %r2, %r1;") for name in ("$global", "$vector")
    )
    word, vector = (LaunchedText(body).races(seeds=1).findings for body in bodies)
    (finding,) = word
    assert (finding.kind, finding.offset, finding.count) == ("different values", 8, 1)
    assert finding.index == "2: thread 0 stores 0x0, thread 1 stores 0x1"
    assert finding.memory.startswith("a int32 tensor") and "st.global.b32" in str(finding)
    (finding,) = vector
    assert (finding.offset, finding.count) == (8, 32)


@pytest.mark.parametrize("text", ["$global", "$shared"])
def test_threads_of_different_warps_are_found_in_every_schedule(text: str) -> None:
    """Together it is one instruction, apart a race of two."""
    program = LaunchedText(written_out(text).replace("$2", "shr.u32 %r2, %r1, 5;"))
    for seed in range(12):
        kinds = test_memory_faults.kinds(program.races(seeds=[seed]))
        assert {"different values", "write-write"} & kinds


def test_line_bytes_and_all_programs() -> None:
    body = "mov.b32 %r5, memory; shl.b32 %r6, %r1, 4; add.s32 %r7, %r5, %r6; $few $put $get_all"
    program = LaunchedText(written_out(body), threads=32, words=4, arch=90, grid=3)
    (finding,) = program.races().findings
    assert (finding.offset, finding.count, finding.index) == (256, 64, "64")
    assert re.fullmatch(r"shared memory of rank 0 kernel program \d", finding.memory)
    assert "ld.shared.v4.b32 {%r3" in str(finding) and finding.extent.programs == 3


# -- compiled code ---------------------------------------------------------------------------------


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
