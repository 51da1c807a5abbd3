"""Processes that are not ranks.

Strangers send data to the sockets of a job while it begins and while it runs. Children that a rank forks
get an error if they use the group, and their parent continues.
"""

import contextlib
import os
import random
import re
import select
import signal
import socket
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from faults.crew import BRIEF, LONG, Crew, crew, repeated, sum_is_right, tried
from faults.rows import NotHere, Plan, Row, Trial
from interlace.groups import groups
from interlace.runtime.places.hosts import links
from interlace.runtime.places.hosts.links import CONTROL, PACKET_BYTES
from interlace.runtime.processes import rendezvous, rendezvous as meetings
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.segment import LAYOUT_VERSION, MAGIC, NONCE_BYTES
from processes import heard, started

RANKS = 4
LATE = RANKS - 1
"""The rank that comes only when the strangers are there."""
NOBODY = 65534
IDLE, TALKING = 8, 8
"""Connections to each socket, on which nothing is said, and garbage."""
PREFIX, THERE = "interlace/faults/0/nonce", "strangers are there"


def stranger(rank: int, count: int, _: str, end: Any, port: int, user: int, as_rank: bool) -> None:
    """Become ``user``, read all addresses from the store, connect to them, and report the number of
    connections. With ``as_rank`` the stranger also sends rank 0 the data of the late rank.
    """
    try:
        os.setuid(user)
    except OSError as error:
        end.send(f"needs root, to become another user ({error})")
        return
    store, chance = TCPStore("127.0.0.1", port, is_master=False), random.Random(9)
    while not store.check([PREFIX]) or len(nonce := store.get(PREFIX).decode()) != 2 * NONCE_BYTES:
        time.sleep(1e-3)
    held = []
    for peer in range(LATE):
        while not store.check([key := f"{PREFIX}/{nonce}/{peer}"]):
            time.sleep(1e-3)
        address = bytes.fromhex(store.get(key).decode())[meetings._PID_BYTES :]
        said = [chance.randbytes(chance.randrange(1, 2000)) for _ in range(TALKING)]
        if as_rank and peer == 0:
            label = MAGIC, LAYOUT_VERSION, bytes.fromhex(nonce), RANKS, 0, 0, LATE
            said.append(rendezvous._MESSAGE.pack(*label))
        for text in [None] * IDLE + said:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(address)
            held.append(connection)
            if text is not None:
                with contextlib.suppress(OSError):  # it may be closed already
                    connection.send(text)
    end.send(len(held))
    time.sleep(LONG)


def joining(join: Any, end: Any, port: int, believing: bool) -> None:
    """Join; the late rank joins after the strangers. Report whether the sum is right."""
    if believing:
        rendezvous._uid = lambda _: os.geteuid()
    store, connect = TCPStore("127.0.0.1", port, is_master=False), meetings.connect

    def late(group: Any, meeting: Any) -> Any:
        while group.rank == LATE and not store.check([THERE]):
            time.sleep(1e-3)
        return connect(group, meeting)

    meetings.connect = late
    end.send(tried(lambda: sum_is_right(join())))


def while_joining(user: int | None, plan: Plan) -> Iterator[Trial]:
    """Another user has all data of the late rank; the control takes it for this user.

    A stranger of this user, who may do everything, sends only garbage, and in the control the data of the
    late rank.
    """
    for _ in range(plan.trials):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        timeout = BRIEF if plan.broken else LONG
        with crew("shm", RANKS, joining, store.port, plan.broken, timeout=timeout) as team:
            who = os.geteuid() if user is None else user
            rest = team.store.port, who, user is not None or plan.broken
            with started(stranger, 1, "", *rest) as (_, ends):
                connected = heard(ends[0], LONG)
                if isinstance(connected, str):
                    raise NotHere(connected)
                moment = time.monotonic()
                store.set(THERE, "")
                said = team.all_said()
        right = connected > LATE * IDLE and all(each.text == "True" for each in said)
        yield Trial(right, [1e3 * (each.ended - moment) for each in said], str(said))


# -- between hosts -----------------------------------------------------------------------------------


