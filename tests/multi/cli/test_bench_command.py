"""``python -m interlace bench``: measurements, checks, output and files, wrong kernels, and refusals."""

import io
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from cases.bench_runs import rows, run
from interlace.benchmark import plain
from interlace.cli import main
from interlace.cli.commands.bench import BenchOptions, bench
from interlace.output.consoles import PlainConsole
from interlace.output.files import draw_bars, refuse_unwritable
from support import under_torchrun
from tiers import thorough

KERNELS = pathlib.Path(__file__).with_name("bench_kernels.py")


@thorough
def test_a_collective_against_gloo_and_alone(tmp_path: pathlib.Path) -> None:
    code, text, facts = run(
        "all_reduce", tmp_path, sizes="4K,8K", algorithm="all", baseline="gloo,torch"
    )
    assert code == 0 and facts["right"] and "All results are right." in text
    assert [size["nbytes"] for size in facts["results"]] == [4096, 8192]
    for size in range(2):
        found = rows(facts, size)
        assert list(found) == ["auto", "copy", "gloo", "torch"]
        for row in found.values():
            time = row["microseconds"]["median"]
            assert row["right"] and row["error"] <= 1 and len(row["blocks"]) == 2
            assert time > 0 and row["algbw"] == pytest.approx(4096 * (size + 1) / time / 1e3)
            assert row["busbw"] == pytest.approx(row["algbw"])  # 2 (W - 1) / W of 2 ranks
        times = {name: row["microseconds"]["median"] for name, row in found.items()}
        assert found["auto"]["speedup"] == {
            "gloo": pytest.approx(times["gloo"] / times["auto"]),
            "torch": pytest.approx(times["torch"] / times["auto"]),
        }
        assert list(found["gloo"]["speedup"]) == ["torch"]
    assert "Left out of all: kernel (interpreted on a CPU), multimem (" in text
    assert facts["machine"]["torch"]["version"] and facts["protocol"]["statistic"]


@thorough
def test_a_fused_op_has_its_parts_and_an_overlap(tmp_path: pathlib.Path) -> None:
    code, text, facts = run(
        "all_gather_matmul", tmp_path, m="64,128", n="32", k="16", algorithm="pipelined,unfused"
    )
    assert code == 0 and "64 x 32 x 16" in text and "128 x 32 x 16" in text
    found = rows(facts, 1)
    assert list(found) == ["pipelined", "unfused", "gloo", "torch.mm alone", "all_gather alone"]
    times = {name: row["microseconds"]["median"] for name, row in found.items()}
    parts = times["torch.mm alone"], times["all_gather alone"]
    for name in ("pipelined", "unfused"):
        assert found[name]["overlap"] == pytest.approx((sum(parts) - times[name]) / min(parts))
        assert found[name]["tflops"] == pytest.approx(2 * 128 * 32 * 16 / times[name] / 1e6)
        assert found[name]["algbw"] == pytest.approx(128 * 16 * 4 / times[name] / 1e3)
    assert found["gloo"]["overlap"] is None and found["torch.mm alone"]["algbw"] is None
    assert found["torch.mm alone"]["right"] is None and found["gloo"]["right"]


def test_all_leaves_out_what_cannot_be(tmp_path: pathlib.Path) -> None:
    options = {"place": "sim", "world_size": 3, "baseline": "none", "algorithm": "all"}
    code, text, facts = run("all_gather", tmp_path, sizes="12,240K", dtype="int64", **options)
    assert code == 0 and "low_latency (for at most 64 KiB a rank)" in text
    assert list(rows(facts)) == ["auto", "copy", "low_latency"]
    assert list(rows(facts, 1)) == ["auto", "copy"]
    _, text, facts = run("all_reduce", tmp_path, sizes="12", dtype="int64", **options)
    assert list(rows(facts)) == ["auto", "copy"] and "low_latency (not for int64)" in text


def test_barrier_has_nothing_to_check(tmp_path: pathlib.Path) -> None:
    code, text, facts = run("barrier", tmp_path, world_size=2, place="sim")
    assert code == 0 and "Not checked" in text
    assert {row["right"] for row in facts["results"][0]["rows"]} == {None}


# -- wrong results -------------------------------------------------------------------------------------


