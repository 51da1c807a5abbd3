"""Tables of the result files and of ``benchmarks/run.py``, and the steps that ``timeline.py`` records."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import interlace
from sim.benchmark.model_support import module
from stand_ins.replaced import replaced
from tiers import thorough


@pytest.fixture
def report() -> Any:
    return module("report")


def test_all_tables_are_current(report: Any) -> None:
    assert report.main(["--check"]) == 0


def test_a_changed_number_is_noticed(report: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = report.PAGES[1].read_text()
    page.write_text(text.replace("| 2 | all_reduce | 16 MiB | ", "| 2 | all_reduce | 16 MiB | 9"))
    assert page.read_text() != text
    with replaced((report, "PAGES", (page,))):
        assert report.main(["--check"]) == 1
        assert report.main([]) == 0
    assert page.read_text() == text


def test_gpu_records_have_a_table(report: Any, tmp_path: Path) -> None:
    time = {"median": 12.5, "lower": 12.0, "upper": 13.0}
    records = [
        {
            "part": "slow-link",
            "case": "copy engine",
            "correct": True,
            "microseconds": {"fused": time},
            "derived": {"overlap": 0.9},
        },
        {"part": "small", "case": "W=2", "correct": False, "microseconds": {}, "derived": {}},
    ]
    (tmp_path / "gpu.json").write_text(json.dumps({"records": records}))
    with replaced((report, "RESULTS", tmp_path)):
        page = report.rewritten("<!-- table gpu gpu.json -->\n<!-- end -->")
        with pytest.raises(ValueError, match="kind must be one of"):
            report.rewritten("<!-- table rumours gpu.json -->\n<!-- end -->")
    assert "| slow-link | copy engine | fused 12 | overlap 0.900 |" in page
    assert "| small | W=2 | wrong result |  |" in page


def test_messages_and_crowds_have_tables_and_messages_a_plot(report: Any, tmp_path: Path) -> None:
    times = {"gloo": 300.0, "interlace": 150.0, "copy_": 50.0}
    messages = [
        {
            "op": "ring",
            "world_size": 4,
            "shape": {"bytes": size, "in flight": 1},
            "microseconds": each,
        }
        for size, each in ((1, times), (1 << 30, {**times, "OpenMPI": 100.0}))
    ]
    shape = {"bytes": 4096, "busy loops": 6, "threads": 2}
    crowd = {"op": "step", "world_size": 2, "shape": shape, "microseconds": times}
    (tmp_path / "cpu.json").write_text(json.dumps({"measurements": [*messages, crowd]}))
    marks = [f"<!-- table {kind} cpu.json -->\n<!-- end -->" for kind in ("messages", "crowds")]
    with replaced((report, "RESULTS", tmp_path), (report, "IMAGES", tmp_path)):
        page = report.rewritten("\n".join(marks))
        assert "| ranks | op | 1 B | 1 GiB |" in page
        assert "| 4 | ring | 150 (2.00) | 150 (2.00, 1.50) |" in page
        assert "| 2 | 2 | 6 | 4 KiB | 0.1 | 0.3 | 2.00 |" in page
        pytest.importorskip("matplotlib")
        assert [path.name for path in report.plots(page)] == ["messages-cpu.png"]


def test_another_run_of_a_commit_has_a_file_of_its_own(tmp_path: Path) -> None:
    circumstances = module("circumstances")
    with replaced((circumstances, "RESULTS", tmp_path)):
        for name in ("cpu-day-01234567", "cpu-day-01234567-2", "cpu-day-01234567-3"):
            path = circumstances.new_result("cpu", {"date": "day", "commit": "0123456789"})
            assert path == tmp_path / f"{name}.json"
            path.write_text("{}")


@pytest.fixture
def runner() -> Any:
    return module("run")


@pytest.fixture
def wide(runner: Any) -> Any:
    times = {"gloo": 123456.0, "interlace": 104851.0, "copy_": 99999.0, "streamed copy": 87654.0}
    times["OpenMPI"] = 54321.0
    shape = {"bytes": 1 << 30, "dtype": "float32"}
    return runner.Measurement("all_reduce", 2, shape, "gloo", times, 3)


def test_a_table_in_a_pipe_is_whole(runner: Any, wide: Any) -> None:
    out = io.StringIO()
    runner.show(Console(file=out, width=80), [wide])
    printed = out.getvalue()
    assert max(map(len, printed.splitlines())) > 80
    cells = [
        f"{wide.microseconds[name]:,.0f} ({wide.ratio(name):.2f})" for name in wide.microseconds
    ]
    for text in [*cells[1:], *wide.microseconds, "10.24", "1073741824"]:
        assert text in printed
    assert "\u2026" not in printed


def test_control_on_a_terminal_a_table_is_as_wide_as_that(runner: Any, wide: Any) -> None:
    out = io.StringIO()
    runner.show(Console(file=out, width=80, force_terminal=True, color_system=None), [wide])
    assert max(map(len, out.getvalue().splitlines())) == 80


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_message_that_is_sent_is_received(runner: Any, world_size: int) -> None:
    cells = module("cpu.message_cells").cells(world_size, [1, 1 << 30], 16 << 30)
    assert {cell.op for cell in cells} >= {"exchange", "send", "ping-pong", "batch"}
    assert all(world_size * (1 + cell.in_flight) * cell.nbytes <= 16 << 30 for cell in cells)
    assert any(cell.nbytes == 1 << 30 for cell in cells) and any(
        cell.in_flight > 1 for cell in cells
    )
    for cell in cells:
        ends = [cell.peers(rank, world_size) for rank in range(world_size)]
        sent = {(rank, to) for rank, (to, _) in enumerate(ends) if to is not None}
        assert sent == {
            (source, rank) for rank, (_, source) in enumerate(ends) if source is not None
        }
        assert sent and len({cell.key for cell in cells}) == len(cells)


# -- the picture of a matmul with its all-gather ------------------------------------------------------


@pytest.fixture
def timeline() -> Any:
    return module("timeline")


def test_the_fastest_call_counts_from_the_first_rank_to_the_last(timeline: Any) -> None:
    first = [("pipelined", 10.0, 30.0, [("matmul", 12.0, 20.0)]), ("gloo", 50.0, 60.0, [])]
    second = [("pipelined", 15.0, 31.0, []), ("gloo", 45.0, 60.0, [("copy", 46.0, 50.0)])]
    slower = [("pipelined", 100.0, 130.0, [])]
    ranks = [first + slower, second + slower]
    assert timeline.fastest(ranks, "pipelined") == {
        "microseconds": 21.0,
        "steps": [[("matmul", 2.0, 10.0)], []],
    }
    assert timeline.fastest(ranks, "gloo") == {
        "microseconds": 15.0,
        "steps": [[], [("copy", 1.0, 5.0)]],
    }


@thorough
def test_every_way_has_its_steps(timeline: Any, tmp_path: Any) -> None:
    ranks = interlace.run(timeline.on_rank, 2, 2, f"{tmp_path}/meeting", place="shm")
    for calls in ranks:
        assert [name for name, *_ in calls] == ["gloo", "unfused", "pipelined"] * 2
        for name, begin, end, steps in calls:
            kinds = [kind for kind, *_ in steps]
            assert kinds.count("matmul") == (2 if name == "pipelined" else 1)
            assert kinds.count("gather") == (name == "gloo")
            assert all(begin <= start <= stop <= end for _, start, stop in steps)
