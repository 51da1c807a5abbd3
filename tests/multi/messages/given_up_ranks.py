"""Ops that one rank of two gives up in the midst of them, for test_given_up.py; on one host or on two."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore

import interlace
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.places.connect import connect_place
from interlace.runtime.places.shm import mail
from interlace.runtime.processes.worker import Helper

LARGE = 16 << 20  # numbers; more than leave before they are asked for


class LateError(Exception):
    """What the handler of a signal raises."""


def raises(*_: Any) -> None:
    raise LateError


def send_signal() -> None:
    """Once a message is waited for, not before."""

    def send() -> None:
        while not any(each.awaited for each in list(mail._mails)):
            time.sleep(1e-3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    threading.Thread(target=send).start()


@contextmanager
def signalled() -> Iterator[None]:
    """A signal comes while the block waits; what its handler raises ends the block."""

    before = signal.signal(signal.SIGALRM, raises)
    try:
        send_signal()
        yield
        raise AssertionError("it has not waited")
    except LateError:
        pass
    finally:
        signal.signal(signal.SIGALRM, before)


@contextmanager
def joined(path: str, hosts: int) -> Iterator[Communicator]:
    rank, store = interlace.get_rank(), FileStore(path, 2)
    os.environ["INTERLACE_SECRET"] = "of this test"
    host = f"host {rank % hosts}"
    place = connect_place(store, rank, 2, timeout=600, name="given up", host=host)
    group = Communicator(place, range(2))
    try:
        yield group
    finally:
        del os.environ["INTERLACE_SECRET"]
        group.close()


def said(function: Callable[[], Any]) -> str:
    try:
        function()
    except (interlace.InterlaceError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def receive(group: Communicator) -> None:
    """With a bound, which rank 1 needs: two that wait for each other would be a deadlock."""
    work = interlace.irecv(torch.zeros(1), group_src=1 - group.rank, group=group)
    work.wait(timeout=600)


def without_threads(path: str, hosts: int, message: bool) -> list[str]:
    """Rank 0 can start none when it begins an op; what that says, and the next one."""

    def refuse(thread: Helper) -> None:
        raise RuntimeError("can't start new thread")

    def begin() -> None:
        if message:
            interlace.irecv(torch.zeros(1), group_src=1, group=group)
        else:
            interlace.all_reduce(torch.ones(1), group=group, async_op=True)

    with joined(path, hosts) as group, pytest.MonkeyPatch.context() as patch:
        group.barrier()
        first = ""
        while any(each._thread for each in list(mail._mails)):  # of messages before
            time.sleep(1e-3)
        if group.rank == 0:
            patch.setattr(Helper, "start", refuse)
            first = said(begin)
        return [first, said(lambda: receive(group))]


def synchronous(path: str, hosts: int) -> str:
    """A signal ends rank 0's receive; what the next receive says."""
    with joined(path, hosts) as group:
        if group.rank == 0:
            with signalled():
                interlace.recv(torch.zeros(1), group_src=1, group=group)
        return said(lambda: receive(group))


def of_torch(path: str) -> str:
    """The same of torch.distributed's receive, which is called again where the exception is handled."""
    rank, tensor = interlace.get_rank(), torch.zeros(1)
    dist.init_process_group("interlace", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        if rank == 1:
            work: Any = dist.irecv(tensor, 0)
            return said(lambda: work.wait(timedelta(seconds=600)))
        signal.signal(signal.SIGALRM, raises)
        send_signal()
        try:
            dist.recv(tensor, 1)
        except LateError:
            return said(lambda: dist.recv(tensor, 1))
        return "it has not waited"
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        dist.destroy_process_group()


def asynchronous(path: str, hosts: int) -> tuple[float, str]:
    """Rank 0 waits again after a signal, and after another it does not; the data, and what is said."""
    with joined(path, hosts) as group:
        store = FileStore(path + ".again", 2)
        if group.rank == 1:
            store.wait(["again"])
            interlace.send(torch.tensor([7.0]), group_dst=0, group=group)
            return 7.0, said(lambda: receive(group))
        work = interlace.irecv(tensor := torch.zeros(1), group_src=1, group=group)
        with signalled():
            work.wait()
        store.set("again", "")
        work.wait()
        work = interlace.irecv(torch.zeros(1), group_src=1, group=group)
        signal.signal(signal.SIGALRM, raises)
        send_signal()
        try:  # no block with ``signalled``, which would leave a circle with the exception in it
            work.wait()
        except LateError:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        del work
        return tensor.item(), said(lambda: receive(group))


def late_alone(path: str, hosts: int) -> tuple[str, list[float]]:
    """Nobody waits for rank 0's message, which is asked for too late; what is said, and what comes."""
    store = FileStore(path + ".late", 2)
    with joined(path, hosts) as group:
        if group.rank == 0:
            group.set_timeout(0.5)
            work = interlace.isend(tensor := torch.ones(LARGE), group_dst=1, group=group)
            while not work.is_completed():
                time.sleep(0.01)
            tensor.fill_(2)
            store.set("late", "")
            return said(lambda: interlace.send(tensor, group_dst=1, group=group)), []
        store.wait(["late"])
        target = torch.zeros(LARGE)
        text = said(lambda: interlace.recv(target, group_src=0, group=group))
        return text, target.unique().tolist() if not text else []


def left(path: str) -> int:
    """Rank 0 sends and leaves at once; how many rank 1 receives that has sent something meanwhile."""
    with joined(path, 2) as group:
        if group.rank == 0:
            group.barrier()
            for number in range(300):
                interlace.send(torch.full((1000,), number), group_dst=1, group=group)
            return 300
        group.barrier()
        time.sleep(0.2)
        interlace.isend(torch.zeros(1), group_dst=0, group=group)
        time.sleep(0.2)
        target = torch.zeros(1000, dtype=torch.int64)
        for number in range(300):
            interlace.recv(target, group_src=0, group=group)
            assert (target == number).all()
        return 300
