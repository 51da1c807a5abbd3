"""The flight recorder: its contents, its readers, torch's analyser, and the writer of a record."""

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch

import interlace
from guard import MOST as LONG
from interlace.cli.commands.inspect import InspectOptions, inspect
from interlace.groups.groups import default_group
from interlace.output.consoles import PlainConsole
from interlace.runtime.core import plain
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.pool import default_pool
from interlace.runtime.processes import dump, recorder
from interlace.runtime.processes.recorder import (
    ENTRIES,
    REGION_BYTES,
    FlightRecorder,
    PastOp,
    RankRecord,
    read_file,
    read_rank,
)
from ranks import ranks

LINES = Path(__file__).read_text().splitlines()
LINE = "interlace.all_reduce(vector)  # the call site"
SITES = [number for number, line in enumerate(LINES, 1) if line.strip() == LINE]

T = TypeVar("T")


@pytest.fixture(autouse=True, scope="module")
def new_processes() -> None:
    """Failed groups exist until their errors are freed, and would be in the written files."""
    default_pool.close()


def shown(*targets: object) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        inspect(PlainConsole(), InspectOptions(tuple(map(str, targets))))
    return printed.getvalue().splitlines()


def analysed(folder: Path) -> str:
    """Return the output of torch's analyser for the files in ``folder``."""
    (prefix,) = {path.name.partition("_rank_")[0] for path in folder.glob("*_rank_*")}
    command = ["torch.distributed.flight_recorder.fr_trace", str(folder), "-p", f"{prefix}_rank_"]
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def records_in(folder: Path) -> dict[int, RankRecord]:
    """Return the record of each rank from its own file or another rank's."""
    found = {int(path.name.rpartition("_")[2]): path for path in folder.glob("*_rank_*")}
    return {rank: read_file(str(path))[-1] for rank, path in found.items()}


def wait_for(*paths: Path) -> None:
    end = time.monotonic() + LONG
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, paths
        time.sleep(0.01)


# -- contents --------------------------------------------------------------------------------------


def own_record() -> RankRecord:
    place: Any = default_group().place
    record = dump.record_of(place.group, place.group.rank)
    assert record is not None
    return record


@ranks(2)
def test_the_last_ops_are_kept_with_their_call_sites() -> None:
    vector = torch.ones(4)
    for _ in range(300):
        interlace.all_reduce(vector)  # the call site
    interlace.all_gather(torch.empty(2, 3), torch.zeros(3))
    interlace.reduce_scatter(torch.empty(3), torch.zeros(6))
    interlace.broadcast_object_list([b"nobody's business" * 9], src=0)
    interlace.all_reduce(torch.ones(4), async_op=True).wait()  # type: ignore[union-attr]
    record = own_record()
    found: list[Any] = [None, None]
    interlace.all_gather_object(found, record)
    ops, other = record.collectives, found[1 - interlace.get_rank()]
    assert (record.rank, other.rank) == (interlace.get_rank(), 1 - interlace.get_rank())
    assert record.ranks == (0, 1) and record.pids == other.pids and len({*record.pids}) == 2
    assert [op.number for op in ops] == [*range(ops[-1].number - ENTRIES + 1, ops[-1].number + 1)]
    assert all(0 < op.began <= op.ended for op in ops)
    assert [op.began for op in ops] == sorted(op.began for op in ops)
    first = [op for op in ops if op.site and op.site[2] == SITES[0]]
    assert {str(op) for op in first} == {"all_reduce (4,) float32 sum"}
    name = "test_the_last_ops_are_kept_with_their_call_sites"
    assert len(first) > 200 and {op.site[0] for op in first} == {name}
    assert {op.site[1] for op in ops} == {__file__}, "an op whose call site is inside"
    names = [op.op for op in ops if op not in first]
    assert names[:2] == ["all_gather", "reduce_scatter"] and names[-1] == "all_reduce"
    assert "broadcast_object_list" in names
    last = LINES[ops[-1].site[2] - 1]
    assert "async_op=True" in last, "an op of another thread, called here"
    assert b"business" not in plain.dumps([record])
    for mine, theirs in zip(ops, other.collectives, strict=True):
        assert (mine.number, str(mine), mine.site) == (theirs.number, str(theirs), theirs.site)


