"""The mark ``interlace``, whose test's body is what every rank runs, and the fixture ``races``.

    @pytest.mark.interlace(ranks=4, seeds=10)
    def test_sums():
        total = torch.ones(3)
        interlace.all_reduce(total)
        assert total.tolist() == [4, 4, 4]

The body runs on simulated ranks, once for each schedule, under the race detector. The test fails if a rank
raises, if ranks wait for each other, and if there is a race, with the report of ``interlace.verify.races``.
"""

import functools
import unittest
from collections.abc import Callable, Collection, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from interlace_verify import RaceReport

DEFAULTS: dict[str, Any] = {"ranks": 2, "seeds": 10, "store_buffers": False, "timeout": 300.0}
SIGNATURE = f"interlace({', '.join(f'{name}={value}' for name, value in DEFAULTS.items())})"
MARK = (
    f"{SIGNATURE}: run the body on so many simulated "
    "ranks, in so many schedules, or in those of a list of seeds, and look for races"
)
REPORTS = pytest.StashKey["list[RaceReport]"]()
# of a rank: how a body ends a test otherwise than by an error
OUTCOMES = (pytest.skip.Exception, pytest.fail.Exception, unittest.SkipTest)


class Races:
    """``races(fn, world_size, ...)`` is ``interlace.verify.races``, whose reports are kept."""

    def __init__(self, reports: "list[RaceReport]") -> None:
        self.reports = reports

    def __call__(self, fn: Callable[..., Any], world_size: int, *args: Any, **how: Any) -> Any:
        from interlace import verify

        self.reports.append(verify.races(fn, world_size, *args, **how))
        return self.reports[-1]


@pytest.fixture
def races(request: pytest.FixtureRequest) -> Generator[Races, None, None]:
    """As ``interlace.verify.races``; what it finds in all its calls fails the test when that has ended."""
    reports = request.node.stash.setdefault(REPORTS, [])
    yield Races(reports)
    _tell(reports)  # of calls after the test, by fixtures that end


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    reports = item.stash.setdefault(REPORTS, [])
    wrong, how = "", None
    try:
        how = _marked(item)
    except (TypeError, ValueError) as error:
        wrong = str(error)  # the mark cannot be as it is written
    if wrong:
        pytest.fail(wrong, pytrace=False)
    test: Any = item
    if how is not None:
        body, test.obj = test.obj, _on_ranks(test.obj, **how)
    try:
        result = yield
    except BaseException:
        reports.clear()  # it has failed already
        raise
    finally:
        if how is not None:
            test.obj = body  # for whoever runs it again
    _tell(reports)
    return result


def _marked(item: pytest.Item) -> dict[str, Any] | None:
    """Arguments of the marks of a test: those of a class and, before them, those of its method."""
    marks = [m for node in item.listchain() for m in node.own_markers if m.name == "interlace"]
    if not marks:
        return None
    from interlace_verify.race_check.check import check_races

    how = dict(DEFAULTS)
    for mark in marks:
        if mark.args or not mark.kwargs.keys() <= DEFAULTS.keys():
            strange = [*map(repr, mark.args), *(k for k in mark.kwargs if k not in DEFAULTS)]
            raise TypeError(f"the mark is {SIGNATURE}, by name; got {', '.join(strange)}")
        how.update(mark.kwargs)
    if not isinstance(item, pytest.Function):
        raise TypeError(f"the mark interlace is for functions, got a {type(item).__name__}")
    if not isinstance(how["seeds"], (int, Collection)):  # the mark may be of several tests
        raise TypeError(f"seeds must be a number of schedules or a list, got {how['seeds']!r}")
    check_races(item.obj, *how.values(), names=("the body", "ranks"))
    return how


def _on_ranks(body: Callable[..., Any], ranks: int, **how: Any) -> Callable[..., None]:
    """A function that runs ``body`` on ranks and fails for what is found; takes the fixtures."""

    @functools.wraps(body)  # unittest looks for attributes
    def test(**fixtures: Any) -> None:
        from interlace import verify

        ended: list[BaseException] = []

        def on_rank() -> None:
            try:
                body(**fixtures)
            except OUTCOMES as outcome:
                ended.append(outcome)

        report = verify.races(on_rank, ranks, **how)
        if ended:
            raise ended[0]
        _tell([report])

    return test


def _tell(reports: "list[RaceReport]") -> None:
    """Fail for what is in the reports, each of which is told once."""
    found = [str(report) for report in reports if not report.clean]
    reports.clear()
    if found:
        pytest.fail("\n\n".join(found), pytrace=False)
