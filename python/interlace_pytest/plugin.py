"""The mark ``interlace``, whose test's body is what every rank runs, and the fixture ``races``.

    @pytest.mark.interlace(ranks=4, seeds=10)
    def test_sums():
        total = torch.ones(3)
        interlace.all_reduce(total)
        assert total.tolist() == [4, 4, 4]

The body runs on simulated ranks, once for each schedule, under the race detector. The test fails if a rank
raises, if ranks wait for each other, and if there is a race, with the report of ``interlace.verify.races``.
"""

import inspect
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from interlace.verify import RaceReport

MARK = (
    "interlace(ranks=2, seeds=10, store_buffers=False, timeout=300.0): run the body on so many simulated "
    "ranks, in so many schedules, or in those of a list of seeds, and look for races"
)


class Races:
    """``races(fn, world_size, ...)`` is ``interlace.verify.races``, whose reports are kept."""

    def __init__(self) -> None:
        self.reports: list[RaceReport] = []

    def __call__(self, fn: Callable[..., Any], world_size: int, *args: Any, **how: Any) -> Any:
        from interlace import verify

        self.reports.append(verify.races(fn, world_size, *args, **how))
        return self.reports[-1]


@pytest.fixture
def races() -> Races:
    """As ``interlace.verify.races``; what it finds in all its calls fails the test when that has ended."""
    return Races()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    kept: list[RaceReport] = []
    marker = pyfuncitem.get_closest_marker("interlace")
    if marker is not None:
        try:
            pyfuncitem.obj = _on_ranks(pyfuncitem.obj, kept, *marker.args, **marker.kwargs)
        except TypeError as error:
            pytest.fail(f"{error}; the mark is {MARK}", pytrace=False)
    result = yield
    fixture = pyfuncitem.funcargs.get("races")
    if isinstance(fixture, Races):
        kept += fixture.reports
    if found := [str(report) for report in kept if not report.clean]:
        pytest.fail("\n\n".join(found), pytrace=False)
    return result


def _on_ranks(
    body: Callable[..., Any],
    kept: "list[RaceReport]",
    *,
    ranks: int = 2,
    seeds: int | Iterable[int] = 10,
    store_buffers: bool = False,
    timeout: float = 300.0,
) -> Callable[..., None]:
    """A function that runs ``body`` on ranks and keeps the report; takes the fixtures."""

    def test(**fixtures: Any) -> None:
        from interlace import verify

        if inspect.iscoroutinefunction(body):
            raise TypeError("the body is async: a call would not run it")
        skipped: list[BaseException] = []

        def on_rank() -> None:
            try:
                body(**fixtures)
            except pytest.skip.Exception as skip:
                skipped.append(skip)

        how: Any = {"seeds": seeds, "store_buffers": store_buffers, "timeout": timeout}
        report = verify.races(on_rank, ranks, **how)
        if skipped:
            raise skipped[0]
        kept.append(report)

    return test
