"""The mark ``interlace``, which runs a test's body on every rank, and the fixture ``races``.

    @pytest.mark.interlace(ranks=4, seeds=10)
    def test_sums():
        total = torch.ones(3)
        interlace.all_reduce(total)
        assert total.tolist() == [4, 4, 4]

The body runs on simulated ranks under the race detector, once for each schedule. The test fails if a rank
raises, if ranks wait for each other, or if there is a race. It prints ``interlace.verify.races``'s report.
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
    f"{SIGNATURE}: run the test's body on this number of simulated "
    "ranks, in this number of schedules or with these seeds, and report races"
)
REPORTS = pytest.StashKey["list[RaceReport]"]()
# exceptions that end a test without an error, raised in a rank
OUTCOMES = (pytest.skip.Exception, pytest.fail.Exception, unittest.SkipTest)


class Races:
    """Calls ``interlace.verify.races(fn, world_size, ...)`` and keeps the reports."""

    def __init__(self, reports: "list[RaceReport]") -> None:
        self.reports = reports

    def __call__(self, fn: Callable[..., Any], world_size: int, *args: Any, **how: Any) -> Any:
        from interlace import verify

        self.reports.append(verify.races(fn, world_size, *args, **how))
        return self.reports[-1]


@pytest.fixture
def races(request: pytest.FixtureRequest) -> Generator[Races, None, None]:
    """Call ``interlace.verify.races``; findings of all calls fail the test after it has ended."""
    reports = request.node.stash.setdefault(REPORTS, [])
    yield Races(reports)
    _tell(reports)  # calls by fixtures that end after the test


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    reports = item.stash.setdefault(REPORTS, [])
    wrong, options = "", None
    try:
        options = _marked(item)
    except (TypeError, ValueError) as error:
        wrong = str(error)  # an argument of the mark is wrong
    if wrong:
        pytest.fail(wrong, pytrace=False)
    test: Any = item
    if options is not None:
        body, test.obj = test.obj, _on_ranks(test.obj, **options)
    try:
        result = yield
    except BaseException:
        reports.clear()  # the test has failed already
        raise
    finally:
        if options is not None:
            test.obj = body  # restored for plugins that run the test again
    _tell(reports)
    return result


def _marked(item: pytest.Item) -> dict[str, Any] | None:
    """Return the arguments of a test's marks. A mark of a method overrides the mark of its class."""
    marks = [m for node in item.listchain() for m in node.own_markers if m.name == "interlace"]
    if not marks:
        return None
    from interlace import launcher
    from interlace_verify.schedule_check.check import seed_list

    options = dict(DEFAULTS)
    for mark in marks:
        if mark.args or not mark.kwargs.keys() <= DEFAULTS.keys():
            strange = [*map(repr, mark.args), *(k for k in mark.kwargs if k not in DEFAULTS)]
            raise TypeError(
                f"the mark is {SIGNATURE}, with named arguments; got {', '.join(strange)}"
            )
        options.update(mark.kwargs)
    if not isinstance(item, pytest.Function):
        raise TypeError(f"the mark interlace is for functions, got a {type(item).__name__}")
    if not isinstance(options["seeds"], (int, Collection)):  # several tests may share the mark
        raise TypeError(f"seeds must be a number of schedules or a list, got {options['seeds']!r}")
    ranks, seeds, store_buffers, timeout = options.values()
    names = "the body", "ranks"
    launcher.check_run(item.obj, ranks, timeout, names, store_buffers=store_buffers)
    seed_list(seeds)
    return options


def _on_ranks(body: Callable[..., Any], ranks: int, **how: Any) -> Callable[..., None]:
    """Return a function of the fixtures that runs ``body`` on ranks and fails if there are findings."""

    @functools.wraps(body)  # unittest reads attributes of the function
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
    """Fail if the reports have findings. Each report is shown once."""
    found = [str(report) for report in reports if not report.clean]
    reports.clear()
    if found:
        pytest.fail("\n\n".join(found), pytrace=False)
