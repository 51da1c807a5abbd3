"""Record files, written when a group fails or on SIGUSR2, for torch's ``fr_trace`` and for ``inspect``.

A file is the pickle that torch's analyser reads, followed by the records of a rank in all its groups, which
``python -m interlace inspect`` reads without unpickling (docs/how-to/run/record.md). No function here
raises, and none waits, except for one second while another rank writes.

This file also assigns the blame for a lasting wait: which ranks are late, and where they are instead. A
waiting rank publishes in its control segments again and again for whom it waits (``waiting.py``). So any
rank whose wait fails can follow the chain of waits to its last rank. In the groups in which a rank does not
wait, it publishes where it waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import pickle
import re
import signal
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Protocol

from interlace.runtime.core.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    InterlaceError,
    PeerDiedError,
)
from interlace.runtime.processes.recorder import PastOp, RankRecord, foot, read_file, read_rank

MOST_FILES = 256  # in the default folder
VARIABLE = "INTERLACE_RECORD"
VERSION = "2.10"  # version of torch's format

# fr_trace knows these in every release. For any other op, as for a barrier, it compares shapes and states.
_BARRIER = "all_reduce_barrier"
_KNOWN = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter",
          "all_to_all")  # fmt: skip
JOB_AND_RANK = re.compile(r"(.+)_rank_[0-9]+")  # file names
_log = logging.getLogger("interlace")


class RecordedGroup(Protocol):
    """The part of a group of processes (a HostGroup) that its record needs."""

    rank: int
    world_size: int
    prefix: str
    names: tuple[int, ...]
    pids: dict[int, int]
    nonce: bytes
    tag: str
    dumped: bool
    control: Any  # a Control; None unless joined


_groups: weakref.WeakSet[RecordedGroup] = weakref.WeakSet()
"""The groups of this process, from their joining on."""


def register(group: RecordedGroup) -> None:
    """Register ``group``, which is about to join: SIGUSR2 dumps it, unless the application handles that."""
    _groups.add(group)
    if threading.current_thread() is threading.main_thread():
        with contextlib.suppress(ValueError):  # raised in an interpreter that is not the main one
            if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
                signal.signal(signal.SIGUSR2, lambda number, frame: dump_all("SIGUSR2 has come"))


def known_as(group: RecordedGroup, ranks: Sequence[int], whole: Sequence[int] = ()) -> None:
    """Record which ranks of the job form ``group``, and which form ``whole`` if it is on several hosts."""
    if group.control is not None:
        pids = tuple(group.pids[rank] for rank in range(group.world_size))
        identity = group.prefix, group.rank, tuple(ranks), pids, tuple(whole)
        group.control.recorder.about(identity)


def began(group: RecordedGroup, op: bytes | str, peer: int = -1, tag: int = 0) -> int:
    """Record the beginning of an op that is not a message to all ranks; return its number, or 0."""
    return 0 if (control := group.control) is None else control.recorder.other(op, peer, tag)


def ended(group: RecordedGroup, number: int) -> None:
    """Record the end of the op that :func:`began` recorded."""
    if number and (control := group.control) is not None:
        control.recorder.other_ended(number)


@contextlib.contextmanager
def recording_op(group: RecordedGroup, op: bytes | str) -> Iterator[None]:
    """Record an op around the ``with`` block. An exception leaves the op without an end."""
    number = began(group, op)
    yield
    ended(group, number)


def dump_all(why: str, level: int = logging.WARNING, pids: Container[int] = ()) -> None:
    """Write this process's records and what it has of processes ``pids``. Log why and where."""
    found: dict[tuple[str, int], dict[str, RankRecord]] = {}
    for group in list(_groups):
        for rank, pid in list(group.pids.items()):
            wanted = rank == group.rank or pid in pids
            if wanted and (record := record_of(group, rank)):
                found.setdefault((_tag(group), record.name), {})[record.group] = record
    written: dict[tuple[bool, int], list[str]] = {}
    for (tag, name), records in sorted(found.items(), key=lambda each: each[0]):
        if path := _write([*records.values()], tag):
            is_own = any(record.pid == os.getpid() for record in records.values())
            written.setdefault((is_own, name), []).append(path)
    for (is_own, name), paths in written.items():
        reason, at = (why, level) if is_own else ("it may not do so itself", logging.DEBUG)
        reason = reason.removeprefix(f"rank {name}: ")
        _log.log(at, "rank %d: %s; its last ops are in %s", name, reason, ", ".join(paths))