def test_a_wrong_kernel_is_exit_status_1_and_says_so(tmp_path: pathlib.Path) -> None:
    code, text, facts = run(f"{KERNELS}::wrong", tmp_path, sizes="256")
    assert code == 1 and not facts["right"]
    found = rows(facts)
    assert found["wrong"]["right"] is False and found["gloo"]["right"] is True
    assert "WRONG" in text and "rank 1: 1 elements are not 1" in text
    assert "WRONG results: wrong." in text.splitlines()[-2]
    assert "All results are right" not in text


def test_what_is_wrong_only_after_the_first_call_is_seen(tmp_path: pathlib.Path) -> None:
    code, text, facts = run(f"{KERNELS}::late", tmp_path, sizes="64", place="sim")
    assert code == 1 and rows(facts)["late"]["right"] is False and "WRONG results: late." in text


def test_a_function_that_raises_is_wrong_too(tmp_path: pathlib.Path) -> None:
    code, text, facts = run(f"{KERNELS}::wrong_whole", tmp_path, sizes="256")
    assert code == 1 and not facts["right"] and "wrong sum" in text
    assert ["256", "B", "WRONG"] in [line.split() for line in text.splitlines()]


@pytest.mark.parametrize("place", ["sim", "shm"])
def test_what_a_function_raises_is_shown_from_its_first_line(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench", f"{KERNELS}::raising", "--place", place]) == 2
    _, _, said = capsys.readouterr().err.partition("error: rank ")
    head, begin, first, *_, last = said.splitlines()
    assert head[1:] == ": KeyError: 'missing'" and begin.startswith("Traceback")
    assert first.startswith(f'  File "{KERNELS}"') and last == "KeyError: 'missing'"


@pytest.mark.parametrize("fault", ["an element", "nothing done", "another rank's"])
def test_faults_in_an_op_of_ours_are_seen(fault: str, tmp_path: pathlib.Path) -> None:
    right = plain.AllGather.ours

    def faulty(self: plain.AllGather, algorithm: str) -> Any:
        def run(output: Any, x: Any) -> Any:
            if fault == "nothing done":
                return output
            right(self, algorithm)(output, x)
            if fault == "an element":
                output[-1] += 1 / 32
            else:
                output.copy_(output.view(self.world_size, -1).flip(0).flatten())
            return output

        return run

    options: dict[str, Any] = {"sizes": "64", "place": "sim", "repetitions": 1}
    with mock.patch.object(plain.AllGather, "ours", faulty):
        code, text, facts = run("all_gather", tmp_path, **options)
    assert code == 1 and rows(facts)["auto"]["right"] is False and "WRONG" in text


# -- kernels of the user -------------------------------------------------------------------------------


def test_a_kernel_with_everything(tmp_path: pathlib.Path) -> None:
    code, _, facts = run(f"{KERNELS}::right", tmp_path, sizes="256,1K")
    assert code == 0 and [size["nbytes"] for size in facts["results"]] == [256, 1024]
    found = rows(facts, 1)
    assert list(found) == ["right", "gloo"] and all(row["right"] for row in found.values())
    assert found["right"]["busbw"] == pytest.approx(found["right"]["algbw"])


def test_parts_of_a_kernel_give_an_overlap(tmp_path: pathlib.Path) -> None:
    options = {"m": "8", "n": "4", "k": "4", "dtype": "float64"}
    code, text, facts = run(f"{KERNELS}::fused", tmp_path, place="sim", **options)
    assert code == 0 and "8 x 4 x 4" in text
    assert math.isfinite(rows(facts)["fused"]["overlap"]) and rows(facts)["fused"]["right"]


def test_the_example_of_the_documentation(tmp_path: pathlib.Path) -> None:
    target = KERNELS.parents[3] / "docs" / "examples" / "bench_kernel.py"
    code, _, facts = run(f"{target}::one_shot", tmp_path, sizes="4K", place="sim")
    assert code == 0 and rows(facts)["one_shot"]["right"] is True
    wrong = target.read_text().replace("+ number) + ranks", "+ number)")
    assert wrong != target.read_text()
    (tmp_path / "bench_wrong.py").write_text(wrong)
    example = target.with_name("one_shot_all_reduce.py").read_text()
    (tmp_path / "one_shot_all_reduce.py").write_text(example)
    code, text, _ = run(f"{tmp_path}/bench_wrong.py::one_shot", tmp_path, sizes="4K", place="sim")
    assert code == 1 and "WRONG results: one_shot." in text


@pytest.mark.parametrize("name", ["bare", "whole"])
def test_less_than_a_kernel(name: str, tmp_path: pathlib.Path) -> None:
    code, text, facts = run(f"{KERNELS}::{name}", tmp_path, place="sim")
    assert code == 0 and rows(facts)[name]["algbw"] is None
    assert ("Not checked" in text) == (name == "bare")


# -- how it is started ---------------------------------------------------------------------------------


@thorough
def test_under_torchrun(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "out.json"
    printed = under_torchrun(
        "torchrun --nproc-per-node 2 -m interlace bench all_reduce",
        "--sizes",
        "4K",
        "--repetitions",
        "2",
        "--json",
        str(path),
    )
    assert printed.count("All results are right.") == 1  # rank 0 alone prints
    found = rows(json.loads(path.read_text()))
    assert list(found) == ["auto", "gloo"] and all(row["right"] for row in found.values())


@thorough
def test_a_plot_is_written(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    run("all_reduce", tmp_path, sizes="64,128", place="sim", repetitions=1, plot=str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "begins"), [("t.svg", b"<?xml"), ("t.png", b"\x89PNG")])
def test_times_are_drawn_as_bars(name: str, begins: bytes, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    times = [("64 KiB", [("auto", 50.0), ("gloo", 200.0)]), ("none", [])]
    draw_bars(PlainConsole(), str(tmp_path / name), times)
    assert (tmp_path / name).read_bytes().startswith(begins)


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("rich", "matplotlib"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
from interlace.cli.main import run as main
arguments = ["bench", "broadcast", "--sizes", "64", "--place", "sim", "--repetitions", "1"]
assert main(arguments) == 0
assert main([*arguments, "--plot", "-"]) == 0
assert main([*arguments, "--plot", "plot.png"]) == 2
"""


@thorough
def test_without_rich_and_matplotlib() -> None:
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 of 1: broadcast 64 B" in done.stderr
    assert "--plot needs matplotlib, which is not installed: pip install" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("broadcast, float32, 2 ranks, place sim")
    assert lines[1].split()[0] == "time" and lines[2].split()[:3] == ["size", "candidate", "us"]
    assert lines[4].split()[:3] == ["64", "B", "auto"] and lines[4].endswith("right")


def test_nothing_is_cut_off_in_a_narrow_console(tmp_path: pathlib.Path) -> None:
    out = io.StringIO()
    options = BenchOptions("all_gather", sizes="64", place="sim", baseline="torch", repetitions=2)
    bench(Console(file=out, width=30), options)
    assert "candidate" in out.getvalue() and "\u2026" not in out.getvalue()


# -- refusals ------------------------------------------------------------------------------------------


def test_a_bare_function_has_no_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks find this error; the other errors are in tests/sim/cli/refusals.txt."""
    assert main.run(["bench", f"{KERNELS}::bare", "--place", "sim", "--baseline", "gloo"]) == 2
    assert "has no baselines" in capsys.readouterr().err


def test_looking_whether_a_file_can_be_written_leaves_it(tmp_path: pathlib.Path) -> None:
    held, new = tmp_path / "held", tmp_path / "new"
    held.write_text("text")
    for path in (held, new):
        refuse_unwritable("--json", str(path))
    assert held.read_text() == "text" and not new.exists()


def test_figures_are_printed_though_the_file_cannot_be_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["all_reduce", "--sizes", "64", "--place", "sim", "--repetitions", "1"]
    assert main.run(["bench", *arguments, "--json", "/dev/full"]) == 2
    said = capsys.readouterr()
    assert "All results are right." in said.out and "No space left" in said.err


@thorough
def test_a_terminated_command_leaves_nothing(tmp_path: pathlib.Path) -> None:
    arguments = ["all_reduce", "--sizes", "64", "--place", "sim", "--repetitions", "1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "interlace", "bench", *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    try:
        while not list(tmp_path.glob("interlace-bench-*")):
            assert process.poll() is None, "it has not begun"
            time.sleep(0.05)
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    assert not list(tmp_path.glob("interlace-*"))


def test_ranks_of_torchrun_are_not_counted_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "2"}):
        assert main.run(["bench", "all_reduce", "--world-size", "4"]) == 2
    assert "--world-size 4: torchrun has started 2 ranks" in capsys.readouterr().err


def test_the_place_decides_about_the_interpreter() -> None:
    assert BenchOptions("all_reduce", place="shm").interprets()
    assert not BenchOptions("all_reduce", place="cuda").interprets()
