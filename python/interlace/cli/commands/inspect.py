"""``interlace inspect``: show where every rank of a job is, from outside, for a live hang or from files.

A process keeps a descriptor of the shared memory segment with its record. A process that may trace it can
read that record, even while it is stopped. The record is not trusted, and nothing is written.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interlace.arguments.paths import refuse_empty
from interlace.output.consoles import write
from interlace.output.options import CommandOptions, option
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.processes.control import CONTROL_BYTES, RECORD, said
from interlace.runtime.processes.dump import FRESH_SECONDS, JOB_AND_RANK, follow
from interlace.runtime.processes.recorder import (
    REGION_BYTES,
    PastOp,
    RankRecord,
    read_file,
    read_rank,
)
from interlace.runtime.processes.segment import HEADER_BYTES, MAGIC, PAGE, Identity

_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "in the kernel",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
}
_WIDTHS = (5, 8, 8, 44, 17, 9)
_HEAD = ("rank", "pid", "process", "op", "", "waits for", "called at")

Found = dict[int, RankRecord | None]
"""The records of a group's ranks; None for ranks whose process or file is not there."""


@dataclass(frozen=True)
class InspectOptions(CommandOptions):
    """Show where every rank of a job is, and which ranks the others wait for.

    A PID is a rank on this host, or a process that started ranks, such as torchrun or a script that calls
    interlace.run. Other ranks of its groups on this host are shown as well. A FILE is a record that a
    rank wrote when it failed, or on SIGUSR2. A FOLDER stands for all records in it.
    """

    target: tuple[str, ...] = option(
        positional=True,
        nargs="+",
        metavar="PID|FILE|FOLDER",
        help="process of a rank, or records that ranks have written",
    )


def inspect(console: Any, options: InspectOptions) -> int:
    """Print a table of each group, with the ranks that others wait for first; return 0."""
    groups: dict[tuple[str, str], Found] = defaultdict(dict)
    for target in options.target:
        refuse_empty("PID, FILE or FOLDER", target)
        for job, record in _records(console, target):
            found, base = groups[job, record.group], _base(record)
            found.update({base + rank: found.get(base + rank) for rank in range(len(record.ranks))})
            found[base + record.rank] = record
    if not groups:
        raise ValueError(f"no readable record in {' '.join(options.target)}")
    several = len({job for job, _ in groups}) > 1
    for (job, name), group in sorted(groups.items()):
        _show(console, name + several * f" of job {job or 'that runs'}", group)
    return 0


def _records(console: Any, target: str) -> Iterator[tuple[str, RankRecord]]:
    """Yield the records in ``target``, each with the job that the name of its file begins with."""
    path = Path(target)
    if target.isdigit() and not path.exists():
        yield from (("", record) for record in _of_processes(int(target)))
        return
    if not path.exists():
        raise ValueError(f"{target}: there is no process, file or folder of that name")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if JOB_AND_RANK.fullmatch(file.name))
        if not files:
            raise ValueError(f"no file in {target} is named JOB_rank_RANK, as records are")
    for file in files:
        named = JOB_AND_RANK.fullmatch(file.name)
        try:
            found = read_file(str(file))
        except (InterlaceError, OSError) as error:
            if file == path:
                raise
            write(console, _clean(f"left out {file.name}: {error}"), "red")
            continue
        yield from ((named[1] if named else "", record) for record in found)


def _base(record: RankRecord) -> int:
    """Return the first rank of the record's host: ranks of several hosts are counted from it."""
    return record.whole.index(record.ranks[0]) if record.ranks[0] in record.whole else 0


