"""Limits of time: a slow test fails by itself; a dead worker of pytest-xdist ends the run with an error.

    event                       after                               consequence
    a test that runs Python     LIMIT, times the load of the        it fails, and the next one begins
                                machine (at most MOST)
    a test that hangs in C      faulthandler_timeout of             its process ends, with every stack
                                pyproject.toml, far above
    a worker of xdist dies      at once                             the others end their files, and the
                                                                    run ends with an error
    a run with ``--minutes N``  N minutes                           no other test begins; the rest is
                                                                    skipped, and listed at the end

xdist itself would start another worker for all files of the dead worker, also the finished ones. A worker
that gets a finished file waits for ever (3.8).
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

LIMIT = 150.0  # seconds of a quiet machine; no test needs a tenth of it there
MOST = 1500.0
AGAIN = 30.0  # an exception may be lost where nobody can take it, as in __del__
LEFT_OUT = "left out:"
_BEGIN = time.monotonic()
LINGER = 5.0  # in which the end of a worker is usually known by its closed pipe


def busy() -> float:
    """Return the number of waiting processes per core: a second on a quiet machine takes this many here."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("limit", "seconds for each test, on a quiet machine", default=str(LIMIT))
    parser.addoption("--minutes", type=float, help="begin no test after so many minutes")


def _limited(item: pytest.Item) -> Generator[None, Any, Any]:
    if item.config.getoption("usepdb") or sys.gettrace():
        return (yield)  # somebody is debugging
    quiet, begin = float(item.config.getini("limit")), time.monotonic()

    def late(*_: object) -> None:
        limit = min(quiet * busy(), max(quiet, MOST))
        left = begin + limit - time.monotonic()
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, left, AGAIN)
            return
        faulthandler.dump_traceback(file=sys.stderr)
        pytest.fail(f"{item.nodeid} has taken more than {limit:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, quiet, AGAIN)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_protocol(item: pytest.Item) -> None:
    minutes = item.config.getoption("minutes", None)
    if minutes is not None and time.monotonic() > _BEGIN + 60 * minutes:
        item.add_marker(pytest.mark.skip(f"{LEFT_OUT} {minutes:g} minutes were over"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _limited(item))


# -- in the process that spreads the tests over workers ----------------------------------------


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which files have tests that ``--minutes`` left out."""
    skipped = terminalreporter.stats.get("skipped", [])
    left = [each.nodeid.partition("::")[0] for each in skipped if LEFT_OUT in str(each.longrepr)]
    if left:
        terminalreporter.write_sep("=", f"{len(left)} tests were left out: they did not run")
        for file, count in sorted(Counter(left).items()):
            terminalreporter.write_line(f"{count:5} {file}")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: Any) -> None:
    """A pipe that a child of the dead worker holds open does not tell of its end."""
    session = node.config.pluginmanager.getplugin("dsession")
    process = node.gateway._io.popen

    def watch() -> None:
        process.wait()
        time.sleep(LINGER)
        if node in session._active_nodes:
            session.queue.put(("errordown", {"node": node, "error": "its process has ended"}))

    threading.Thread(target=watch, name=f"the end of {node.gateway.id}", daemon=True).start()