@ranks(2)
def test_messages_between_two_ranks_are_kept() -> None:
    vector = torch.ones(4)
    if interlace.get_rank() == 0:
        interlace.barrier()
        interlace.send(vector, 1, tag=7)
        (sent,) = own_record().transfers
        assert (sent.op, sent.peer, sent.tag) == ("isend", 1, 7) or sent.op == "send"
    else:
        work = interlace.irecv(vector, 0, tag=7)
        (waiting,) = own_record().transfers
        interlace.barrier()
        work.wait()
        (received,) = own_record().transfers
        assert waiting.peer == received.peer == 0 and waiting.tag == 7
        assert not waiting.ended and received.ended >= received.began
        assert waiting.site[0] == "test_messages_between_two_ranks_are_kept"


# -- readers ---------------------------------------------------------------------------------------


@ranks(3, gone=[1])
def test_the_record_of_a_killed_rank_is_in_files_of_the_others(tmp_path: Path) -> None:
    os.environ[dump.VARIABLE] = str(tmp_path)
    vector = torch.ones(4)
    for _ in range(300):
        interlace.all_reduce(vector)  # the call site
    if interlace.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(InterlaceError, match=r"rank 1 .* died"):
        interlace.all_reduce(vector)  # the call site
    wait_for(*(tmp_path / name for name in names_of(tmp_path, 3)))
    found = records_in(tmp_path)
    last = {rank: record.collectives[-1] for rank, record in found.items()}
    assert [*sorted(found)] == [0, 1, 2]
    assert last[1].ended and last[1].site[2] == SITES[1]
    for rank in (0, 2):
        assert last[rank].number == last[1].number + 1 and not last[rank].ended
        assert last[rank].site[2] == SITES[2]
        assert "rank 1" in found[rank].failed or found[rank].waits == 1
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    lines = shown(tmp_path)
    assert lines[1] == "  waited for: rank 1"
    assert lines[3].split()[0] == "rank" and lines[4].split()[0] == "1", "the culprit is first"
    if interlace.get_rank() == 0:
        said = analysed(tmp_path)
        assert "Not all ranks joining collective" in said and "missing ranks: {1}" in said
        name = "test_the_record_of_a_killed_rank_is_in_files_of_the_others"
        assert f"{name} at {__file__}:{SITES[2]}" in said


@ranks(3, gone=[1])
def test_all_groups_of_a_killed_rank_are_in_its_file(tmp_path: Path) -> None:
    """The groups have no common survivor, and the ranks that blame rank 1 write its file at one time."""
    os.environ[dump.VARIABLE] = str(tmp_path)
    vector = torch.ones(4)
    made = [interlace.new_group(members) for members in ([0, 1], [1, 2], [0, 1, 2])]
    for group in made:
        if not isinstance(group, int):  # a member
            interlace.all_reduce(vector, group=group)
    if interlace.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(InterlaceError, match=r"rank 1 .* died"):
        interlace.all_reduce(vector)
    files = [tmp_path / name for name in names_of(tmp_path, 3)]
    wait_for(*files)
    end = time.monotonic() + LONG
    while len(found := read_file(str(files[1]))) < 4 and time.monotonic() < end:
        time.sleep(0.01)
    assert sorted(record.ranks for record in found) == [(0, 1), (0, 1, 2), (0, 1, 2), (1, 2)]
    assert {record.name for record in found} == {1}
    assert all(record.collectives[-1].ended for record in found)
    assert not [line for line in shown(tmp_path) if "unknown" in line]
    assert sum("have not reached" in line for line in shown(tmp_path)) == 1
    assert interlace.get_rank() or analysed(tmp_path).count("missing ranks: {1}") == 1