def listening(pid: int) -> list[tuple[int, str, int]]:
    """Return the TCP ports of a process: family and address of each."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    found = []
    for name, family, host in (
        ("tcp", socket.AF_INET, "127.0.0.1"),
        ("tcp6", socket.AF_INET6, "::1"),
    ):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append((family, host, int(fields[1].rpartition(":")[2], 16)))
    return found


def at_work(join: Any, end: Any, port: int, broken: bool) -> None:
    """Sum until the strangers have finished, then 200 times more; report the result.

    In the control rank 1 itself sends garbage to rank 2 through their connection.
    """
    api = join()
    store = TCPStore("127.0.0.1", port, is_master=False)
    assert sum_is_right(api)
    end.send("at work")

    def work() -> bool:
        more = 200
        enough = torch.zeros(1)
        while more:
            if broken and more == 100 and api.get_rank() == 1:
                links: Any = groups.default_group().place
                garbage = torch.full((PACKET_BYTES,), 7, dtype=torch.uint8)
                links._links._gloo.send([garbage], 2, CONTROL)
            enough[0] = float(store.check([THERE]))
            api.broadcast(enough, 0)
            more -= int(enough)
            assert sum_is_right(api)
        return True

    end.send(tried(work))


def said_to_ports(team: Crew, chance: random.Random) -> int:
    """Send garbage to all ports of all ranks, and return the number of connections."""
    count = 0
    for process in team.processes:
        for family, host, port in listening(process.pid):
            for _ in range(TALKING):
                with socket.socket(family, socket.SOCK_STREAM) as connection:
                    connection.settimeout(1.0)
                    try:
                        connection.connect((host, port))
                        connection.sendall(chance.randbytes(chance.randrange(1, 5000)))
                    except OSError:
                        continue  # the port is another interface's
                    count += 1
    return count


def while_working(plan: Plan) -> Iterator[Trial]:
    chance = random.Random(10)
    for _ in range(plan.trials):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with crew("hosts", RANKS, at_work, store.port, plan.broken) as team:
            team.reports()
            connected = said_to_ports(team, chance)
            store.set(THERE, "")
            said = team.all_said()
        right = bool(connected) and all(each.text == "True" for each in said)
        yield Trial(right, [], f"{connected} connections: {said}")


# -- forked children -----------------------------------------------------------------------------------


def in_a_child(call: Any, seconds: float) -> str:
    """Return the error of ``call`` in a forked child, and its time in ms; empty if it takes longer."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forking with threads
        child = os.fork()
    if child == 0:
        # also if its parent ends before: it would keep open what the parent writes to
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        said = tried(call)
        os.write(write_end, f"{1e3 * (said.ended - said.begun)} {said.kind}: {said.text}".encode())
        os._exit(0)
    os.close(write_end)
    text = b""
    if select.select([read_end], [], [], seconds)[0]:
        text = os.read(read_end, 1 << 16)
    os.close(read_end)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return text.decode()


def in_children(join: Any, end: Any, times: int, broken: bool) -> None:
    """Report the error of a child, and whether the ranks continue, ``times`` times."""
    if broken:
        HostGroup.disown = lambda *_: None  # type: ignore[method-assign]
    api = join()
    if broken:
        links._links.clear()
    for _ in range(times):
        said = in_a_child(partial(api.all_reduce, torch.ones(4)), BRIEF if broken else LONG / 2)
        end.send((said, tried(partial(sum_is_right, api))))


def judged(reports: list[Any]) -> Trial:
    """Every child must get its error, and the ranks continue."""
    refused = all("a forked child has to make its own" in said for said, _ in reports)
    times = [float(said.split()[0]) for said, _ in reports if said]
    return Trial(refused and all(sums.text == "True" for _, sums in reports), times, str(reports))


def forked(place: str) -> Row:
    measure = partial(repeated, place, 2, in_children, judged)
    return Row("a forked child uses the group", place, measure, 100, 10)


def rows() -> list[Row]:
    return [
        forked("shm"),
        forked("hosts"),
        Row("another user connects", "shm", partial(while_joining, NOBODY), 20, 2),
        Row("garbage while ranks join", "shm", partial(while_joining, None), 20, 2),
        Row("garbage to ports of ranks", "hosts", while_working, 5, 1),
    ]
