"""The flight recorder on GPUs: ops as hosts agree on them, and their ends from the device.

The GPU is the fake one, and its watchdog looks only when a test calls it.
"""

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace
from interlace.runtime.core.errors import CollectiveTimeoutError
from interlace.runtime.processes import dump
from interlace.runtime.processes.recorder import RankRecord, read_file
from multi.record.test_record import analysed, shown
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu, capturing
from stand_ins.fake_host import gpu_ranks, look, own_place


def own_record() -> RankRecord:
    place: Any = own_place()
    record = dump.record_of(place.processes, place.rank)
    assert record is not None
    return record


def ops() -> list[tuple[str, bool]]:
    """Return this rank's ops except allocations, and whether each has ended."""
    found = [(str(op), bool(op.ended)) for op in own_record().collectives]
    return [(op, ended) for op, ended in found if not op.startswith("an allocation")]


def looked() -> list[tuple[str, bool]]:
    """Return the ops after the watchdog has read the headers."""
    look()
    torch.cuda.synchronize()
    look()
    return ops()


@pytest.mark.parametrize("algorithm", ["copy", "kernel", "low_latency"])
def test_an_op_ends_when_the_device_says_so(algorithm: str) -> None:
    text = f"all_reduce (4,) float32 sum {algorithm}"

    def on_rank() -> RankRecord:
        vector = torch.ones(4)
        for number in range(3):  # the first is watched, the last is from its plan
            interlace.all_reduce(vector, algorithm=algorithm)  # type: ignore[arg-type]
            assert ops()[-1] == (text, False)
            torch.cuda.synchronize()
            assert looked() == [(text, True)] * (number + 1)
        work = interlace.all_reduce(vector, algorithm=algorithm, async_op=True)  # type: ignore[arg-type]
        assert work is not None and ops()[-1] == (text, False)
        interlace.barrier()
        assert [each[1] for each in ops()] == [True] * 3 + [False, True], "nothing was enqueued"
        work.wait()
        torch.cuda.synchronize()
        assert looked() == [(text, True)] * 4 + [("barrier", True)]
        return own_record()

    one, other = fake_host.run(on_rank, 2, FakeGpu(eager=0.0))
    assert one.whole == other.whole == (0, 1)
    assert {op.site[:2] for op in one.collectives} == {("on_rank", __file__)}
    for mine, theirs in zip(one.collectives, other.collectives, strict=True):
        assert (mine.number, str(mine), mine.site) == (theirs.number, str(theirs), theirs.site)


@gpu_ranks(eager=0.0)
def test_an_op_of_several_parts_ends_with_the_last() -> None:
    place: Any = own_place()
    kept = place._agreement.ops
    kept.begins("an op of two parts")
    kept.enqueued(1, 5)
    kept.reached({1: 5})
    assert ops() == [("an op of two parts", False)], "the host is not through"
    kept.enqueued(2, 7)
    kept.launched()
    kept.reached({1: 6, 2: 6})
    assert ops() == [("an op of two parts", False)]
    kept.reached({1: 6, 2: 7})
    assert ops() == [("an op of two parts", True)]


def test_who_does_not_come_is_in_the_files(tmp_path: Path) -> None:
    recorded = (
        (os.environ, dump.VARIABLE, str(tmp_path)),
        (dump, "_groups", weakref.WeakSet()),  # without those that other tests have left
    )

    def on_rank() -> None:
        vector = torch.ones(4)
        for _ in range(2):
            interlace.all_reduce(vector, algorithm="copy")
        torch.cuda.synchronize()
        looked()
        own_place().set_timeout(1e-4)
        own_place().processes.meet(None, "all have waits of a hundred polls")
        if interlace.get_rank() == 1:
            return
        interlace.all_reduce(vector, algorithm="copy")
        torch.cuda.synchronize()
        looked()
        own_place().check()

    with pytest.raises(CollectiveTimeoutError, match="timed out waiting for rank 1"):
        fake_host.run(on_rank, 3, FakeGpu(eager=0.0), *recorded)
    found = {int(path.name[-1]): read_file(str(path))[-1] for path in tmp_path.iterdir()}
    last = {rank: record.collectives[-1] for rank, record in found.items()}
    assert [*sorted(last)] == [0, 1, 2], "rank 1 is blamed, and writes nothing itself"
    assert last[1].ended and last[1].number == last[0].number - 1
    assert not last[0].ended and "timed out waiting for rank 1" in found[0].failed
    said = analysed(tmp_path)
    assert "Not all ranks joining collective" in said and "missing ranks: {1}" in said
    assert shown(tmp_path)[1] == "  waited for: rank 1"


@gpu_ranks(2, eager=0.0)
def test_after_a_capture_no_end_is_told() -> None:
    """A replay counts epochs that the host does not know."""
    vector = torch.ones(4)
    interlace.all_reduce(vector, algorithm="copy")
    torch.cuda.synchronize()
    looked()
    with capturing() as graph:
        interlace.all_reduce(vector, algorithm="copy")
    for _ in range(3):
        graph.replay()
    interlace.all_reduce(vector, algorithm="copy")
    torch.cuda.synchronize()
    assert [ended for _, ended in looked()] == [True, False, False]
