"""Processes that are not ranks.

Strangers send data to the ports of a job while it runs. Children that a rank forks get an error if they use
the group, and their parent continues.
"""

import contextlib
import os
import random
import re
import select
import signal
import socket
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from faults.crew import BRIEF, LONG, Crew, crew, repeated, sum_is_right, tried
from faults.rows import Plan, Row, Trial
from interlace.groups import groups
from interlace.runtime.places.hosts import links
from interlace.runtime.places.hosts.links import CONTROL, PACKET_BYTES
from interlace.runtime.processes.group import HostGroup

RANKS = 4
TALKING = 8
"""Connections to each port, with garbage."""
THERE = "strangers are there"


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
        Row("garbage to ports of ranks", "hosts", while_working, 5, 1),
    ]
