"""A rank killed or stopped in the middle of messages between hosts: waits for the rest end."""

import contextlib
import multiprocessing
import os
import pathlib
import re
import signal
import socket
import time
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from guard import MOST
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.places.connect import connect_place
from processes import heard, started
from tiers import thorough

LONG = 2 * MOST  # a timeout that no test reaches
SHORT = 5.0  # one that is reached; an op of ranks that both go on takes hundredths of that
ELEMENTS = 3_000_000  # a message is under way most of the time


def with_a_broken_connection(rank: int, world_size: int, folder: str, said: Any) -> None:
    """Rank 1 loses its connections, and lives; what both are told, who are in an op."""
    os.environ["INTERLACE_TRUST_NETWORK"] = "1"
    store = FileStore(f"{folder}/store", 2)
    place = connect_place(store, rank, 2, timeout=LONG, name="broken", host=f"host {rank}")
    group = Communicator(place, range(2))
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


def test_a_rank_whose_connection_breaks_is_not_said_to_have_died(tmp_path: pathlib.Path) -> None:
    with started(with_a_broken_connection, 2, tmp_path) as (_, ends):
        for rank in range(2):
            found = rf"rank {1 - rank} \(pid \d+\) died, or the connection to it broke, while"
            assert re.search(found, said := heard(ends[rank])), said


def send_to_a_stopped_rank(rank: int, world_size: int, folder: str, said: Any) -> None:
    """Rank 1 is stopped; what rank 0 is told, which sends it more than its connection holds."""
    os.environ["INTERLACE_TRUST_NETWORK"] = "1"
    store = FileStore(f"{folder}/store", 2)
    place = connect_place(store, rank, 2, timeout=LONG, name="stopped", host=f"host {rank}")
    place.set_timeout(SHORT)
    group = Communicator(place, range(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        while True:
            group.engine.send(Call("send"), torch.zeros(ELEMENTS), 1, 0).result()
    except InterlaceError as error:
        said.send(f"{type(error).__name__}: {error}")
    os._exit(0)


@thorough
def test_sends_to_a_stopped_rank_end_at_the_timeout(tmp_path: pathlib.Path) -> None:
    with started(send_to_a_stopped_rank, 2, tmp_path) as (_, ends):
        expected = (
            "CollectiveTimeoutError: rank 0: send to rank 1 (tag 0) has waited 5 s for ranks [1]"
        )
        assert heard(ends[0]) == expected


def gather_for_ever(rank: int, timeout: float, folder: pathlib.Path, said: Any) -> None:
    """Ranks on hosts of their own gather until one of them is gone; what rank 0 is told of that."""
    os.environ["INTERLACE_TRUST_NETWORK"] = "1"
    store = FileStore(str(folder / "store"), 2)
    place = connect_place(store, rank, 2, timeout=LONG, name="half", host=f"host {rank}")
    place.set_timeout(timeout)
    group = Communicator(place, range(2))
    mine = torch.full((ELEMENTS,), float(rank))
    out = torch.empty(2 * ELEMENTS)
    call = Call("all_gather", ())
    try:
        while True:
            group.run(
                "all_gather",
                lambda: group.engine.all_gather(call, out, mine),
                async_op=False,
            )
            (folder / f"up{rank}").touch()
    except InterlaceError as error:
        said.put(f"{type(error).__name__}: {error}")


@thorough
@pytest.mark.parametrize("delay", [0.0, 0.03, 0.06, 0.09])
@pytest.mark.parametrize(("end", "timeout"), [(signal.SIGKILL, LONG), (signal.SIGSTOP, SHORT)])
def test_a_wait_for_the_rest_of_a_message_ends(
    tmp_path: pathlib.Path, delay: float, end: signal.Signals, timeout: float
) -> None:
    """At once if its sender is known to be dead, else at the timeout."""
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    ranks = [
        context.Process(target=gather_for_ever, args=(r, timeout, tmp_path, said)) for r in range(2)
    ]
    for each in ranks:
        each.start()
    try:
        up = [tmp_path / f"up{rank}" for rank in range(2)]
        while not all(each.exists() for each in up):
            time.sleep(0.005)
        time.sleep(delay)
        assert ranks[1].pid is not None
        os.kill(ranks[1].pid, end)
        text = said.get()
        died, waited = "PeerDiedError: rank 1 ", "has waited 5 s for ranks [1]"
        assert (died if end == signal.SIGKILL else waited) in text, text
    finally:
        for each in ranks:
            each.kill()
            each.join()
