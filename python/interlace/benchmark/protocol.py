"""The protocol of time measurements, on all ranks of a group, and payloads with errors of results.

Candidates alternate block by block, so that noise of the machine affects all of them alike. A block is as
many calls as fill 20 ms (at least one), one after another without a barrier. Its time is its slowest
rank's, from the end of the barrier before it until the device has finished. Results are medians over
blocks, and ratios are of medians of the same run. Calls that calibrate the length of a block do not count.

On a GPU the host waits for the device at the end of a block only, so calls are launched while earlier ones
run, like in nccl-tests. With virtual ranks, which take turns on the host, a rank waits for its device after
all ranks have launched. Inputs are rotated past the last cache before memory.

Element i of rank r in call c is one of 128 values that float16, bfloat16 and all wider dtypes hold exactly.
They are whole numbers from -64 to 63 for integers, and these divided by 32 for floats.
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
from interlace import reference
from interlace.groups import groups
from interlace.ops.matmul.formats import Scaled, packed_rows, unpacked_rows
from interlace.runtime.core import plain

BLOCK_SECONDS = 0.02
MOST_CALLS = 2000
ALIGNMENT = 256  # bytes, as torch's own allocator on GPUs


@dataclass
class Timing:
    """``microseconds`` per call, by block; ``calls`` in a block."""

    calls: int
    microseconds: list[float]


def everyones(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank; small and picklable. Collective, on the host only.

    It does not use ``Communicator.agree``, where a place may answer from an earlier agreement.
    """
    messages = groups.default_group().place.exchange(plain.dumps(value), "a benchmark")
    return [plain.loads(message) for message in messages]


def slowest(value: float) -> float:
    return float(max(everyones(value)))


def finish(*, virtual: bool = False) -> None:
    """Return when all work that this rank has launched has ended. Collective for virtual ranks."""
    if virtual:  # a rank that blocked here at once would keep the others from launching
        everyones(None)
    if interlace.device().type == "cuda":
        torch.cuda.synchronize()


def block(function: Callable[[], object], calls: int, *, virtual: bool = False) -> float:
    """Return seconds per call of the slowest rank. Collective."""
    interlace.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    finish(virtual=virtual)
    return slowest((time.perf_counter() - start) / calls)


def calls_per_block(function: Callable[[], object], *, virtual: bool = False) -> int:
    """Return the number of calls that fill a block; the same on every rank. Collective."""
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

    ``calls``: in every block, or None for as many as fill it. ``warm_up``: the number of blocks of each
    function that do not count. ``tick`` is called after every block that counts.
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
    """Sets of inputs, one after another. Candidates share it, so none finds inputs in the cache."""

    def __init__(self, sets: Sequence[tuple[Any, ...]]) -> None:
        self._sets = itertools.cycle(sets)

    def calling(self, run: Callable[..., Any]) -> Callable[[], Any]:
        """Return a function without arguments that calls ``run`` with the next set."""
        return lambda: run(*next(self._sets))


def total_bytes(value: Any) -> int:
    """Return the bytes of the storages of all tensors in nested tuples and lists, and packed matrices."""
    return sum(storage.nbytes() for storage in _storages(value).values())


def copies_of(value: Any, count: int) -> list[Any]:
    """Return ``count`` copies of the tensors, each tensor in one allocation: thousands are made quickly."""
    copies: dict[int, tuple[torch.Tensor, int]] = {}
    for address, storage in _storages(value).items():
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        padded = -(-max(1, storage.nbytes()) // ALIGNMENT) * ALIGNMENT
        rows = torch.empty(count, padded, dtype=torch.uint8, device=storage.device)
        rows[:, : storage.nbytes()] = raw
        copies[address] = (rows, padded)

    def copy(number: int, each: Any) -> Any:
        if isinstance(each, Scaled) and each.inner == -2:
            return copy(number, each.t()).t()
        if isinstance(each, Scaled):
            return unpacked_rows(copy(number, packed_rows(each)), each.kind, each.shape[-1])
        rows, padded = copies[each.untyped_storage().data_ptr()]
        first = number * padded // each.element_size() + each.storage_offset()
        empty = torch.empty(0, dtype=each.dtype, device=each.device)
        return empty.set_(rows.untyped_storage(), first, each.shape, each.stride())

    numbers = range(count)
    kinds = torch.Tensor, Scaled
    return [tree_map_only(kinds, functools.partial(copy, n), value) for n in numbers]


def _storages(value: Any) -> dict[int, Any]:
    leaves = (
        packed_rows(leaf) if isinstance(leaf, Scaled) else leaf for leaf in tree_leaves(value)
    )
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}


