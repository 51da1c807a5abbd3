"""The ring of keys: its order holds on four ranks, and each of its waits is needed."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from interlace.runtime.algorithms.attention import moves, travelling
from interlace.verify import races
from interlace.verify.suite.targets import TARGETS

RING = TARGETS["attention"].variants["ring fused"]


def changed(old: str, new: str) -> Callable[..., Any]:
    """``RingKeys`` with this line of its source replaced."""
    source = inspect.getsource(moves)
    assert source.count(old) == 1
    names: dict[str, Any] = {"__name__": moves.__name__}
    exec(compile(source.replace(old, new), moves.__file__, "exec"), names)
    ring: Callable[..., Any] = names["RingKeys"]
    return ring


def test_four_ranks_have_no_race() -> None:
    report = races(RING, 4, seeds=2)
    assert report.clean, report


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("                    copying.wait(workspace, after, self._free + step - 1)", "read-write"),
        ("                copying.wait(workspace, before, self._arrived + step)", "write-read"),
        ("        copying.wait_credits(workspace)\n        for step", "read-write"),
    ],
    ids=["room", "arrival", "credits"],
)
def test_without_one_of_its_waits_there_is_a_race(
    line: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    indent = line[: len(line) - len(line.lstrip())]
    rest = "\n        for step" if "for step" in line else ""
    monkeypatch.setitem(travelling.WAYS, "ring", changed(line, f"{indent}pass{rest}"))
    for seed in range(6):
        report = races(RING, 4, seeds=[seed])
        if not report.clean:
            assert any(kind in str(finding) for finding in report.findings), report
            return
    raise AssertionError("no race was found")
