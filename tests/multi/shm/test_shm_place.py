"""The place ``shm``: processes of one host that share memory, and what happens when one fails."""

import contextvars
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from interlace.runtime.core.errors import (
    AbortedError,
    CollectiveTimeoutError,
    InterlaceError,
    RankError,
)
from interlace.runtime.places import pool as pool_module
from interlace.runtime.places.pool import ProcessPool
from interlace.runtime.processes import segment
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.meetings import StoreMeeting
from interlace.runtime.processes.segment import PAGE, Identity, create_segment, map_segment
from interlace.runtime.processes.waiting import Patience
from interlace.runtime.processes.worker import OrderedWorker
from multi.shm import shm_ranks as ranks
from support import shared_names
from tiers import thorough

NONCE = bytes(range(16))


def run(pool, function, *args, world_size, **options):
    return pool.run(function, args, setup=ranks.setup, world_size=world_size, **options)


# -- memory, signals and messages ------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [4, 3, 2, 1])  # the first starts all processes at once
def test_push_publish_wait(pool: ProcessPool, world_size: int) -> None:
    assert run(pool, ranks.ring, 8, True, world_size=world_size) == [[]] * world_size


def test_without_credits_data_is_overwritten(pool: ProcessPool) -> None:
    """The control of the test above: its delay does reveal a producer that does not wait."""
    wrong = run(pool, ranks.ring, 8, False, world_size=2)
    assert wrong[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_kernels_publish_and_wait_across_processes(pool: ProcessPool, world_size: int) -> None:
    assert run(pool, ranks.kernel_ring, world_size=world_size) == [True] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_300_exchanges(pool: ProcessPool, world_size: int) -> None:
    assert run(pool, ranks.exchanges, 300, 2, world_size=world_size) == [[]] * world_size


def test_one_message_area_is_not_enough(pool: ProcessPool) -> None:
    """The control of the test above: with a single area the late reader sees the next message."""
    wrong = run(pool, ranks.exchanges, 50, 1, world_size=2)
    assert any(sender == 0 for _, sender in wrong[1])


def test_message_that_does_not_fit(pool: ProcessPool) -> None:
    with pytest.raises(ValueError, match=r"a long exchange has 65537 bytes.*at most 65536"):
        run(pool, ranks.too_long, world_size=2)


def test_unequal_allocation(pool: ProcessPool) -> None:
    texts = run(pool, ranks.unequal_allocation, world_size=2)
    assert texts == ["nbytes differs: rank 0 allocates 4096 bytes, rank 1 8192"] * 2


def test_allocation_without_memory_fails_on_all_ranks(pool: ProcessPool) -> None:
    for text, total in run(pool, ranks.allocation_without_memory, world_size=2):
        assert text.startswith(f"rank 1: cannot allocate {PAGE + (1 << 20)} bytes")
        assert total == 0


def test_more_memory_than_there_is() -> None:
    with pytest.raises(InterlaceError, match=str(PAGE + (1 << 50))):
        create_segment(Identity(NONCE, 0, 1, 1 << 50))


def test_memory_that_is_left_in_control_groups(tmp_path: pathlib.Path) -> None:
    """Of the process's own group, of those around it, and in both versions; none of others'."""

    def limited(folder: str, limit: str, used: str, stat: str, amounts: Sequence[object]) -> None:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, value in zip((limit, used, "memory.stat"), amounts, strict=True):
            text = f"anon 5\n{stat} {value}\n" if name == "memory.stat" else str(value)
            (tmp_path / folder / name).write_text(text)

    second = "memory.max", "memory.current", "inactive_file"
    limited("a", *second, ("max", 70, 7))
    limited("a/b", *second, (100, 70, 7))
    limited("a/other", *second, (10, 10, 0))
    first = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    limited("memory", *first, (1000, 300, 0))
    limited("memory/job", *first, (500, 300, 50))
    groups = "9:name=systemd:/job\n4:memory:/job\n3:cpu:/elsewhere\n0::/a/b\n"
    assert list(segment.left_in_groups(groups, tmp_path)) == [250, 700, 37]
    assert list(segment.left_in_groups("0::/not/here\n", tmp_path)) == []


def test_subgroup_needs_no_others(pool: ProcessPool) -> None:
    answers = run(pool, ranks.in_subgroup, world_size=3)
    assert answers == [[b"2->0", b"0->1"] * 2, [], [b"2->0", b"0->1"] * 2]


def test_async_and_sync_messages_keep_their_order(pool: ProcessPool) -> None:
    for answers in run(pool, ranks.mixed_async, 24, world_size=2):
        assert all(mine == others for mine, others in answers)


# -- joining ---------------------------------------------------------------------------------------

OTHER = Identity(NONCE, 1, 2, 4096)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (Identity(bytes(16), 1, 2, 4096), "nonce is 000102.*expected 000000"),
        (Identity(NONCE, 0, 2, 4096), "rank is 1, expected 0"),
        (Identity(NONCE, 1, 3, 4096), "world size is 2, expected 3"),
        (Identity(NONCE, 1, 2, 8192), "size in bytes is 4096, expected 8192"),
    ],
)
def test_foreign_segment_is_rejected(expected: Identity, message: str) -> None:
    descriptor = create_segment(OTHER)
    try:
        assert map_segment(descriptor, OTHER).nbytes == PAGE + 4096
        with pytest.raises(InterlaceError, match=message):
            map_segment(descriptor, expected)
    finally:
        os.close(descriptor)


def test_foreign_file_is_rejected() -> None:
    descriptor = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(descriptor, OTHER.pack(), 0)
        os.ftruncate(descriptor, PAGE + 4096)
        with pytest.raises(InterlaceError, match="not sealed"):
            map_segment(descriptor, OTHER)
    finally:
        os.close(descriptor)


def test_sealed_segment_cannot_shrink() -> None:
    descriptor = create_segment(OTHER)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def test_one_name_again_and_again(pool: ProcessPool) -> None:
    """Nothing of a generation stays in the store, so the next one cannot take it for its own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    empty = store.num_keys()
    left = run(pool, ranks.connect_again, store.port, 5, world_size=3)
    assert left == [empty] * 3


def test_stale_nonce_in_the_store() -> None:
    """What a crashed generation left cannot be joined, and does not hang."""
    store = HashStore()
    store.set("interlace/crashed/0/nonce", NONCE.hex())
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1: ranks \[0\] have not joined"):
        HostGroup(StoreMeeting(store), 1, 2, timeout=0.2, prefix="interlace/crashed/0")


def test_late_rank_is_named() -> None:
    with pytest.raises(CollectiveTimeoutError) as caught:
        HostGroup(StoreMeeting(HashStore()), 0, 3, timeout=0.2, prefix="interlace/late/0")
    assert caught.value.waited_for == (1, 2)


# -- failing ---------------------------------------------------------------------------------------


def test_exception_names_its_rank(pool: ProcessPool) -> None:
    with pytest.raises(ZeroDivisionError, match="rank 2: ZeroDivisionError: rank 2 does") as caught:
        run(pool, ranks.raise_on, 2, ZeroDivisionError, world_size=4)
    assert isinstance(caught.value, RankError)
    assert caught.value.rank == 2
    assert "in raise_on" in str(caught.value)


def test_exception_that_does_not_pickle(pool: ProcessPool) -> None:
    with pytest.raises(InterlaceError, match="Stubborn: stubborn 1 2"):
        run(pool, ranks.raise_stubborn, world_size=2)


def test_result_that_does_not_pickle(pool: ProcessPool) -> None:
    with pytest.raises(TypeError, match="fn returned a function that cannot be pickled"):
        run(pool, ranks.unpicklable_result, world_size=2)


def test_function_that_does_not_pickle(pool: ProcessPool) -> None:
    with pytest.raises(TypeError, match=r"fn of a run .* define it at module level"):
        run(pool, lambda: None, world_size=2)


def test_argument_that_does_not_pickle(pool: ProcessPool) -> None:
    with pytest.raises(TypeError, match="args of a run"):
        run(pool, ranks.raise_on, threading.Lock(), world_size=2)


def test_abort_ends_every_wait(pool: ProcessPool) -> None:
    expected = ("rank 1 aborted the group: enough", True)
    assert run(pool, ranks.aborted, "enough", world_size=4) == [expected] * 4


def test_abort_of_the_whole_group_ends_waits_in_a_part(pool: ProcessPool) -> None:
    texts = run(pool, ranks.subgroup_sees_abort, world_size=3)
    assert texts[0] == "rank 1 aborted the group: the whole group"


def test_wait_for_a_rank_that_has_left(pool: ProcessPool) -> None:
    with pytest.raises(InterlaceError, match=r"rank 1 has left the group.*a barrier") as caught:
        run(pool, ranks.leaves_early, world_size=2)
    assert caught.value.rank == 0
    assert not isinstance(caught.value, CollectiveTimeoutError)


def test_wait_that_passes_its_bound(pool: ProcessPool) -> None:
    with pytest.raises(CollectiveTimeoutError, match=r"all_reduce number 7 .* for ranks \[1\]"):
        run(pool, ranks.late_for_exchange, world_size=2)


def test_forked_child_cannot_use_the_group(pool: ProcessPool) -> None:
    for text in run(pool, ranks.forked, world_size=2):
        assert "a forked child has to make its own" in text


def test_reason_to_give_up_must_hold_after_one_more_poll() -> None:
    """A peer may publish and then exit: the wait that was served by it is no failure."""
    looks: list[str] = []

    def interruption(doing: str, waited_for: Sequence[int]) -> InterlaceError | None:
        looks.append(doing)
        return InterlaceError("the peer is gone")

    patience = Patience(0, 10.0, interruption)
    while not looks:
        patience.step("an op", (1,))
    with pytest.raises(InterlaceError, match="the peer is gone"):
        patience.step("an op", (1,))
    assert len(looks) == 2


# -- ends of processes, in one test each because a new process costs seconds -----------------------


def test_killed_rank_is_named_by_all(pool: ProcessPool, tmp_path: pathlib.Path) -> None:
    """SIGKILL."""
    named = shared_names()
    with pytest.raises(RankError, match=r"rank 1: .* exit code -9 \(SIGKILL\)") as caught:
        run(pool, ranks.killed_in_a_wait, 1, str(tmp_path), world_size=4)
    assert caught.value.rank == 1
    for rank in (0, 2, 3):
        dead, text = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert dead == "1", f"rank {rank} says: {text}"
    assert shared_names() <= named


def test_pool_goes_on_after_a_process_ended(pool: ProcessPool) -> None:
    before = [pid for _, _, pid in run(pool, ranks.whoami, world_size=3)]
    with pytest.raises(RankError, match=r"rank 2: .* exit code 7"):
        run(pool, ranks.end_process, 2, 7, world_size=3)
    after = run(pool, ranks.whoami, world_size=3)
    assert [rank for rank, _, _ in after] == [0, 1, 2]
    kept = [old == new for old, (_, _, new) in zip(before, after, strict=True)]
    assert kept == [True, True, False]


@thorough
def test_run_that_does_not_end(pool: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time has passed as soon as rank 0 has reported."""
    run(pool, ranks.whoami, world_size=2)
    before, collect = len(pool.processes()), pool._collect
    monkeypatch.setattr(
        pool, "_collect", lambda late, until: collect(late, until if len(late) > 1 else 0.0)
    )
    with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] have not finished") as caught:
        run(pool, ranks.never_ends, 1, world_size=2)
    assert caught.value.waited_for == (1,)
    assert len(pool.processes()) == before - 1