def test_a_rank_without_a_file_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(recorder.foot([a_record()]))
    lines = shown(tmp_path / "file")
    assert lines[1] == "  unknown: rank 1"
    assert [line.split()[0] for line in lines[2:]] == ["rank", "0", "1"]
    assert lines[4].endswith("no record here")


def names_of(folder: Path, count: int) -> list[str]:
    wait = time.monotonic() + LONG
    while not (found := [path.name for path in folder.glob("*_rank_*") if "." not in path.name]):
        assert time.monotonic() < wait
        time.sleep(0.01)
    prefix = found[0].rpartition("_")[0]
    return [f"{prefix}_{rank}" for rank in range(count)]


@ranks(3)
def test_different_ops_are_found_by_torchs_analyser(tmp_path: Path) -> None:
    vector, rank = torch.ones(4), interlace.get_rank()
    interlace.all_reduce(vector)
    with (
        mock.patch.dict(os.environ, {dump.VARIABLE: str(tmp_path)}),
        pytest.raises(ValueError, match="different ops"),
    ):
        if rank == 1:
            interlace.broadcast(vector, 0)
        else:
            interlace.all_reduce(vector)
    if rank == 0:
        wait_for(*(tmp_path / name for name in names_of(tmp_path, 3)))
        said = analysed(tmp_path)
        assert "Culprit rank" in said and "COLLECTIVE_TYPE_MISMATCH" in said


def stopped(folder: Path, op: str) -> None:
    """Rank 1 stops itself between two ops; before that it writes its process id to a file."""
    vector, rank = torch.ones(4), interlace.get_rank()
    interlace.all_reduce(vector)
    (folder / f"pid.{rank}.part").write_text(str(os.getpid()))
    (folder / f"pid.{rank}.part").rename(folder / f"pid.{rank}")
    with mock.patch.dict(os.environ, {dump.VARIABLE: str(folder)}):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if op == "all_reduce":
            interlace.all_reduce(vector)
        elif rank == 1:
            interlace.send(vector, 0)
        elif rank == 0:
            interlace.recv(vector, 1)
        interlace.barrier()
        wait_for(folder / "enough")
    assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL


@pytest.mark.parametrize("op", ["all_reduce", "recv"])
def test_a_hang_is_seen_from_outside(tmp_path: Path, op: str) -> None:
    ended: list[int] = []

    def run() -> None:
        ended.append(len(interlace.run(stopped, 3, tmp_path, op, place="shm")))

    thread = threading.Thread(target=run)
    thread.start()
    pids: list[int] = []
    try:
        wait_for(*(tmp_path / f"pid.{rank}" for rank in range(3)))
        pids = [int((tmp_path / f"pid.{rank}").read_text()) for rank in range(3)]
        end = time.monotonic() + LONG
        while True:
            lines = shown(pids[1])
            words = [line.split() for line in lines]
            if words[-3][2] == "stopped" and "  waited for: rank 1" in lines:
                break
            assert time.monotonic() < end, lines
            time.sleep(0.05)
        assert words[-3][:2] == ["1", str(pids[1])], "the culprit is first"
        assert shown(pids[0])[:2] == shown(pids[2])[:2] == lines[:2], "from any rank"
        assert shown(os.getpid())[:2] == lines[:2], "from what started them"
        os.kill(pids[0], signal.SIGUSR2)
        wait_for(*[tmp_path / name for name in names_of(tmp_path, 1)])
        assert not records_in(tmp_path)[0].collectives[-1].ended or op == "recv"
        for path in tmp_path.glob("*_rank_*"):
            path.unlink()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        if pids:
            end = time.monotonic() + LONG
            while "waited for" in shown(pids[0])[1] and time.monotonic() < end:
                time.sleep(0.05)
            for pid in pids:
                os.kill(pid, signal.SIGUSR2)
            wait_for(*[tmp_path / name for name in names_of(tmp_path, 3)])
        (tmp_path / "enough").touch()
        thread.join(LONG)
    assert ended == [3], "a rank has failed"
    if op == "all_reduce":
        said = analysed(tmp_path)
        assert "Culprit" not in said and "missing" not in said, said


