"""Messages of two ranks on one host: through boxes, in pieces, kept, interrupted, and without memory."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import interlace
from interlace.runtime.places.shm import matching
from multi.messages import message_ranks
from tiers import few

NOBODY = -1


def run(fn: Any, world_size: int, *args: Any) -> list[Any]:
    return interlace.run(fn, world_size, *args, place="shm", timeout=message_ranks.BOUND)


@pytest.mark.parametrize(
    ("nbytes", "count", "python", "world_size"),
    few(
        [
            (nbytes, count, python, world_size)
            for nbytes in (1, 5000, 40_000, 1 << 20, 9_000_001)
            for count in (1, 8, 40)
            for python in (NOBODY, 1)
            for world_size in (2, 3)
            if nbytes * count < 1 << 27
        ],
        (1, 40, NOBODY, 2),
        (5000, 40, 1, 3),
        (40_000, 8, NOBODY, 3),
        (9_000_001, 8, 1, 2),
    ),
)
def test_around_a_ring(nbytes: int, count: int, python: int, world_size: int) -> None:
    """Every size class, more at once than a box holds; by machine code and by Python, also mixed."""
    assert run(message_ranks.ring, world_size, nbytes, count, python) == [True] * world_size


@pytest.mark.parametrize("python", [NOBODY, 0])
@pytest.mark.parametrize("nbytes", [100, 5_000_000])
def test_who_sends_first_and_receives_then_waits_for_nobody(nbytes: int, python: int) -> None:
    assert run(message_ranks.send_before_receiving, 2, nbytes, python) == [True, True]


@pytest.mark.parametrize("nbytes", [100, 5_000_000])
def test_an_early_message_without_memory_waits_for_its_receive(nbytes: int) -> None:
    assert run(message_ranks.early_without_memory, 2, nbytes) == [True, True]


def test_no_memory_to_keep_what_is_in_the_way_ends_the_group() -> None:
    sender, receiver = run(message_ranks.behind_one_without_memory, 2, 5_000_000)
    text = "rank 1: no memory to keep 5000000 bytes from rank 0 (tag 5), not yet asked for"
    assert receiver == f"InterlaceError: {text}"
    assert sender.startswith("AbortedError: rank 1 aborted the group: ") and text in sender


@pytest.mark.parametrize("nbytes", [100, 300_000])
def test_a_wait_that_a_signal_ends_loses_nothing(nbytes: int) -> None:
    """Or it ends the group, if it came in the midst of a change, which all hear."""
    sender, (times, receiver) = run(message_ranks.interrupted_waits, 2, nbytes)
    assert times > 0, "no wait was interrupted"
    assert (sender[1], receiver) in [("fine", "fine"), ("AbortedError", "AbortedError")]


def test_an_exception_in_the_midst_of_a_change_ends_the_group() -> None:
    for text in run(message_ranks.interrupted_in_the_midst, 2):
        assert text == (
            "AbortedError: rank 1 aborted the group: an exception while messages moved: LateError: now"
        )


def test_waits_that_are_interrupted_share_one_bound(tmp_path: Path) -> None:
    assert run(message_ranks.bound_of_an_op, 2, 1.0, str(tmp_path / "end")) == [True, True]


def test_messages_that_ends_of_others_begin() -> None:
    """Ends are told when all is seen to: else a record would be read again by what they begin."""
    assert run(message_ranks.begun_by_callbacks, 2, 30) == [list(range(30))] * 2


def test_a_large_message_that_fails_leaves_nothing_behind() -> None:
    text, left = run(message_ranks.fails_while_it_leaves, 2, 50_000_000)[0]
    assert "rank 1 has left the group" in text and left == "0"


LAST_SEND = """
import sys, time, torch, torch.distributed as dist, interlace
from interlace.runtime.processes import worker
worker.END_SECONDS = 600.0  # however slow the receiver is
rank = int(sys.argv[1])
dist.init_process_group("interlace", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
dist.barrier()
x = torch.full((1_000_000,), float(rank + 1))
if rank == 0:
    kept = dist.isend(x, 1)
    if sys.argv[3] == "destroyed":
        dist.destroy_process_group()
else:
    time.sleep(0.3)
    dist.recv(x, 0)
    assert x.min() == x.max() == 1
    print("received")
"""


@pytest.mark.parametrize("how", ["left", "destroyed"])
def test_what_has_begun_to_leave_leaves_before_its_process_ends(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", LAST_SEND]
    first, second = (
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), how],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    )  # fmt: skip
    texts = first.communicate()[0], second.communicate()[0]
    assert (first.returncode, second.returncode) == (0, 0), texts
    assert texts[1].strip().endswith("received")


def test_an_exception_while_an_end_is_told_loses_nothing() -> None:
    assert run(message_ranks.interrupted_while_told, 2) == [True, True]


def test_a_child_that_is_forked_while_messages_move_waits_for_nobody() -> None:
    for *said, value in run(message_ranks.forked_while_messages_move, 2):
        assert len(said) == 2 and all("a forked child has to make its own" in text for text in said)
        assert value == "5.0"


def test_who_sleeps_is_woken_once_and_not_for_room_that_was_there() -> None:
    """Each ring is a call of the operating system, and may cost the one who rings its core."""
    assert run(message_ranks.wakes_of_a_sleeper, 2, 20) == [[1], [0]]


def test_a_message_may_begin_while_others_are_looked_through() -> None:
    """As a signal handler's may, between any two steps of Python."""
    boxes = SimpleNamespace(move=lambda *_, **__: False)
    messages = matching.Messages(SimpleNamespace(rank=0), boxes, print)
    traffic = messages._traffic

    class Interrupted(matching._Traffic):
        def __getattribute__(self, name: str) -> Any:
            traffic[len(traffic)] = matching._Traffic()
            return super().__getattribute__(name)

    traffic[0] = Interrupted()
    assert not messages.unasked and not messages.leaving
    assert not messages.futures() and not messages.move(0.0, sleep=False)
    assert len(traffic) > 4
