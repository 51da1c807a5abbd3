"""Tables for people are what the result files say."""

import json
from pathlib import Path
from typing import Any

import pytest

from sim.benchmark.model_support import module
from stand_ins.replaced import replaced


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
