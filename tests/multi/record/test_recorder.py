"""The writer of a record, by itself: texts and call sites are written once, and found again."""

import sys
from typing import Any

import pytest

from interlace.runtime.core.call import Call
from interlace.runtime.processes import recorder
from interlace.runtime.processes.recorder import REGION_BYTES, FlightRecorder, read_rank

WHO = "a group", 0, (0, 1), (11, 12), ()


def test_a_log_that_is_full_begins_anew() -> None:
    region = memoryview(bytearray(REGION_BYTES))
    kept = FlightRecorder(region)
    kept.about(WHO)
    for number in range(1, 2000):
        op = Call("op", (("number", number), ("text", "x" * 300))).message
        kept.begins(recorder.MESSAGES, number, 0, 0, 0, 0, kept.told(op))
        if number % 97 == 0:
            ops = read_rank(bytes(region), None, 0.0, "").collectives
            told = [op for op in ops if op.op != "?"]
            assert [dict(op.terms)["number"] for op in told] == [op.number for op in told]
            assert ops[-1].number == number and len(told) >= min(number, 40)
    long = Call("op", (("text", "x" * 5000),)).message
    kept.begins(recorder.MESSAGES, 2000, 0, 0, 0, 0, kept.told(long))
    last = read_rank(bytes(region), None, 0.0, "").collectives[-1]
    assert (last.op, last.terms) == ("op", None), "a text that is too long is left out"


def through(depth: int, kept: FlightRecorder, number: int) -> None:
    """Call the recorder through several functions, as interlace does."""
    if depth:
        through(depth - 1, kept, number)
    else:
        kept.begins(recorder.MESSAGES, number, 0, 0, 0, 0, kept.told("an op"))


def test_the_call_site_is_found_however_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    region = memoryview(bytearray(REGION_BYTES))
    kept = FlightRecorder(region)
    kept.about(WHO)
    space: dict[str, Any] = {"__name__": "interlace.inside"}
    source = "def through(depth, kept, n):\n    if depth: through(depth - 1, kept, n)\n"
    entry = f"{recorder.MESSAGES}, n, 0, 0, 0, 0, kept.told('an op')"
    exec(f"{source}    else: kept.begins({entry})", space)
    monkeypatch.setitem(globals(), "through", space["through"])
    expected = {}
    for number, depth in enumerate([1, 1, 5, 1, 3, 3, 5], 1):
        if number % 2:
            line = sys._getframe().f_lineno + 1
            through(depth, kept, number)
        else:
            line = sys._getframe().f_lineno + 1
            through(depth, kept, number)
        expected[number] = line
    ops = read_rank(bytes(region), None, 0.0, "").collectives
    assert {op.number: op.site[2] for op in ops} == expected