FALLBACK_BYTES = 32 << 20
PAST = 2  # times the cache: before a set is used again, the others have replaced it
MOST_SETS = 4096
MOST_BYTES = 2 << 30
_CPU = Path("/sys/devices/system/cpu/cpu0/cache")


def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the largest cache: a GPU's L2, a CPU's last level; 32 MiB if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size or FALLBACK_BYTES
    return last_level(_CPU) or FALLBACK_BYTES


def last_level(folder: Path) -> int:
    """Return the bytes of the largest cache level that Linux lists in ``folder``; 0 if it lists none."""
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
    """Return the number of sets to use in turn, so that ``cache`` holds no part of one at its next use."""
    if not set_bytes:
        return 1
    wanted = math.ceil(PAST * cache / set_bytes)
    return max(1, min(wanted, MOST_SETS, MOST_BYTES // set_bytes))


PIECE = 1 << 22
_MIX = -7046029254386353131  # 2**64 / golden ratio, as a signed word
_MIX_AGAIN = -4658895280553007687
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def values(index: torch.Tensor, rank: int, call: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements ``index`` (int64, any shape) of a vector of ``rank`` in ``call``."""
    mixed = (index + (rank + 1) * 1_000_003 + (call + 1) * 7_368_787_331) * _MIX
    mixed = (mixed ^ (mixed >> 29)) * _MIX_AGAIN
    small = ((mixed >> 33) & 127) - 64
    return (small / 32).to(dtype) if dtype.is_floating_point else small.to(dtype)


def vector(
    first: int, count: int, rank: int, call: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    output = torch.empty(count, dtype=dtype, device=device)
    for begin in range(0, count, PIECE):
        end = min(count, begin + PIECE)
        index = torch.arange(first + begin, first + end, device=device)
        output[begin:end] = values(index, rank, call, dtype)
    return output


def some_rows(
    rows: torch.Tensor, columns: int, rank: int, call: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return these rows of a matrix that has the elements of a vector, row by row."""
    index = rows[:, None] * columns + torch.arange(columns, device=rows.device)
    return values(index, rank, call, dtype)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with values that no right result has: nan, or a number beyond the payload. In place."""
    return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 99)


def error_of_copy(result: torch.Tensor, first: int, rank: int, call: int) -> float:
    """Return 0 if ``result`` is the payload of ``rank`` from element ``first`` on, otherwise inf."""
    flat = result.reshape(-1)
    for begin in range(0, flat.numel(), PIECE):
        piece = flat[begin : begin + PIECE]
        right = vector(first + begin, piece.numel(), rank, call, piece.dtype, piece.device)
        if not torch.equal(piece, right):
            return float("inf")
    return 0.0


def error_of_sum(
    result: torch.Tensor, first: int, world_size: int, call: int, *, rounds_often: bool
) -> float:
    """Return the largest error of a sum, in bounds; ``rounds_often``: partial sums are rounded."""
    flat, worst = result.reshape(-1), 0.0
    for begin in range(0, flat.numel(), PIECE):
        piece = flat[begin : begin + PIECE]
        parts = [
            vector(first + begin, piece.numel(), rank, call, piece.dtype, piece.device)
            for rank in range(world_size)
        ]
        if not piece.dtype.is_floating_point:
            right = torch.stack(parts).sum(0, dtype=torch.int64).to(piece.dtype)
            worst = max(worst, 0.0 if torch.equal(piece, right) else float("inf"))
            continue
        value, bound = reference.reduce(parts)
        if rounds_often:
            bound = bound + often_rounded(parts, piece.dtype)
        worst = max(worst, reference.worst_ratio(piece, value, bound))
    return worst


def often_rounded(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return a bound on a sum's error from rounding each partial sum of ``parts`` to ``dtype``."""
    magnitude = torch.stack([part.double().abs() for part in parts]).sum(0)
    return reference.gamma(len(parts) + 1, reference.unit_roundoff(dtype)) * magnitude
