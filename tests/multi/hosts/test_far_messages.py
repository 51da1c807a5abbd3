"""Messages between ranks on several hosts: their waits, records in parts, and ends in the middle."""

import atexit
import contextlib
import linecache
import os
import pathlib
import re
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.core.call import Call, MessageEnd
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.hosts import links
from interlace.runtime.places.hosts.mail import _RECORD, FarBox, FarPipe
from interlace.runtime.places.shm.mail import _NUMBER, Messages, Sending
from processes import heard, started
from ranks import LONG, close, joined, members, ranks

CALL = Call("message")
LARGE = 16 << 20  # bytes that no kernel keeps for a connection


@pytest.fixture
def groups() -> Iterator[list[Communicator]]:
    made = members(3, hosts=2)
    yield made
    close(made)


def content(nbytes: int, seed: int = 1) -> torch.Tensor:
    return torch.arange(256).mul_(seed).to(torch.uint8).repeat(nbytes // 256 + 1)[:nbytes]


@pytest.mark.parametrize("peer", [1, 2])
def test_a_message_behind_one_that_nobody_has_asked_for_is_heard(
    groups: list[Communicator], peer: int
) -> None:
    sends = [
        groups[peer].engine.send(CALL, content(size, size + 3), 0, tag)
        for tag, size in enumerate((LARGE, 5, LARGE))
    ]
    for tag, size in (1, 5), (2, LARGE), (0, LARGE):
        target = torch.zeros(size, dtype=torch.uint8)
        groups[0].engine.recv(CALL, target, peer, tag).result(LONG)
        assert torch.equal(target, content(size, size + 3))
    for send in sends:
        send.result(LONG)


@ranks(3, place="threads", hosts=2)
def test_both_directions_at_once_between_all() -> None:
    rank, engine = interlace.get_rank(), default_group().engine
    others = [peer for peer in range(3) if peer != rank]
    targets = {peer: torch.zeros(LARGE, dtype=torch.uint8) for peer in others}
    ends = [engine.send(CALL, content(LARGE, 2 * rank + 1), peer, 0) for peer in others]
    ends += [engine.recv(CALL, target, peer, 0) for peer, target in targets.items()]
    for end in ends:
        end.result(LONG)
    for peer, target in targets.items():
        assert torch.equal(target, content(LARGE, 2 * peer + 1))


def test_from_anybody_near_or_far(groups: list[Communicator]) -> None:
    engine, target = groups[0].engine, torch.zeros(LARGE, dtype=torch.uint8)
    for peer in 1, 2, 2, 1:
        received = engine.recv(CALL, target, None, 4)
        sent = groups[peer].engine.send(CALL, content(LARGE, peer), 0, 4)
        outcome = received.result(LONG)
        assert outcome.source is not None and outcome.source() == peer
        assert torch.equal(target, content(LARGE, peer))
        sent.result(LONG)


def test_what_was_sent_arrives_although_its_sender_has_left(groups: list[Communicator]) -> None:
    sent = groups[2].engine.send(CALL, content(LARGE, 3), 0, 0)
    groups[2].close()  # which waits for the end of what it sends, in a thread
    target = torch.zeros(LARGE, dtype=torch.uint8)
    groups[0].engine.recv(CALL, target, 2, 0).result(LONG)
    assert torch.equal(target, content(LARGE, 3))
    sent.result(LONG)
    with pytest.raises(InterlaceError, match="rank 2 has left the group"):
        groups[0].engine.recv(CALL, target, 2, 0).result(LONG)


def test_a_rank_that_waits_for_one_lets_another_thread_begin(groups: list[Communicator]) -> None:
    answer, asked = torch.zeros(1), torch.zeros(1)
    waiting = threading.Thread(
        target=lambda: groups[0].engine.recv(CALL, answer, 2, 1).result(LONG)
    )
    waiting.start()
    while not groups[0].place._mail.awaited:
        pass
    groups[0].engine.send(CALL, torch.ones(1), 2, 0).result(LONG)
    groups[2].engine.recv(CALL, asked, 0, 0).result(LONG)
    groups[2].engine.send(CALL, torch.full((1,), 7.0), 0, 1).result(LONG)
    waiting.join()
    assert (asked.item(), answer.item()) == (1, 7)


@ranks(3, place="threads", hosts=2)
def test_hosts_with_unequal_numbers_of_ranks_choose_alike() -> None:
    """At these sizes one host alone would choose another algorithm than the other host."""
    for numel in (4000, 5000, 9000):
        tensor, outputs = torch.full((numel,), interlace.get_rank() + 1.0), torch.zeros(3, numel)
        interlace.all_gather_into_tensor(outputs.view(-1), tensor)
        interlace.all_reduce(tensor)
        assert tensor.unique().tolist() == [6.0] and outputs.mean(1).tolist() == [1.0, 2.0, 3.0]


# -- processes -------------------------------------------------------------------------------------


@ranks(2, hosts=2, gone=[0])
def test_a_message_that_leaves_has_time_when_the_process_ends(tmp_path: pathlib.Path) -> None:
    ends, target = tmp_path / "ends", torch.zeros(LARGE, dtype=torch.uint8)
    if interlace.get_rank() == 0:
        interlace.isend(content(LARGE, 5), 1)
        atexit.register(ends.touch)
        util._exit_function()  # multiprocessing skips the steps of Python's end
        atexit._run_exitfuncs()
        os._exit(0)
    while not ends.exists():
        time.sleep(1e-3)
    interlace.recv(target, 0)
    assert torch.equal(target, content(LARGE, 5))


def killed_beside_its_child(rank: int, world_size: int, folder: str, said: Any) -> None:
    """Rank 1 has forked a child, which lives on; report rank 0's error after rank 1 is killed."""
    links._VERDICT = LONG  # so long nobody would wait who sees that the connection has ended
    group = joined(rank, world_size, folder)
    try:
        group.barrier()  # which rank 1 may leave, and be killed, before rank 0 has
        if rank == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of forking with threads
                child = os.fork()
            if child == 0:
                time.sleep(LONG)
            said.send(child)
            os.kill(os.getpid(), signal.SIGKILL)
        group.engine.recv(CALL, torch.zeros(1), 1, 0).result()
    except InterlaceError as error:
        said.send(type(error).__name__)


def test_a_killed_rank_is_noticed_though_its_forked_child_lives(tmp_path: pathlib.Path) -> None:
    with started(killed_beside_its_child, 2, tmp_path) as (_, ends):
        child = heard(ends[1])
        try:
            assert heard(ends[0]) == "PeerDiedError"
        finally:
            os.kill(child, signal.SIGKILL)


# -- one box ---------------------------------------------------------------------------------------


@pytest.fixture
def boxes() -> Iterator[tuple[FarBox, socket.socket]]:
    """A box, and the other end of its connection for records."""
    (own, other), (pieces, end) = socket.socketpair(), socket.socketpair()
    yield FarBox(1, own, pieces, 4096), other
    for each in own, other, pieces, end:
        each.close()


def test_records_are_read_however_they_come(boxes: tuple[FarBox, socket.socket]) -> None:
    box, other = boxes
    said = b"".join(
        _RECORD.pack(tag, nbytes, 9, follows) + bytes([tag]) * follows
        for tag, nbytes, follows in ((1, 3, 3), (2, 0, 0), (3, 1 << 40, 0), (4, 4096, 4096))
    )
    found = []
    for at in range(len(said)):
        other.send(said[at : at + 1])
        box.readable = True
        while (record := box.peek()) is not None:
            found.append((record.tag, record.nbytes, record.data is None))
            box.take(record)
    assert found == [(1, 3, False), (2, 0, False), (3, 1 << 40, True), (4, 4096, False)]
    assert not box.unread


@pytest.mark.parametrize("record", [(0, -1, 9, 0), (0, 5, 9, 4), (0, 1 << 20, 9, 1 << 20)])
def test_what_is_no_record_is_an_error(
    boxes: tuple[FarBox, socket.socket], record: tuple[int, ...]
) -> None:
    box, other = boxes
    other.send(_RECORD.pack(*record))
    box.readable = True
    with pytest.raises(InterlaceError, match="rank 1 sent an invalid message header"):
        box.peek()


class Narrow:
    """A connection that takes these numbers of bytes, one after another; 0 means that it is full."""

    def __init__(self, counts: list[int]) -> None:
        self.counts, self.said = counts, b""

    def send(self, data: bytes, flags: int) -> int:
        count = self.counts.pop(0) if self.counts else len(data)
        if not count:
            raise BlockingIOError
        self.said += data[:count]
        return min(count, len(data))


def test_a_record_that_is_half_gone_is_sent_once(boxes: tuple[FarBox, socket.socket]) -> None:
    box, narrow, data = boxes[0], Narrow([0, 7, 0, 60, 200, 0]), content(200, 5)
    box.wire = narrow  # type: ignore[assignment]
    tries = 0
    for tag in range(3):
        while not box.put(tag, 200, 9, data.data_ptr()):
            tries += 1
    each = [_RECORD.pack(tag, 200, 9, 200) + data.numpy().tobytes() for tag in range(3)]
    assert narrow.said == b"".join(each) and tries == 5


def test_a_record_that_has_begun_to_leave_is_not_withdrawn(
    boxes: tuple[FarBox, socket.socket],
) -> None:
    """A sender that reuses the memory for other contents sends a new record."""
    box, narrow, first, second = boxes[0], Narrow([0, 0, 7, 0]), content(200, 5), content(200, 3)
    box.wire = narrow  # type: ignore[assignment]
    carrier = SimpleNamespace(
        inline=4096, prepare=lambda *_, **__: None, arrived=lambda: (), begun=lambda peer: box.begun,
        put=lambda peer, tag, nbytes, dtype, data, shift: box.put(tag, nbytes, dtype, data),
    )  # fmt: skip
    messages, memory, ends = Messages(SimpleNamespace(rank=0), carrier, print), first.clone(), []
    for tag in range(3):
        ends.append(MessageEnd())
        ends[-1].refused = deque()
        messages.advance(Sending(memory, 1, 0, ends[-1]))
        if tag < 2:  # nothing of the first has left, a part of the second has
            messages.fail(ends[-1], InterlaceError("late"))
            memory.copy_(second)
    ends[2].result(0)
    each = [_RECORD.pack(0, 200, number, 200) for number in [_NUMBER[torch.uint8]] * 2]
    content_of = [second.numpy().tobytes()] * 2
    assert narrow.said == each[0] + content_of[0] + each[1] + content_of[1]


class Handler(Exception):
    """The exception of the signal handler."""


@pytest.mark.parametrize("puts", [True, False])
def test_bytes_that_have_moved_count_whatever_comes_between(puts: bool) -> None:
    """An exception comes after each line that the pipe executes, one after the other."""
    own, other = socket.socketpair()
    data, target = content(100_000, 7), torch.zeros(100_000, dtype=torch.uint8)
    pipe, line = FarPipe(own, puts), 0
    pipe.begin((data if puts else target).data_ptr(), 100_000, 0, past=False)
    said, left = b"", memoryview(data.numpy().tobytes())
    code, until = FarPipe.move.__code__, 0

    def traced(frame: Any, event: str, _: Any) -> Any:
        nonlocal line
        here = linecache.getline(code.co_filename, frame.f_lineno)
        if event == "line" and frame.f_code is code and "_busy = False" not in here:
            line += 1  # Python itself ensures that line
            if line == until:
                raise Handler
        return traced

    while not pipe.finished:
        if not puts and left:
            left = left[other.send(left[:997]) :]
        line, until = 0, until + 1
        sys.settrace(traced)
        try:
            pipe.move()
        except Handler:
            pass
        finally:
            sys.settrace(None)
        until %= 20
        while puts and select.select([other], [], [], 0)[0]:
            said += other.recv(997)
    while puts and len(said) < 100_000:
        said += other.recv(100_000)
    assert said == data.numpy().tobytes() if puts else torch.equal(target, data)
    own.close()
    other.close()


def test_a_sender_hears_of_a_misfit_though_it_only_sends(groups: list[Communicator]) -> None:
    target, short = torch.zeros(5), torch.zeros(4)
    groups[0].engine.send(CALL, short, 2, 0).result(LONG)
    with pytest.raises(ValueError, match="number of elements differs"):
        groups[2].engine.recv(CALL, target, 0, 0).result(LONG)
    with pytest.raises(ValueError, match="number of elements differs"):
        while True:
            groups[0].engine.send(CALL, short, 2, 1).result(LONG)


def with_a_broken_connection(rank: int, world_size: int, folder: str, said: Any) -> None:
    """Rank 1 loses its connections and lives; report the errors of both ranks' op."""
    group = joined(rank, world_size, folder)
    group.barrier()
    if rank == 1:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                connection = socket.socket(fileno=os.dup(int(name)))
                if connection.family == socket.AF_INET and connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)
    try:
        group.barrier()
    except InterlaceError as error:
        said.send(f"{type(error).__name__}: {error}")
    time.sleep(LONG)


def test_a_rank_whose_connection_breaks_is_not_said_to_have_died(tmp_path: Path) -> None:
    with started(with_a_broken_connection, 2, tmp_path) as (_, ends):
        for rank in range(2):
            found = rf"rank {1 - rank} \(pid \d+\) died, or the connection to it broke, while"
            assert re.search(found, said := heard(ends[rank])), said
