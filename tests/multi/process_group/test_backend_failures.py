"""Failures that torch's C++ must see as such, modes, gradients, and the end and the start of groups."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import interlace
from interlace.runtime.processes import dump
from multi.process_group import backend_failure_ranks as ranks
from support import free_port
from tiers import thorough

ENDS = """
import sys, torch.distributed as dist

_, path, rank = sys.argv
dist.init_process_group("interlace", init_method=f"file://{path}", rank=int(rank), world_size=2)
groups = [dist.new_group() for _ in range(3)]
for group in groups:
    dist.barrier(group)
raise RuntimeError("the mistake")
"""

PENDING = """
import atexit, sys, threading, time, torch, torch.distributed as dist

_, path, rank = sys.argv
store = dist.FileStore(path, 2)
dist.init_process_group("interlace", store=store, rank=int(rank), world_size=2)
begun, ends = threading.Event(), threading.Event()

def follow(future):
    begun.set()
    ends.wait()
    until = time.monotonic() + 1
    while time.monotonic() < until:
        torch.ones(1000).sum()
    print("has followed", flush=True)

if rank == "1":
    store.wait(["follows"])  # of a finished op, it would be called at once and in this thread
    dist.all_reduce(torch.ones(4))
else:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    following = work.get_future().then(follow)
    store.set("follows", "")
    begun.wait()
    atexit.register(ends.set)
"""


def on_ranks(function: Any, world_size: int, *args: Any) -> list[Any]:
    return interlace.run(function, world_size, *args, place="shm")


def test_a_backward_whose_peer_has_left_raises(tmp_path: Path) -> None:
    texts = on_ranks(ranks.backward_without_a_peer, 2, str(tmp_path / "store"))
    assert "rank 1 has left the group" in texts[0]


def test_an_op_that_fails_under_a_mode_raises(tmp_path: Path) -> None:
    texts = on_ranks(ranks.failing_under_a_mode, 2, str(tmp_path / "store"))
    assert "rank 1 has left the group" in texts[0]


def test_a_mode_on_one_rank(tmp_path: Path) -> None:
    found = on_ranks(ranks.under_a_mode, 2, str(tmp_path / "store"))
    both = [0.0, 1.0]
    assert found == [[both, both, [2.0], [1.0], 1], [both, both, [2.0], [0.0], 0]]


def test_functional_collectives_with_gradients(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(ranks.gradients, 2, str(tmp_path / "store"))):
        whole = [0.0, 4.0, 8.0, 12.0]
        assert found == [whole, whole[2 * rank : 2 * rank + 2], [2.0] * 4]


def test_inference_tensors(tmp_path: Path) -> None:
    found = on_ranks(ranks.inference, 2, str(tmp_path / "store"))
    assert found == [[3.0, 6.0] * 3] * 2


def test_again_on_the_same_port() -> None:
    port = free_port()
    assert on_ranks(ranks.same_port, 3, port, 3) == [3] * 3


def test_roots_and_peers_that_are_no_ranks(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(ranks.bad_ranks, 2, str(tmp_path / "store"))):
        *said, sum_after = found
        for name, value, text in zip(
            ("src", "dst", "dst", "dst"), (-1, 9, -1, -1), said, strict=True
        ):
            assert f"{name} must be within 0..1, got {value} (on rank {rank})" in text
        assert sum_after == "2.0"


def test_torchs_next_default_group_is_found(tmp_path: Path) -> None:
    found = on_ranks(ranks.another_default_group, 2, str(tmp_path / "store"))
    assert found == [[True, 1, True, 1, True]] * 2


def test_groups_do_not_wait_for_each_other() -> None:
    assert on_ranks(ranks.groups_in_different_order, 2) == [[2.0, 4.0]] * 2


def test_more_tensors_than_a_message_can_name() -> None:
    assert on_ranks(ranks.many_coalesced, 2, 1500) == [2.0 * sum(range(1500))] * 2


@pytest.mark.parametrize("pending", ["", "op", "message"])
def test_dropped_groups_leave_no_descriptors_and_no_threads(pending: str) -> None:
    """Nor do those of which an op is pending: the other rank has dropped the group, and so left it."""
    assert on_ranks(ranks.dropped_groups, 2, 10, pending) == [True, True]


def test_the_default_group_is_that_of_all_threads() -> None:
    assert on_ranks(ranks.in_another_thread, 2) == [[2.0], [2.0]]


@thorough
def test_a_process_of_many_groups_says_once_why_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path / "store")]
    env = {**os.environ, dump.VARIABLE: str(tmp_path / "records")}
    processes = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, env=env)
        for rank in range(2)
    ]
    for rank, process in enumerate(processes):
        said = [line for line in process.communicate()[1].splitlines() if "last ops" in line]
        assert len(said) == 1 and said[0].count(f"_rank_{rank}") == 4, said
        assert "its process ended with RuntimeError: the mistake" in said[0]


def test_what_runs_in_a_thread_when_the_process_ends_ends_before(tmp_path: Path) -> None:
    """Its thread once came back from torch when Python was gone, and aborted the process."""
    command = [sys.executable, "-c", PENDING, str(tmp_path / "store")]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(2)]
    for process, said in zip(processes, ("has followed\n", ""), strict=True):
        assert (*process.communicate(), process.returncode) == (said, "", 0)
