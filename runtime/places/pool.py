"""Processes that run functions as ranks, for ``interlace.run(place="shm")``.

The start of a process takes seconds (it imports torch), and a run takes milliseconds, so processes are
kept. A run takes the first W processes of a pool, makes a group of them in a new generation, and collects
one report from each. The ranks find each other through a store of the parent, on a port of the loopback
interface that the kernel chose.

A run ends in one of these ways::

    all ranks report a result  they are returned, by rank
    a rank raises              it aborts the group, so the other ranks end too; the earliest error that
                               another rank's end did not cause is raised, and names the rank
    a process ends             the other ranks notice it themselves (pidfd); the error has the rank and its
                               exit code
    timeout, or a rank that    the late processes are killed
    ignores an abort

The next run that needs processes that ended or were killed starts them again.

Each process (:func:`serve`) takes tasks from its connection one after another: it joins the group of the
run, calls the function, leaves the group and reports. It ends when its parent ends, for any reason.
"""

import contextlib
import contextvars
import ctypes
import faulthandler
import functools
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection as mp_connection, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from interlace.kernels.signal import MAX_WORLD_SIZE
from interlace.runtime.compat.torch_groups import TCPStore
from interlace.runtime.compat.torch_modes import pickle_tensors
from interlace.runtime.core.errors import (
    AbortedError,
    CollectiveTimeoutError,
    InterlaceError,
    PeerDiedError,
    rank_error,
    users_traceback,
)
from interlace.runtime.core.place import Place
from interlace.runtime.places.shm.place import ShmPlace
from interlace.runtime.processes.dump import Blame
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.rendezvous import StoreMeeting
from interlace.runtime.processes.signed_store import SignedStore
from interlace.runtime.processes.waiting import usable_cores
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
        return TaskReport(False, pickle_tensors(value))
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"fn returned a {kind} that cannot be pickled: {error}") from error


def failure(error: BaseException) -> TaskReport:
    try:
        value = pickle_tensors(error)
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


STARTED_WITHOUT = {signal.SIGINT, signal.SIGTERM}
"""Signals that are blocked when a process starts, until it has set its own handlers."""

Setup = Callable[[Place], Any]
"""Called with a rank's place; returns the place to close at the end of the run, if it is another one."""


@dataclass
class RankTask:
    """One rank of one run. ``call`` is the pickle of (function, arguments, keywords, setup)."""

    run: int
    rank: int
    world_size: int
    store_port: int
    secret: bytes
    place_timeout: float
    path: list[str]
    call: bytes


def serve(connection: Connection, parent_thread_stays: bool) -> None:
    """Serve as a rank's process: report ready, then run tasks until the connection closes."""
    end_with_parent(parent_thread_stays)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends the pool
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has its parent's handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STARTED_WITHOUT)
    faulthandler.enable()
    with contextlib.suppress(EOFError, OSError):
        connection.send("ready")
        while True:
            task: RankTask = connection.recv()
            # A separate context, so that no setting of a run reaches the next one.
            connection.send(contextvars.Context().run(_perform, task))