def _tag(group: Any) -> str:
    """Return the tag that the files of a job, and of its restarts after a failure, have in common."""
    while group._parent is not None:
        group = group._parent
    return str(group.tag or group.nonce.hex()[:8])


def dump(
    group: RecordedGroup, why: str, blamed: Iterable[int] = (), level: int = logging.WARNING
) -> None:
    """Write this process's records, once, and the records of the ranks ``blamed`` of a failed ``group``."""
    if group.dumped or group.control is None:
        return
    group.dumped = True
    dump_all(why, level, {group.pids[rank] for rank in blamed})


def dump_last(why: str) -> None:
    """Write the records once at the end of the process, for all groups that have not failed before."""
    left = [group for group in _groups if group.control is not None and not group.dumped]
    if left:
        dump_all(why)
    for group in left:
        group.dumped = True


def record_of(group: RecordedGroup, rank: int) -> RankRecord | None:
    """Return the record of ``rank`` in ``group``, or None if it cannot be read."""
    control = group.control
    with contextlib.suppress(Exception):
        return read_rank(bytes(control.record(rank)), *control.says_of(rank))
    return None


def _write(records: Sequence[RankRecord], tag: str) -> str:
    folder = os.environ.get(VARIABLE, "")
    if folder == "off" or not records:
        return ""
    try:
        chosen = folder or os.path.join(tempfile.gettempdir(), f"interlace-{os.getuid()}")
        _make(chosen, private=not folder)
        path = os.path.join(chosen, f"{tag}_rank_{records[0].name}")
        part = f"{path}.{os.getpid()}.{threading.get_ident()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _alone_in(chosen):
            if records[0].pid != os.getpid():
                records = _with_others(records, path)
            with open(os.open(part, flags, 0o600), "wb") as file:
                file.write(pickle.dumps(as_torch(records), protocol=4) + foot(list(records)))
            os.replace(part, path)
        if not folder:
            _prune(chosen)
        return path
    except Exception as error:  # a problem with the record must not cause another failure
        with contextlib.suppress(Exception):
            _log.warning("the record of rank %d cannot be written: %s", records[0].name, error)
        return ""


def _with_others(records: Sequence[RankRecord], path: str) -> Sequence[RankRecord]:
    """Return ``records`` and those already in the file, of groups that do not contain this process."""
    known = {record.group for record in records}
    with contextlib.suppress(Exception):
        return [*records, *(each for each in read_file(path) if each.group not in known)]
    return records


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """Hold the lock of ``folder`` while writing, but not for long: the other process may be stopped."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _make(folder: str, *, private: bool) -> None:
    with contextlib.suppress(FileExistsError):
        os.makedirs(folder, mode=0o700)
    found = os.lstat(folder)
    if private and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid()):
        raise OSError(f"{folder} is not this user's folder")


def _prune(folder: str) -> None:
    found = []
    for name in filter(JOB_AND_RANK.fullmatch, os.listdir(folder)):
        with contextlib.suppress(FileNotFoundError):  # other ranks also delete files
            found.append((os.path.getmtime(path := os.path.join(folder, name)), path))
    for _, path in sorted(found)[:-MOST_FILES]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def as_torch(records: Sequence[RankRecord]) -> dict[str, Any]:
    """Return the records of one rank in the form that torch's analyser reads."""
    config, status, entries = {}, {}, []
    for record in records:
        ranks = list(record.whole or record.ranks)
        ops = record.collectives
        ended = [op.number for op in ops if op.ended]
        config[record.group] = {"name": record.group, "desc": "undefined", "ranks": str(ranks)}
        status[record.group] = {
            "last_enqueued_collective": ops[-1].number if ops else -1,
            "last_started_collective": ops[-1].number if ops else -1,
            "last_completed_collective": ended[-1] if ended else -1,
        }
        entries += [_entry(record, op, len(ranks)) for op in ops]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    return {
        "version": VERSION,
        "pg_config": config,
        "pg_status": status,
        "entries": entries,
        "rank": records[0].name,
    }


