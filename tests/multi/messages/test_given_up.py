"""Ops that a rank gives up in the midst of them: all hear of it, and nobody takes other data for his."""

from pathlib import Path

import pytest

import interlace
from guard import MOST as LONG
from interlace.runtime.places.pool import default_pool
from multi.messages import given_up_ranks as ranks

HOSTS = pytest.mark.parametrize("hosts", [1, 2])


@pytest.fixture(autouse=True, scope="module")
def processes_of_its_own() -> None:
    default_pool.close()


@HOSTS
@pytest.mark.parametrize("message", [True, False])
def test_an_op_whose_thread_cannot_be_started(tmp_path: Path, hosts: int, message: bool) -> None:
    """It had begun once, and a later receive got the data of the first."""
    path = str(tmp_path / "store")
    of_first, of_other = interlace.run(
        ranks.without_threads, 2, path, hosts, message, place="shm", timeout=LONG
    )
    assert of_first[0] == "RuntimeError: can't start new thread"
    for text in of_first[1], of_other[1]:
        assert "rank 0 aborted the group" in text and "can't start new thread" in text


@HOSTS
def test_a_signal_ends_a_receive_that_nobody_can_wait_for_again(tmp_path: Path, hosts: int) -> None:
    path = str(tmp_path / "store")
    for text in interlace.run(ranks.synchronous, 2, path, hosts, place="shm", timeout=LONG):
        assert "rank 0 aborted the group: recv went on after LateError" in text


def test_a_signal_ends_torchs_receive(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    for text in interlace.run(ranks.of_torch, 2, path, place="shm", timeout=LONG):
        assert "rank 0 aborted the group: recv went on after LateError" in text


@HOSTS
def test_a_handle_that_is_dropped_after_a_signal(tmp_path: Path, hosts: int) -> None:
    path = str(tmp_path / "store")
    for value, text in interlace.run(ranks.asynchronous, 2, path, hosts, place="shm", timeout=LONG):
        assert value == 7.0 and "and nobody has its handle" in text


@HOSTS
def test_a_send_that_is_late_alone_after_a_part_has_left(tmp_path: Path, hosts: int) -> None:
    """Its tensor is the caller's again, so the rest of the message would be something else."""
    path = str(tmp_path / "store")
    for text, values in interlace.run(ranks.late_alone, 2, path, hosts, place="shm", timeout=LONG):
        assert "send to rank 1 (tag 0) has waited 0.5 s" in text and not values


def test_what_was_sent_comes_though_something_is_sent_to_who_has_left(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    assert interlace.run(ranks.left, 2, path, place="shm", timeout=LONG) == [300, 300]
