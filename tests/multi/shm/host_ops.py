"""Collectives of an engine in every size and form, exactly checked, for ranks of tests."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from interlace.groups import groups
from interlace.runtime.core.call import Call
from interlace.runtime.core.engine import Engine
from interlace.runtime.numerics.reductions import fold
from interlace.runtime.places.shm import engine as host_engine
from interlace.runtime.places.shm.caches import Thresholds, own_caches
from interlace.runtime.places.shm.engine import HostEngine

REDUCED = ("all_reduce", "reduce", "reduce_scatter")
MOVED_PARTS = ("all_to_all", "scatter")
MOVED_WHOLE = ("all_gather", "in place", "broadcast", "gather")
OPS = (*REDUCED, *MOVED_WHOLE, *MOVED_PARTS)
SIZES = Thresholds.of(own_caches(), 2)
MEDIUM_DATA, SLOT_BYTES = SIZES.medium, SIZES.slot  # for any world size
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.float64, torch.uint8)


@contextmanager
def engine(with_steps: bool = True) -> Iterator[HostEngine]:
    """Return this rank's engine: with steps of machine code, or without them."""
    with mock.patch.object(host_engine, "available", lambda: with_steps):
        made = groups.default_group().engine
    assert isinstance(made, HostEngine)
    assert made._steps.machine_code is with_steps
    yield made


@functools.cache
def _line() -> torch.Tensor:
    return (torch.arange(1 << 20, dtype=torch.int64) * 0x1E3779B97F4A7C15).view(torch.uint8)


def data(rank: int, nbytes: int, key: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return ``nbytes`` for this rank and key: whole numbers, or any bytes if they are only moved."""
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
    """Return the bytes of an ``op`` of this many whole rounds, in the op's unit: a part or the whole."""
    section = SLOT_BYTES // world_size & ~63
    if op in MOVED_WHOLE:
        return rounds * SLOT_BYTES
    return rounds * section * (1 if op in ("reduce_scatter", *MOVED_PARTS) else world_size)


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return got.numel() == 0 or torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def check(
    e: Engine,
    op: str,
    nbytes: int,
    key: int = 0,
    dtype: torch.dtype = torch.uint8,
    reduction: str = "sum",
    memory: torch.Tensor | None = None,
    part: Any = None,
) -> None:
    """Run one op, and compare.

    An odd ``key`` means lists, if the op takes them; every third key scatters a sum in place. ``memory``
    has this rank's inputs, if given; its lists are parts of it. ``part`` is an argument of the call, which
    fits any value of the others.
    """
    rank, world, lists = e.rank, e.world_size, key % 2 == 1
    n, root = nbytes // dtype.itemsize, key % world
    terms = (("n", n), ("dtype", str(dtype)), ("key", key % 2), ("op", reduction), ("root", root))
    call = Call(op, terms, part=part, match=lambda parts: None, equal_fits=True)
    own = slice(rank * n, (rank + 1) * n)

    def split(whole: torch.Tensor) -> list[torch.Tensor]:
        parts = [whole[peer * n : (peer + 1) * n] for peer in range(world)]
        return parts if memory is not None and whole is mine else [each.clone() for each in parts]

    def filled(count: int) -> torch.Tensor:
        return torch.full((count,), 9, dtype=dtype)

    of_each = nbytes * (world if op in ("reduce_scatter", *MOVED_PARTS) else 1)
    everyone = [data(peer, of_each, key, dtype) for peer in range(world)]
    mine = everyone[rank].clone() if memory is None else memory[: len(everyone[rank])]
    mine.copy_(everyone[rank])
    if op in ("all_reduce", "reduce"):
        got, wanted = mine, filled(n)
        fold(reduction, everyone, wanted)
        if op == "all_reduce":
            e.all_reduce(call, got, reduction)
        else:
            e.reduce_to(call, got, root, reduction)
            wanted = wanted if rank == root else everyone[rank]
    elif op == "reduce_scatter":
        inputs, wanted = split(mine), filled(n)
        got = filled(n) if key % 3 else inputs[rank] if lists else mine[own]
        e.reduce_scatter(call, got, inputs if lists else mine, reduction)
        fold(reduction, [each[own] for each in everyone], wanted)
    elif op in ("all_gather", "in place", "gather"):
        got, wanted = filled(n * world), torch.cat(everyone)
        outputs = split(got)
        if op == "in place":
            mine = (outputs[rank] if lists else got[own]).copy_(mine)
        if op == "gather":
            e.gather(call, outputs if rank == root else None, mine, root)
            wanted = wanted if rank == root else filled(n * world)
        else:
            e.all_gather(call, outputs if lists else got, mine)
        got = torch.cat(outputs) if lists or op == "gather" else got
    elif op == "scatter":
        got, inputs = filled(n), split(everyone[root])
        e.scatter(call, got, inputs if rank == root else None, root)
        wanted = inputs[rank]
    elif op == "broadcast":
        got, wanted = mine, everyone[root]
        e.broadcast(call, got, root)
    else:
        assert op == "all_to_all"
        got, wanted = filled(n * world), torch.cat([each[own] for each in everyone])
        outputs = split(got)
        e.all_to_all(call, outputs if lists else got, split(mine) if lists else mine)
        got = torch.cat(outputs) if lists else got
    assert same(got, wanted), f"{op} of {nbytes} bytes, {dtype}, {reduction}, key {key}"


def check_lengths(e: Engine, lengths: Sequence[int]) -> None:
    """Run ops whose parts have other ``lengths`` on each rank, and for each pair of ranks."""
    rank, everyone = e.rank, range(e.world_size)

    def length(number: int) -> int:
        return lengths[number % len(lengths)]

    wholes = [data(peer, length(peer) + peer, 0) for peer in everyone]
    pairs = {
        (source, target): data(source, length(source + 2 * target), 1 + target)
        for source in everyone
        for target in everyone
    }
    sums = [[data(peer, len(whole) // 4 * 4, 9) for whole in wholes] for peer in everyone]

    def empty(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros_like(part) for part in parts]

    gathered, collected, own = empty(wholes), empty(wholes), torch.zeros_like(wholes[rank])
    e.all_gather(Call("a"), gathered, wholes[rank])
    last = everyone[-1]
    e.gather(Call("g"), collected if rank == last else None, wholes[rank], last)
    e.scatter(Call("s"), own, wholes if rank == 0 else None, 0)
    received = empty([pairs[peer, rank] for peer in everyone])
    e.all_to_all(Call("t"), received, [pairs[rank, peer] for peer in everyone])
    result, wanted = empty([sums[rank][rank]] * 2)
    e.reduce_scatter(Call("r"), result, sums[rank], "max")
    fold("max", [sums[peer][rank] for peer in everyone], wanted)
    assert same(own, wholes[rank]) and same(result, wanted)
    for peer in everyone:
        assert same(gathered[peer], wholes[peer])
        assert rank != last or same(collected[peer], wholes[peer])
        assert same(received[peer], pairs[peer, rank])


def make_ring(e: HostEngine) -> None:
    """Run the first large op, which makes the ring and so takes another way."""
    check(e, "all_gather", SLOT_BYTES)
