"""Messages of two ranks on one host: through boxes, in pieces, kept, interrupted, and without memory."""

import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from guard import LIMIT
from interlace.groups import groups
from interlace.runtime.places.shm import boxes, mail
from interlace.runtime.places.shm.engine import HostEngine
from ranks import ranks
from tiers import few

NOBODY = -1


class LateError(Exception):
    """The exception of the signal handler."""


def own_engine(group: Any = None) -> HostEngine:
    engine = (group or groups.default_group()).engine
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
