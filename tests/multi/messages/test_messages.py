"""Messages of two ranks: through boxes, in pieces, kept, interrupted, given up, and without memory."""

import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore

import interlace
from guard import LIMIT
from interlace.groups.groups import default_group
from interlace.runtime.places.pool import default_pool
from interlace.runtime.places.shm import boxes, mail
from interlace.runtime.places.shm.engine import HostEngine
from interlace.runtime.processes.worker import Helper
from ranks import ranks
from tiers import few

NOBODY = -1
HOSTS = pytest.mark.parametrize("hosts", [1, 2])
LARGE = 16 << 20  # numbers; more than leave before they are asked for


@pytest.fixture(autouse=True, scope="module")
def processes_of_its_own() -> None:
    default_pool.close()


class LateError(Exception):
    """The exception of the signal handler."""


def own_engine(group: Any = None) -> HostEngine:
    engine = (group or default_group()).engine
    assert isinstance(engine, HostEngine)
    return engine


def by_python(rank: int) -> None:
    """On this rank, the group of this run moves pieces by Python."""
    if interlace.get_rank() == rank:
        engine = own_engine()
        with mock.patch.object(boxes, "_machine_code", lambda: None):
            engine.mail._messages = mail.Messages(
                engine._group, engine.mail._new_boxes(), engine.mail.refused.append
            )


