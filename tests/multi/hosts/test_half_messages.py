"""A rank killed or stopped in the middle of messages between hosts: waits for the rest end."""

import contextlib
import itertools
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.errors import InterlaceError
from multi.shm.members import LONG, joined
from processes import heard, started
from tiers import thorough

SHORT = 5.0  # a timeout that is reached; an op of ranks that both go on takes hundredths of that
ELEMENTS = 3_000_000  # a message is under way most of the time


def with_a_broken_connection(rank: int, world_size: int, folder: str, said: Any) -> None:
    """Rank 1 loses its connections, and lives; what both are told, who are in an op."""
    group = joined(rank, folder)
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


def send_to_a_stopped_rank(rank: int, world_size: int, folder: str, said: Any) -> None:
    """Rank 1 is stopped; what rank 0 is told, which sends it more than its connection holds."""
    group = joined(rank, folder, SHORT)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        while True:
            group.engine.send(Call("send"), torch.zeros(ELEMENTS), 1, 0).result()
    except InterlaceError as error:
        said.send(f"{type(error).__name__}: {error}")
    os._exit(0)


@thorough
def test_sends_to_a_stopped_rank_end_at_the_timeout(tmp_path: Path) -> None:
    with started(send_to_a_stopped_rank, 2, tmp_path) as (_, ends):
        expected = (
            "CollectiveTimeoutError: rank 0: send to rank 1 (tag 0) has waited 5 s for ranks [1]"
        )
        assert heard(ends[0]) == expected


def gather_for_ever(rank: int, world_size: int, folder: str, said: Any, timeout: float) -> None:
    """Until one rank is gone; what the other is told of that."""
    group = joined(rank, folder, timeout)
    mine, out = torch.full((ELEMENTS,), float(rank)), torch.empty(2 * ELEMENTS)
    gather = group.engine.all_gather
    try:
        for number in itertools.count():
            group.run("all_gather", lambda: gather(Call("all_gather"), out, mine), async_op=False)
            if number == 0:
                said.send("up")
    except InterlaceError as error:
        said.send(f"{type(error).__name__}: {error}")


@thorough
@pytest.mark.parametrize("delay", [0.0, 0.03, 0.06, 0.09])
@pytest.mark.parametrize(
    ("end", "timeout", "text"),
    [
        (signal.SIGKILL, LONG, "PeerDiedError: rank 1 "),
        (signal.SIGSTOP, SHORT, "has waited 5 s for ranks [1]"),
    ],
)
def test_a_wait_for_the_rest_of_a_message_ends(
    tmp_path: Path, delay: float, end: signal.Signals, timeout: float, text: str
) -> None:
    """At once if its sender is known to be dead, else at the timeout."""
    with started(gather_for_ever, 2, tmp_path, timeout) as (processes, ends):
        assert [heard(each) for each in ends] == ["up", "up"]
        time.sleep(delay)
        os.kill(processes[1].pid, end)
        assert text in heard(ends[0])