def _perform(task: RankTask) -> TaskReport:
    place: Place | None = None
    for left in Blame.everywhere():
        left.close()  # all have left it; a deadlock would name its groups
    try:
        torch.set_num_threads(max(1, usable_cores() // task.world_size))
        sys.path[:] += [entry for entry in task.path if entry not in sys.path]
        function, arguments, keywords, setup = _unpickle(task.call)
        meeting = StoreMeeting(SignedStore(_store(task.store_port), task.secret))
        name, bound = f"interlace/run/{task.run}", task.place_timeout
        group = HostGroup(meeting, task.rank, task.world_size, timeout=bound, prefix=name)
        place = ShmPlace(group)
        if setup is not None:
            place = setup(place) or place
        result = function(*arguments, **keywords)
        place.settle()
        report = success(result)
    except BaseException as error:
        report = failure(error)
        if place is not None:
            place.abort(report.summary)
    if place is not None:
        place.close()
    return report


@functools.cache
def _store(port: int) -> TCPStore:
    """Return the process's only client: torch looks names up when it connects, which may take seconds."""
    return TCPStore("127.0.0.1", port, is_master=False)


def _unpickle(call: bytes) -> Any:
    try:
        return pickle.loads(call)
    except Exception as error:
        raise TypeError(
            f"fn, its arguments or setup cannot be loaded in a new process ({error}): define them "
            "at module level of a module that can be imported, not in an interactive session"
        ) from error


# A forked child could not use a GPU that its parent has used. The tests, which use none here, start
# theirs from a fork server (tests/conftest.py).
START_METHOD = "spawn"
START_SECONDS = 120.0
UNGUARDED = 78  # exit code of a process whose import of the script starts ranks


class _Child:
    def __init__(self, index: int) -> None:
        context = multiprocessing.get_context(START_METHOD)
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        stays = threading.current_thread() is threading.main_thread()
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(theirs, stays), name=f"interlace {index}", daemon=True
        )
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class ProcessPool(contextlib.AbstractContextManager["ProcessPool", None]):
    """Up to ``size`` processes, started when a run first needs them."""

    def __init__(self, size: int) -> None:
        if not 1 <= size <= MAX_WORLD_SIZE:
            raise ValueError(f"size must be within 1..{MAX_WORLD_SIZE}, got {size}")
        self.size = size
        self._children: dict[int, _Child] = {}
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self._secret = os.urandom(32)  # signs the ranks' values in the store
        self._runs = 0

    def run(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        world_size: int | None = None,
        setup: Setup | None = None,
        timeout: float = 300.0,
        place_timeout: float | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank; return the results, by rank.

        Everything is pickled by value, tensors too. ``setup(place)`` is called on every rank before
        ``fn``. ``timeout`` bounds the run in seconds. ``place_timeout`` bounds every wait of a rank; by
        default it is 9/10 of ``timeout``, so that the waiting rank can name the ranks that it waits for.

        Raises
        ------
        TypeError : ``fn``, an argument or ``setup`` cannot be pickled.
        RankError : an exception on a rank (it is of that class too), or the end of its process.
        CollectiveTimeoutError : names the ranks that had not finished.
        """
        world_size = self.size if world_size is None else world_size
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size must be within 1..{self.size}, got {world_size}")
        call = _pickled_call(fn, args, kwargs or {}, setup)
        with self._lock:
            try:
                self._start(world_size)
                return self._run(call, world_size, timeout, place_timeout or 0.9 * timeout)
            except Exception:
                raise
            except BaseException:  # KeyboardInterrupt: the ranks are in an unknown state
                self._kill(range(self.size))
                raise

    def _run(self, call: bytes, world_size: int, timeout: float, place_timeout: float) -> list[Any]:
        assert self._store is not None
        self._runs += 1
        deadline = time.monotonic() + timeout
        known = world_size, self._store.port, self._secret, place_timeout, sys.path, call
        for rank in range(world_size):
            task = RankTask(self._runs, rank, *known)
            with contextlib.suppress(OSError):  # ``_collect`` finds that the process has ended
                self._children[rank].connection.send(task)
        reports: dict[int, TaskReport] = {}
        first_failure: float | None = None
        while len(reports) < world_size:
            late = [rank for rank in range(world_size) if rank not in reports]
            until = deadline if first_failure is None else first_failure + GRACE_SECONDS
            arrived = self._collect(late, min(until, deadline))
            if not arrived:
                self._kill(late)
                if first_failure is None:
                    raise CollectiveTimeoutError(
                        f"ranks {late} have not finished within {timeout:g} s", tuple(late)
                    )
                break
            reports.update(arrived)
            if first_failure is None and any(report.failed for report in arrived.values()):
                first_failure = time.monotonic()
        failures = [(rank, report) for rank, report in reports.items() if report.failed]
        if failures:
            rank, report = min(failures, key=lambda item: (item[1].follows, item[1].when))
            raise rank_error(rank, report.exception(), report.details)
        return [reports[rank].result() for rank in range(world_size)]

    def _collect(self, ranks: Sequence[int], deadline: float) -> dict[int, TaskReport]:
        """Wait for reports of ``ranks``, or the end of their processes. Empty at the deadline."""
        sources: dict[Any, int] = {}
        for rank in ranks:
            child = self._children[rank]
            sources[child.connection] = sources[child.process.sentinel] = rank
        ready = mp_connection.wait(list(sources), max(0.0, deadline - time.monotonic()))
        reports: dict[int, TaskReport] = {}
        for rank in {sources[source] for source in ready}:
            child = self._children[rank]
            try:
                # A process may have ended after its report: the report counts.
                if not child.connection.poll():
                    raise EOFError
                reports[rank] = child.connection.recv()
            except (EOFError, OSError):
                when = time.monotonic()
                reports[rank] = TaskReport(True, b"", when, summary=ended(child.process))
                self._kill([rank])
        return reports

    def _start(self, world_size: int) -> None:
        """Start processes until 0..world_size - 1 live and are ready."""
        if self._store is None:
            self._store = _loopback_store()
        self._kill(r for r, child in self._children.items() if not child.process.is_alive())
        new = [rank for rank in range(world_size) if rank not in self._children]
        if new and multiprocessing.current_process().daemon:
            raise InterlaceError("a rank of place 'shm' cannot start ranks that are processes")
        if new and getattr(multiprocessing.process.current_process(), "_inheriting", False):
            os._exit(UNGUARDED)  # the parent of this process raises the error
        main = sys.modules["__main__"]
        script = getattr(main, "__file__", None) if main.__spec__ is None else None
        if new and script is not None and not os.path.exists(script):
            raise InterlaceError(
                f"ranks that are processes import the script that starts them, and {script} is not a file: "
                "save the script as a file"
            )
        with _interrupts_later():
            for rank in new:
                self._children[rank] = _Child(rank)
        deadline = time.monotonic() + START_SECONDS
        for rank in new:
            child = self._children[rank]
            try:
                if child.connection.poll(max(0.0, deadline - time.monotonic())):
                    child.connection.recv()
                    continue
                problem = f"its process was not ready within {START_SECONDS:g} s"
            except (EOFError, OSError):
                problem = ended(child.process)
                if child.process.exitcode == UNGUARDED:
                    problem = (
                        "it is a new process, which imports this script first, and the script "
                        'starts ranks when it is imported. Put that code under `if __name__ == "__main__":`'
                    )
            self._kill(new)
            raise InterlaceError(f"rank {rank} could not be started: {problem}")

    def processes(self) -> list[int]:
        """Return the process ids of the living processes, by rank."""
        return [
            child.process.pid or 0
            for _, child in sorted(self._children.items())
            if child.process.is_alive()
        ]

    def _kill(self, ranks: Iterable[int]) -> None:
        for rank in list(ranks):
            child = self._children.pop(rank, None)
            if child is not None:
                child.kill()

    def close(self) -> None:
        """End all processes. A later run starts new ones."""
        with self._lock:
            self._kill(range(self.size))
            self._store = None

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends; the processes started in it unblock them."""
    multiprocessing.resource_tracker.ensure_running()  # it unblocks them when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STARTED_WITHOUT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


default_pool = ProcessPool(MAX_WORLD_SIZE)
"""The pool that this process keeps until it ends."""


def _pickled_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, object], setup: Setup | None
) -> bytes:
    """Pickle the call plainly: multiprocessing's pickle turns tensors into one receiver's shared memory."""
    for name, value in (("fn", fn), ("args", tuple(args)), ("kwargs", kwargs), ("setup", setup)):
        try:
            pickle_tensors(value)
        except Exception as error:
            hint = ": define it at module level of a module" if name in ("fn", "setup") else ""
            raise TypeError(
                f"{name} of a run in processes cannot be pickled{hint} ({error})"
            ) from error
    return pickle_tensors((fn, tuple(args), dict(kwargs), setup))


def _loopback_store() -> TCPStore:
    """Return a store that only this host can reach; torch's own listener is open to the network."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        host, port = listener.getsockname()
        descriptor = listener.detach()
        return TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )
