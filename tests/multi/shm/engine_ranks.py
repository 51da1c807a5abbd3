"""Ranks of test_host_engine.py. Every rank can compute every rank's data."""

import functools
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

import interlace
from interlace.groups import groups
from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.core.engine import Engine
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.numerics.reductions import fold
from interlace.runtime.places.shm import message_steps
from interlace.runtime.places.shm.caches import RingWrites, Thresholds, own_caches
from interlace.runtime.places.shm.engine import HostEngine
from interlace.runtime.places.shm.machine_code import available
from interlace.runtime.places.shm.rounds import SLOTS
from interlace.runtime.processes.control import SMALL_DATA

SIZES = Thresholds.of(own_caches(), 2)
MEDIUM_DATA, SLOT_BYTES = SIZES.medium, SIZES.slot  # of any world size
DTYPES = (torch.uint8, torch.float32, torch.bfloat16, torch.complex128)


def engine() -> Engine:
    return groups.default_group().engine


@functools.cache
def _line() -> torch.Tensor:
    """Random numbers, made once: they cost more than moving them does."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 100, (1 << 24,), generator=generator, dtype=torch.uint8)


def data(rank: int, elements: int, dtype: torch.dtype, key: int = 0) -> torch.Tensor:
    """Elements that no other rank and no other key has, at any place."""
    first = (1009 * rank + 9176 * key) % 100_003
    part = _line()[first : first + elements]
    assert len(part) == elements
    return part.to(dtype, copy=True)


def sizes(itemsize: int, world_size: int) -> list[int]:
    """Numbers of elements around everything that changes the way data goes."""
    edges = [SMALL_DATA, SMALL_DATA // world_size, MEDIUM_DATA, SLOT_BYTES * (SLOTS + 2)]
    return [0, 1, 3, *(edge // itemsize + more for edge in edges for more in (-1, 0, 5))]


def _check(what: str, got: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    same = torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)) if got.numel() else True
    return [] if same else [what]


def moving() -> list[str]:
    """All ops that move, in all sizes; what came out wrong."""
    e, wrong = engine(), []
    rank, world = e.rank, e.world_size
    for dtype in DTYPES[:1]:
        for number, n in enumerate(sizes(dtype.itemsize, world)):
            name, mine = f"{dtype} {n}", data(rank, n, dtype, number)
            theirs = [data(peer, n, dtype, number) for peer in range(world)]
            call = Call("op", (("n", n),))
            whole = torch.zeros(world * n, dtype=dtype)
            e.all_gather(call, whole.split(n) if n else [whole] * world, mine)
            wrong += _check(f"all_gather {name}", whole, torch.cat(theirs))
            own = whole[rank * n : (rank + 1) * n]  # in place
            e.all_gather(call, whole.split(n) if n else [whole] * world, own)
            wrong += _check(f"all_gather in place {name}", whole, torch.cat(theirs))
            root = number % world
            tensor = mine.clone()
            e.broadcast(call, tensor, root)
            wrong += _check(f"broadcast {name}", tensor, theirs[root])
            outputs = [torch.zeros_like(mine) for _ in range(world)] if rank == root else None
            e.gather(call, outputs, mine, root)
            for peer, output in enumerate(outputs or []):
                wrong += _check(f"gather {name} of {peer}", output, theirs[peer])
            inputs = [theirs[root] + (peer if n else 0) for peer in range(world)]
            output = torch.zeros_like(mine)
            e.scatter(call, output, inputs if rank == root else None, root)
            wrong += _check(f"scatter {name}", output, inputs[rank])
            parts = [mine + peer for peer in range(world)]
            outputs = [torch.zeros_like(mine) for _ in range(world)]
            e.all_to_all(call, outputs, parts)
            for peer, output in enumerate(outputs):
                wrong += _check(f"all_to_all {name} of {peer}", output, theirs[peer] + rank)
    return wrong


def uneven() -> list[str]:
    """Lengths that differ by rank and pair: some small, some large, some empty."""
    e, wrong = engine(), []
    rank, world = e.rank, e.world_size
    scale = [0, 1, 70_000, 3_000_000]
    lengths = [scale[peer % len(scale)] + peer for peer in range(world)]
    everyone = [data(peer, lengths[peer], torch.uint8) for peer in range(world)]
    outputs = [torch.zeros_like(part) for part in everyone]
    e.all_gather(Call("a"), outputs, everyone[rank])
    for peer in range(world):
        wrong += _check(f"all_gather of {peer}", outputs[peer], everyone[peer])
    root = world - 1
    outputs = [torch.zeros_like(part) for part in everyone]
    e.gather(Call("g"), outputs if rank == root else None, everyone[rank], root)
    if rank == root:
        for peer in range(world):
            wrong += _check(f"gather of {peer}", outputs[peer], everyone[peer])
    own = torch.zeros_like(everyone[rank])
    e.scatter(Call("s"), own, everyone if rank == 0 else None, 0)
    wrong += _check("scatter", own, everyone[rank])

    def between(source: int, target: int) -> torch.Tensor:
        n = scale[(source + 2 * target) % len(scale)]
        return data(source, n, torch.uint8, target)

    outputs = [torch.zeros_like(between(peer, rank)) for peer in range(world)]
    e.all_to_all(Call("t"), outputs, [between(rank, peer) for peer in range(world)])
    for peer in range(world):
        wrong += _check(f"all_to_all of {peer}", outputs[peer], between(peer, rank))
    owned = [length // 4 * 4 for length in lengths]
    parts = [[data(peer, owned[r], torch.uint8, r) for r in range(world)] for peer in range(world)]
    result = torch.zeros(owned[rank], dtype=torch.uint8)
    e.reduce_scatter(Call("r"), result, parts[rank], "max")
    wanted = torch.zeros_like(result)
    fold("max", [parts[peer][rank] for peer in range(world)], wanted)
    wrong += _check("reduce_scatter", result, wanted)
    return wrong


def many_rounds(way: str) -> list[str]:
    """Ops of many rounds, often, written into the rings in one ``way``; some with steps, some without."""
    e, wrong = engine(), []
    rank, world = e.rank, e.world_size
    n = SLOT_BYTES * 9 + 8
    mine = [data(peer, n, torch.uint8) for peer in range(world)]
    total, most = torch.zeros(n, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8)
    fold("sum", mine, total)
    fold("max", mine, most)
    used: set[bool] = set()
    one = {"through": False, "past": True, "differently": rank % 2 == 1}
    choose = RingWrites.past

    def past(self: RingWrites, op: str, count: int) -> bool:
        chosen = one[way] if way in one else choose(self, op, count)
        used.add(chosen)
        return chosen

    RingWrites.past = past  # type: ignore[method-assign]
    try:
        for turn in range(8 if way == "measured" else 2):
            tensor, root = mine[rank].clone(), turn % world
            e.broadcast(Call("b"), tensor, root)
            wrong += _check(f"broadcast {turn}", tensor, mine[root])
            for op, wanted in (("sum", total), ("max", most)):
                tensor = mine[rank].clone()
                e.all_reduce(Call("r"), tensor, op)
                wrong += _check(f"all_reduce {op} {turn}", tensor, wanted)
                scattered = torch.zeros(n // world, dtype=torch.uint8)
                parts = mine[rank][: n // world * world].chunk(world)
                e.reduce_scatter(Call("s"), scattered, parts, op)
                part = slice(n // world * rank, n // world * (rank + 1))
                wrong += _check(f"reduce_scatter {op} {turn}", scattered, wanted[part])
            outputs = [torch.zeros_like(each) for each in mine]
            e.all_to_all(Call("t"), outputs, [mine[rank] + peer for peer in range(world)])
            for peer, output in enumerate(outputs):
                wrong += _check(f"all_to_all {turn} of {peer}", output, mine[peer] + rank)
            whole = torch.zeros(world * n, dtype=torch.uint8)
            e.all_gather(Call("g"), whole.split(n), mine[rank])
            wrong += _check(f"all_gather {turn}", whole, torch.cat(mine))
            whole.zero_()
            e.all_gather(Call("h"), whole, mine[rank])
            wrong += _check(f"all_gather_single {turn}", whole, torch.cat(mine))
    finally:
        RingWrites.past = choose  # type: ignore[method-assign]
    if not available():
        return wrong
    ways = {one[way]} if way in one else {False, True}
    return wrong + ([] if used == ways else [f"ways used: {used}"])


def failing_in_the_middle() -> str:
    """Rank 1 fails while data moves, with an error that all ranks would share before: what each gets."""
    tensor = torch.ones(1 << 20)
    interlace.all_reduce(tensor, op="max")
    if interlace.get_rank() == 1:

        def failing(*_: Any) -> None:
            raise ValueError("odd")

        message_steps.fold = failing  # type: ignore[assignment]
    try:
        interlace.all_reduce(tensor, op="max")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        message_steps.fold = fold
    return "nothing"


def killed_in_broadcast(folder: str) -> None:
    """Rank 2 dies while the others move data; rank 1 waits for rank 0 alone. They note what they see."""
    e = engine()
    tensor = torch.zeros(64 << 20, dtype=torch.uint8)
    if e.rank == 2:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        for _ in range(10_000):
            e.broadcast(Call("b"), tensor, 0)
    except InterlaceError as error:
        Path(folder, str(e.rank)).write_text(f"{type(error).__name__}: {error}")
        while not all(Path(folder, str(rank)).exists() for rank in (0, 1)):
            time.sleep(0.01)  # lives on: nobody learns it from this one's end
        raise


def reducing() -> list[str]:
    """All ops that reduce, in all sizes."""
    e, wrong = engine(), []
    rank, world = e.rank, e.world_size
    for dtype in DTYPES:
        for number, n in enumerate(sizes(dtype.itemsize, world)):
            op = ("sum", "product", "avg")[number % 3]
            name = f"{op} {dtype} {n}"
            everyone = [data(peer, n, dtype, number) for peer in range(world)]
            wanted = torch.zeros(n, dtype=dtype)
            fold(op, everyone, wanted)
            call = Call("op", (("n", n), ("op", op)))
            tensor = everyone[rank].clone()
            e.all_reduce(call, tensor, op)
            wrong += _check(f"all_reduce {name}", tensor, wanted)
            root = number % world
            tensor = everyone[rank].clone()
            e.reduce_to(call, tensor, root, op)
            wrong += _check(f"reduce {name}", tensor, wanted if rank == root else everyone[rank])
            parts = [data(rank, n, dtype, 7 * r + number) for r in range(world)]
            mine = [data(p, n, dtype, 7 * rank + number) for p in range(world)]
            fold(op, mine, wanted)
            call = Call("op", (("n", n), ("op", op)))
            for output in (torch.zeros(n, dtype=dtype), parts[rank].clone()):
                inputs = list(parts)
                inputs[rank] = output.copy_(inputs[rank]) if n % 2 else inputs[rank]
                e.reduce_scatter(call, output, inputs, op)
                wrong += _check(f"reduce_scatter {name}", output, wanted)
    return wrong


def mixed(count: int) -> list[str]:
    """Small and large ops in turn, and ranks that are late: areas and slots are used again."""
    e, wrong = engine(), []
    rank, world = e.rank, e.world_size
    calls = {n: Call("op", (("n", n),)) for n in (5, 20_000, 400_000)}
    for number in range(count):
        n = (5, 20_000, 5, 400_000)[number % 4]
        everyone = [data(peer, n, torch.float32, number) for peer in range(world)]
        if (number + rank) % 5 == 0:
            sum(range(20_000))
        tensor = everyone[rank].clone()
        e.all_reduce(calls[n], tensor, "sum")
        wanted = torch.zeros(n)
        fold("sum", everyone, wanted)
        wrong += _check(f"op {number} ({n})", tensor, wanted)
    return wrong


def differing(large: bool) -> str:
    """Rank 1 asks for something else; then all ask for the same."""
    communicator: Communicator = groups.default_group()
    e = communicator.engine
    n = 200_000 if large else 4
    shape = n + (e.rank == 1)
    text = ""
    tensor = torch.ones(shape)
    try:
        e.all_reduce(Call("all_reduce", (("shape of tensor", (shape,)),)), tensor, "sum")
    except ValueError as error:
        text = str(error)
    assert torch.equal(tensor, torch.ones(shape)), "bytes moved before the comparison"
    tensor = torch.ones(n)
    e.all_reduce(Call("all_reduce", (("shape of tensor", (n,)),)), tensor, "sum")
    assert torch.equal(tensor, torch.full((n,), float(e.world_size)))
    return text


def fitting(nbytes: int) -> list[float]:
    """Sums of ranks whose messages differ, but fit together; twice, for steps that are kept."""
    e, found = engine(), []
    for _ in range(2):
        call = Call("sum", part=e.rank, match=lambda parts: None, equal_fits=True)
        tensor = torch.ones(nbytes // 4)
        e.all_reduce(call, tensor, "sum")
        part = torch.zeros(nbytes // 4)
        e.reduce_scatter(call, part, torch.ones(e.world_size * nbytes // 4), "sum")
        found += [float(each) for of in (tensor, part) for each in (of[0], of[-1])]
    return found


def mail(nbytes: int) -> list[str]:
    """Everybody sends to everybody, before anyone receives, in another order of tags."""
    e, wrong = engine(), []
    rank, world = e.rank, e.world_size
    call = Call("send")
    peers = [peer for peer in range(world) if peer != rank]
    sent = [
        e.send(call, data(rank, nbytes, torch.uint8, 10 * peer + tag), peer, tag)
        for peer in peers
        for tag in (0, 1, 2)
    ]
    buffers = {
        (peer, tag): torch.zeros(nbytes, dtype=torch.uint8) for peer in peers for tag in (2, 0, 1)
    }
    received = [e.recv(call, buffers[key], *key) for key in buffers]
    for future in received + sent:
        future.result(300)
    for (peer, tag), buffer in buffers.items():
        wrong += _check(f"{peer} {tag}", buffer, data(peer, nbytes, torch.uint8, 10 * rank + tag))
    return wrong


def mail_in_background(nbytes: int) -> bool:
    """Rank 0 sends more than a box holds and never waits: the thread has to move it."""
    e = engine()
    tensor = data(0, nbytes, torch.uint8)
    if e.rank == 0:
        future = e.send(Call("send"), tensor, 1, 0)
        e.barrier(Call("barrier"))
        return future.result(300).event is None
    buffer = torch.zeros_like(tensor)
    e.recv(Call("recv"), buffer, 0, 0).result(300)
    e.barrier(Call("barrier"))
    return torch.equal(buffer, tensor)


def mail_from_anyone(count: int) -> list[int]:
    """Rank 0 receives from whoever sends; the sources, and what each sent must agree."""
    e = engine()
    if e.rank:
        for number in range(count):
            e.send(Call("send"), torch.tensor([e.rank, number]), 0, 5).result(300)
        return []
    sources, next_number = [], [0] * e.world_size
    for _ in range(count * (e.world_size - 1)):
        buffer = torch.zeros(2, dtype=torch.int64)
        outcome = e.recv(Call("recv"), buffer, None, 5).result(300)
        assert outcome.source is not None
        source = outcome.source()
        assert buffer.tolist() == [source, next_number[source]]
        next_number[source] += 1
        sources.append(source)
    return sources


def mail_from_the_last_one() -> list[int]:
    """Rank 1 sends and leaves; rank 0 still receives from anyone, which is rank 2, later."""
    e = engine()
    if e.rank:
        if e.rank == 2:
            time.sleep(0.5)
        e.send(Call("send"), torch.tensor([e.rank]), 0, 5).result(300)
        return []
    buffers = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    for buffer in buffers:
        e.recv(Call("recv"), buffer, None, 5).result(300)
    return [int(buffer) for buffer in buffers]


def mail_of_other(dtype: torch.dtype, elements: int) -> str:
    """Rank 1 expects something else than rank 0 sends; the next message is right again.

    What rank 0 is told at the end of one of its messages: once, and before that of a later one comes.
    """
    e = engine()
    text = ""
    if e.rank == 0:
        for message in (torch.ones(4, dtype=dtype), torch.full((3,), 7.0), None):
            try:
                if message is None:
                    e.recv(Call("recv"), torch.zeros(1), 1, 0).result(300)
                else:
                    e.send(Call("send"), message, 1, 0).result(300)
            except (TypeError, ValueError) as error:
                text += f"{type(error).__name__}: {error}"
        return text
    try:
        e.recv(Call("recv"), torch.zeros(elements), 0, 0).result(300)
    except (TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    buffer = torch.zeros(3)
    e.recv(Call("recv"), buffer, 0, 0).result(300)
    assert buffer.tolist() == [7.0] * 3
    e.send(Call("send"), torch.zeros(1), 0, 0).result(300)
    return text


def mail_never_sent() -> str:
    """Rank 0 waits for a message; rank 1 leaves. Not in a thread's own time: the wait finds it."""
    e = engine()
    if e.rank == 1:
        return ""
    try:
        e.recv(Call("recv"), torch.zeros(1), 1, 3).result(30)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "received"


