"""Files of records: written when a group fails, or on SIGUSR2; what torch's ``fr_trace`` reads, and more.

A file is the pickle that torch's analyser reads, with the records of a rank in all groups behind it, which
``python -m interlace inspect`` reads without the pickle. Each rank writes its own, and those of ranks that
it blames, which may not come to it, of all groups that it has with them. Nothing here raises, and nothing
waits, but a second for another rank that writes.

Blame of a wait that lasts: who is late, where it is instead, and telling everybody when a wait fails.

A rank that waits says in its control segments for whom, again and again (``deadlock.py``). So others can
follow a chain of ranks to the one that nobody waits behind, whichever of them is the first to give up. To
the groups in which it does not wait it says where it does.
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

MOST_FILES = 256  # in the folder that nobody has chosen
VARIABLE = "INTERLACE_RECORD"
VERSION = "2.10"  # of torch's format

# what fr_trace of every release knows; of all else it compares shapes and states, as of a barrier
_BARRIER = "all_reduce_barrier"
_KNOWN = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter",
          "all_to_all")  # fmt: skip
JOB_AND_RANK = re.compile(r"(.+)_rank_[0-9]+")  # names of files
_log = logging.getLogger("interlace")


class RecordedGroup(Protocol):
    """A group of processes, as its record needs it: a HostGroup."""

    rank: int
    world_size: int
    prefix: str
    names: tuple[int, ...]
    pids: dict[int, int]
    nonce: bytes
    tag: str
    dumped: bool
    control: Any  # a Control, while it has joined

    def close(self) -> None: ...


_groups: weakref.WeakSet[RecordedGroup] = weakref.WeakSet()


def register(group: RecordedGroup) -> None:
    """``group``, a HostGroup, has joined: dump it on SIGUSR2, if the application has no use for that."""
    _groups.add(group)
    if threading.current_thread() is threading.main_thread():
        with contextlib.suppress(ValueError):  # of an interpreter that is not the main one
            if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
                signal.signal(signal.SIGUSR2, lambda number, frame: dump_all("SIGUSR2 has come"))


def known_as(group: RecordedGroup, ranks: Sequence[int], whole: Sequence[int] = ()) -> None:
    """Say in the record which ranks of the job are in ``group``; and in ``whole``, if on several hosts."""
    if group.control is not None:
        pids = tuple(group.pids[rank] for rank in range(group.world_size))
        who = group.prefix, group.rank, tuple(ranks), pids, tuple(whole)
        group.control.recorder.about(who)


def began(group: RecordedGroup, op: bytes | str, peer: int = -1, tag: int = 0) -> int:
    """An op begins that is no message to all ranks of ``group``; its number there, 0 if none is kept."""
    return 0 if (control := group.control) is None else control.recorder.other(op, peer, tag)


def ended(group: RecordedGroup, number: int) -> None:
    """What :func:`began` has ended."""
    if number and (control := group.control) is not None:
        control.recorder.other_ended(number)


@contextlib.contextmanager
def recorded(group: RecordedGroup, op: bytes | str) -> Iterator[None]:
    """Around an op that :func:`began` is for; what it raises leaves it open."""
    number = began(group, op)
    yield
    ended(group, number)


def dump_all(why: str, level: int = logging.WARNING, pids: Container[int] = ()) -> None:
    """Write this process's records, and what it has of processes ``pids``; log why and where."""
    found: dict[tuple[str, int], dict[str, RankRecord]] = {}
    for group in list(_groups):
        for rank, pid in list(group.pids.items()):
            wanted = rank == group.rank or pid in pids
            if wanted and (record := record_of(group, rank)):
                found.setdefault((_tag(group), record.name), {})[record.group] = record
    written: dict[tuple[bool, int], list[str]] = {}
    for (tag, name), records in sorted(found.items(), key=lambda each: each[0]):
        if path := _write([*records.values()], tag):
            own = any(record.pid == os.getpid() for record in records.values())
            written.setdefault((own, name), []).append(path)
    for (own, name), paths in written.items():
        said, at = (why, level) if own else ("it may not do so itself", logging.DEBUG)
        _log.log(at, "rank %d: %s; its last ops are in %s", name, said, ", ".join(paths))


def _tag(group: Any) -> str:
    """What files of a job, or of those that went on after a failure of it, have in common."""
    while group._parent is not None:
        group = group._parent
    return str(group.tag or group.nonce.hex()[:8])


def dump(
    group: RecordedGroup, why: str, blamed: Iterable[int] = (), level: int = logging.WARNING
) -> None:
    """Write this process's records, and those of ``blamed``, ranks of ``group``, which has failed; once."""
    if group.dumped or group.control is None:
        return
    group.dumped = True
    dump_all(why, level, {group.pids[rank] for rank in blamed})


