"""Ops and messages that are pending when something else happens."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import interlace
from faults.crew import LONG, Said, crew, folder, sum_is_right, tried
from faults.limits import MIB, POOR, OfAddresses
from faults.rows import Plan, Row, Trial
from guard import busy
from interlace.groups import groups
from multi.process_group.test_backend_failures import dropped_groups

RANKS = 3
EARLY = 256 * MIB
COUNTS = 1000, 30_000, 300_000
"""Numbers of messages whose receiver is interrupted, by so many signals each."""
MESSAGES, RINGS = 100, 4
BOUND = 2.0
"""The timeout of groups in which a signal interrupts a wait, in seconds of a quiet machine."""


def ended(found: Sequence[Any]) -> list[Said]:
    """Return the messages of ranks that have ended, or of silent ranks."""
    return [each for each in found if isinstance(each, Said)]


# -- no memory for a message ---------------------------------------------------------------------------


def with_early_message(join: Any, end: Any, broken: bool) -> None:
    """Send a message before its receive to a rank without memory for it.

    Report this rank's errors, and whether a receive returned without its data.
    """
    api, missing = join(), False
    rank = api.get_rank()
    calls: list[Any] = []
    if rank == POOR:
        late, early = torch.zeros(4), torch.zeros(EARLY // 4)
        calls = [partial(api.recv, late, 0, tag=2), partial(api.recv, early, 0, tag=1)]
    elif rank == 0:
        works = [
            api.isend(torch.ones(EARLY // 4), POOR, tag=1),
            api.isend(torch.ones(4), POOR, tag=2),
        ]
        calls = [work.wait for work in works]
    said = []
    for number, call in enumerate(calls):
        if rank == POOR and number == 0 and not broken:
            with OfAddresses():
                said.append(tried(call))
        else:
            said.append(tried(call))
        if rank == POOR and not said[-1].kind:
            missing |= not bool((late, early)[number].eq(1).all())
    said.append(tried(api.barrier))
    end.send(([each for each in said if each.kind], missing))


def without_memory(plan: Plan) -> Iterator[Trial]:
    """All ranks must name the rank without memory, or the message waits at its sender and arrives.

    The control has memory, so that no error comes.
    """
    for _ in range(plan.trials):
        with crew("shm", RANKS, with_early_message, plan.broken, timeout=LONG / 4) as team:
            found = team.all_said(seconds=LONG / 2)
        if ended(found):
            yield Trial(False, said=str(found))
            continue
        errors = [said for said, _ in found]
        heard = all(any(f"rank {POOR}" in each.text for each in said) for said in errors)
        arrived = not any(errors) and not plan.broken
        whole = not any(missing for _, missing in found)
        times = [1e3 * (said[0].ended - said[0].begun) for said in errors if said]
        yield Trial(whole and (heard or arrived), times, str(found))


# -- an exception of a signal handler ------------------------------------------------------------------


class Alarm(BaseException):
    """The exception of the signal handler."""


def interrupted(join: Any, end: Any, seed: int, comes: bool, bound: float, broken: bool) -> None:
    """Rank 0 waits for messages, or for one that never comes, while signals raise; it waits again each
    time. Report the results, whether the data is right, and the result of a later op of all ranks.
    """
    api, chance, sizes, right = join(), random.Random(seed), random.Random(seed), True
    armed = False  # a signal may come while its timer is being stopped
    api.barrier()
    groups.default_group().place.set_timeout(bound)

    def ring(*_: object) -> None:
        if armed:
            raise Alarm

    def receive(number: int) -> None:
        nonlocal right, armed
        received, rings = torch.zeros(sizes.choice(COUNTS)), RINGS
        work, done = api.irecv(received, 1, tag=number), False
        while not done:
            try:
                after = chance.uniform(50e-6, 900e-6) if comes else 0.3 * bound
                armed = True
                signal.setitimer(signal.ITIMER_REAL, after if rings else 0)
                work.wait()
                done = True
            except Alarm:
                rings -= 1
            finally:
                armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        right &= bool(received.eq(number).all())

    def messages() -> None:
        for number in range(1, MESSAGES if comes else 2):
            receive(number)

    def sends() -> None:
        for number in range(1, MESSAGES):
            api.send(torch.full((sizes.choice(COUNTS),), float(number + broken)), 0, tag=number)

    if api.get_rank() == 0:
        signal.signal(signal.SIGALRM, ring)
        said = tried(messages)
    elif comes:
        said = tried(sends)
    else:  # a wait for rank 0 would be a deadlock error at once
        said = tried(partial(time.sleep, 2.5 * bound))
    end.send((said, right, tried(partial(sum_is_right, api))))


def signalled(comes: bool, plan: Plan) -> Iterator[Trial]:
    """A message arrives in one of the waits, or the rank ends the group on all ranks.

    A message that never comes is an error after the bound of the op. In the control other data comes, or
    the bound is four times as long.
    """
    for seed in range(plan.trials):
        bound = BOUND * busy()
        given = 4 * bound if plan.broken and not comes else bound
        arguments = seed, comes, given, plan.broken
        with crew("shm", 2, interrupted, *arguments, timeout=LONG) as team:
            found = team.all_said(seconds=LONG)
        if ended(found):
            yield Trial(False, said=str(found))
            continue
        (said, right, after), (_, _, others) = found
        took = said.ended - said.begun
        if said.kind:
            lost = bool(re.search("deadlock|has waited", said.text))
            right &= bool(after.kind and others.kind) and lost != comes
        else:
            right &= comes and after.text == others.text == "True"
            took /= MESSAGES
        yield Trial(right and took < 2 * bound, [1e3 * took], str(found))


# -- the end of a group, and of its last reference -----------------------------------------------------


def closing(join: Any, end: Any, times: int, broken: bool) -> None:
    """Close a group while an op runs, and report the result of its wait.

    In the control one rank closes it without a call of the op.
    """
    api, chance = join(), random.Random(1)
    rank = api.get_rank()
    for number in range(times):
        group, out = api.new_group(), torch.full((1000,), float(rank))
        time.sleep(chance.random() * 0.01 * rank)
        if broken and rank:
            work = None
        elif number % 2:
            work = api.all_reduce(out, group=group, async_op=True)
        elif rank:
            work = api.isend(out, 0, group=group)
        else:
            work = api.irecv(out, 1, group=group)
        group.close()
        said = tried(work.wait) if work is not None else Said("", "", 0.0, 0.0)
        end.send((said, bool(out.eq(1).all())))


def closed(place: str, plan: Plan) -> Iterator[Trial]:
    with crew(place, 2, closing, plan.trials, plan.broken, timeout=LONG / 4) as team:
        for _ in range(plan.trials):
            found = team.all_said()
            if ended(found):
                yield Trial(False, said=str(found))
                return
            right = all(not said.kind and whole for said, whole in found)
            yield Trial(right, [1e3 * (said.ended - said.begun) for said, _ in found], str(found))


def dropping(join: Any, end: Any, times: int, pending: str, broken: bool) -> None:
    """Drop groups with an op pending on rank 0; in the control a descriptor is left each time."""
    join()
    if broken:
        made = interlace.new_group
        interlace.new_group = lambda *some: (os.dup(0), made(*some))[1]  # type: ignore[assignment]
    end.send(dropped_groups(times, pending, LONG / 20 if broken else LONG / 2))


def dropped(place: str, plan: Plan) -> Iterator[Trial]:
    for pending in ("op", "message", "large message"):
        with crew(place, 2, dropping, plan.trials, pending, plan.broken, timeout=LONG) as team:
            found = team.all_said()
        yield from [Trial(found == [True, True], said=f"{pending}: {found}")] * plan.trials


# -- the end of the process ----------------------------------------------------------------------------

EXITS = """
import atexit, os, sys, threading, time, torch, interlace
from torch.distributed import FileStore
from interlace.groups import groups
from interlace.runtime.processes import worker
from interlace.runtime.places.connect import connect_place

