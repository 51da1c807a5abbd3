"""The demo: input from files, right numbers, measured bytes, a timeline that fits, a trace that loads."""

import io
import json
import pathlib
import re
import sys
from collections import Counter
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from rich.console import Console

import interlace
from interlace import reference
from interlace.cli.commands import demo as command
from interlace.cli.commands.demo import CASES, DemoOptions, run_case
from interlace.kernels.tiling import split_rows
from interlace.runtime.places.sim.scheduler import recording, recording as trace

SMALL = {"m": 45, "n": 40, "k": 24}


def printed(options: DemoOptions, width: int = 80, **console: Any) -> tuple[int, str]:
    out = io.StringIO()
    code = command.demo(Console(file=out, width=width, **console), options)
    return code, out.getvalue()


@pytest.fixture(scope="module")
def small() -> tuple[command.Workload, list[command.CaseResult]]:
    """Run every case on 3 ranks with uneven shards."""
    options = DemoOptions(ranks=3, **SMALL)
    work = command.from_text(None, torch.bfloat16, 0, **SMALL)
    return work, [run_case(case, work, options) for case in CASES]


def recorded(outcome: command.CaseResult) -> recording.Recording:
    assert outcome.recording is not None
    return outcome.recording


# -- measurements ------------------------------------------------------------------------------------


def test_errors_are_within_bounds(small: Any) -> None:
    for outcome in small[1]:
        assert outcome.correct
        assert all(error > 0 for error, _ in outcome.errors)


def test_bytes_sent_are_what_the_algorithms_must_send(small: Any) -> None:
    """A gather sends its shard to every peer; a scatter sends every row except its own rows."""
    gathered, scattered, both = (recorded(outcome) for outcome in small[1])
    m, n, k = SMALL["m"], SMALL["n"], SMALL["k"]
    for rank, (_, rows) in enumerate(split_rows(m, 3)):
        gather = rows * k * 2 * (3 - 1)
        assert gathered.bytes_sent(rank) == gather
        assert scattered.bytes_sent(rank) == (m - rows) * n * 2
        assert both.bytes_sent(rank) == gather + (m - rows) * k * 2


def test_bytes_of_the_copy_engine_are_seen() -> None:
    from interlace.runtime.tuning import configuration

    def on_rank() -> None:
        with configuration.override(copiers=0):
            interlace.all_gather_matmul(torch.ones(20, 8), torch.ones(8, 4), algorithm="fused")

    with trace.recording() as recorder:
        interlace.run(on_rank, 3)
    record = recording.merge([recorder.recording()])
    assert [record.bytes_sent(rank) for rank in range(3)] == [20 * 8 * 4 * 2] * 3
    assert all(record.arrivals(rank) for rank in range(3))
    assert {span.lane for span in record.spans if span.kind == "copy"} == {"stream copy"}


def test_tiles_know_whose_rows_they_multiply(small: Any) -> None:
    """45 rows on 3 ranks are 15 rows each, so one row of tiles."""
    for outcome, columns in zip(small[1], (1, 2), strict=False):
        for rank in range(3):
            found = Counter(tile.peer for tile in recorded(outcome).tiles(rank))
            assert found == dict.fromkeys(range(3), columns)


def test_overlap_counts_tiles_before_the_last_arrival() -> None:
    slot = recording.Slot(0, 0, 2000)
    tiles = [
        recording.RecordedSpan("tile", 0, "p", "op", start, start + 9) for start in (0, 10, 20, 30)
    ]
    arrivals = [recording.Signal(time, 1, "p", "op", slot) for time in (5, 25)]
    assert recording.Recording(recording.STEPS, tiles, arrivals).overlap(0) == (2, 4)
    assert recording.Recording(recording.STEPS, tiles, []).overlap(0) is None


def test_programs_do_one_thing_at_a_time(small: Any) -> None:
    for outcome in small[1]:
        ends: dict[tuple[int, str], int] = {}
        for span in recorded(outcome).spans:
            if span.kind in ("tile", "sum", "wait") or span.lane.startswith("all_gather"):
                key = span.rank, span.lane
                assert span.start >= ends.get(key, 0)
                ends[key] = span.end


def test_every_tile_of_a_peers_rows_was_waited_for(small: Any) -> None:
    record = recorded(small[1][0])
    ended_by = record.ended_by()
    for tile in (tile for rank in range(3) for tile in record.tiles(rank)):
        if tile.peer != tile.rank:
            waits = [w for w in ended_by if w.slot == tile.slot and w.lane == tile.lane]
            assert waits and waits[0].end <= tile.start
            assert ended_by[waits[0]].source == tile.peer == waits[0].peer
            assert ended_by[waits[0]].time <= waits[0].end


def test_recording_repeats_with_the_seed_and_changes_nothing(small: Any) -> None:
    work, outcomes = small
    again = run_case(CASES[0], work, DemoOptions(ranks=3))
    assert again == outcomes[0]
    assert run_case(CASES[0], work, DemoOptions(ranks=3, seed=1)) != outcomes[0]
    plain = interlace.run(CASES[2].on_rank, 3, work)
    with trace.recording():
        watched = interlace.run(CASES[2].on_rank, 3, work)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert trace.current() is None


