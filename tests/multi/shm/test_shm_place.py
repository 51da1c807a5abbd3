"""The place ``shm``: processes of one host that share memory, and what happens when one fails."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore, TCPStore

import interlace
from interlace.groups.groups import default_group
from interlace.kernels.signal import ABORT_WORD, HEADER_WORDS, SPIN_LIMIT_WORD, wait_kernel
from interlace.runtime.core.errors import (
    AbortedError,
    CollectiveTimeoutError,
    InterlaceError,
    PeerDiedError,
    RankError,
)
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import WORD, Workspace, peers_of
from interlace.runtime.places import pool as pool_module
from interlace.runtime.places.pool import default_pool
from interlace.runtime.places.shm.place import ShmPlace
from interlace.runtime.processes import control, segment
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.rendezvous import StoreMeeting
from interlace.runtime.processes.segment import PAGE, Identity, create_segment, map_segment
from interlace.runtime.processes.waiting import Patience
from interlace.runtime.processes.worker import OrderedWorker
from ranks import ranks
from support import resources, shared_names
from tiers import few, thorough

NONCE = bytes(range(16))
ELEMENTS = 1 << 12


def of_rank() -> ShmPlace:
    place = default_group().place
    assert isinstance(place, ShmPlace)
    return place


def workspace(op: str) -> Workspace:
    """Make a channel with 16 slots and ELEMENTS int64."""
    place = of_rank()
    slot_offset = HEADER_WORDS * WORD
    data_offset = slot_offset + 16 * WORD
    buffer = place.allocate(data_offset + ELEMENTS * WORD)
    space = Workspace(0, buffer, slot_offset, data_offset, place.world_size, op)
    space.header(place.rank)[SPIN_LIMIT_WORD] = 1 << 62
    return space


def launched_wait(space: Workspace) -> KernelLaunch:
    """An interpreted kernel that waits for slot 1 of rank 1."""
    peers = peers_of(space.buffer, space.world_size)
    arguments = {"peers": peers, "source": 1, "slot_byte": space.slot_byte(1)}
    return KernelLaunch(wait_kernel, 1, arguments, space.op)


# -- memory, signals and messages ------------------------------------------------------------------


def ring(wait_for_credits: bool) -> None:
    """Write the next rank's data in every round.

    Rank 1 is slow between its wait and its read, so a producer that does not wait for the credit writes the
    next round over unread data.
    """
    place = of_rank()
    rank, world_size = place.rank, place.world_size
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    space, stream = workspace("ring"), place.new_stream("compute")
    for number in range(8):
        payload = torch.full((ELEMENTS,), 1000 * number + rank)
        if wait_for_credits:
            stream.wait_credits(space)
        stream.copy(space.data(after, 0, (ELEMENTS,), torch.int64), payload, "push")
        stream.publish(space, after, slot=3)
        stream.wait(space, before, slot=3)
        if rank == 1:
            time.sleep(0.02)
        received = space.data(rank, 0, (ELEMENTS,), torch.int64)
        assert (received == 1000 * number + before).all()
        stream.finish(space)
    place.exchange(b"", "the end of the ring")


@pytest.mark.parametrize("world_size", few([4, 3, 2, 1], 4, 1))
@ranks()
def test_push_publish_wait(world_size: int) -> None:
    ring(wait_for_credits=True)


def test_without_credits_data_is_overwritten() -> None:
    """The delay of the test above does reveal a producer that does not wait."""
    with pytest.raises(AssertionError, match="rank 1"):
        interlace.run(ring, 2, False, place="shm")


def message(rank: int, number: int) -> bytes:
    length = (
        (number * 977 + rank * 13) % (64 << 10) if number % 50 else (64 << 10) * (number % 100 > 0)
    )
    return (f"{rank}:{number};".encode() * (length // 4 + 1))[:length]


def exchanges(count: int) -> None:
    """Exchanges of changing length; rank 1 reads late."""
    place, read = of_rank(), control.Control.message

    def late(self: control.Control, peer: int, sequence: int) -> bytes:
        time.sleep(0.002)
        return read(self, peer, sequence)

    with mock.patch.object(control.Control, "message", late if place.rank == 1 else read):
        for number in range(count):
            answers = place.exchange(message(place.rank, number), "an exchange")
            assert answers == [message(rank, number) for rank in range(place.world_size)]


def exchanges_in_one_area(count: int) -> None:
    """This is the mutant: both areas are at the same place."""
    with mock.patch.object(control, "AREA", 0):
        exchanges(count)


@pytest.mark.parametrize("world_size", few([1, 2, 4], 2))
@ranks()
def test_300_exchanges(world_size: int) -> None:
    exchanges(300)


def test_one_message_area_is_not_enough() -> None:
    """With a single area the late reader sees the next message."""
    with pytest.raises(AssertionError, match="rank 1"):
        interlace.run(exchanges_in_one_area, 2, 50, place="shm")


@ranks(2)
def test_message_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"a long exchange has 65537 bytes.*at most 65536"):
        of_rank().exchange(bytes((64 << 10) + 1), "a long exchange")


@ranks(2)
def test_unequal_allocation() -> None:
    place = of_rank()
    said = "nbytes differs: rank 0 allocates 4096 bytes, rank 1 8192"
    with pytest.raises(ValueError, match=said):
        place.allocate(4096 * (place.rank + 1))


@ranks(2)
def test_allocation_without_memory_fails_on_all_ranks() -> None:
    place, said = of_rank(), f"^rank 1: cannot allocate {PAGE + (1 << 20)} bytes"
    known = segment.available_memory
    there = (lambda: 0) if place.rank == 1 else known
    with (
        mock.patch.object(segment, "available_memory", there),
        pytest.raises(InterlaceError, match=said),
    ):
        place.allocate(1 << 20)
    assert int(place.allocate(4096).peer_bytes[0].sum()) == 0


def test_more_memory_than_there_is() -> None:
    with pytest.raises(InterlaceError, match=str(PAGE + (1 << 50))):
        create_segment(Identity(NONCE, 0, 1, 1 << 50))


def test_memory_that_is_left_in_control_groups(tmp_path: pathlib.Path) -> None:
    """Limits of the own control group and of its parents count, in both versions of the interface."""

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


@ranks(3)
def test_one_name_again_and_again() -> None:
    place = of_rank()
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, *_ = place.exchange(str(own.port).encode(), "rank 0's store")
    store = TCPStore("127.0.0.1", int(port), is_master=False)
    empty = store.num_keys()
    place.exchange(b"", "all")
    for _ in range(5):
        meeting = StoreMeeting(store)
        again = ShmPlace(HostGroup(meeting, place.rank, 3, timeout=300, prefix="interlace/again/0"))
        again.exchange(b"", "again")
        again.close()
    place.exchange(b"", "all")
    assert store.num_keys() == empty
    place.exchange(b"", "rank 0's store may end")


def test_stale_nonce_in_the_store() -> None:
    """Nobody can join the data of a crashed generation, and nobody hangs."""
    store = HashStore()
    store.set("interlace/crashed/0/nonce", NONCE.hex())
    said = r"rank 1: ranks \[0\] have not joined"
    with pytest.raises(CollectiveTimeoutError, match=said) as caught:
        HostGroup(StoreMeeting(store), 1, 2, timeout=0.2, prefix="interlace/crashed/0")
    assert caught.value.waited_for == (0,)


# -- failing ---------------------------------------------------------------------------------------


def raise_on(rank: int, kind: type[Exception]) -> None:
    if of_rank().rank == rank:
        raise kind(f"rank {rank} does not want to")
    of_rank().exchange(b"", "waiting for the one that fails")


def test_exception_names_its_rank() -> None:
    with pytest.raises(ZeroDivisionError, match="rank 2: ZeroDivisionError: rank 2 does") as caught:
        interlace.run(raise_on, 4, 2, ZeroDivisionError, place="shm")
    assert isinstance(caught.value, RankError)
    assert caught.value.rank == 2
    assert "in raise_on" in str(caught.value)


class Stubborn(Exception):
    """An object that can be pickled, but not loaded."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"stubborn {one} {two}")


def raise_stubborn() -> None:
    raise Stubborn(1, 2)


def return_a_function() -> Any:
    return lambda: None


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "said"),
    [
        (raise_stubborn, (), InterlaceError, "Stubborn: stubborn 1 2"),
        (return_a_function, (), TypeError, "fn returned a function that cannot be pickled"),
        (lambda: None, (), TypeError, r"fn of a run .* define it at module level"),
        (print, (threading.Lock(),), TypeError, "args of a run"),
    ],
)
def test_what_does_not_pickle(
    function: Any, arguments: Any, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        default_pool.run(function, arguments, world_size=2)


@ranks(4)
def test_abort_ends_every_wait() -> None:
    place, space = of_rank(), workspace("an op")
    stream = place.new_stream("compute")

    def until_abort_word() -> None:
        while not int(space.header(place.rank)[ABORT_WORD]):
            time.sleep(0.001)

    with pytest.raises(AbortedError, match=r"^rank 1 aborted the group: enough$"):
        if place.rank == 1:
            place.abort("enough")
            place.abort("another reason")
            place.check()
        elif place.rank == 0:
            place.exchange(b"", "an exchange")
        elif place.rank == 2:
            stream.wait(space, 1, slot=1)
        else:
            space.header(place.rank)[SPIN_LIMIT_WORD] = 0
            until_abort_word()
            stream.launch(launched_wait(space))
    until_abort_word()


def failed(place: ShmPlace) -> bool:
    try:
        place.check()
    except AbortedError:
        return True
    return False


@ranks(3)
def test_abort_of_the_whole_group_ends_waits_in_a_part() -> None:
    place = of_rank()
    part = place.subgroup((0, 2), 1) if place.rank != 1 else None
    place.exchange(b"", "all")
    if part is None:
        place.abort("the whole group")
    elif place.rank == 0:
        with pytest.raises(AbortedError, match=r"^rank 1 aborted the group: the whole group"):
            part.exchange(b"", "part")
    else:
        place.group.wait_until(lambda: failed(place), "the abort", ())


@ranks(2)
def test_wait_for_a_rank_that_has_left() -> None:
    if of_rank().rank == 0:
        with pytest.raises(InterlaceError, match=r"rank 1 has left the group.*a barrier") as caught:
            of_rank().exchange(b"", "a barrier")
        assert not isinstance(caught.value, CollectiveTimeoutError)


@ranks(2)
def test_wait_that_passes_its_bound() -> None:
    place, bounded = of_rank(), interlace.get_rank() == 0
    place.set_timeout(0.5)
    while not bounded and not failed(place):
        time.sleep(0.001)
    kind = CollectiveTimeoutError if bounded else AbortedError
    with pytest.raises(kind, match=r"all_reduce number 7 .* for ranks \[1\]"):
        place.exchange(b"", "all_reduce number 7")


@ranks(2)
def test_forked_child_cannot_use_the_group() -> None:
    place = of_rank()
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forking with threads
        child = os.fork()
    if child == 0:
        try:
            place.exchange(b"", "in the child")
        except InterlaceError as error:
            os.write(write_end, str(error).encode())
        place.close()
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        assert "a forked child has to make its own" in stream.read()
    place.exchange(b"", "the parent goes on")


def test_reason_to_give_up_must_hold_after_one_more_poll() -> None:
    """A peer may publish and exit; a wait that the publication ended is not a failure."""
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


def killed_in_a_wait(folder: str) -> None:
    """Rank 1 dies after all others wait for it; the others note their errors.

    Rank 0 is in an exchange, rank 2 waits for a slot on a stream, rank 3 in an interpreted kernel.
    """
    place, space = of_rank(), workspace("a doomed op")
    stream = place.new_stream("compute")
    if place.rank == 1:
        time.sleep(0.1)  # not for order, but so that the others sleep in their wait already
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if place.rank == 0:
            place.exchange(b"", "an exchange of the dead")
        elif place.rank == 2:
            stream.wait(space, 1, slot=1)
        else:
            stream.launch(launched_wait(space))
    except PeerDiedError as error:
        pathlib.Path(folder, str(place.rank)).write_text(f"{error.rank} {error}")
        raise


def test_killed_rank_is_named_by_all(tmp_path: pathlib.Path) -> None:
    named = shared_names()
    with pytest.raises(RankError, match=r"rank 1: .* exit code -9 \(SIGKILL\)") as caught:
        interlace.run(killed_in_a_wait, 4, str(tmp_path), place="shm")
    assert caught.value.rank == 1
    for rank in (0, 2, 3):
        assert (tmp_path / str(rank)).read_text().startswith("1 ")
    assert shared_names() <= named


def end_process() -> None:
    if of_rank().rank == 2:
        os._exit(7)
    of_rank().exchange(b"", "waiting for the one that ends")


def test_pool_goes_on_after_a_process_ended() -> None:
    before = interlace.run(os.getpid, 3, place="shm")
    with pytest.raises(RankError, match=r"rank 2: .* exit code 7"):
        interlace.run(end_process, 3, place="shm")
    after = interlace.run(os.getpid, 3, place="shm")
    assert before[:2] == after[:2] and before[2] != after[2]


def rank_1_never_ends() -> None:
    while interlace.get_rank() == 1:
        time.sleep(0.01)


@thorough
def test_run_that_does_not_end() -> None:
    interlace.run(os.getpid, 2, place="shm")
    before, collect = len(default_pool.processes()), default_pool._collect

    def collect_one(late: Any, until: float) -> Any:
        return collect(late, until if len(late) > 1 else 0.0)

    with (
        mock.patch.object(default_pool, "_collect", collect_one),
        pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] have not finished") as caught,
    ):
        interlace.run(rank_1_never_ends, 2, place="shm")
    assert caught.value.waited_for == (1,)
    assert len(default_pool.processes()) == before - 1


