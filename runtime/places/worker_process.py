"""Processes that work for a parent: they end with it, and report a function's result or error."""

import contextlib
import ctypes
import os
import pickle
import signal
import time
from dataclasses import dataclass
from multiprocessing import connection as mp_connection, parent_process
from multiprocessing.process import BaseProcess
from typing import Any

from interlace.runtime.compat.torch_modes import pickled
from interlace.runtime.core.errors import (
    AbortedError,
    InterlaceError,
    PeerDiedError,
    users_traceback,
)
from interlace.runtime.processes.worker import Helper

GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


@dataclass
class TaskReport:
    """A report of a task's end; ``value``: a pickle, or empty. ``follows``: caused by another rank's fault.

    By plain pickle: multiprocessing's would turn tensors into shared memory of one receiver.
    """

    failed: bool
    value: bytes
    when: float = 0.0
    follows: bool = False
    summary: str = ""
    details: str = ""

    def result(self) -> Any:
        """Return the function's result."""
        return pickle.loads(self.value)

    def exception(self) -> BaseException:
        """Return the function's exception; an InterlaceError with its text if it cannot be pickled."""
        if self.value:
            with contextlib.suppress(Exception):
                error = pickle.loads(self.value)
                if isinstance(error, BaseException):
                    return error
        return InterlaceError(self.summary)


def success(value: object) -> TaskReport:
    """Return the report of a function that returned ``value``; TypeError if it cannot be pickled."""
    try:
        return TaskReport(False, pickled(value))
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"fn returned a {kind} that cannot be pickled: {error}") from error


def failure(error: BaseException) -> TaskReport:
    """Return the report of a function that raised ``error``."""
    try:
        value = pickled(error)
        pickle.loads(value)  # many exceptions can be pickled, but not loaded
    except Exception:
        value = b""
    return TaskReport(
        failed=True,
        value=value,
        when=time.monotonic(),
        follows=isinstance(error, (AbortedError, PeerDiedError)),
        summary=f"{type(error).__name__}: {error}",
        details=users_traceback(error),
    )


def ended(process: BaseProcess) -> str:
    """Return a text that says how the process ended, for an error message."""
    process.join(GRACE_SECONDS)
    code = process.exitcode
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"its process ended with exit code {code} ({signal.Signals(-code).name})"
    return f"its process ended with exit code {code}"


def end_with_parent(parent_thread_stays: bool) -> None:
    """End when the parent ends, even by SIGKILL.

    The kernel's signal comes when the *thread* that started this process ends, so it is requested only if
    that was the parent's main thread. The watching thread always works, unless C code of this process
    holds the GIL for ever.
    """
    if parent_thread_stays:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        mp_connection.wait([parent.sentinel])
        os._exit(1)

    Helper("parent watch", watch, endless=True).start()