def _entry(record: RankRecord, op: PastOp, world_size: int) -> dict[str, Any]:
    """Return one op. Only those terms of a call are known that are equal on all ranks."""
    terms = op.terms if isinstance(op.terms, tuple) else ()
    pairs = [term for term in terms if isinstance(term, tuple) and len(term) == 2]
    sizes = [list(v) for k, v in pairs if str(k).startswith("shape") and isinstance(v, tuple)]
    dtypes = [str(v).removeprefix("torch.") for k, v in pairs if str(k).startswith("dtype")]
    inputs = outputs = sizes or [[]]
    known = op.op if op.op in _KNOWN else _BARRIER
    if known in ("all_gather", "reduce_scatter"):
        whole = sum(map(math.prod, sizes))
        inputs, outputs = [[whole]], [[whole // world_size]]
        if whole % world_size:
            known = _BARRIER
        if known == "all_gather":
            inputs, outputs = outputs, inputs
    later = record.wall - record.now
    name, file, line = op.site or ("?", "?", 0)
    return {
        "record_id": op.number,
        "pg_id": 0,
        "process_group": (record.group, "undefined"),
        "collective_seq_id": op.number,
        "p2p_seq_id": 0,
        "op_id": op.number,
        "profiling_name": f"nccl:{known}",  # whatever the backend was: torch 2.11 knows no other
        "op": str(op),
        "time_created_ns": op.began + later,
        "time_discovered_started_ns": op.began + later,
        "time_discovered_completed_ns": op.ended + later if op.ended else None,
        "duration_ms": (op.ended - op.began) / 1e6 if op.ended else None,
        "input_sizes": inputs,
        "output_sizes": outputs,
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": "completed" if op.ended else "started",
        "is_p2p": False,
        "retired": bool(op.ended),
        "timeout_ms": 0,
        "frames": [
            {"name": name, "filename": file, "line": line},
            {"name": str(op), "filename": "interlace", "line": op.number},
        ],
    }


FRESH_SECONDS = 0.5  # a waiting rank publishes every millisecond, if it gets a core


def follow(rank: int, awaited: Callable[[int], int | None], start: int) -> int:
    """Return the last rank of the chain of waits from ``rank`` on, or ``rank`` if ``start`` is in it."""
    seen, last = {start}, rank
    while last not in seen:
        seen.add(last)
        if (further := awaited(last)) is None:
            return last
        last = further
    return rank


def aborted_by(rank: int, reason: str) -> str:
    """Return a text: which rank aborted, and why. A reason that was passed on keeps the first rank."""
    phrase = " aborted the group: "
    return reason if phrase in reason else f"rank {rank}{phrase}{reason}"


class Blame:
    """Finds out who is to blame for a wait in ``group``, a HostGroup."""

    def __init__(self, group: RecordedGroup) -> None:
        self.group = weakref.proxy(group)  # an error's traceback may keep this object for longer

    @staticmethod
    def everywhere() -> list[Any]:
        return [group for group in list(_groups) if group.control is not None]

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """Return a text on where these ranks, by name, wait instead; "" if none of them waits."""
        control, since = self.group.control, time.monotonic() - FRESH_SECONDS
        if control is None:
            return ""
        local = enumerate(self.group.names)
        known = [(name, control.elsewhere(rank, since)) for rank, name in local if name in ranks]
        return "".join(f"; rank {name} waits for {text}" for name, text in known if text)

    def awaited(self, rank: int) -> int | None:
        control = self.group.control
        return None if control is None else control.awaited(rank, time.monotonic() - FRESH_SECONDS)

    def culprits(self, waited_for: Sequence[int]) -> list[int]:
        """Return the names of the ranks for which ``waited_for`` wait in the end: the ones to blame."""
        group = self.group
        late = {follow(rank, self.awaited, group.rank) for rank in waited_for}
        return sorted({group.beyond(group.names[rank]) for rank in late})

    def ended(self, error: InterlaceError) -> None:
        """Handle a wait that ended with ``error``: a late or dead rank aborts the group for all."""
        group = self.group
        if isinstance(error, CollectiveTimeoutError):
            late = error.waited_for
        elif isinstance(error, PeerDiedError):
            late = (error.rank,)
        elif isinstance(error, DeadlockError):
            late = ()
        else:
            dump(group, str(error), level=logging.INFO)  # another rank has logged the error
            return
        blamed = [rank for rank, name in enumerate(group.names) if name in late]
        group.abort(f"{error} (op {group.sequence} of its group)", blamed)
