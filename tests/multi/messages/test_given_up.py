"""Ops that a rank aborts while they run: all ranks get an error, and no rank takes wrong data."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.places.pool import default_pool
from interlace.runtime.places.shm import mail
from interlace.runtime.processes.worker import Helper
from ranks import ranks

HOSTS = pytest.mark.parametrize("hosts", [1, 2])
LARGE = 16 << 20  # numbers; more than leave before they are asked for


@pytest.fixture(autouse=True, scope="module")
def processes_of_its_own() -> None:
    default_pool.close()


class LateError(Exception):
    """The exception of the signal handler."""


@contextmanager
def signalled() -> Iterator[None]:
    """A signal comes during a wait for a message; its handler raises LateError."""

    def send() -> None:
        while not any(each.awaited for each in list(mail._mails)):
            time.sleep(1e-3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def raises(*_: Any) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, raises)
    try:
        threading.Thread(target=send).start()
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def receive() -> None:
    """Receive with a bound: without one, two ranks that wait for each other would be a deadlock."""
    work = interlace.irecv(torch.zeros(1), 1 - interlace.get_rank())
    work.wait(timeout=600)


@HOSTS
@pytest.mark.parametrize("message", [True, False])
@ranks(2)
def test_an_op_whose_thread_cannot_be_started(hosts: int, message: bool) -> None:
    """Such a receive once began, and a later receive got the data of the first."""
    no_thread = RuntimeError("can't start new thread")
    group = default_group()
    group.barrier()
    while any(each._thread for each in list(mail._mails)):  # for earlier messages
        time.sleep(1e-3)
    if group.rank == 0:
        with (
            mock.patch.object(Helper, "start", side_effect=no_thread),
            pytest.raises(RuntimeError, match=r"^can't start new thread$"),
        ):
            if message:
                interlace.irecv(torch.zeros(1), 1)
            else:
                interlace.all_reduce(torch.ones(1), async_op=True)
    said = r"rank 0 aborted the group.*can't start new thread"
    with pytest.raises(interlace.InterlaceError, match=said):
        receive()


@HOSTS
@ranks(2)
def test_a_signal_ends_a_receive_that_nobody_can_wait_for_again(hosts: int) -> None:
    group = default_group()
    if group.rank == 0:
        with signalled(), pytest.raises(LateError):
            interlace.recv(torch.zeros(1), 1)
    said = "rank 0 aborted the group: recv was still running after LateError"
    with pytest.raises(interlace.InterlaceError, match=said):
        receive()


@ranks(2, backend="interlace")
def test_a_signal_ends_torchs_receive() -> None:
    tensor = torch.zeros(1)
    said = "rank 0 aborted the group: recv was still running after LateError"
    ended = pytest.raises(interlace.InterlaceError, match=said)
    if dist.get_rank() == 1:
        work: Any = dist.irecv(tensor, 0)
        with ended:
            work.wait(timedelta(seconds=600))
        return
    with signalled():
        try:
            dist.recv(tensor, 1)
        except LateError:
            with ended:
                dist.recv(tensor, 1)


@HOSTS
@ranks(2)
def test_a_handle_that_is_dropped_after_a_signal(tmp_path: Path, hosts: int) -> None:
    group = default_group()
    store = FileStore(str(tmp_path / "again"), 2)
    if group.rank == 1:
        store.wait(["again"])
        interlace.send(torch.tensor([7.0]), 0)
    else:
        work = interlace.irecv(tensor := torch.zeros(1), 1)
        with signalled(), pytest.raises(LateError):
            work.wait()
        store.set("again", "")
        work.wait()
        assert tensor.item() == 7
        work = interlace.irecv(torch.zeros(1), 1)
        with signalled(), suppress(LateError):  # nobody keeps the exception, and so the work
            work.wait()
        del work
    with pytest.raises(interlace.InterlaceError, match="and its handle no longer exists"):
        receive()


@HOSTS
@ranks(2)
def test_a_send_that_is_late_alone_after_a_part_has_left(tmp_path: Path, hosts: int) -> None:
    """The caller may change the tensor again, so the rest of the message would have other contents."""
    store = FileStore(str(tmp_path / "late"), 2)
    group = default_group()
    tensor = torch.ones(LARGE)
    if group.rank == 0:
        group.set_timeout(0.5)
        work = interlace.isend(tensor, 1)
        while not work.is_completed():
            time.sleep(0.01)
        tensor.fill_(2)
        store.set("late", "")
    else:
        store.wait(["late"])
    said = r"send to rank 1 \(tag 0\) has waited 0.5 s"
    with pytest.raises(interlace.InterlaceError, match=said):
        if group.rank == 0:
            interlace.send(tensor, 1)
        else:
            interlace.recv(tensor, 0)


@ranks(2, hosts=2)
def test_what_was_sent_comes_though_something_is_sent_to_who_has_left() -> None:
    group = default_group()
    group.barrier()
    if group.rank == 0:
        for number in range(300):
            interlace.send(torch.full((1000,), number), 1)
        return
    time.sleep(0.2)
    interlace.isend(torch.zeros(1), 0)
    time.sleep(0.2)
    target = torch.zeros(1000, dtype=torch.int64)
    for number in range(300):
        interlace.recv(target, 0)
        assert (target == number).all()
