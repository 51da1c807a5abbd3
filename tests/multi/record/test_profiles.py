"""Ops and layers in profiles of torch's: ranges by op, algorithm and group, also as NVTX."""

import json
import os
import shutil
import threading
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import profiler

import interlace
from interlace import functional
from multi.ops.test_hooks import every_kind_of_op
from ranks import ranks
from tiers import few

OURS = "interlace:"
FOR_A_PROFILE = "run", "transfer"  # attributes that a group has only during a profile


def names_in(profile: torch.profiler.profile) -> list[str]:
    names = [event.name for event in profile.events()]
    return [name[len(OURS) :] for name in names if name.startswith(OURS)]


@pytest.mark.parametrize("place", few(["sim", "shm"], "sim"))
@ranks(2)
def test_a_profile_names_every_kind_of_op(place: str) -> None:
    """torch records only one profile per process at a time, so in ``sim`` one rank records."""
    group = interlace.new_group()
    if place == "sim" and group.rank:
        every_kind_of_op(group)
        return
    with torch.profiler.profile() as profile:
        every_kind_of_op(group)
    expected = {f"{op} on 0-1" for op in ("all_reduce", "all_gather", "barrier", "recv")}
    assert expected <= {*names_in(profile)}


@ranks(2)
def test_fused_ops_are_in_a_profile_and_nothing_is_left_of_it() -> None:
    names, left = profiled()
    gathered = ["all_gather_matmul on 0-1", "all_gather_matmul:pipelined"]
    reduced = ["all_reduce on 0-1", "all_reduce:message"]
    large = [*reduced, "all_reduce:rings"]
    later = ["all_gather on 0-1", "all_gather:message"]
    assert names == gathered + reduced + reduced + large + later and left == []


@ranks(1, place="sim")
def test_algorithms_on_streams_are_in_a_profile_and_again_where_they_are_waited_for() -> None:
    chosen = [name for name in profiled()[0] if not name.endswith(" on 0")]
    now, later = ["all_reduce:low_latency"], ["all_gather:low_latency"]
    assert chosen == ["all_gather_matmul:pipelined", *3 * now, "all_reduce:kernel", *2 * later]


def profiled() -> tuple[list[str], list[str]]:
    """Return the names in a profile of some ops, and the ranges that their groups keep."""
    group = interlace.new_group()
    with torch.profiler.profile() as profile:
        interlace.all_gather_matmul(
            torch.ones(2, 8), torch.ones(8, 4), group=group, algorithm="pipelined"
        )
        functional.all_reduce(torch.ones(2), group=group).sum()
        inner = interlace.new_group()
        interlace.all_reduce(torch.ones(2), group=inner)
        interlace.all_reduce(torch.ones(1 << 20), group=inner)
        interlace.all_gather(torch.empty(2 * group.world_size), torch.ones(2), async_op=True).wait()
    for each in group, inner:
        interlace.barrier(each)
    left = [name for each in (group, inner) for name in FOR_A_PROFILE if name in vars(each)]
    names = [name for name in names_in(profile) if not name.startswith("new_group")]
    return names, left


@ranks(2)
def test_ops_in_a_thread_of_their_own_are_in_a_profile_of_all_threads() -> None:
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    shard, weight = torch.ones(2, 8), torch.ones(8, 4)
    with torch.profiler.profile(experimental_config=everywhere) as profile:
        interlace.all_gather_matmul(shard, weight, algorithm="pipelined", async_op=True).wait()
        functional.all_gather_matmul(shard, weight, algorithm="unfused").sum()
    by_algorithm = {f"all_gather_matmul:{each}" for each in ("pipelined", "unfused")}
    assert by_algorithm <= {*names_in(profile)}


@ranks(1, place="sim")
def test_nvtx_has_the_same_ranges() -> None:
    """Without a GPU the test can only see that torch's switch turns the ranges on."""
    stand_ins = {
        "_enable_profiler": mock.Mock(),
        "_disable_profiler": mock.Mock(),
        "record_function": mock.Mock(return_value=nullcontext()),
    }
    nothing = mock.patch.object(torch.cuda, "synchronize")
    with nothing, mock.patch.multiple(profiler, **stand_ins):
        with profiler.emit_nvtx():
            interlace.barrier()
        interlace.barrier()
    assert stand_ins["record_function"].mock_calls == [mock.call("interlace:barrier on 0")]