def in_shared_memory() -> list[str]:
    """Ops on tensors in symmetric memory; nothing may be staged, so a ring must not be made."""
    e, wrong = engine(), []
    rank, world = e.rank, e.world_size
    n = world * 60_000
    per = n // world
    shared = interlace.symmetric_memory.empty(n)
    interlace.symmetric_memory.rendezvous(shared)
    everyone = [data(peer, n, torch.float32) for peer in range(world)]
    wanted = torch.zeros(n)
    fold("sum", everyone, wanted)

    def fill() -> None:
        e.barrier(Call("barrier"))
        shared.copy_(everyone[rank])

    for number in range(3):
        fill()
        e.all_reduce(Call("all_reduce"), shared, "sum")
        wrong += _check("all_reduce", shared, wanted)
        fill()
        outputs = [torch.zeros(n) for _ in range(world)]
        e.all_gather(Call("all_gather"), outputs, shared)
        shared.zero_()  # whoever left the op early would see this
        for peer in range(world):
            wrong += _check(f"all_gather of {peer}", outputs[peer], everyone[peer])
        fill()
        e.broadcast(Call("broadcast"), shared, number % world)
        wrong += _check("broadcast", shared, everyone[number % world])
        fill()
        parts = [shared[r * per : (r + 1) * per] for r in range(world)]
        output = torch.zeros(per)
        e.reduce_scatter(Call("reduce_scatter"), output, parts, "sum")
        wrong += _check("reduce_scatter", output, wanted[rank * per : (rank + 1) * per])
        e.reduce_scatter(Call("reduce_scatter"), parts[rank], parts, "sum")
        wrong += _check("in place", parts[rank], wanted[rank * per : (rank + 1) * per])
        fill()
        outputs = [torch.zeros(per) for _ in range(world)]
        e.all_to_all(Call("all_to_all"), outputs, parts)
        for peer in range(world):
            mine = everyone[peer][rank * per : (rank + 1) * per]
            wrong += _check(f"all_to_all of {peer}", outputs[peer], mine)
    assert isinstance(e, HostEngine)
    if e._rounds._rings:
        wrong.append("something was staged")
    fill()
    e.all_to_all(Call("all_to_all"), parts, parts)  # its outputs are what peers would read
    for peer in range(world):
        mine = everyone[peer][rank * per : (rank + 1) * per]
        wrong += _check(f"all_to_all in place of {peer}", parts[peer], mine)
    fill()
    one_elsewhere = shared if rank else shared.clone()
    e.all_reduce(Call("all_reduce"), one_elsewhere, "sum")
    wrong += _check("one elsewhere", one_elsewhere, wanted)
    return wrong


def shared_memory_that_is_gone() -> list[str]:
    """Rank 0 has dropped its tensor and uses another; the others still have theirs."""
    e, n = engine(), 100_000
    first = interlace.symmetric_memory.empty(n)
    interlace.symmetric_memory.rendezvous(first)
    if e.rank == 0:
        del first
        gc.collect()
        first = torch.empty(n)
    first.fill_(1.0)
    e.all_reduce(Call("all_reduce"), first, "sum")
    return _check("all_reduce", first, torch.full((n,), float(e.world_size)))


def sleeps() -> None:
    """Rank 0 waits for rank 1, which comes once rank 0 has slept so often: who spins never does."""
    e = engine()
    e.barrier(Call("barrier"))
    if e.rank == 1:
        status = Path(f"/proc/{groups.default_group().place.group.pids[0]}/status")

        def slept() -> int:
            return int(status.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])

        enough = slept() + 50
        while slept() < enough:
            time.sleep(0.001)
    e.barrier(Call("barrier"))
