"""The place ``ptx``: it computes what ``sim`` does, and mutants of compiled code are found by running."""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import interlace
from interlace import verify
from interlace.tools.targets import TARGETS
from sim.ptx.ptx_texts import kernel

# those of a switch are compiled from 9.0 on
COMPILED = [
    (arch, op, name)
    for arch in (80, 90)
    for op, target in TARGETS.items()
    for name in target.variants
    if arch == 90 or name not in ("multimem", "switch")
]
SCATTER = TARGETS["matmul_reduce_scatter"].variants["fused"]


def gathered(algorithm: str = "kernel") -> torch.Tensor:
    rank, output = interlace.get_rank(), torch.empty(80)
    interlace.all_gather(output, torch.arange(40.0) + 100 * rank, algorithm=algorithm)
    return output


def test_a_gather_is_that_of_sim() -> None:
    for found, expected in zip(
        interlace.run(gathered, 2, place="ptx", seed=3), interlace.run(gathered, 2), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize(("arch", "op", "name"), COMPILED)
def test_every_algorithm_is_right(arch: int, op: str, name: str) -> None:
    """Targets check their own results, of several calls in flight."""
    interlace.run(TARGETS[op].variants[name], 2, place="ptx", seed=1, arch=arch)


@pytest.mark.thorough
@pytest.mark.parametrize("op", ["signal", "all_gather_matmul", "matmul_reduce_scatter"])
def test_what_is_shipped_is_right_where_stores_come_late(op: str) -> None:
    name = next(iter(TARGETS[op].variants))
    how = {"n": 2, "arch": 90, "store_buffers": True, "workers": 1}
    report = verify.schedules(TARGETS[op].variants[name], 2, **how)
    assert report.clean, str(report)


@pytest.mark.thorough
@pytest.mark.parametrize("op", TARGETS)
def test_what_is_shipped_has_no_races(op: str) -> None:
    name = next(iter(TARGETS[op].variants))
    report = verify.races(TARGETS[op].variants[name], 2, seeds=1, arch=80)
    assert report.clean, str(report)


def without_barrier(ptx: str) -> str:
    """Without the barrier before each release."""
    *before, last = re.split(r"(?=atom\.\S*release\S*exch)", ptx)
    return "".join(re.sub(r"(?s)(.*)bar\.sync\s+0;", r"\1", part) for part in before) + last


@pytest.mark.thorough
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda ptx: ptx, None),
        (without_barrier, "no barrier"),
        (lambda ptx: re.sub(r"\.release(\S*exch)", r".relaxed\1", ptx), "weak order"),
        (lambda ptx: re.sub(r"\.acquire(\S*add)", r".relaxed\1", ptx), "weak order"),
    ],
    ids=["shipped", "no barrier", "no release", "no acquire"],
)
def test_many_slots_are_published_and_waited_for(
    change: Callable[[str], str], kind: str | None, arch: int
) -> None:
    """Compiled, as vectors: tiles of an owner by one barrier and one fence, sources by one poll."""

    def rewrite(name: str, ptx: str) -> str:
        if name != "matmul_reduce_scatter_kernel":
            return ptx
        assert re.search(r"release\S*exch", ptx) and re.search(r"acquire\S*add", ptx)
        return change(ptx)

    report = verify.races(SCATTER, 2, seeds=2, arch=arch, rewrite=rewrite)
    kinds = {each for finding in report.findings for each in finding.kinds}
    assert (kind in kinds) if kind else not kinds, str(report)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match='arch is for place="ptx", got 80'):
        interlace.run(gathered, 2, arch=80)
    with pytest.raises(ValueError, match="arch must be one of 80, 90, got 70"):
        interlace.run(gathered, 2, place="ptx", arch=70)
    with pytest.raises(ValueError, match="arch must be one of 80, 90, got 70"):
        verify.races(gathered, 2, arch=70)
    with pytest.raises(ValueError, match="arch must be one of 80, 90, got 70"):
        verify.schedules(gathered, 2, n=1, arch=70)
    with pytest.raises(ValueError, match="rewrite changes PTX, so arch must be passed"):
        verify.races(gathered, 2, rewrite=lambda name, ptx: ptx)


def test_texts_given_with_their_launch_are_rewritten_too() -> None:
    """And what is no function, or gives no PTX, is told."""
    text = kernel("bar.sync 0; st.global.b32 [%rd1], 1;")

    sums = []

    def on_rank() -> None:
        out = torch.zeros(32, dtype=torch.int32)
        verify.launch_ptx(text, 1, out)
        sums.append(int(out.sum()))

    verify.races(on_rank, 1, seeds=1, arch=80, rewrite=lambda _, ptx: ptx.replace("], 1;", "], 2;"))
    assert sums == [64]
    report = verify.races(on_rank, 1, seeds=1, arch=80, rewrite=lambda name, ptx: None)  # type: ignore[arg-type, return-value]
    assert "rewrite must return PTX, a str; for kernel it returned None" in str(report)
    with pytest.raises(TypeError, match="rewrite must be a function of a name and PTX, got 'x'"):
        verify.races(on_rank, 1, arch=80, rewrite="x")  # type: ignore[arg-type]


SCRIPT = """
import interlace
import torch
import triton
import triton.language as tl

@triton.jit
def fill_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)

def on_rank():
    x = torch.zeros(16)
    fill_kernel[(1,)](x, 16)
    return int(x.sum())

for place in ("sim", "ptx"):
    print(interlace.run(on_rank, 2, place=place))
"""


@pytest.mark.thorough
def test_a_script_without_a_guard_is_run_once(tmp_path: pathlib.Path) -> None:
    """Its file is loaded to compile the kernel, and the ranks at its top level are not started there."""
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert run.stdout == "[16, 16]\n" * 2, run.stderr
