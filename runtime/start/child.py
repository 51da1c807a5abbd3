"""The main loop of one process of a :class:`~interlace.runtime.start.pool.ProcessPool`.

It takes tasks from its connection one after another: joins the group of the run, calls the
function, leaves the group, reports. It ends with its parent, however that ends.
"""

import contextlib
import contextvars
import faulthandler
import functools
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from interlace.runtime.compat.torch_groups import TCPStore
from interlace.runtime.core.place import Place
from interlace.runtime.places.shm.place import ShmPlace
from interlace.runtime.processes.blame import Blame
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.meetings import StoreMeeting
from interlace.runtime.processes.signed_store import SignedStore
from interlace.runtime.processes.waiting import usable_cores
from interlace.runtime.start.worker_process import (
    TaskReport,
    end_with_parent,
    failure,
    success,
)

STARTED_WITHOUT = {signal.SIGINT, signal.SIGTERM}
"""Signals that are blocked when the process starts, until it does what is its own on them."""

Setup = Callable[[Place], Any]
"""Called with a rank's place; the place to close at the end of the run, if that is another one."""


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
    """The life of a process: ready, then one report per task until the connection closes."""
    end_with_parent(parent_thread_stays)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends the pool
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the parent does, if this is its fork
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STARTED_WITHOUT)
    faulthandler.enable()
    with contextlib.suppress(EOFError, OSError):
        connection.send("ready")
        while True:
            task: RankTask = connection.recv()
            # A context of its own, so that nothing a run sets reaches the next one.
            connection.send(contextvars.Context().run(_perform, task))


def _perform(task: RankTask) -> TaskReport:
    place: Place | None = None
    for left in Blame.everywhere():
        left.close()  # of the run before, which all have left: a deadlock would be told of its groups
    try:
        torch.set_num_threads(max(1, usable_cores() // task.world_size))
        sys.path[:] += [entry for entry in task.path if entry not in sys.path]
        function, arguments, keywords, setup = _unpickled(task.call)
        store = SignedStore(_store(task.store_port), task.secret)
        prefix, timeout = f"interlace/run/{task.run}", task.place_timeout
        group = HostGroup(
            StoreMeeting(store), task.rank, task.world_size, timeout=timeout, prefix=prefix
        )
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
    """One client per process: torch looks names up when it connects, which may take seconds."""
    return TCPStore("127.0.0.1", port, is_master=False)


def _unpickled(call: bytes) -> Any:
    try:
        return pickle.loads(call)
    except Exception as error:
        raise TypeError(
            f"fn, its arguments or setup cannot be loaded in a new process ({error}): define them "
            "at module level of a module that can be imported, not in an interactive session"
        ) from error
