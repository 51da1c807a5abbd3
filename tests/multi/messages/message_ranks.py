"""Ranks of test_messages.py."""

import ctypes
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import interlace
from interlace.groups import groups
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.shm import boxes, matching
from interlace.runtime.places.shm.engine import HostEngine
from interlace.runtime.processes.control import ANYONE, BELL

BOUND = 600.0


class LateError(Exception):
    """What the handler of a signal raises."""


def by_python(rank: int) -> None:
    """The group of this run moves pieces by Python on this rank."""
    if interlace.get_rank() == rank:
        engine, made = groups.default_group().engine, boxes._machine_code
        assert isinstance(engine, HostEngine)
        boxes._machine_code = lambda: None
        try:
            engine.mail._messages = matching.Messages(
                engine._group, engine.mail._new_boxes(), engine.mail.refused.append
            )
        finally:
            boxes._machine_code = made


def _of(source: int, tag: int, nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes, dtype=torch.int64).mul_(31 + source).add_(tag).to(torch.uint8)


def ring(nbytes: int, count: int, python: int) -> bool:
    """Several messages around a ring at once, of sizes that differ."""
    rank, world = interlace.get_rank(), interlace.get_world_size()
    by_python(python)
    sizes = [max(0, nbytes - 7 * number) for number in range(count)]
    works = [
        interlace.isend(_of(rank, number, size), (rank + 1) % world)
        for number, size in enumerate(sizes)
    ]
    source, targets = (rank - 1) % world, [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    works += [interlace.irecv(target, source) for target in targets]
    for work in works:
        work.wait()
    return all(
        torch.equal(target, _of(source, number, len(target)))
        for number, target in enumerate(targets)
    )


def send_before_receiving(nbytes: int, python: int) -> bool:
    """Each sends to the other and waits for its end, before it receives: it is kept meanwhile."""
    rank = interlace.get_rank()
    target = torch.zeros(nbytes, dtype=torch.uint8)
    by_python(python)
    for number in range(3):
        interlace.send(_of(rank, number, nbytes), 1 - rank)
        interlace.recv(target, 1 - rank)
        if not torch.equal(target, _of(1 - rank, number, nbytes)):
            return False
    return True


@contextmanager
def no_memory() -> Iterator[None]:
    """Within it there is no memory to keep a message."""

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    real, matching.torch.empty = torch.empty, empty  # type: ignore[assignment]
    try:
        yield
    finally:
        matching.torch.empty = real


def early_without_memory(nbytes: int) -> bool:
    """A message comes early, and rank 1 has no memory for it: it stays where it is meanwhile."""
    message = _of(0, 5, nbytes)
    if interlace.get_rank() == 0:
        work = interlace.isend(message, 1, tag=5)
        interlace.barrier()
        work.wait()
        return True
    target = torch.zeros(nbytes, dtype=torch.uint8)
    other = interlace.irecv(torch.zeros(1), 0, tag=6)
    with no_memory():
        interlace.barrier()
        for _ in range(20):
            other.is_completed()
        interlace.recv(target, 0, tag=5)
    return torch.equal(target, message)


def behind_one_without_memory(nbytes: int) -> str:
    """What is asked for comes behind a large message for which there is no memory: all hear of it."""
    works = []
    if interlace.get_rank() == 0:
        works = [interlace.isend(_of(0, tag, nbytes), 1, tag=tag) for tag in (5, 6)]
    target = torch.full((nbytes,), 9, dtype=torch.uint8)
    try:
        if interlace.get_rank() == 1:
            with no_memory():
                interlace.recv(target, 0, tag=6)
        for work in works:
            work.wait()
    except interlace.InterlaceError as error:
        try:  # and none later succeeds without its data
            interlace.recv(target, 1 - interlace.get_rank(), tag=5)
        except interlace.InterlaceError:
            return f"{type(error).__name__}: {error}"
    return "no error"


def _interrupted(call: Callable[[], object], seconds: float, times: list[int]) -> None:
    """``call`` until it succeeds; ``times`` counts how often a timer's signal ended it by an exception.

    A little later each time: who is interrupted within microseconds of every call comes to nothing.
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


def interrupted_waits(nbytes: int) -> tuple[int, str]:
    """Rank 1's waits for a message are ended by signals until it comes: it comes, or all hear why not."""
    if interlace.get_rank() == 0:
        time.sleep(0.1)
        try:
            for number in range(20):
                interlace.isend(_of(0, number, nbytes), 1).wait()
            interlace.recv(torch.zeros(1), 1)
        except interlace.InterlaceError as error:
            return 0, type(error).__name__
        return 0, "fine"
    times = [0]
    try:
        for number in range(20):
            target = torch.zeros(nbytes, dtype=torch.uint8)
            work = interlace.irecv(target, 0)
            _interrupted(work.wait, 50e-6 * (1 + number), times)
            assert torch.equal(target, _of(0, number, nbytes))
        interlace.send(torch.zeros(1), 0)
    except (interlace.InterlaceError, LateError) as error:  # which may come right after the other
        return times[0], type(error.__context__ if type(error) is LateError else error).__name__
    return times[0], "fine"


def interrupted_in_the_midst() -> str:
    """An exception while Python's state of messages changes ends the group, on all ranks, at once."""
    rank, usual = interlace.get_rank(), matching.Messages._finish

    def finish(*args: Any) -> None:
        raise LateError("now")

    if rank == 1:
        matching.Messages._finish = finish  # type: ignore[method-assign]
    try:
        try:
            if rank == 0:
                interlace.send(torch.ones(4), 1)
                interlace.recv(torch.ones(4), 1)
            else:
                interlace.recv(torch.ones(4), 0)
        except LateError:
            interlace.recv(torch.ones(4), 0)
    except interlace.InterlaceError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        matching.Messages._finish = usual  # type: ignore[method-assign]
    return "no error"


def bound_of_an_op(seconds: float, end: str) -> bool:
    """A message that never comes, waited for again and again: the last wait ends with the op's bound."""
    if interlace.get_rank() == 0:
        while not Path(end).exists():
            time.sleep(0.01)
        return True
    engine = groups.default_group().engine
    assert isinstance(engine, HostEngine)
    work = interlace.irecv(torch.zeros(1), 0)
    work._outcome.bound = seconds  # type: ignore[union-attr]
    while True:
        try:
            _interrupted(work.wait, seconds / 10, [0])
        except interlace.CollectiveTimeoutError:
            break
        except interlace.InterlaceError:
            continue
    Path(end).touch()
    return True  # each wait was ended long before that: with bounds of their own this would have no end


def begun_by_callbacks(count: int) -> list[int]:
    """Each receive is begun by the end of the one before; rank 1 answers each, by its end, too."""
    rank = interlace.get_rank()
    if rank == 0:
        for number in range(count):
            interlace.send(torch.tensor([number]), 1)
        answers = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
        for answer in answers:
            interlace.recv(answer, 1)
        return [int(answer) for answer in answers]
    found = [torch.full((1,), -1) for _ in range(count)]
    works = []

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
    return [int(each) for each in found]


def fails_while_it_leaves(nbytes: int) -> list[str]:
    """What is left of a large send whose receiver has left: nothing that keeps a thread or the group."""
    rank = interlace.get_rank()
    group = interlace.new_group()
    if rank == 1:
        group.close()
        return []
    try:
        interlace.isend(_of(0, 0, nbytes), 1, group=group).wait()
    except interlace.InterlaceError as error:
        group.close()
        engine = group.engine
        assert isinstance(engine, HostEngine)
        while engine.mail._thread is not None:  # else this hangs
            time.sleep(1e-3)
        return [f"{error}", str(len(engine.mail._futures()))]
    return ["no error"]


def interrupted_while_told() -> bool:
    """An exception comes right before the end of a receive is told: it is told by the next wait."""
    if interlace.get_rank() == 0:
        interlace.barrier()
        interlace.send(torch.ones(4), 1)
        return True
    target, hit = torch.zeros(4), []
    work = interlace.irecv(target, 0)
    kind: Any = type(work._outcome)
    told = kind.set_result

    def interrupted(*args: Any) -> None:
        kind.set_result = told
        hit.append(args)
        raise LateError

    kind.set_result = interrupted
    interlace.barrier()
    with suppress(LateError):  # if it does not come in the thread
        work.wait()
    work.wait()
    return torch.equal(target, torch.ones(4)) and len(hit) == 1


def forked_while_messages_move() -> list[str]:
    """What a child says whose parent forks it while a thread of its own moves messages."""
    engine = groups.default_group().engine
    assert isinstance(engine, HostEngine)
    rank, target = interlace.get_rank(), torch.zeros(1)
    pending = interlace.irecv(target, 1 - rank)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.mail._lock:
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
            except InterlaceError as error:
                os.write(write, f"{error}\n".encode())
        os._exit(0)
    os.close(write)
    forked.set()
    thread.join()
    with open(read) as said:
        found = said.read().splitlines() if select.select([said], [], [], BOUND / 4)[0] else []
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    interlace.isend(torch.full((1,), 5.0), 1 - rank).wait()
    pending.wait()
    return [*found, str(target.item())]


def wakes_of_a_sleeper(count: int) -> list[int]:
    """How often ``count`` messages ring for rank 1, which sleeps; whether to take them rings for rank 0."""
    group = groups.default_group()
    engine = group.engine
    assert isinstance(engine, HostEngine)
    control = engine._group.control
    assert control is not None
    word = control.mail_asleep(1)
    asleep, rung = ctypes.c_int64.from_address(word), ctypes.c_uint32.from_address(word + BELL)
    found = []
    if interlace.get_rank() == 0:
        asleep.value, before = ANYONE, rung.value
        for number in range(count):
            interlace.send(torch.tensor([number]), 1)
        found.append(rung.value - before)
        asleep.value = 0
    interlace.barrier()
    if interlace.get_rank() == 1:
        asleep = ctypes.c_int64.from_address(control.mail_asleep(0))
        asleep.value = ANYONE
        for number in range(count):
            target = torch.zeros(1, dtype=torch.int64)
            interlace.recv(target, 0)
            assert int(target) == number
        found.append(int(asleep.value == 0))  # for room, of which there was enough
    interlace.barrier()
    return found