def test_another_process_is_no_rank(tmp_path: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        for pid, why in ((other.pid, "are in no group"), (99999999, "no process 99999999")):
            with pytest.raises(ValueError, match=why):
                shown(pid)
    (tmp_path / "file").write_bytes(b"x" * 100)
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "pipe"):
        with pytest.raises(InterlaceError, match="not a file of the flight recorder"):
            shown(tmp_path / name)

    refused = PermissionError(13, "Permission denied")  # like another user's files in /proc
    with mock.patch.object(Path, "iterdir", side_effect=refused):
        with pytest.raises(ValueError, match="If it is a rank of interlace, run inspect with"):
            shown(os.getpid())
        text = r"belongs to uid \d+, and this .* run inspect as that user"
        with mock.patch.object(os, "getuid", lambda: -1), pytest.raises(ValueError, match=text):
            shown(os.getpid())


# -- files -----------------------------------------------------------------------------------------


def a_record(text: str = "op") -> RankRecord:
    ops = [PastOp(n, text, (("shape", (2, 3)),), ("f", "file", 3), n, n + 1) for n in (1, 2)]
    return RankRecord("a group", 0, (0, 1), (11, 12), (), 1, 1.0, "", ops, [], 5, 6)


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with mock.patch.dict(os.environ, {dump.VARIABLE: str(tmp_path / "file" / "folder")}):
        dump._write([a_record()], "0badcafe")
    assert "cannot be written" in caplog.text


