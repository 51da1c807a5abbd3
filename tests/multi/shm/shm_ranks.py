"""Ranks of test_shm_place.py. A module of its own, because new processes import it.

``setup`` gives the place of the rank to the functions, as the launcher gives the group.
"""

import gc
import os
import pathlib
import signal
import time
import warnings
from typing import Any

import torch

from interlace.kernels.signal import (
    ABORT_WORD,
    HEADER_WORDS,
    SPIN_LIMIT_WORD,
    publish_kernel,
    wait_kernel,
)
from interlace.runtime.core.errors import AbortedError, InterlaceError, PeerDiedError
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.core.memory import WORD, Workspace, peers_of
from interlace.runtime.places.shm.place import ShmPlace
from interlace.runtime.processes import control, segment
from interlace.runtime.processes.group import HostGroup
from interlace.runtime.processes.meetings import StoreMeeting

SLOTS = 16
ELEMENTS = 1 << 12
place: ShmPlace


def setup(rank_place: Any) -> None:
    global place
    place = rank_place


def workspace(op: str) -> Workspace:
    """A channel of its own, of SLOTS slots and ELEMENTS int64."""
    slot_offset = HEADER_WORDS * WORD
    data_offset = slot_offset + SLOTS * WORD
    buffer = place.allocate(data_offset + ELEMENTS * WORD)
    space = Workspace(0, buffer, slot_offset, data_offset, place.world_size, op)
    space.header(place.rank)[SPIN_LIMIT_WORD] = 1 << 62
    return space


def whoami() -> tuple[int, int, int]:
    return place.rank, place.world_size, os.getpid()


def ring(rounds: int, wait_for_credits: bool) -> list[int]:
    """Every round, every rank writes its next rank's data; which rounds were read wrong.

    Rank 1 is slow between waiting and reading, so a producer that does not wait for the credit
    writes the next round over what rank 1 has still to read.
    """
    rank, world_size = place.rank, place.world_size
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    space, stream = workspace("ring"), place.new_stream("compute")
    wrong = []
    for number in range(rounds):
        payload = torch.full((ELEMENTS,), 1000 * number + rank)
        if wait_for_credits:
            stream.wait_credits(space)
        stream.copy(space.data(after, 0, (ELEMENTS,), torch.int64), payload, "push")
        stream.publish(space, after, slot=3)
        stream.wait(space, before, slot=3)
        if rank == 1:
            time.sleep(0.02)
        received = space.data(rank, 0, (ELEMENTS,), torch.int64)
        if not torch.equal(received, torch.full((ELEMENTS,), 1000 * number + before)):
            wrong.append(number)
        stream.finish(space)
    place.exchange(b"", "the end of the ring")
    return wrong


def launch_publish(space: Workspace, peer: int, slot: int) -> KernelLaunch:
    arguments = {"peer": peer, "slot_byte": space.slot_byte(slot)}
    return KernelLaunch(
        publish_kernel,
        1,
        {"peers": peers_of(space.buffer, space.world_size), **arguments},
        space.op,
    )


def launch_wait(space: Workspace, source: int, slot: int) -> KernelLaunch:
    arguments = {"source": source, "slot_byte": space.slot_byte(slot)}
    return KernelLaunch(
        wait_kernel, 1, {"peers": peers_of(space.buffer, space.world_size), **arguments}, space.op
    )


def kernel_ring() -> bool:
    """As the ring, but published and waited for by interpreted kernels, rank after rank."""
    rank, world_size = place.rank, place.world_size
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    space, stream = workspace("kernel ring"), place.new_stream("compute")
    arrived = True
    for number in range(1, 4):
        if rank > 0:  # a baton: rank r goes on only after rank r - 1
            stream.launch(launch_wait(space, before, slot=0))
            view = space.data(rank, 0, (8,), torch.int64)
            arrived = arrived and bool((view == 10 * number + before).all())
        target = space.data(after, 0, (8,), torch.int64)
        stream.copy(target, torch.full((8,), 10 * number + rank), "baton")
        stream.launch(launch_publish(space, after, slot=0))
        if rank == 0:
            stream.launch(launch_wait(space, before, slot=0))
        stream.finish(space)
        stream.wait_credits(space)
    place.exchange(b"", "the end of the ring")
    return arrived