def test_nothing_is_left(pool: ProcessPool) -> None:
    """Descriptors and mappings after runs that used memory are those from before."""
    world_size, buffers = 2, 3
    run(pool, ranks.use_memory, buffers, world_size=world_size)
    before = run(pool, ranks.resources, world_size=world_size)
    named = shared_names()
    for during, at_rest in zip(
        run(pool, ranks.use_memory, buffers, world_size=world_size), before, strict=True
    ):
        assert during[1] == at_rest[1] + buffers * world_size  # so the count does see mappings
        assert during[0] == at_rest[0]  # and a mapped buffer holds no descriptor
    assert run(pool, ranks.resources, world_size=world_size) == before
    assert shared_names() <= named


PARENT = """
if __name__ == "__main__":
    from multi.shm import shm_ranks as ranks
    from interlace.runtime.places.pool import ProcessPool
    ProcessPool(1).run(ranks.kill_parent, setup=ranks.setup)
"""


def test_processes_end_with_their_parent(tmp_path: pathlib.Path) -> None:
    """Even when the parent is killed; and starting says nothing on stderr."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == -9
    assert result.stderr == ""
    (pid,) = map(int, result.stdout.split())
    while pathlib.Path(f"/proc/{pid}/stat").exists():
        if pathlib.Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
            break  # ended; nobody has collected it
        time.sleep(0.01)


def as_script(folder: pathlib.Path, text: str, **how: Any) -> "subprocess.Popen[str]":
    """A Python of its own that runs ``text``, which is a file; with pipes for what it says."""
    (folder / "script.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


@thorough
def test_a_script_that_starts_ranks_when_it_is_imported(tmp_path: pathlib.Path) -> None:
    """It is told what to do once, and not by each of the processes that import it."""
    text = "import interlace\ninterlace.run(interlace.get_rank, 2, place='shm')\n"
    _, said = as_script(tmp_path, text).communicate()
    assert said.count("Traceback") == 1 and "freeze_support" not in said
    assert 'Put that under `if __name__ == "__main__":`' in said.splitlines()[-1]


def test_a_script_that_is_no_file_is_told_to_become_one() -> None:
    """Python's own text of that would be a traceback of each process."""
    text = "import interlace\ninterlace.run(interlace.get_rank, 2, place='shm')\n"
    path = os.pathsep.join(filter(None, sys.path))
    script = subprocess.run(
        [sys.executable],
        input=text,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert script.stderr.count("Traceback") == 1
    assert "<stdin> is no file: save it as one" in script.stderr.splitlines()[-1]


STARTING = """
import signal
import threading
import interlace

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    interlace.run(interlace.get_rank, 2, place="shm")
else:
    print("importing", flush=True)
    threading.Event().wait()
"""


@thorough
def test_an_interrupt_while_ranks_start_is_told_once(tmp_path: pathlib.Path) -> None:
    script = as_script(tmp_path, STARTING, start_new_session=True)
    assert script.stdout is not None
    assert script.stdout.readline() == "importing\n"
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does
    _, said = script.communicate()
    assert said.count("Traceback") == 1 and said.splitlines()[-1] == "KeyboardInterrupt"
    assert said.count("\n  File ") <= 5 and "selectors.py" not in said


def test_a_forked_process_does_not_do_what_its_parent_does_on_sigterm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where ranks are forked, a command's own handler would run in them, and print its traceback."""
    monkeypatch.setattr(pool_module, "START_METHOD", "fork")
    before = signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    try:
        child = pool_module._Child(0)
        assert child.connection.recv() == "ready"
    finally:
        signal.signal(signal.SIGTERM, before)
    child.process.terminate()
    child.process.join()
    assert child.process.exitcode == -signal.SIGTERM
    child.kill()


# -- the worker ------------------------------------------------------------------------------------


def test_worker_runs_in_order_with_the_context_of_the_caller() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=-1)
    worker, seen, gate = OrderedWorker("test"), [], threading.Event()
    assert not worker.unfinished
    first = worker.submit(gate.wait)
    for number in range(50):
        variable.set(number)
        future = worker.submit(lambda number=number: seen.append((number, variable.get())))
    assert worker.unfinished
    gate.set()
    future.result()
    assert first.result() and not worker.unfinished
    assert seen == [(number, number) for number in range(50)]
    worker.close()


def test_worker_delivers_exceptions_and_goes_on() -> None:
    worker = OrderedWorker("test")
    failing, fine = worker.submit(lambda: 1 // 0), worker.submit(lambda: "fine")
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert fine.result() == "fine"
    worker.close()


def test_closed_worker_fails_what_has_not_started() -> None:
    worker, gate, started = OrderedWorker("test"), threading.Event(), threading.Event()
    running = worker.submit(lambda: (started.set(), gate.wait()))
    waiting = worker.submit(lambda: None)
    started.wait()
    worker.close(timeout=0)
    gate.set()
    assert running.result() == (None, True)
    with pytest.raises(AbortedError):
        waiting.result()
    with pytest.raises(AbortedError):
        worker.submit(lambda: None)