def use_memory(buffers: int) -> tuple[int, int]:
    """Allocate, close while a tensor exists, then free it. Return the resources during this."""
    place = of_rank()
    tensors = [place.allocate(1 << 16).peer_bytes for _ in range(buffers)]
    place.exchange(b"", "everyone has mapped")
    during = resources()
    place.close()
    for tensor in tensors[0]:
        tensor.fill_(7)  # still mapped: close must not unmap under a tensor
    return during


def test_nothing_is_left() -> None:
    buffers = 3
    interlace.run(use_memory, 2, buffers, place="shm")
    before = interlace.run(resources, 2, place="shm")
    named = shared_names()
    all_during = interlace.run(use_memory, 2, buffers, place="shm")
    for during, at_rest in zip(all_during, before, strict=True):
        assert during[1] == at_rest[1] + buffers * 2  # so the count does see mappings
        assert during[0] == at_rest[0]  # and a mapped buffer holds no descriptor
    assert interlace.run(resources, 2, place="shm") == before
    assert shared_names() <= named


def as_script(folder: pathlib.Path, text: str, **how: Any) -> "subprocess.Popen[str]":
    """Start a new Python that runs ``text`` as a file, with pipes for its output."""
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


PARENT = """
import os
import signal
import threading
import interlace

def kill_parent():  # in the middle of a run that would never end
    print(os.getpid(), flush=True)
    os.kill(os.getppid(), signal.SIGKILL)
    threading.Event().wait()

if __name__ == "__main__":
    interlace.run(kill_parent, 1, place="shm")
"""