folder, times, broken = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"

def on_rank(rank, path):
    if broken:
        atexit.unregister(worker._at_exit)
    store = FileStore(path, 2)
    place = connect_place(store, rank, 2, timeout=60, name="exits")
    groups.install(place, all_threads=True)
    begun, ends = threading.Event(), threading.Event()

    def follow(future):
        begun.set()
        ends.wait()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            torch.ones(1000).sum()
        open(f"{path}.followed", "w").close()

    works.append(interlace.irecv(torch.ones(4), 1 - rank))
    if rank == 1:
        store.wait(["follows"])  # after the op it would be called at once and in this thread
        interlace.all_reduce(torch.ones(4))
    else:
        work = interlace.all_reduce(torch.ones(4), async_op=True)
        works.append(work.get_future().then(follow))
        store.set("follows", "")
        begun.wait()
        atexit.register(ends.set)

works, child = [], False
for number in range(times):
    path, children = f"{folder}/{number}", []
    for rank in range(2):
        children.append(os.fork())
        if not children[-1]:
            on_rank(rank, path)
            child = True
            break
    if child:
        break
    began = time.monotonic()
    codes = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]
    right = codes == [0, 0] and os.path.exists(f"{path}.followed")
    print(right, 1e3 * (time.monotonic() - began), codes, flush=True)
"""


def exiting(plan: Plan) -> Iterator[Trial]:
    """End processes with ops pending, and with a callback at work in torch: none may abort.

    The control does not wait for threads.
    """
    with folder() as name:
        command = [sys.executable, "-c", EXITS, name, str(plan.trials), str(plan.broken)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        )
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    yield from [Trial(right == "True", [float(ms)], codes) for right, ms, codes in lines]
    if len(lines) < plan.trials:
        yield Trial(False, said=done.stderr[-2000:])


def rows() -> list[Row]:
    return [
        Row("no memory: an early message", "shm", without_memory, 5, 1),
        Row("signals in a wait", "shm", partial(signalled, True), 20, 3),
        Row("signals in a wait in vain", "shm", partial(signalled, False), 3, 1),
        Row("closed before the wait", "shm", partial(closed, "shm"), 50, 4),
        Row("closed before the wait", "hosts", partial(closed, "hosts"), 50, 4),
        Row("dropped with ops pending", "shm", partial(dropped, "shm"), 20, 5),
        Row("dropped with ops pending", "hosts", partial(dropped, "hosts"), 20, 5),
        Row("the end with ops pending", "shm", exiting, 30, 2),
    ]
