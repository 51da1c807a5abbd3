"""The protocol by which time is taken, on all ranks of a group::

    repetition 1     candidate A: barrier, block of calls    candidate B: barrier, block    ...
    repetition 2     candidate A ...

- Candidates alternate block by block, so that noise of the machine meets all of them alike.
- A block is as many calls as fill 20 ms (at least one), one after another without a barrier; it takes as
  long as its slowest rank, from leaving the barrier until its device has finished.
- Results are medians over blocks, and ratios are of medians of the same run.
- What is called first may allocate and compile: calls that calibrate the length of a block do not count.

On a GPU the host waits for the device at the end of a block only, so calls are launched while earlier ones
run, as in nccl-tests. With virtual ranks, which take turns on the host, a rank waits for its device after
all ranks have launched.

Inputs are rotated past the last cache before memory: as many sets of them as do not fit in it.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import interlace
from interlace.groups import groups
from interlace.runtime.core import plain

BLOCK_SECONDS = 0.02
MOST_CALLS = 2000
ALIGNMENT = 256  # bytes, as torch's own allocator on GPUs


@dataclass
class Timing:
    """``microseconds`` per call, by block; ``calls`` in a block."""

    calls: int
    microseconds: list[float]


def everyones(mine: Any) -> list[Any]:
    """The values of all ranks, by rank; small and picklable. Collective, on the host only.

    Not by ``Communicator.agree``, for which a place may answer from what it has agreed on before.
    """
    messages = groups.default_group().place.exchange(plain.dumps(mine), "a benchmark")
    return [plain.loads(message) for message in messages]


def slowest(value: float) -> float:
    """The largest of all ranks' values. Collective."""
    return float(max(everyones(value)))


def finish(*, virtual: bool = False) -> None:
    """Return when what this rank has launched has ended. Collective for virtual ranks."""
    if virtual:  # a rank that blocked here at once would keep the others from launching
        everyones(None)
    if interlace.device().type == "cuda":
        torch.cuda.synchronize()


def block(function: Callable[[], object], calls: int, *, virtual: bool = False) -> float:
    """Seconds per call of the slowest rank. Collective."""
    interlace.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    finish(virtual=virtual)
    return slowest((time.perf_counter() - start) / calls)


def calls_per_block(function: Callable[[], object], *, virtual: bool = False) -> int:
    """The number of calls that fill a block; the same on every rank. Collective.

    The first call does not count: it may allocate, compile and start threads.
    """
    once = min(block(function, 1, virtual=virtual) for _ in range(2))
    if once < BLOCK_SECONDS:
        once = min(block(function, 3, virtual=virtual) for _ in range(2))
    return max(1, min(MOST_CALLS, int(BLOCK_SECONDS / max(once, 1e-9))))


def alternate(
    functions: dict[str, Callable[[], object]],
    repetitions: int,
    *,
    calls: int | None = None,
    warm_up: int = 0,
    virtual: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time all ``functions`` in turn. Collective, and the same on every rank.

    ``calls``: in every block, or None for as many as fill it. ``warm_up``: blocks of each that do not
    count. ``tick`` is called after every block that does.
    """
    timings = {}
    for name, function in functions.items():
        fill = calls_per_block(function, virtual=virtual) if calls is None else calls
        timings[name] = Timing(fill, [])
    for repetition in range(-warm_up, repetitions):
        for name, function in functions.items():
            seconds = block(function, timings[name].calls, virtual=virtual)
            if repetition >= 0:
                timings[name].microseconds.append(seconds * 1e6)
                tick()
    return timings


class Rotation:
    """Sets of inputs, one after another. Candidates share it, so none finds what another has just used."""

    def __init__(self, sets: Sequence[tuple[Any, ...]]) -> None:
        self._sets = itertools.cycle(sets)

    def calling(self, run: Callable[..., Any]) -> Callable[[], Any]:
        """A function without arguments that calls ``run`` with the next set."""
        return lambda: run(*next(self._sets))


def total_bytes(value: Any) -> int:
    """Bytes of the storages of all tensors in nested tuples and lists."""
    return sum(storage.nbytes() for storage in _storages(value).values())


def copies_of(value: Any, count: int) -> list[Any]:
    """A list of ``count`` copies of the tensors, each in one allocation: thousands are made in no time."""
    copies: dict[int, tuple[torch.Tensor, int]] = {}
    for address, storage in _storages(value).items():
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        padded = -(-max(1, storage.nbytes()) // ALIGNMENT) * ALIGNMENT
        rows = torch.empty(count, padded, dtype=torch.uint8, device=storage.device)
        rows[:, : storage.nbytes()] = raw
        copies[address] = (rows, padded)

    def copied(number: int, each: torch.Tensor) -> torch.Tensor:
        rows, padded = copies[each.untyped_storage().data_ptr()]
        first = number * padded // each.element_size() + each.storage_offset()
        empty = torch.empty(0, dtype=each.dtype, device=each.device)
        return empty.set_(rows.untyped_storage(), first, each.shape, each.stride())

    numbers = range(count)
    return [tree_map_only(torch.Tensor, functools.partial(copied, n), value) for n in numbers]


def _storages(value: Any) -> dict[int, Any]:
    """By address."""
    tensors = (each for each in tree_leaves(value) if isinstance(each, torch.Tensor))
    return {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}


FALLBACK_BYTES = 32 << 20
PAST = 2  # times the cache: what is used again was replaced meanwhile
MOST_SETS = 4096
MOST_BYTES = 2 << 30
_CPU = Path("/sys/devices/system/cpu/cpu0/cache")


def cache_bytes(device: torch.device) -> int:
    """Bytes of the largest cache: a GPU's L2, a CPU's last level; 32 MiB where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size or FALLBACK_BYTES
    return last_level(_CPU) or FALLBACK_BYTES


def last_level(folder: Path) -> int:
    """Bytes of the largest cache level that Linux lists in ``folder``; 0 if it lists none."""
    found = (0, 0)
    for index in folder.glob("index*"):
        try:
            level = int((index / "level").read_text())
            text = (index / "size").read_text().strip()
            nbytes = int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
        except (OSError, ValueError):
            continue
        found = max(found, (level, nbytes))
    return found[1]


def sets_needed(set_bytes: int, cache: int) -> int:
    """The number of sets to use in turn, so that ``cache`` holds no part of one when it comes again."""
    if not set_bytes:
        return 1
    wanted = math.ceil(PAST * cache / set_bytes)
    return max(1, min(wanted, MOST_SETS, MOST_BYTES // set_bytes))