def test_bound_of_the_mlp_is_not_loose(small: Any) -> None:
    """The error of a bf16 MLP must be above a hundredth of the bound, or the bound proves nothing."""
    assert max(ratio for _, ratio in small[1][2].errors) > 0.01
    value, bound = CASES[2].expected(small[0], 3)
    assert reference.worst_ratio(value + 3 * bound, value, bound) > 1


# -- output ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_timeline_fits_and_has_all_ranks(small: Any, width: int) -> None:
    for outcome in small[1]:
        out = io.StringIO()
        Console(file=out, width=width).print(command.Timeline(recorded(outcome), 3))
        lines = out.getvalue().splitlines()
        assert len(lines) == 2 * 3 + 1
        assert {len(line) for line in lines[:-1]} == {width - 1} or all(
            len(line) <= width for line in lines
        )
        assert "schedule steps" in lines[-1]
        for rank in range(3):
            chunks, tiles = lines[2 * rank], lines[2 * rank + 1]
            assert chunks.startswith(f"rank {rank}") and "tiles" in tiles
            others = {str(source) for source in range(3) if source != rank}
            assert others <= set(chunks[17:]) and str(rank) not in chunks[17:]
            assert str(rank) in tiles[17:]


def test_timeline_has_stand_ins_for_ascii(small: Any) -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"  # type: ignore[assignment]

    out = Ascii()
    Console(file=out, width=80).print(command.Timeline(recorded(small[1][0]), 3))
    assert out.getvalue().isascii()


def test_report_is_complete_and_exit_code_is_zero() -> None:
    code, text = printed(DemoOptions(ranks=2, **SMALL))
    assert code == 0 and "Correct" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    for case in CASES:
        assert case.title in text
    assert text.count("before last chunk") == 3


def test_wrong_result_is_exit_code_one() -> None:
    """One element of one rank is wrong by little more than rounding explains."""
    right = interlace.matmul_reduce_scatter

    def wrong(input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        output: torch.Tensor = right(input, weight, **options)
        if interlace.get_rank() == 1:
            output[2, 3] += 0.25
        return output

    with mock.patch.object(interlace, "matmul_reduce_scatter", wrong):
        code, text = printed(DemoOptions(ranks=2, **SMALL))
    assert code == 1
    assert "WRONG" in text and "Correct" not in text
    assert "matmul_reduce_scatter, MLP" in re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    ("ranks", "m", "n", "k", "dtype"),
    [
        (1, 40, 24, 16, "bfloat16"),
        (4, 3, 33, 17, "float16"),
        (3, 7, 2, 2, "float32"),
        (5, 1, 1, 1, "bfloat16"),
        (4, 129, 20, 20, "bfloat16"),  # shards of 33 and 30 rows need the same chunks
    ],
)
def test_odd_sizes(ranks: int, m: int, n: int, k: int, dtype: str) -> None:
    code, text = printed(DemoOptions(ranks=ranks, m=m, n=n, k=k, dtype=dtype))
    assert code == 0, text


# -- the input -------------------------------------------------------------------------------------


def test_text_gives_distinct_rows_that_depend_on_the_seed() -> None:
    work = command.from_text(None, torch.float32, 0, None, None, None)
    assert work.sizes == (command.DEFAULT_M, command.DEFAULT_N, command.DEFAULT_K)
    assert len(torch.unique(work.activations, dim=0)) == command.DEFAULT_M
    again = command.from_text(None, torch.float32, 0, None, None, None)
    other = command.from_text(None, torch.float32, 1, None, None, None)
    assert torch.equal(work.activations, again.activations)
    assert not torch.equal(work.activations, other.activations)


