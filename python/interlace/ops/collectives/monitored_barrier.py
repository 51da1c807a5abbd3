"""``monitored_barrier``: a barrier after which rank 0 can say who has not come.

Every rank tells rank 0 that it came, and waits until rank 0 tells it that all have. Both ways are messages
between two ranks, with a number of their own for every monitored barrier of the group, so a rank that comes
late to one is not taken to have come to the next. If one has not come rank 0 tells that to those that have.
"""

import time
import weakref
from datetime import timedelta

import torch

from interlace.arguments import checks
from interlace.arguments.words import Group
from interlace.groups.groups import resolve
from interlace.ops.collectives import point_to_point
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import CollectiveTimeoutError, InterlaceError, PeerDiedError
from interlace.runtime.core.work import Work

FIRST_TAG = (1 << 30) + 1

_numbers: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def _monitored_barrier(
    communicator: Communicator,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Its CollectiveTimeoutError's ``waited_for`` are ranks of the group. If one refuses, all raise."""
    rank = communicator.rank
    refused: Exception | None = None
    try:
        with communicator.accepting():
            given = checks.seconds("timeout", timeout)
            if given is not None and given < 0:
                raise ValueError(f"timeout must not be negative, got {timeout}")
    except (TypeError, ValueError) as error:
        refused, given = error, None
    seconds = communicator.place.bound() if given is None else given
    number = _numbers[communicator] = _numbers.get(communicator, 0) + 1
    tag = FIRST_TAG + number
    token = torch.zeros(1, dtype=torch.int64, device=communicator.place.device)
    if refused is not None:
        token += 1 + rank
    if rank == 0:
        _collect(communicator, token, tag, seconds, wait_all_ranks)
    else:
        said = point_to_point._isend(communicator, token, 0, tag)
        if refused is not None:
            said.wait()
            raise refused
        try:
            _received(communicator, token, 0, tag).wait(max(seconds, 1e-3))
            if (number := int(token.item())) < 0:
                raise CollectiveTimeoutError(f"rank {-number} failed to pass it", (-number,))
        except InterlaceError as error:
            raise CollectiveTimeoutError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
                f"for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n{error}",
                (0,),
            ) from error
    if refused is not None:
        raise refused
    if number := int(token.item()):  # one more than that of a rank that refused its arguments
        raise ValueError(
            f"monitored_barrier: rank {number - 1} cannot take part: its timeout is no number of seconds"
        )


def _received(communicator: Communicator, token: torch.Tensor, peer: int, tag: int) -> Work:
    """A receive whose end is early if ``peer`` cannot come, for it waits for this rank elsewhere."""
    work = point_to_point._irecv(communicator, token, peer, tag)
    vars(work._outcome)["early"] = True
    return work


def _collect(
    communicator: Communicator, token: torch.Tensor, tag: int, seconds: float, wait_all_ranks: bool
) -> None:
    deadline = time.monotonic() + seconds
    milliseconds = round(seconds * 1000)
    late: dict[int, str] = {}
    tokens = [torch.empty_like(token) for _ in range(communicator.world_size)]
    works = [
        _received(communicator, tokens[peer], peer, tag)
        for peer in range(1, communicator.world_size)
    ]
    if works and seconds <= 0:
        raise CollectiveTimeoutError(
            f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {milliseconds} ms", (1,)
        )
    for peer, work in enumerate(works, 1):
        try:
            work.wait(max(deadline - time.monotonic(), 1e-3))
        except InterlaceError as error:
            late[peer] = f"\n{error}" if work.exception() is not None else ""
            if not isinstance(error, CollectiveTimeoutError):  # the group is over
                peer = error.rank if isinstance(error, PeerDiedError) else peer
                text = f"[Rank 0]: Rank {peer} failed to pass monitoredBarrier in {milliseconds} ms"
                raise CollectiveTimeoutError(f"{text}\n{error}", (peer,)) from error
            if not wait_all_ranks:
                break
    for each in tokens[1:]:
        token.copy_(torch.maximum(token, each))
    if late:
        token.fill_(-next(iter(late)))
    for peer, work in enumerate(works, 1):
        if not late or (work.is_completed() and work.exception() is None):
            point_to_point._isend(communicator, token, peer, tag)
    if late:
        names = f"Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, late))}"
        text = f"[Rank 0]: {names} failed to pass monitoredBarrier in {milliseconds} ms"
        raise CollectiveTimeoutError(text + "".join(late.values()), tuple(late))


def monitored_barrier(
    group: Group = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier in which rank 0 of the group names the ranks that have not come within ``timeout``.

    ``timeout``: seconds or a timedelta, the group's by default; 0 always fails. ``wait_all_ranks``: name
    every missing rank rather than the first; a rank that died is named at once, and so is one of the same
    host that cannot come, for it waits in another op for rank 0, if nothing else is to be
    done in their processes. Blocks. In ``sim``, which has no clock, a rank that never comes is a
    DeadlockError, which names it too.

    Raises CollectiveTimeoutError, a RuntimeError, on rank 0, and on the ranks that came; ValueError on all
    for a ``timeout`` less than 0. Semantics and messages: ``torch.distributed.monitored_barrier``.

    >>> interlace.run(interlace.monitored_barrier, 2, timeout=60)
    [None, None]
    """
    _monitored_barrier(resolve(group), timeout, wait_all_ranks)