def content(source: int, tag: int, nbytes: int) -> torch.Tensor:
    period = torch.arange(256).mul_(31 + source).add_(tag).to(torch.uint8)
    return period.repeat(nbytes // 256 + 1)[:nbytes]


@pytest.mark.parametrize(
    ("nbytes", "count", "python", "world_size"),
    few(
        [
            (nbytes, count, python, world_size)
            for nbytes in (1, 5000, 40_000, 1 << 20, 9_000_001)
            for count in (1, 8, 40)
            for python in (NOBODY, 1)
            for world_size in (2, 3)
            if nbytes * count < 1 << 27
        ],
        (1, 40, NOBODY, 2),
        (5000, 40, 1, 3),
        (40_000, 8, NOBODY, 3),
        (9_000_001, 8, 1, 2),
    ),
)
@ranks()
def test_around_a_ring(nbytes: int, count: int, python: int, world_size: int) -> None:
    """Messages of each size class fill more than a box, by machine code and by Python."""
    rank = interlace.get_rank()
    by_python(python)
    sizes = [max(0, nbytes - 7 * number) for number in range(count)]
    works = [
        interlace.isend(content(rank, number, size), (rank + 1) % world_size)
        for number, size in enumerate(sizes)
    ]
    source = (rank - 1) % world_size
    targets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    works += [interlace.irecv(target, source) for target in targets]
    for work in works:
        work.wait()
    for number, target in enumerate(targets):
        assert torch.equal(target, content(source, number, len(target)))


@pytest.mark.parametrize("python", [NOBODY, 0])
@pytest.mark.parametrize("nbytes", [100, 5_000_000])
@ranks(2)
def test_who_sends_first_and_receives_then_waits_for_nobody(nbytes: int, python: int) -> None:
    rank = interlace.get_rank()
    target = torch.zeros(nbytes, dtype=torch.uint8)
    by_python(python)
    for number in range(3):
        interlace.send(content(rank, number, nbytes), 1 - rank)
        interlace.recv(target, 1 - rank)
        assert torch.equal(target, content(1 - rank, number, nbytes))


# -- without memory --------------------------------------------------------------------------------


def no_memory() -> Any:
    """Allow no memory for kept messages."""
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    return mock.patch.object(mail.torch, "empty", side_effect=error)


@pytest.mark.parametrize("nbytes", [100, 5_000_000])
@ranks(2)
def test_an_early_message_without_memory_waits_for_its_receive(nbytes: int) -> None:
    message = content(0, 5, nbytes)
    if interlace.get_rank() == 0:
        work = interlace.isend(message, 1, tag=5)
        interlace.barrier()
        work.wait()
        return
    target = torch.zeros(nbytes, dtype=torch.uint8)
    other = interlace.irecv(torch.zeros(1), 0, tag=6)
    with no_memory():
        interlace.barrier()
        for _ in range(20):
            other.is_completed()
        interlace.recv(target, 0, tag=5)
    assert torch.equal(target, message)


@ranks(2)
def test_no_memory_to_keep_what_is_in_the_way_ends_the_group() -> None:
    """The receive asks for a message that comes after a large message."""
    rank, nbytes = interlace.get_rank(), 5_000_000
    said = "rank 1: no memory to keep 5000000 bytes from rank 0 .tag 5., not yet asked for"
    said = f"^{said}$" if rank else f"^rank 1 aborted the group: .*{said}"
    kind = interlace.InterlaceError if rank else interlace.AbortedError
    target = torch.full((nbytes,), 9, dtype=torch.uint8)
    works = []
    if rank == 0:
        works = [interlace.isend(content(0, tag, nbytes), 1, tag=tag) for tag in (5, 6)]
    with pytest.raises(kind, match=said) as caught:
        if rank == 1:
            with no_memory():
                interlace.recv(target, 0, tag=6)
        for work in works:
            work.wait()
    assert type(caught.value) is kind
    with pytest.raises(interlace.InterlaceError):  # and none later succeeds without its data
        interlace.recv(target, 1 - rank, tag=5)


# -- interrupted -----------------------------------------------------------------------------------


def interrupted(call: Callable[[], object], seconds: float, times: list[int]) -> None:
    """Call until it succeeds; ``times`` counts the exceptions of a timer's signal.

    The signal comes a little later each time, because an interrupt within microseconds of every call allows
    no progress.
    """

    def handler(number: int, frame: object) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                call()
                signal.setitimer(signal.ITIMER_REAL, 0)
                return
            except LateError:
                times[0] += 1
                seconds *= 1.02
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted_waits(nbytes: int) -> str:
    """Signals end rank 1's waits for a message until it comes, or all ranks get an error."""
    if interlace.get_rank() == 0:
        time.sleep(0.1)
        try:
            for number in range(20):
                interlace.isend(content(0, number, nbytes), 1).wait()
            interlace.recv(torch.zeros(1), 1)
        except interlace.InterlaceError as error:
            return type(error).__name__
        return "fine"
    times = [0]
    try:
        for number in range(20):
            target = torch.zeros(nbytes, dtype=torch.uint8)
            work = interlace.irecv(target, 0)
            interrupted(work.wait, 50e-6 * (1 + number), times)
            assert torch.equal(target, content(0, number, nbytes))
        interlace.send(torch.zeros(1), 0)
    except (interlace.InterlaceError, LateError) as error:  # which may come right after the other
        return type(error.__context__ if type(error) is LateError else error).__name__
    finally:
        assert times[0], "no wait was interrupted"
    return "fine"


@pytest.mark.parametrize("nbytes", [100, 300_000])
def test_a_wait_that_a_signal_ends_loses_nothing(nbytes: int) -> None:
    """A signal in the middle of a change ends the group on all ranks."""
    said = interlace.run(interrupted_waits, 2, nbytes, place="shm")
    assert said in (["fine"] * 2, ["AbortedError"] * 2)


@ranks(2)
def test_an_exception_in_the_midst_of_a_change_ends_the_group() -> None:
    said = "^rank 1 aborted the group: an exception while messages moved: LateError: now$"
    ended = pytest.raises(interlace.AbortedError, match=said)
    if interlace.get_rank() == 0:
        with ended:
            interlace.send(torch.ones(4), 1)
            interlace.recv(torch.ones(4), 1)
        return
    late = mock.patch.object(mail.Messages, "_finish", side_effect=LateError("now"))
    with late, ended:
        with suppress(LateError):
            interlace.recv(torch.ones(4), 0)
        interlace.recv(torch.ones(4), 0)


@ranks(2)
def test_waits_that_are_interrupted_share_one_bound(tmp_path: Path) -> None:
    """With a bound for each wait, a receive that is interrupted again and again would never end."""
    end, seconds = tmp_path / "end", 1.0
    if interlace.get_rank() == 0:
        while not end.exists():
            time.sleep(0.01)
        return
    with interlace.timeout(seconds):
        work = interlace.irecv(torch.zeros(1), 0)
    while True:
        try:
            interrupted(work.wait, seconds / 10, [0])
        except interlace.CollectiveTimeoutError:
            break
        except interlace.InterlaceError:
            continue
    end.touch()


@ranks(2)
def test_an_exception_while_an_end_is_told_loses_nothing() -> None:
    if interlace.get_rank() == 0:
        interlace.barrier()
        interlace.send(torch.ones(4), 1)
        return
    target = torch.zeros(4)
    work = interlace.irecv(target, 0)
    kind: Any = type(work._outcome)
    told, hit = kind.set_result, []

    def once(*args: Any) -> None:
        kind.set_result = told
        hit.append(args)
        raise LateError

    kind.set_result = once
    interlace.barrier()
    with suppress(LateError):  # if it does not come in the thread
        work.wait()
    work.wait()
    assert torch.equal(target, torch.ones(4)) and len(hit) == 1


def test_a_message_may_begin_while_others_are_looked_through() -> None:
    boxes = SimpleNamespace(move=lambda *_, **__: False)
    messages = mail.Messages(SimpleNamespace(rank=0), boxes, print)
    traffic = messages._traffic

    class Interrupted(mail._Traffic):
        def __getattribute__(self, name: str) -> Any:
            traffic[len(traffic)] = mail._Traffic()
            return super().__getattribute__(name)

    traffic[0] = Interrupted()
    assert not messages.unasked and not messages.leaving
    assert not messages.futures() and not messages.move(0.0, sleep=False)
    assert len(traffic) > 4


# -- ends ------------------------------------------------------------------------------------------


@ranks(2)
def test_messages_that_ends_of_others_begin() -> None:
    """Each receive of rank 1 starts in the callback of the one before, and its callback answers it."""
    count = 30
    found = [torch.full((1,), -1) for _ in range(count)]
    if interlace.get_rank() == 0:
        for number in range(count):
            interlace.send(torch.tensor([number]), 1)
        for answer in found:
            interlace.recv(answer, 1)
    else:
        works: list[Any] = []

        def receive(number: int) -> None:
            works.append(interlace.irecv(found[number], 0))
            works[-1].get_future().then(lambda _: ended(number))

        def ended(number: int) -> None:
            works.append(interlace.isend(found[number], 0))
            if number + 1 < count:
                receive(number + 1)

        receive(0)
        while len(works) < 2 * count:
            works[-1].wait()
        for work in works:
            work.wait()
    assert torch.cat(found).tolist() == list(range(count))


@ranks(2)
def test_a_large_message_that_fails_leaves_nothing_behind() -> None:
    group = interlace.new_group()
    if interlace.get_rank() == 0:
        with pytest.raises(interlace.InterlaceError, match="rank 1 has left the group"):
            interlace.isend(content(0, 0, 50_000_000), 1, group=group).wait()
    group.close()
    mail = own_engine(group).mail
    while mail._thread is not None:  # else this hangs
        time.sleep(1e-3)
    assert not mail._futures()


@ranks(2)
def test_a_child_that_is_forked_while_messages_move_waits_for_nobody() -> None:
    rank, target, mail = interlace.get_rank(), torch.zeros(1), own_engine().mail
    pending = interlace.irecv(target, 1 - rank)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with mail._lock:
            held.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forking with threads
        child = os.fork()
    if child == 0:
        for call in (pending.wait, lambda: interlace.isend(torch.ones(1), 1 - rank)):
            try:
                call()
            except interlace.InterlaceError as error:
                os.write(write, f"{error}\n".encode())
        os._exit(0)
    os.close(write)
    forked.set()
    thread.join()
    with open(read) as said:
        found = said.read().splitlines() if select.select([said], [], [], LIMIT)[0] else []
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(found) == 2 and all("a forked child has to make its own" in text for text in found)
    interlace.isend(torch.full((1,), 5.0), 1 - rank).wait()
    pending.wait()
    assert target.item() == 5


# -- aborted while they run: all ranks get an error, and no rank takes wrong data -------------------------


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
