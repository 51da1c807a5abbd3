"""A rank killed or stopped in the middle of messages between hosts: waits for the rest end."""

import contextlib
import functools
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
from processes import heard, started
from ranks import LONG, joined
from tiers import thorough

SHORT = 5.0  # a timeout that is reached; an op of ranks that both go on takes hundredths of that
ELEMENTS = 3_000_000  # a message is under way most of the time


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


def moving_for_ever(
    rank: int, world_size: int, folder: str, said: Any, timeout: float, op: str
) -> None:
    """Run ops until one rank has ended; report the other rank's error."""
    group = joined(rank, world_size, folder, timeout=timeout)
    engine, mine, out = group.engine, torch.ones(ELEMENTS), torch.empty(2 * ELEMENTS)
    try:
        for number in itertools.count():
            if op == "all_gather":
                gather = functools.partial(engine.all_gather, Call(op), out, mine)
                group.run(op, gather, async_op=False)
            elif rank == 0:
                engine.send(Call("send"), mine, 1, 0).result()
            else:
                engine.recv(Call("recv"), mine, 0, 0).result()
            if number == 0:
                said.send("up")
    except InterlaceError as error:
        said.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # a part of a message to a stopped rank has not left yet


@thorough
@pytest.mark.parametrize("delay", [0.0, 0.03, 0.06, 0.09])
@pytest.mark.parametrize(
    ("op", "end", "timeout", "text"),
    [
        ("all_gather", signal.SIGKILL, LONG, "PeerDiedError: rank 1 "),
        ("all_gather", signal.SIGSTOP, SHORT, "has waited 5 s for ranks [1]"),
        ("send", signal.SIGSTOP, SHORT, "send to rank 1 (tag 0) has waited 5 s for ranks [1]"),
    ],
)
def test_a_wait_for_the_rest_of_a_message_ends(
    tmp_path: Path, delay: float, op: str, end: signal.Signals, timeout: float, text: str
) -> None:
    with started(moving_for_ever, 2, tmp_path, timeout, op) as (processes, ends):
        assert [heard(each) for each in ends] == ["up", "up"]
        time.sleep(delay)
        os.kill(processes[1].pid, end)
        assert text in heard(ends[0])