def _segments(pid: int) -> Iterator[tuple[Identity, RankRecord]]:
    """Yield the records of a process, one per group, each with the identity of its memory."""
    folder = Path(f"/proc/{pid}/fd")
    for entry in sorted(folder.iterdir()):
        try:
            if not os.readlink(entry).startswith("/memfd:interlace"):
                continue
            descriptor = os.open(entry, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:  # closed meanwhile
            continue
        try:
            header = os.pread(descriptor, HEADER_BYTES, 0)
            if len(header) < HEADER_BYTES or header[: len(MAGIC)] != MAGIC:
                continue
            identity = Identity.unpack(header)
            if identity.nbytes != CONTROL_BYTES:
                continue
            head = os.pread(descriptor, PAGE, PAGE)
            region = os.pread(descriptor, REGION_BYTES, PAGE + RECORD)
            yield identity, read_rank(region, *said(head))
        except (InterlaceError, ValueError):  # the group is still joining
            continue
        finally:
            os.close(descriptor)


def _below(pid: int) -> list[int]:
    started = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the name, in brackets, may have any characters
            _, parent = entry.read_text(errors="replace").rpartition(") ")[2].split()[:2]
            started[int(parent)].append(int(entry.parent.name))
    found = sorted(started[pid])
    for child in found:
        found += sorted(started[child])
    return found


def _of_processes(pid: int) -> Iterator[RankRecord]:
    """Yield the records of ``pid``, or of its first descendant with one, and of its peers on this host."""
    try:
        segments = list(_segments(pid))
    except FileNotFoundError:
        raise ValueError(f"there is no process {pid}, and no file of that name") from None
    except PermissionError:
        owner, name = os.stat(f"/proc/{pid}").st_uid, Path(f"/proc/{pid}/comm").read_text().strip()
        if owner == os.getuid():
            why = "it runs with extra privileges, so it cannot be inspected. If it is a rank of interlace,"
            why += " run inspect with CAP_SYS_PTRACE"
        else:
            why = f"it belongs to uid {owner}, and this is uid {os.getuid()}: only its user, and root with "
            why += "CAP_SYS_PTRACE, may read its record; run inspect as that user, or by sudo"
        raise ValueError(f"process {pid}, {_clean(name)}: {why}") from None
    # for torchrun, or for a script that called interlace.run
    for rank in [] if segments else _below(pid):
        with contextlib.suppress(OSError):
            segments = segments or list(_segments(rank))
    if not segments:
        raise ValueError(
            f"process {pid} and the processes that it started are in no group of interlace"
        )
    nonces = {identity.nonce for identity, _ in segments}
    yield from (record for _, record in segments)
    for other in sorted({other for _, record in segments for other in record.pids}):
        try:
            yield from (r for identity, r in _segments(other) if identity.nonce in nonces)
        except OSError:  # it has ended, or its number belongs to another user now
            continue


def _awaited_place(record: RankRecord | None) -> int | None:
    """Return the place of the rank that a rank waits for; None if it waits for none."""
    op = None if record is None else _last(record)
    if record is None or op is None or op.ended or record.now / 1e9 - record.since > FRESH_SECONDS:
        return None
    return record.waits


def _last(record: RankRecord) -> PastOp | None:
    ops = [*record.collectives[-1:], *record.transfers]
    return max(ops, key=lambda op: (not op.ended, op.began), default=None)


def _show(console: Any, name: str, found: Found) -> None:
    waiting = {rank: to for rank, r in found.items() if (to := _awaited_place(r)) is not None}
    late = sorted({follow(to, waiting.get, rank) for rank, to in waiting.items()})
    come = {
        rank: max([op.number for op in r.collectives], default=0) for rank, r in found.items() if r
    }
    latest = max(come.values(), default=0)
    missing = sorted(rank for rank, number in come.items() if number < latest)
    unknown = sorted({*found} - {*come})
    write(console, f"group {_clean(name)}, {len(found)} ranks")
    if late:
        write(console, f"  waited for: {_names(found, late)}", "red")
    if missing:
        write(console, f"  have not reached op {latest}: {_names(found, missing)}")
    if unknown:
        write(console, f"  unknown: {_names(found, unknown)}")
    order = sorted(found, key=lambda rank: (rank not in late, come.get(rank, latest + 1), rank))
    for row in [_HEAD, *(_row(rank, found, waiting.get(rank)) for rank in order)]:
        cells = [cell.ljust(width) for cell, width in zip(row, _WIDTHS, strict=False)]
        write(console, ("  " + " ".join([*cells, row[-1]])).rstrip())


def _names(found: Found, ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {_identity(found, rank)[0]}" for rank in ranks)


def _identity(found: Found, rank: int) -> tuple[int, int]:
    """Return the rank in the job and its process, from any record of its host."""
    for record in found.values():
        if record is not None and 0 <= (place := rank - _base(record)) < len(record.ranks):
            return int(record.ranks[place]), int(record.pids[place])
    return rank, 0


def _row(rank: int, found: Found, waits: int | None) -> tuple[str, ...]:
    record, (name, pid) = found[rank], map(str, _identity(found, rank))
    process = _process(pid)
    if record is None:
        return name, pid, process, "no record here", "", "", ""
    op = _last(record)
    if op is None:
        return name, pid, process, "has called nothing", "", "", ""
    seconds = (record.now - (op.ended or op.began)) / 1e9
    when = f"ended {seconds:.1f} s ago" if op.ended else f"since {seconds:.1f} s"
    place = "" if op.site is None else f"{_clean(op.site[1])}:{op.site[2]} {_clean(op.site[0])}"
    waited = "" if waits is None else f"rank {_identity(found, waits + _base(record))[0]}"
    return name, pid, process, f"{op.number} {_clean(str(op))}"[: _WIDTHS[3]], when, waited, place


def _process(pid: str) -> str:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return _STATES.get(state, state)


def _clean(text: str) -> str:
    """Return ``text`` without characters that could control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
