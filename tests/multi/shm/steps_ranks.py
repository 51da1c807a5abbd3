"""Ranks of test_host_steps.py. Every rank can compute every rank's data."""

import functools
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import interlace
from interlace.groups import groups
from interlace.runtime.core.call import Call
from interlace.runtime.core.errors import InterlaceError
from interlace.runtime.numerics.reductions import fold
from interlace.runtime.places.shm import engine as host_engine, message_steps, rounds as host_rounds
from interlace.runtime.places.shm.caches import Caches, RingWrites, Thresholds, own_caches
from interlace.runtime.places.shm.engine import HostEngine
from interlace.runtime.places.shm.rounds import cuts
from interlace.runtime.processes.control import REDUCED, SMALL_DATA

MOVED_PARTS = ("all_to_all", "scatter")
MOVED_WHOLE = ("all_gather", "in place", "broadcast", "gather")
OPS = ("all_reduce", "reduce_scatter", *MOVED_WHOLE, *MOVED_PARTS)
SUMMED = ("all_reduce", "reduce_scatter")
SIZES = Thresholds.of(own_caches(), 2)
MEDIUM_DATA, SLOT_BYTES = SIZES.medium, SIZES.slot  # of any world size
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.float64, torch.uint8)


@contextmanager
def engine(with_steps: bool = True) -> Iterator[HostEngine]:
    """This rank's engine: with steps, or without, as where no code can be made."""
    available, host_engine.available = host_engine.available, lambda: with_steps
    try:
        made = groups.default_group().engine
    finally:
        host_engine.available = available
    assert isinstance(made, HostEngine)
    assert made._steps.machine_code is with_steps
    yield made


@functools.cache
def _line() -> torch.Tensor:
    """Bytes that are different at every place."""
    return (torch.arange(1 << 20, dtype=torch.int64) * 0x1E3779B97F4A7C15).view(torch.uint8)


def data(rank: int, nbytes: int, key: int, dtype: torch.dtype) -> torch.Tensor:
    """``nbytes`` that no other rank and no other key has: whole numbers, or any if it is only moved."""
    count = nbytes // dtype.itemsize
    first = (100_003 * rank + 9176 * key) % 1_000_003
    if dtype.is_floating_point:
        return _repeated(first, count).to(dtype)
    return _repeated(first, nbytes).clone().view(dtype) if nbytes else torch.empty(0, dtype=dtype)