def test_own_text(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("to be, or not to be")
    work = command.from_text(str(file), torch.float32, 0, 20, 4, 8)
    assert "repeated" in work.origin
    code, text = printed(DemoOptions(ranks=2, m=20, n=4, k=8, text=str(file)))
    assert code == 0 and "own.txt" in text.replace("\n", "")


def test_own_activations_and_weights(tmp_path: pathlib.Path) -> None:
    x, w1, w2 = torch.randn(10, 6), torch.randn(6, 8).double(), torch.randn(8, 6).half()
    numpy.save(tmp_path / "x.npy", x.numpy().astype(">f8"))
    work = command.from_file(str(tmp_path / "x.npy"), torch.float32, 0, None, 5, None)
    assert work.sizes == (10, 5, 6)
    assert torch.equal(work.activations, x)
    torch.save({"activations": x, "weight1": w1, "weight2": w2}, tmp_path / "all.pt")
    work = command.from_file(str(tmp_path / "all.pt"), torch.bfloat16, 0, 7, None, None)
    assert work.sizes == (7, 8, 6)
    assert torch.equal(work.weight1, w1.bfloat16()) and torch.equal(work.weight2, w2.bfloat16())
    torch.save(x, tmp_path / "x.pt")
    assert printed(DemoOptions(ranks=2, input=str(tmp_path / "x.pt"), n=4))[0] == 0


@pytest.mark.parametrize(
    ("content", "sizes", "message"),
    [
        ({"activations": torch.ones(4)}, {}, r"activations: must be a non-empty matrix.*\(4,\)"),
        ({"activations": torch.ones(0, 3)}, {}, r"non-empty matrix"),
        ({"activations": torch.ones(4, 3).int()}, {}, r"floating point, got torch.int32"),
        ({"activations": torch.full((4, 3), float("nan"))}, {}, r"not finite"),
        ({"activations": torch.full((4, 3), 1e6)}, {}, r"1e\+06 is more than torch.float16"),
        ({"weight1": torch.ones(4, 3)}, {}, r'no "activations"'),
        ({"activations": torch.ones(4, 3), "w": torch.ones(1)}, {}, r"unknown key 'w'"),
        (
            {"activations": torch.ones(4, 3), "weight1": torch.ones(4, 5)},
            {},
            r"weight1 has shape \(4, 5\), must be \(k, n\) = \(3, 5\)",
        ),
        (
            {"activations": torch.ones(4, 3), "weight2": torch.ones(5, 4)},
            {},
            r"weight2 has shape \(5, 4\), must be \(n, k\) = \(5, 3\)",
        ),
        ([torch.ones(4, 3)], {}, r"a tensor or a dict, got list"),
        (torch.ones(4, 3), {"m": 5}, r"--m 5, but activations have 4 rows"),
        (torch.ones(4, 3), {"k": 4}, r"--k 4, but activations have 3 columns"),
        ({"activations": torch.ones(4, 3), "weight1": torch.ones(3, 5)}, {"n": 4}, r"--n 4, but"),
        (recording.Slot, {}, r"holds more than tensors"),
    ],
)
def test_bad_content(tmp_path: pathlib.Path, content: Any, sizes: Any, message: str) -> None:
    torch.save(content, tmp_path / "bad.pt")
    with pytest.raises((ValueError, TypeError), match=message):
        printed(DemoOptions(input=str(tmp_path / "bad.pt"), dtype="float16", **sizes))


def test_bad_files(tmp_path: pathlib.Path) -> None:
    for name, message in (
        ("x.csv", "must be a .npy or a .pt file"),
        ("x.npy", "not an array in .npy format"),
        ("x.pt", "not a file of torch.save"),
    ):
        (tmp_path / name).write_bytes(b"\xff nothing of the kind")
        with pytest.raises(ValueError, match=message):
            printed(DemoOptions(input=str(tmp_path / name)))
    with pytest.raises(ValueError, match="not a text in UTF-8"):
        printed(DemoOptions(text=str(tmp_path / "x.csv")))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="no words"):
        printed(DemoOptions(text=str(tmp_path / "empty.txt")))
    numpy.save(tmp_path / "int.npy", numpy.ones((2, 2), dtype=numpy.int64))
    with pytest.raises(TypeError, match="floating point, got int64"):
        printed(DemoOptions(input=str(tmp_path / "int.npy")))


# -- files -------------------------------------------------------------------------------------------


def test_trace_is_valid(small: Any, tmp_path: pathlib.Path) -> None:
    parts = [(outcome.case.title, recorded(outcome)) for outcome in small[1]]
    recording.write_trace(tmp_path / "t.json", parts)
    content = json.loads((tmp_path / "t.json").read_text())
    events = content["traceEvents"]
    assert content["otherData"]["time"] == "schedule steps"
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in complete)
    assert {event["pid"] for event in complete} == {0, 1, 2}
    assert {"tile", "sum", "copy", "wait", "item"} <= {event["cat"] for event in complete}
    tiles = sum(len(record.tiles(rank)) for _, record in parts for rank in range(3))
    assert sum(event["cat"] == "tile" for event in complete) == tiles
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in complete} == named


def test_arrows_go_forward_between_ranks(small: Any, tmp_path: pathlib.Path) -> None:
    recording.write_trace(tmp_path / "t.json", [("gather", recorded(small[1][0]))])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    assert starts and starts.keys() == ends.keys()
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"] and start["pid"] != ends[number]["pid"]


def test_plot_and_trace_from_the_command(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    png, js = tmp_path / "p.png", tmp_path / "t.json"
    options = DemoOptions(ranks=2, m=16, n=16, k=16, plot=str(png), trace=str(js))
    assert printed(options)[0] == 0
    assert png.read_bytes().startswith(b"\x89PNG") and json.loads(js.read_text())


def test_plot_without_matplotlib_says_what_to_install() -> None:
    without = mock.patch.dict(sys.modules, {"matplotlib.figure": None})
    with without, pytest.raises(ValueError, match=r"interlace\[plot\]"):
        printed(DemoOptions(plot="p.png"))