def test_the_folder_that_nobody_has_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(dump.VARIABLE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"interlace-{os.getuid()}"
    names = [f"{number:08x}_rank_0" for number in range(dump.MOST_FILES + 2)]
    for number, name in enumerate(names):
        dump._write([a_record()], name[:8])
        os.utime(folder / name, (number, number))
    assert sorted(path.name for path in folder.iterdir()) == names[2:]
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    dump._write([a_record()], "0badcafe")
    assert "is not this user's folder" in caplog.text


def test_nothing_of_a_file_steers_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(recorder.foot([a_record("\x1b[31mop\n")]))
    assert not [line for line in shown(tmp_path / "file") if not line.isprintable()]


def test_a_file_is_read_without_its_pickle(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return exec, ("raise SystemExit('run')",)

    (tmp_path / "file").write_bytes(pickle.dumps(Evil()) + recorder.foot([a_record()]))
    assert read_file(str(tmp_path / "file")) == [a_record()]


def called(record: RankRecord) -> list[PastOp]:
    """Return the ops after the join, which is an op of all ranks too."""
    assert record.collectives[0].op.startswith("joining")
    return record.collectives[1:]


@ranks(3, place="threads", hosts=2)
def test_messages_between_hosts_are_kept() -> None:
    rank, vector = interlace.get_rank(), torch.ones(4)
    if rank:
        work = interlace.irecv(vector, 0, tag=rank)
        (waiting,) = own_record().transfers
        interlace.barrier()
        work.wait()
    else:
        interlace.barrier()
        for work in [interlace.isend(vector, peer, tag=peer) for peer in (1, 2)]:
            work.wait()
    interlace.barrier()
    record = own_record()
    assert [(op.number, op.op) for op in called(record)] == [(2, "barrier"), (3, "barrier")]
    if not rank:
        sent = [(op.op, op.peer, op.tag, op.number) for op in record.transfers]
        assert sent == [("send", 1, 1, 1), ("send", 2, 2, 2)]
        assert all(op.ended >= op.began for op in record.transfers)
        return
    (received,) = record.transfers
    assert (waiting.op, waiting.peer, waiting.tag) == ("recv", 0, rank)
    assert not waiting.ended and received.ended >= received.began == waiting.began
    assert str(received).startswith(f"recv 0 tag {rank} float32 4")
    assert received.site[0] == "test_messages_between_hosts_are_kept"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(dump.VARIABLE, str(tmp_path))
    return tmp_path


@ranks(3, place="threads", hosts=2)
def test_ops_between_hosts_are_kept_once(folder: Path) -> None:
    rank, place = interlace.get_rank(), default_group().place
    group = Communicator(place, (10, 11, 12))
    for _ in range(3):
        interlace.all_reduce(torch.ones(4), group=group)
    record = own_record()
    ops = called(record)
    assert [str(op) for op in ops] == ["all_reduce (4,) float32 sum"] * 3
    assert [op.number for op in ops] == [2, 3, 4]
    assert {op.site[0] for op in ops} == {"test_ops_between_hosts_are_kept_once"}
    assert record.name == 10 + rank and record.ranks == ((10, 11), (10, 11), (12,))[rank]
    interlace.barrier(group)
    if not rank:
        place.abort("enough")
    with contextlib.suppress(InterlaceError):
        interlace.all_reduce(torch.ones(4), group=group)
    job = dump._tag(place.group)  # the process may have groups of other jobs
    wait_for(*(folder / f"{job}_rank_{name}" for name in group.ranks))
    assert rank or {line.split()[0] for line in shown(folder)} >= {"10", "11", "12"}


def test_files_of_two_jobs_are_two_tables(tmp_path: Path) -> None:
    for job in ("1", "2"):
        (tmp_path / f"{job}_rank_0").write_bytes(recorder.foot([a_record()]))
    (tmp_path / "notes.txt").write_text("no record")
    (tmp_path / "9_rank_8").mkdir()
    (tmp_path / "9_rank_9").write_text("no record")
    for number, line in zip((8, 9), shown(tmp_path), strict=False):
        assert line.startswith(f"left out 9_rank_{number}: ")
    assert [line for line in shown(tmp_path) if line.startswith("group")] == [
        f"group {a_record().group} of job {job}, {len(a_record().ranks)} ranks"
        for job in ("1", "2")
    ]
    (empty := tmp_path / "empty").mkdir()
    for said in ("is named JOB_rank_RANK", "no readable record in"):
        with pytest.raises(ValueError, match=said):
            shown(empty)
        (empty / "9_rank_9").write_text("no record")


def test_files_that_others_prune_meanwhile(tmp_path: Path) -> None:
    for number in range(dump.MOST_FILES + 2):
        (tmp_path / f"{number:08x}_rank_0").touch()
    unlink, gone = os.unlink, []

    def also_by_another(path: str) -> None:
        unlink(path)
        gone.append(path)
        unlink(path)

    with mock.patch.object(dump.os, "unlink", also_by_another):
        dump._prune(str(tmp_path))
    assert len(gone) == 2 and len(os.listdir(tmp_path)) == dump.MOST_FILES


WHO = "a group", 0, (0, 1), (11, 12), ()


def test_a_log_that_is_full_begins_anew() -> None:
    region = memoryview(bytearray(REGION_BYTES))
    kept = FlightRecorder(region)
    kept.about(WHO)
    for number in range(1, 2000):
        op = Call("op", (("number", number), ("text", "x" * 300))).message
        kept.begins(recorder.MESSAGES, number, 0, 0, 0, 0, kept.told(op))
        if number % 97 == 0:
            ops = read_rank(bytes(region), None, 0.0, "").collectives
            told = [op for op in ops if op.op != "?"]
            assert [dict(op.terms)["number"] for op in told] == [op.number for op in told]
            assert ops[-1].number == number and len(told) >= min(number, 40)
    long = Call("op", (("text", "x" * 5000),)).message
    kept.begins(recorder.MESSAGES, 2000, 0, 0, 0, 0, kept.told(long))
    last = read_rank(bytes(region), None, 0.0, "").collectives[-1]
    assert (last.op, last.terms) == ("op", None), "a text that is too long is left out"
