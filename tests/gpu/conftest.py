"""Each test on a GPU runs in its own process: a process that hangs in the driver is killed.

No signal can interrupt a hanging call into CUDA, and after a fault the context of a process is lost. So the
process that collects the tests never uses CUDA, and forks one process for every test.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol

LIMIT = 120.0  # seconds for a test, compilations included
PR_SET_PDEATHSIG = 1


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not torch.cuda.is_available() or item.config.getoption("usepdb"):
        return None  # skipped, or somebody is debugging
    assert not torch.cuda.is_initialized(), "CUDA was used while tests were collected"
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports_of(item, LIMIT):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def reports_of(item: pytest.Item, limit: float) -> Sequence[pytest.TestReport]:
    """Return pytest's reports of ``item``, which runs in a new process for at most ``limit`` seconds."""
    hook, begin = item.config.hook, time.monotonic()
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()  # its children end with it, and it ends with pytest
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(receiving)
        reports = runtestprotocol(item, nextitem=None, log=False)
        data = [
            hook.pytest_report_to_serializable(config=item.config, report=each) for each in reports
        ]
        with os.fdopen(sending, "w") as pipe:
            json.dump(data, pipe)
        os._exit(0)  # an interpreter's end waits for threads, and these for a GPU that may hang
    os.close(sending)
    text = b""
    while (left := begin + limit - time.monotonic()) > 0:
        if select.select([receiving], [], [], left)[0]:
            part = os.read(receiving, 1 << 16)
            if not part:
                break
            text += part
    os.close(receiving)
    with contextlib.suppress(ProcessLookupError):  # it may have ended before it began a session
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    try:
        return [
            hook.pytest_report_from_serializable(config=item.config, data=each)
            for each in json.loads(text)
        ]
    except ValueError:
        took = time.monotonic() - begin
        why = f"took more than {limit:g} s" if took >= limit else f"ended with status {status}"
        return [_failed(item, f"the process of {item.nodeid} {why}", begin, took)]


def _failed(item: pytest.Item, why: str, begin: float, took: float) -> pytest.TestReport:
    keywords: Any = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(
        item.nodeid, item.location, keywords, "failed", why, "call", (), took, begin, begin + took
    )
