"""Kernels of C++ in the place ``ptx``: ``sums.cu`` as nvcc 13.0 compiles it, with -O3 and with -O0.

The texts beside it are its output for sm_80, with ``-lineinfo`` and with ``-Xcicc -O0``; only paths of
files are shortened. Where nvcc is installed, it compiles them again, for debugging and for other GPUs too.
"""

import pathlib
import re
import shutil
import struct
import subprocess
from typing import Any

import pytest
import torch

import interlace
from interlace import verify
from interlace.runtime.core.errors import KernelAssertionError
from interlace.verify import launch_ptx
from tiers import thorough

HERE = pathlib.Path(__file__).parent
TEXTS = {path.stem: path.read_text() for path in HERE.glob("sums_O*.ptx")}
OF = [0.25 * each for each in range(6)]
ROWS, STEP = 3, 6


def sums(ptx: str, n: int, threads: Any, variables: dict[str, torch.Tensor]) -> torch.Tensor:
    extra, out = torch.arange(64.0), torch.zeros(64)
    weights = struct.pack("<i6f4xq", ROWS, *OF, extra.data_ptr())
    given: dict[str, Any] = {"kernel": "sums", "threads": threads, "shared_bytes": 4 * n}
    launch_ptx(ptx, 1, out, weights, n, variables=variables, **given)
    return out


def expected(n: int) -> list[float]:
    def polynomial(x: float) -> float:
        return ((1 * x + 2) * x + 3) * x + 4

    turned = [OF[i % 6] * ((ROWS + i) % 8) for i in range(n)]
    pairs = [OF[i % 6] + i + OF[i % 6] * i for i in range(n)]
    return [polynomial(turned[n - 1 - i]) + n - 1 - i + pairs[i] + STEP for i in range(n)]


def check_sums(ptx: str, capsys: pytest.CaptureFixture[str], arch: int = 80) -> None:
    """A block of two dimensions, and one whose last warp is not whole; a variable counts launches."""

    def step() -> list[list[float]]:
        first = sums(ptx, 64, (16, 4), {})
        return [first.tolist(), sums(ptx, 40, 40, {}).tolist()[:40]]

    (found,) = interlace.run(step, 1, place="ptx", arch=arch)
    assert found[0] == pytest.approx(expected(64), rel=1e-6)
    assert found[1] == pytest.approx(expected(40), rel=1e-6)
    assert capsys.readouterr().out == "3:  2.25 of sums, 0\n3:  2.25 of sums, 1\n"


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_memory_of_threads_and_modules(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_sums(TEXTS[name], capsys)


def handed_on(ptx: str) -> list[int]:
    data, out = (torch.zeros(64, dtype=torch.int32) for _ in range(2))
    launch_ptx(ptx, 2, out, data, torch.zeros(1, dtype=torch.int32), kernel="handed_on")
    return out.tolist()


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_races_of_compiled_c(name: str) -> None:
    ptx = TEXTS[name]
    wrong = (
        ("no barrier", ptx.replace("bar.sync \t0;", "")),
        ("weak order", ptx.replace("red.release.gpu", "red.relaxed.gpu")),
        ("weak order", ptx.replace("ld.acquire.gpu", "ld.relaxed.gpu")),
    )

    def kinds(text: str) -> set[str]:
        report = verify.races(lambda: handed_on(text), 1, seeds=2, arch=80)
        assert not report.errors
        return {finding.kind for finding in report.findings}

    (found,) = interlace.run(handed_on, 1, ptx, place="ptx")
    assert found == [(63 - i) ** 2 for i in range(64)]
    assert not kinds(ptx)
    silent = re.sub(r"red\.release\.gpu[^;]*;", "", ptx)
    with pytest.raises(
        interlace.DeadlockError, match="handed_on program 1 waits for a int32 tensor of 1"
    ):
        interlace.run(handed_on, 1, silent, place="ptx")
    for kind, text in wrong:
        assert text != ptx
        assert kind in kinds(text)


def test_an_assertion_of_c_names_its_line_and_thread() -> None:
    with pytest.raises(
        KernelAssertionError, match=r"sums\.cu:33, void sums\(.*'i < n' fails in thread 40"
    ):
        interlace.run(lambda: sums(TEXTS["sums_O3"], 40, 41, {}), 1, place="ptx")


def test_a_variable_may_be_memory_of_the_caller() -> None:
    """As after cudaMemcpyToSymbol; what the kernel leaves there can be read."""

    def step() -> tuple[list[float], int]:
        launches = torch.full((1,), 7, dtype=torch.int32)
        given = {"coefficients": torch.zeros(4), "launches": launches}
        return sums(TEXTS["sums_O3"], 64, 64, given).tolist(), int(launches)

    ((found, launches),) = interlace.run(step, 1, place="ptx")
    rest = [i + 63 - i + STEP + OF[i % 6] + OF[i % 6] * i for i in range(64)]
    assert found == pytest.approx(rest)
    assert launches == 8


@thorough
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc compiles it")
@pytest.mark.parametrize(
    "options",
    ["-arch=sm_80", "-arch=sm_80 -G", "-arch=sm_90", "-arch=sm_90 -Xcicc -O0", "-arch=sm_100"],
)
def test_what_nvcc_makes_now(
    options: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "sums.ptx"
    subprocess.run(["nvcc", "-ptx", *options.split(), HERE / "sums.cu", "-o", made], check=True)
    text = made.read_text().replace(".target sm_100", ".target sm_90")
    check_sums(text, capsys, arch=80 if "sm_80" in options else 90)