def _repeated(first: int, count: int) -> torch.Tensor:
    line = _line()
    if first + count <= len(line):
        return line[first : first + count]
    return line[first:].repeat(-(-count // (len(line) - first)))[:count]


def rounds_of(op: str, world_size: int, rounds: int) -> int:
    """The bytes of an ``op`` of this many whole rounds, of a part or of the whole as it takes them."""
    section = SLOT_BYTES // world_size & ~63
    if op in MOVED_WHOLE:
        return rounds * SLOT_BYTES
    return rounds * section * (world_size if op == "all_reduce" else 1)


def sizes(op: str, world_size: int, rounds: tuple[int, ...]) -> list[int]:
    """Bytes around everything that changes the way data goes; all of them multiples of 8."""
    small, medium = SMALL_DATA, MEDIUM_DATA
    if op in ("reduce_scatter", *MOVED_PARTS):
        small, medium = (limit // world_size & ~63 for limit in (small, medium))
    edges = [small, medium, *(rounds_of(op, world_size, n) for n in rounds)]
    return [0, 8, 24, *(edge + more for edge in edges for more in (-8, 0, 8))]


def once(
    e: HostEngine, op: str, nbytes: int, key: int, dtype: torch.dtype, reduction: str = "sum"
) -> list[str]:
    """One op, exactly checked; what came out wrong. With an odd ``key`` on lists, if it takes them."""
    rank, world, lists = e.rank, e.world_size, key % 2 == 1
    n, root = nbytes // dtype.itemsize, key % world
    terms = (("n", n), ("dtype", str(dtype)), ("key", key % 2), ("op", reduction), ("root", root))
    call = Call(op, terms, match=lambda parts: None, equal_fits=True)

    def split(whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole[peer * n : (peer + 1) * n].clone() for peer in range(world)]

    def parts(peer: int) -> torch.Tensor:
        return data(peer, nbytes * world, key, dtype)

    if op == "all_reduce":
        everyone = [data(peer, nbytes, key, dtype) for peer in range(world)]
        got, wanted = everyone[rank].clone(), torch.zeros(n, dtype=dtype)
        e.all_reduce(call, got, reduction)
        for first, end in _pieces(n, world):
            fold(reduction, [each[first:end] for each in everyone], wanted[first:end])
    elif op == "reduce_scatter":
        mine, got, wanted = (
            parts(rank),
            torch.full((n,), 9, dtype=dtype),
            torch.zeros(n, dtype=dtype),
        )
        if key % 3 == 0:
            got = mine[rank * n : (rank + 1) * n]
        if lists:
            e.reduce_scatter(call, got, split(mine), reduction)
        else:
            e.reduce_scatter(call, got, mine, reduction)
        fold(reduction, [parts(peer)[rank * n : (rank + 1) * n] for peer in range(world)], wanted)
    elif op in ("all_gather", "in place", "gather"):
        everyone = [data(peer, nbytes, key, dtype) for peer in range(world)]
        wanted, got = torch.cat(everyone), torch.full((n * world,), 9, dtype=dtype)
        own, outputs = everyone[rank].clone(), split(got)
        if op == "in place":
            place = outputs[rank] if lists else got[rank * n : (rank + 1) * n]
            own = place.copy_(own)
        if op == "gather":
            e.gather(call, outputs if rank == root else None, own, root)
        elif lists:
            e.all_gather(call, outputs, own)
        else:
            e.all_gather(call, got, own)
        if op == "gather" or lists:
            got = torch.cat(outputs)
        if op == "gather" and rank != root:
            wanted = torch.full_like(wanted, 9)
    elif op == "scatter":
        got, inputs = torch.full((n,), 9, dtype=dtype), split(parts(root))
        e.scatter(call, got, inputs if rank == root else None, root)
        wanted = inputs[rank]
    elif op == "broadcast":
        got, wanted = data(rank, nbytes, key, dtype), data(root, nbytes, key, dtype)
        e.broadcast(call, got, root)
    else:
        assert op == "all_to_all"
        got = torch.full((n * world,), 9, dtype=dtype)
        if lists:
            outputs = split(got)
            e.all_to_all(call, outputs, split(parts(rank)))
            got = torch.cat(outputs)
        else:
            e.all_to_all(call, got, parts(rank))
        wanted = torch.cat([parts(peer)[rank * n : (rank + 1) * n] for peer in range(world)])
    same = got.numel() == 0 or torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    return [] if same else [f"{op} of {nbytes} bytes, {dtype}, {reduction}, key {key}"]


def _pieces(count: int, world_size: int) -> list[tuple[int, int]]:
    firsts = cuts(count, world_size)
    return list(itertools.pairwise(firsts))


def every_size(seed: int, which: str) -> list[str]:
    """All ops around all limits, in random order, twice each. ``which`` ranks have steps."""
    rank = interlace.get_rank()
    has_steps = {"all": True, "none": False, "odd": rank % 2 == 1, "first": rank == 0}[which]
    with engine(has_steps) as e:
        world = e.world_size
        jobs = [(op, nbytes) for op in OPS for nbytes in sizes(op, world, (1, 2))]
        jobs += [(op, rounds_of(op, world, 5) - 8) for op in OPS]
        jobs += [("barrier", 0)] * 5
        generator = random.Random(seed)
        order = 2 * jobs  # the second time the steps are there
        generator.shuffle(order)
        # the first large op makes the ring, which is another way
        wrong = once(e, "all_gather", SLOT_BYTES, 0, torch.uint8)
        for key, (op, nbytes) in enumerate(order):
            reduction = generator.choice(("sum", "sum", "avg")) if op in SUMMED else "sum"
            dtype = generator.choice(DTYPES)
            if generator.random() < 0.1 and rank == generator.randrange(world):
                time.sleep(0.001)
            if op == "barrier":
                e.barrier(Call("barrier"))
            else:
                wrong += once(e, op, nbytes, key, dtype, reduction)
    return wrong


def every_dtype() -> list[str]:
    """Sums and averages of every dtype, also of those that steps do not sum, small and large."""
    with engine() as e:
        wrong = once(e, "all_gather", SLOT_BYTES, 0, torch.uint8)
        dtypes = (*DTYPES, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint64)
        for key, dtype in enumerate((*dtypes, torch.complex64)):
            for op in SUMMED:
                for reduction in ("sum", "avg"):
                    for nbytes in (160, 100_000, rounds_of(op, e.world_size, 1) + 96):
                        wrong += once(e, op, nbytes, key, dtype, reduction)
    return wrong


def many_rounds() -> list[str]:
    """Ops of 33 rounds, of as many as steps take where that is 36, and of one more."""
    taken, host_rounds.MOST = host_rounds.MOST, 36 * interlace.get_world_size()
    try:
        with engine() as e:
            wrong = []
            for key, op in enumerate(op for op in OPS if op != "in place"):
                for rounds in (33, 36, 37) if op == "broadcast" else (33,):
                    nbytes = rounds_of(op, e.world_size, rounds)
                    wrong += once(e, op, nbytes, key, torch.uint8)
        return wrong
    finally:
        host_rounds.MOST = taken


def shared_on_one_rank(seed: int) -> list[str]:
    """Rank 0's tensors are in symmetric memory: it goes another way than the rest, who have staged."""
    with engine() as e:
        rank, world, wrong = e.rank, e.world_size, []
        n = 3 * SLOT_BYTES // 4
        shared = interlace.symmetric_memory.empty(n)
        interlace.symmetric_memory.rendezvous(shared)
        e.all_reduce(Call("first"), torch.zeros(n), "sum")  # makes the ring
        generator = random.Random(seed)
        for key in range(8):
            count = n - 64 * generator.randrange(100) if key % 4 else 20_000
            everyone = [data(peer, 4 * count, key, torch.float32) for peer in range(world)]
            mine = shared[:count] if rank == 0 else torch.empty(count)
            mine.copy_(everyone[rank])
            wanted = torch.zeros(count)
            fold("sum", everyone, wanted)
            e.all_reduce(Call("all_reduce", (("n", count),)), mine, "sum")
            if not torch.equal(mine, wanted):
                wrong.append(f"all_reduce of {count}, key {key}")
            mine.copy_(everyone[rank])
            e.broadcast(Call("broadcast", (("n", count),)), mine, key % world)
            if not torch.equal(mine, everyone[key % world]):
                wrong.append(f"broadcast of {count}, key {key}")
            mine.copy_(everyone[rank])
            got = torch.zeros(count * world)
            e.all_gather(Call("all_gather", (("n", count),)), got, mine)
            if not torch.equal(got, torch.cat(everyone)):
                wrong.append(f"all_gather of {count}, key {key}")
    return wrong


def uneven_elsewhere(rows: int, most: int) -> list[str]:
    """Splits that fit, but are all equal on rank 0 only: rank 1 keeps ``most`` rows more for itself."""
    wrong = []
    with engine():
        rank, world = interlace.get_rank(), interlace.get_world_size()
        interlace.all_reduce(torch.ones(1 << 20))  # makes the ring
        for turn in range(4):
            sent = [rows + most * (rank == peer == 1) for peer in range(world)]
            parts = [
                torch.full((length, 5), float(100 * turn + 10 * rank + peer))
                for peer, length in enumerate(sent)
            ]
            output = torch.zeros(sum(sent), 5)
            splits = () if rank == 0 else (sent, sent)
            interlace.all_to_all_single(output, torch.cat(parts), *splits)
            numbers = [100.0 * turn + 10 * peer + rank for peer in range(world)]
            wanted = torch.cat(
                [torch.full((n, 5), number) for n, number in zip(sent, numbers, strict=True)]
            )
            if not torch.equal(output, wanted):
                wrong.append(f"turn {turn}")
    return wrong


def awaited() -> list[str]:
    """In a sum of two slots ranks that have called it wait for others' sums only, two for nothing."""
    with engine() as e:
        wrong = once(e, "all_gather", SLOT_BYTES, 0, torch.uint8)
        e._steps.sizes = e._steps.sizes._replace(in_place=2 * SLOT_BYTES)  # whatever the caches
        e._steps._kept.clear()
        wrong += once(e, "all_reduce", SLOT_BYTES * 3 // 2, 1, torch.float32)
        lists = {key[0]: steps for key, steps in e._steps._kept.items() if key}
        words = {index for peers, index, *_ in lists["rounds"].notes.values() if peers}
        if words != ({REDUCED} if e.world_size > 2 else set()):
            wrong.append(f"the words {words} were waited for")
    return wrong


def counted() -> list[float]:
    """The seconds by which ways of writing are chosen, where lists take one each and meetings a hundred."""
    found: list[float] = []
    with engine() as e, pytest.MonkeyPatch.context() as patch:
        wrong = once(e, "all_gather", SLOT_BYTES, 0, torch.uint8)
        clock, steps, taken = [0.0], e._steps, [1.0, 100.0]
        for function, seconds in zip((steps.do, steps.meet), taken, strict=True):

            def counting(*args: Any, run: Any = function, seconds: float = seconds) -> Any:
                clock[0] += seconds
                return run(*args)

            patch.setattr(steps, function.__name__, counting)
        patch.setattr(host_rounds, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
        patch.setattr(RingWrites, "took", lambda *args: found.append(args[-1]))
        wrong += once(e, "all_reduce", SLOT_BYTES * 3 // 2, 1, torch.float32)
    return found if not wrong else [-1.0]


def inference_tensors() -> list[str]:
    """Made in inference mode, and reduced outside of it."""
    with torch.inference_mode():
        tensors = [torch.full((n,), 3.0) for n in (4, 100_000, 1 << 20)]
    wrong = []
    for op in ("sum", "avg"):
        for tensor in tensors:
            with torch.inference_mode():
                tensor.fill_(3.0 + interlace.get_rank())
            interlace.all_reduce(tensor, op=op)
            total = sum(3.0 + rank for rank in range(interlace.get_world_size()))
            if tensor[0] != (total if op == "sum" else total / interlace.get_world_size()):
                wrong.append(f"{op} of {tensor.numel()}: {tensor[0]}")
    return wrong


def late(seconds: float) -> list[str]:
    """Each rank is late in turn, so the others' waits stop, they fall asleep, and are woken."""
    with engine() as e:
        wrong = once(e, "all_gather", SLOT_BYTES, 0, torch.uint8)
        for key in range(2 * e.world_size):
            if key % e.world_size == e.rank:
                time.sleep(seconds)
            nbytes = (8, 3 * SLOT_BYTES)[key // e.world_size]
            wrong += once(e, "all_reduce", nbytes, key, torch.float32)
    return wrong


def died(folder: str, nbytes: int) -> None:
    """Rank 2 is killed in the middle of its ops; the others note what they see."""
    with engine() as e:
        once(e, "all_gather", SLOT_BYTES, 0, torch.uint8)
        if e.rank == 2:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            tensor = torch.zeros(nbytes, dtype=torch.uint8)
            while True:
                e.all_reduce(Call("all_reduce"), tensor, "sum")
        except InterlaceError as error:
            Path(folder, str(e.rank)).write_text(f"{type(error).__name__}: {error}")
            while not all(Path(folder, str(rank)).exists() for rank in (0, 1)):
                time.sleep(0.005)  # lives on: nobody learns it from this one's end
            raise


def mismatched() -> list[str]:
    """Ranks ask for different things, in every way that data may go; then all ask for the same again."""
    said: list[str] = []
    with engine() as e:
        world = e.world_size
        wrong = once(e, "all_gather", SLOT_BYTES, 0, torch.uint8)
        section = SLOT_BYTES // world
        lengths = [
            (4, 5), (4, 100_000), (100_000, 4), (100_000, 100_001), (1 << 20, 4), (4, 1 << 20),
            (2 * section, 30 * section), (30 * section, 2 * section), (30 * section, 31 * section),
        ]  # fmt: skip
        for number, (most, one) in enumerate(lengths):
            shape = one if e.rank == number % world else most
            tensor = torch.ones(shape)
            try:
                interlace.all_reduce(tensor)
                said.append("nothing was raised")
            except ValueError as error:
                said.append(str(error))
            if not torch.equal(tensor, torch.ones(shape)):
                wrong.append(f"bytes moved before the comparison of {most} and {one}")
            wrong += once(e, "all_reduce", rounds_of("all_reduce", world, 7), number, torch.float32)
            wrong += once(e, "broadcast", 2 * SLOT_BYTES, number, torch.float32)
        try:
            if e.rank:
                interlace.all_gather(torch.zeros(world), torch.zeros(1))
            else:
                interlace.barrier()
        except ValueError as error:
            said.append(str(error))
        wrong += once(e, "all_to_all", 64, 1, torch.float32)
    return said + wrong


def aborted(nbytes: int) -> str:
    """Rank 1 aborts the group while the others wait for it."""
    with engine() as e:
        once(e, "all_gather", SLOT_BYTES, 0, torch.uint8)
        group: Any = e._group
        if e.rank == 1:
            time.sleep(0.05)
            group.abort("enough")
            return "rank 1 aborted the group: enough"
        try:
            while True:
                e.all_reduce(Call("all_reduce"), torch.zeros(nbytes // 4), "sum")
        except InterlaceError as error:
            return str(error)


def in_a_thread() -> list[str]:
    """All ops, on a thread that is not the main one, while the main one computes."""
    wrong: list[str] = []
    with engine() as e:

        def work() -> None:
            for key, op in enumerate(2 * OPS):
                for nbytes in (24, 100_000, rounds_of(op, e.world_size, 2)):
                    wrong.extend(once(e, op, nbytes, key, torch.float32))
            wrong.append("done")

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            sum(range(1000))
            thread.join(0.001)
    return wrong


def many_sizes() -> list[str]:
    """More sizes than lists of steps are kept, by number and by bytes; all are right, and few are kept."""
    before = message_steps.KEPT, message_steps.KEPT_BYTES
    wrong = []
    try:
        with engine() as e:
            for message_steps.KEPT, message_steps.KEPT_BYTES in ((5, 1 << 20), (1000, 20_000)):
                for key in range(60):
                    nbytes = 8 * key + (key % 4 == 0) * SLOT_BYTES
                    wrong += once(e, ("all_reduce", "broadcast")[key % 2], nbytes, key, torch.int64)
                    kept = [steps.nbytes for steps in e._steps._kept.values()]
                    if len(kept) > message_steps.KEPT or sum(kept) > message_steps.KEPT_BYTES:
                        wrong.append(f"{len(kept)} lists of {sum(kept)} bytes are kept")
    finally:
        message_steps.KEPT, message_steps.KEPT_BYTES = before  # these processes are used again
    return wrong


def other_caches() -> list[str]:
    """Ops around the sizes of the last rank, whose caches are other than everyone's."""
    own = host_rounds.own_caches
    rank, world = interlace.get_rank(), interlace.get_world_size()
    seen = [Caches((256 << 10) << peer, 32 << 20) for peer in range(world)]
    host_rounds.own_caches = lambda: seen[rank]  # type: ignore[assignment]
    try:
        with engine() as e:
            wrong = once(e, "all_gather", 1 << 20, 0, torch.uint8)  # opens the rings
            taken = Thresholds.of(seen[-1], world)
            if e._steps.sizes != taken:
                wrong.append(f"rank {rank} has {e._steps.sizes}")
            edges = sorted({size for each in seen for size in Thresholds.of(each, world)[:3]})
            for op, edge in itertools.product(("all_reduce", "all_gather", "scatter"), edges):
                wrong += once(e, op, edge + 8, 0, torch.uint8)
    finally:
        host_rounds.own_caches = own  # these processes are used again
    return wrong


def interrupted(folder: str, op: Callable[..., Any]) -> bool:
    """Ctrl-C while rank 0 waits for rank 1; whether it ends the wait, which no timeout does in time."""
    done = Path(folder, "done")
    with engine() as e:
        e.barrier(Call("barrier"))
        if e.rank == 1:
            while not done.exists():
                time.sleep(0.005)
            return True
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            op(e)
            return False
        except KeyboardInterrupt:
            return True
        finally:
            signal.signal(signal.SIGINT, before)
            done.touch()


def small_op(e: HostEngine) -> None:
    e.all_reduce(Call("all_reduce"), torch.zeros(4), "sum")


def middle_op(e: HostEngine) -> None:
    e.barrier(Call("barrier"))
