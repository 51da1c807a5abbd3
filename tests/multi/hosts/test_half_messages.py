"""A rank killed or stopped in the middle of a large message between hosts: waits for the rest end."""

import multiprocessing
import os
import pathlib
import signal
import time
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.start.connect import connect_place
from tiers import thorough

LONG, SHORT = 240.0, 3.0  # timeouts
ELEMENTS = 3_000_000  # a message is under way most of the time


def gather_for_ever(rank: int, timeout: float, folder: pathlib.Path, said: Any) -> None:
    """Ranks on hosts of their own gather until one of them is gone; what rank 0 is told of that."""
    os.environ["INTERLACE_TRUST_NETWORK"] = "1"
    store = FileStore(str(folder / "store"), 2)
    place = connect_place(store, rank, 2, timeout=timeout, name="half", host=f"host {rank}")
    group = Communicator(place, range(2))
    mine = torch.full((ELEMENTS,), float(rank))
    out = torch.empty(2 * ELEMENTS)
    call = Call("all_gather", ())
    try:
        while True:
            group.run(
                "all_gather",
                lambda: group.engine.all_gather_single(call, out, mine),
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
        until = time.monotonic() + 120.0
        while not all(each.exists() for each in up) and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(delay)
        assert ranks[1].pid is not None
        os.kill(ranks[1].pid, end)
        text = said.get(timeout=LONG / 2)
        died, waited = "PeerDiedError: rank 1 ", "has waited 3 s for ranks [1]"
        assert (died if end == signal.SIGKILL else waited) in text, text
    finally:
        for each in ranks:
            each.kill()
            each.join()