def test_processes_end_with_their_parent(tmp_path: pathlib.Path) -> None:
    script = as_script(tmp_path, PARENT)
    printed, said = script.communicate()
    assert (script.returncode, said) == (-9, "")
    status = pathlib.Path(f"/proc/{int(printed)}/stat")
    while status.exists():
        if status.read_text().split(") ")[1][0] == "Z":
            break  # ended; nobody has collected it
        time.sleep(0.01)


AT_IMPORT = "import interlace\ninterlace.run(interlace.get_rank, 2, place='shm')\n"


@thorough
def test_a_script_that_starts_ranks_when_it_is_imported(tmp_path: pathlib.Path) -> None:
    """One error tells what to do, instead of one error from each process that imports the script."""
    _, said = as_script(tmp_path, AT_IMPORT).communicate()
    assert said.count("Traceback") == 1 and "freeze_support" not in said
    assert 'Put that code under `if __name__ == "__main__":`' in said.splitlines()[-1]


@thorough
def test_a_script_that_is_no_file_is_told_to_become_one() -> None:
    """Python itself would print a traceback for each process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    script = subprocess.run(
        [sys.executable], input=AT_IMPORT, env=environment, capture_output=True, text=True
    )
    assert script.stderr.count("Traceback") == 1
    assert "<stdin> is not a file: save the script as a file" in script.stderr.splitlines()[-1]


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
    """Forked ranks inherit the handlers of a command, which would print its traceback."""
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