@ranks(1, place="sim")
def test_layers_are_in_a_profile_by_name() -> None:
    layer = interlace.nn.SequenceParallelMLP(8, 16)
    with torch.profiler.profile() as profile:
        layer(torch.ones(2, 8)).sum().backward()
    names = {event.name for event in profile.events()}
    for kind in ("ColumnParallelLinear", "RowParallelLinear"):
        assert {f"{kind}Function", f"{kind}FunctionBackward"} <= names


# -- traces ----------------------------------------------------------------------------------------------


def gathered(fail: bool) -> float:
    whole = interlace.all_gather_matmul(torch.ones(8, 16), torch.ones(16, 8), algorithm="fused")
    if fail and interlace.get_rank():
        raise LookupError("after it")
    return float(whole.sum())


@pytest.mark.parametrize("place", ["sim", "shm"])
def test_a_program_of_ones_own_is_traced(place: Any, tmp_path: Path) -> None:
    with interlace.trace(tmp_path / "t.json"):
        assert interlace.run(gathered, 2, False, place=place) == [2048.0, 2048.0]
        assert interlace.run(gathered, 2, False, place=place) == [2048.0, 2048.0]
    written = (tmp_path / "t.json").read_bytes()
    interlace.run(gathered, 2, False, place=place)
    assert (tmp_path / "t.json").read_bytes() == written
    events = json.loads(written)["traceEvents"]
    spans = [event for event in events if event.get("cat") == "tile"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {event["args"]["op"] for event in spans} == {"gathered"} and len(spans) % 4 == 0
    assert sum(event["ph"] == "s" for event in events) == sum(
        event["ph"] == "f" for event in events
    )


def test_a_run_that_failed_is_traced_as_far_as_it_came(tmp_path: Path) -> None:
    with pytest.raises(LookupError), interlace.trace(tmp_path / "t.json"):
        interlace.run(gathered, 2, True)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "tile" for event in events)


REFUSED_TRACES: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "^path must name a file, got None$"),
    (5, TypeError, "^path must name a file, got 5$"),
    ("", ValueError, "^path '': the path is empty$"),
    (".", ValueError, "^path .*: is a folder$"),
    ("nowhere/t.json", ValueError, "^path .*/nowhere/t.json: the folder does not exist$"),
    ("/proc/t.json", ValueError, "^path /proc/t.json: cannot be written: "),
]


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    ran: list[int] = []
    for path, error, text in REFUSED_TRACES:
        where: Any = str(tmp_path / path) if error is ValueError and path else path
        with pytest.raises(error, match=text), interlace.trace(where):
            ran.append(1)
    assert not ran and not [*tmp_path.iterdir()]


def test_a_trace_within_a_trace_leaves_it_whole(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    with chdir(tmp_path), interlace.trace("outer.json"):
        os.chdir("inner")
        with interlace.trace("inner.json"):
            interlace.run(gathered, 1, False)
        thread = threading.Thread(target=interlace.run, args=(gathered, 1, False))
        thread.start()
        thread.join()
    inner, outer = (
        sum(event.get("cat") == "tile" for event in json.loads(file.read_text())["traceEvents"])
        for file in (tmp_path / "inner/inner.json", tmp_path / "outer.json")
    )
    assert inner and outer == 2 * inner


def test_a_trace_that_cannot_be_written_hides_no_error(tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with pytest.raises(LookupError), interlace.trace(folder / "t.json"):
        shutil.rmtree(folder)
        raise LookupError
    assert "gone" in caplog.text


def test_a_trace_without_events_is_logged(tmp_path: Path, caplog: Any) -> None:
    with interlace.trace(tmp_path / "t.json"):
        interlace.run(gathered, 1, False)
    assert not caplog.text
    launched = mock.patch.dict(os.environ, {"RANK": "0"})
    with launched, interlace.trace(tmp_path / "t.json"):
        interlace.run(interlace.get_rank, 1)
    assert "as torchrun starts them, are not traced" in caplog.text
    assert (
        "t.json has no events: no kernel was interpreted in interlace.run in this block"
        in caplog.text
    )