def message(rank: int, number: int) -> bytes:
    length = (
        (number * 977 + rank * 13) % (64 << 10) if number % 50 else (64 << 10) * (number % 100 > 0)
    )
    return (f"{rank}:{number};".encode() * (length // 4 + 1))[:length]


def exchanges(count: int, areas: int) -> list[tuple[int, int]]:
    """Exchanges of changing length; (number, sender) of what arrived wrong. Rank 1 reads late."""
    wrong = []
    read = control.Control.message
    stride = control.AREA

    def late(self: control.Control, peer: int, sequence: int) -> bytes:
        time.sleep(0.002)
        return read(self, peer, sequence)

    try:
        if areas == 1:
            control.AREA = 0  # the mutant: both areas in the same place
        if place.rank == 1:
            control.Control.message = late  # type: ignore[method-assign]
        for number in range(count):
            answers = place.exchange(message(place.rank, number), "an exchange")
            for rank, answer in enumerate(answers):
                if answer != message(rank, number):
                    wrong.append((number, rank))
    finally:
        control.Control.message = read  # type: ignore[method-assign]
        control.AREA = stride
    return wrong


def too_long() -> None:
    place.exchange(bytes((64 << 10) + 1), "a long exchange")


def unequal_allocation() -> str:
    try:
        place.allocate(4096 * (place.rank + 1))
    except ValueError as error:
        return str(error)
    return ""


def allocation_without_memory() -> tuple[str, int]:
    """Rank 1 finds that no memory is left; all ranks must hear of it, and can go on afterwards."""
    known = segment.available_memory
    try:
        if place.rank == 1:
            segment.available_memory = lambda: 0
        place.allocate(1 << 20)
    except InterlaceError as error:
        segment.available_memory = known
        return str(error), int(place.allocate(4096).peer_bytes[0].sum())
    finally:
        segment.available_memory = known
    return "", 0


def raise_on(rank: int, kind: type[Exception]) -> None:
    if place.rank == rank:
        raise kind(f"rank {rank} does not want to")
    place.exchange(b"", "waiting for the one that fails")


class Stubborn(Exception):
    """Pickles, and does not load."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"stubborn {one} {two}")


def raise_stubborn() -> None:
    raise Stubborn(1, 2)


def unpicklable_result() -> Any:
    return lambda: None


def end_process(rank: int, code: int) -> None:
    if place.rank == rank:
        os._exit(code)
    place.exchange(b"", "waiting for the one that ends")


def killed_in_a_wait(victim: int, folder: str) -> None:
    """The victim dies once everybody waits for it; the others note what they see.

    Rank 0 is in an exchange, rank 2 waits for a slot on a stream, rank 3 in an interpreted kernel.
    """
    space, stream = workspace("a doomed op"), place.new_stream("compute")
    if place.rank == victim:
        time.sleep(0.1)  # not for order, but so that the others sleep in their wait already
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if place.rank == 0:
            place.exchange(b"", "an exchange of the dead")
        elif place.rank == 2:
            stream.wait(space, victim, slot=1)
        else:
            stream.launch(launch_wait(space, victim, slot=1))
    except PeerDiedError as error:
        pathlib.Path(folder, str(place.rank)).write_text(f"{error.rank} {error}")
        raise


def never_ends(rank: int) -> None:
    while place.rank == rank:
        time.sleep(0.01)


def kill_parent() -> None:
    """The parent dies in the middle of a run that would never end."""
    print(os.getpid(), flush=True)
    os.kill(os.getppid(), signal.SIGKILL)
    never_ends(0)


def late_for_exchange() -> str:
    """Rank 1 does not come to the exchange until rank 0 has failed."""
    place.set_timeout(0.5)
    while place.rank == 1 and not _failed():
        time.sleep(0.001)
    place.exchange(b"", "all_reduce number 7")
    return ""


def aborted(reason: str) -> tuple[str, bool]:
    """Rank 1 aborts; the others are in an exchange, in a wait, in a kernel that gives up at once.

    The error, and whether the buffer's abort word was set.
    """
    space, stream = workspace("an op"), place.new_stream("compute")
    text = ""
    try:
        if place.rank == 1:
            place.abort(reason)
            place.abort("another reason")
            place.check()
        elif place.rank == 0:
            place.exchange(b"", "an exchange")
        elif place.rank == 2:
            stream.wait(space, 1, slot=1)
        else:
            space.header(place.rank)[SPIN_LIMIT_WORD] = 0
            _until_abort_word(space)
            stream.launch(launch_wait(space, 1, slot=1))
    except AbortedError as error:
        text = str(error)
    _until_abort_word(space)
    return text, True


def _until_abort_word(space: Workspace) -> None:
    while not int(space.header(place.rank)[ABORT_WORD]):
        time.sleep(0.001)


def leaves_early() -> None:
    if place.rank == 0:
        place.exchange(b"", "a barrier")


def resources() -> tuple[int, int]:
    """Open descriptors and mapped segments of this process, after collecting what is not used."""
    gc.collect()
    maps = pathlib.Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:interlace")


def use_memory(buffers: int) -> tuple[int, int]:
    """Allocate, close while a tensor is still held, then drop it. Resources during all that."""
    tensors = [place.allocate(1 << 16).peer_bytes for _ in range(buffers)]
    place.exchange(b"", "everyone has mapped")
    during = resources()
    place.close()
    for tensor in tensors[0]:
        tensor.fill_(7)  # still mapped: close must not unmap under a tensor
    return during


def in_subgroup() -> list[bytes]:
    """Ranks 2 and 0 make a group, in that order, twice. Rank 1 does nothing."""
    answers: list[bytes] = []
    for generation in (1, 2):
        if place.rank != 1:
            part = place.subgroup((2, 0), generation)
            answers += part.exchange(f"{place.rank}->{part.rank}".encode(), "part")
            part.close()
    place.exchange(b"", "all")
    return answers


def subgroup_sees_abort() -> str:
    """Rank 1 aborts the whole group while ranks 0 and 2 are in a group without it; rank 0 waits."""
    part = place.subgroup((0, 2), 1) if place.rank != 1 else None
    place.exchange(b"", "all")
    if place.rank == 1:
        place.abort("the whole group")
    elif place.rank == 0 and part is not None:
        try:
            part.exchange(b"", "part")
        except AbortedError as error:
            return str(error)
    else:
        place.group.wait_until(lambda: _failed(), "the abort", ())
    return ""


def _failed() -> bool:
    try:
        place.check()
    except AbortedError:
        return True
    return False


def forked() -> str:
    """What an exchange says in a forked child."""
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
        text = stream.read()
    place.exchange(b"", "the parent goes on")
    return text


def mixed_async(count: int) -> list[list[bytes]]:
    """Asynchronous and synchronous exchanges in turn; rank 1's asynchronous ones are slow."""

    def operation(number: int) -> list[bytes]:
        if place.rank == 1:
            time.sleep(0.002)
        return place.exchange(str(number).encode(), f"op {number}")

    futures, answers = [], []
    for number in range(count):
        if number % 4 == 3:
            answers.append(place.exchange(str(number).encode(), f"op {number}"))
        else:
            asynchronous = number % 4 != 2
            futures.append(
                place.submit(lambda number=number: operation(number), asynchronous=asynchronous)
            )
    return [future.result() for future in futures] + answers


def connect_again(port: int, times: int) -> int:
    """Join and leave a group of one name and generation again and again; keys left in the store."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False)
    for _ in range(times):
        group = HostGroup(
            StoreMeeting(store),
            place.rank,
            place.world_size,
            timeout=300,
            prefix="interlace/again/0",
        )
        again = ShmPlace(group)
        again.exchange(b"", "again")
        again.close()
    place.exchange(b"", "all")
    return store.num_keys()