def dump_last(why: str) -> None:
    """This process ends: write its records once, not for each group that has not failed before."""
    left = [group for group in _groups if group.control is not None and not group.dumped]
    if left:
        dump_all(why)
    for group in left:
        group.dumped = True


def record_of(group: RecordedGroup, rank: int) -> RankRecord | None:
    """The record of ``rank`` in ``group``; None if it cannot be read."""
    control = group.control
    with contextlib.suppress(Exception):
        return read_rank(bytes(control.record(rank)), *control.says_of(rank))
    return None


def _write(records: Sequence[RankRecord], tag: str) -> str:
    """The file's path; empty if none was written."""
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
    except Exception as error:  # a record is not worth another failure
        with contextlib.suppress(Exception):
            _log.warning("the record of rank %d cannot be written: %s", records[0].name, error)
        return ""


def _with_others(records: Sequence[RankRecord], path: str) -> Sequence[RankRecord]:
    """``records``, and those that are in the file already, of groups in which this process is not."""
    known = {record.group for record in records}
    with contextlib.suppress(Exception):
        return [*records, *(each for each in read_file(path) if each.group not in known)]
    return records


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[None]:
    """While nobody else writes in ``folder``, unless one takes long: it may be stopped."""
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
        with contextlib.suppress(FileNotFoundError):  # other ranks do the same
            found.append((os.path.getmtime(path := os.path.join(folder, name)), path))
    for _, path in sorted(found)[:-MOST_FILES]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def as_torch(records: Sequence[RankRecord]) -> dict[str, Any]:
    """The records of one rank as torch's analyser reads them."""
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
    """One op. Of a call only what must be equal on all ranks is known: sizes are compared, not checked."""
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
        "profiling_name": f"nccl:{known}",  # whichever moved it: torch 2.11 knows no other
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


FRESH_SECONDS = 0.5  # a rank that waits says so every millisecond, if it gets a core

_everywhere: weakref.WeakSet[RecordedGroup] = weakref.WeakSet()
"""The groups of this process; a judge may outlive its group, in an error's traceback."""


def follow(rank: int, awaited: Callable[[int], int | None], own: int) -> int:
    """The end of the chain of who waits for whom from ``rank`` on; ``rank`` if that leads to ``own``."""
    seen, last = {own}, rank
    while last not in seen:
        seen.add(last)
        if (further := awaited(last)) is None:
            return last
        last = further
    return rank


def aborted_by(rank: int, reason: str) -> str:
    """A text: who aborted, and why; a reason that goes from rank to rank keeps the first one's name."""
    said = " aborted the group: "
    return reason if said in reason else f"rank {rank}{said}{reason}"


class Blame:
    """The judge of the waits of ``group``, a HostGroup."""

    def __init__(self, group: RecordedGroup) -> None:
        self.group = weakref.proxy(group)
        _everywhere.add(group)

    @staticmethod
    def everywhere() -> list[RecordedGroup]:
        """The groups of this process that have met."""
        return [group for group in list(_everywhere) if group.control is not None]

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """A text on where these ranks, by name, wait instead, of those that do; empty if none does."""
        control, since = self.group.control, time.monotonic() - FRESH_SECONDS
        if control is None:
            return ""
        local = enumerate(self.group.names)
        known = [(name, control.elsewhere(rank, since)) for rank, name in local if name in ranks]
        return "".join(f"; rank {name} waits for {text}" for name, text in known if text)

    def awaited(self, rank: int) -> int | None:
        """For whom ``rank`` waits in this group; None for nobody."""
        control = self.group.control
        return None if control is None else control.awaited(rank, time.monotonic() - FRESH_SECONDS)

    def culprits(self, waited_for: Sequence[int]) -> list[int]:
        """Whom these ranks wait for in the end: the names of who is to blame if none of them comes."""
        group = self.group
        late = {follow(rank, self.awaited, group.rank) for rank in waited_for}
        return sorted({group.beyond(group.names[rank]) for rank in late})

    def ended(self, error: InterlaceError) -> None:
        """A wait has ended with ``error``: what came too late, or died, ends those of all ranks."""
        group = self.group
        if isinstance(error, CollectiveTimeoutError):
            late = error.waited_for
        elif isinstance(error, PeerDiedError):
            late = (error.rank,)
        elif isinstance(error, DeadlockError):
            late = ()
        else:
            dump(group, str(error), level=logging.INFO)  # others have said it
            return
        blamed = [rank for rank, name in enumerate(group.names) if name in late]
        group.abort(f"{error} (message {group.sequence} of its group)", blamed)
