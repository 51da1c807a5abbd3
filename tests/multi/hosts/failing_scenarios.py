"""Scenarios of hosts_ranks.py in which a group of two hosts fails, and what every rank is told of it.

The group of each is its own: ranks 0, 1, 2 on one host, 3 and 4, if they are in it, on another.
"""

import os
import signal

import pytest
import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError
from multi.hosts.hosts_scenarios import run


def ended(group: Communicator) -> str:
    """What this rank's barriers end with: the first that fails, and the next says why, too."""
    texts: list[str] = []
    while len(texts) < 2:
        try:
            run(group, "barrier")
        except InterlaceError as error:
            texts.append(f"{type(error).__name__}: {error}")
    assert texts[0].startswith(texts[1])  # the first may have a note on numbers
    return texts[0]


def timing_out(group: Communicator) -> None:
    """One rank does not come to the barrier, and does not leave before the others have given up."""
    if group.rank != 1:
        assert " has waited 1 s for ranks" in ended(group)
        return
    texts = []
    for _ in range(10):
        with pytest.raises(InterlaceError) as caught:
            group.engine.recv(Call("recv"), torch.zeros(1), 0, 0).result(300)
        texts.append(str(caught.value))
        try:
            group.place.check()
        except InterlaceError:
            break
    # whichever gives up first ends the waits of all
    waits = "recv from rank 0 (tag 0) has waited 1 s", "barrier has waited 1 s"
    assert any(each in texts[0] for each in waits), texts


def timing_out_between_hosts(group: Communicator) -> None:
    """As above; nobody waits within a host."""
    timing_out(group)


def aborting(group: Communicator) -> None:
    if group.rank == 0:
        run(group, "barrier")
        group.place.abort("enough")
    assert ended(group) == "AbortedError: rank 0 aborted the group: enough"


def leaving(group: Communicator) -> None:
    """Rank 0 closes its group in good order; the others still want something of it."""
    run(group, "barrier")
    if group.rank == 0:
        group.close()
    else:
        assert "rank 0 has left the group" in ended(group)


def said_dead(group: Communicator, text: str) -> bool:
    return f"rank {group.world_size - 1} (pid " in text and "died" in text


def dying(group: Communicator) -> None:
    """The last rank is killed while the others are in an op, or between two."""
    run(group, "barrier")
    if group.rank == group.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert said_dead(group, ended(group))


def dying_while_others_receive(group: Communicator) -> None:
    """As above, and the others wait for messages: the last rank of the other host is its only one."""
    run(group, "barrier")
    last = group.world_size - 1
    if group.rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    for peer in (last, None):
        with pytest.raises(InterlaceError) as caught:
            group.engine.recv(Call("recv"), torch.zeros(1), peer, 0).result(300)
        assert said_dead(group, str(caught.value))
