"""Scenarios of hosts_ranks.py: calls of all ranks that are equal, that differ and fit, that do not fit.

Each at every speed: with its call, with its frames, and in pieces (``runtime/places/hosts/pieces.py``).
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from interlace.runtime.core.call import Call
from interlace.runtime.core.communicator import Communicator
from interlace.runtime.places.hosts import pieces

LENGTHS = (3, 30_001)
"""In elements: of what goes with a call, and of what does not."""


@contextlib.contextmanager
def small_pieces(nbytes: int) -> Iterator[None]:
    """Ops of more bytes than these are done in pieces of as many."""
    before = pieces.MIDDLE_BYTES, pieces.PIECE_BYTES
    pieces.MIDDLE_BYTES = pieces.PIECE_BYTES = nbytes
    try:
        yield
    finally:
        pieces.MIDDLE_BYTES, pieces.PIECE_BYTES = before


def _run(group: Communicator, call: Call, *arguments: Any) -> None:
    group.run(call.op, lambda: getattr(group.engine, call.op)(call, *arguments), async_op=False)


def _full(count: int, value: float) -> torch.Tensor:
    return torch.full((count,), value)


def fitting(group: Communicator) -> list[str]:
    """Equal calls, and calls that differ and fit: the results are the same, and nothing is out of step."""
    wrong: list[str] = []
    if group.place.name != "hosts":
        return wrong
    rank, everyone = group.rank, range(group.world_size)
    last, total = group.world_size - 1, float(sum(everyone))

    def check(case: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(found, expected):
            wrong.append(f"{case} on rank {rank}")

    for count in LENGTHS:
        for nbytes in (1 << 14, 4 << 20):
            for alike in (True, False):
                case = (
                    f"{count} elements, {nbytes} bytes, {'equal' if alike else 'different'} calls"
                )

                def call(op: str, alike: bool = alike) -> Call:
                    part = 0 if alike else rank
                    return Call(op, part=part, match=lambda parts: None, equal_fits=True)

                with small_pieces(nbytes):
                    tensor = _full(count, rank)
                    _run(group, call("all_reduce"), tensor, "sum")
                    check(f"all_reduce {case}", tensor, _full(count, total))
                    for root in (0, last):
                        tensor = _full(count, rank)
                        _run(group, call("reduce_to"), tensor, root, "sum")
                        expected = total if rank == root else float(rank)
                        check(f"reduce {root} {case}", tensor, _full(count, expected))
                        tensor = _full(count, rank)
                        _run(group, call("broadcast"), tensor, root)
                        check(f"broadcast {root} {case}", tensor, _full(count, root))
                        outputs = [_full(count, -1) for _ in everyone] if rank == root else None
                        _run(group, call("gather"), outputs, _full(count, rank), root)
                        for r, output in enumerate(outputs or ()):
                            check(f"gather {root} {case}", output, _full(count, r))
                        inputs = [_full(count, r) for r in everyone] if rank == root else None
                        output = _full(count, -1)
                        _run(group, call("scatter"), output, inputs, root)
                        check(f"scatter {root} {case}", output, _full(count, rank))
                    parts = [_full(count, 10 * rank + r) for r in everyone]
                    output = _full(count, -1)
                    _run(group, call("reduce_scatter"), output, parts, "sum")
                    expected = 10 * total + rank * group.world_size
                    check(f"reduce_scatter {case}", output, _full(count, expected))
                    found = [_full(count, -1) for _ in everyone]
                    _run(group, call("all_to_all"), found, parts)
                    for r in everyone:
                        check(f"all_to_all {case}", found[r], _full(count, 10 * r + rank))
                    _run(group, call("all_gather"), found, _full(count, rank))
                    for r in everyone:
                        check(f"all_gather {case}", found[r], _full(count, r))
                    whole = torch.cat(parts)
                    output = torch.empty_like(whole)
                    _run(group, call("all_to_all"), output, whole)
                    expected_of_all = torch.cat([_full(count, 10 * r + rank) for r in everyone])
                    check(f"all_to_all {case}", output, expected_of_all)
    return wrong


def leaving_nothing(group: Communicator) -> list[str]:
    """No op is left to the garbage collector, which would find it, and the caller's tensors, much later."""
    gc.collect()
    gc.disable()
    try:
        wrong = fitting(group)
        left = [each for each in gc.get_objects() if type(each) is pieces.OpPiece]
    finally:
        gc.enable()
    return [*wrong, f"{len(left)} pieces are left"] if left else wrong


def refused(group: Communicator) -> list[str]:
    """One rank calls with another size, so at another speed: all hear it, no tensor changes, all go on.

    Before that all call alike, so that data leaves before it is known that nobody wants it.
    """
    wrong: list[str] = []
    rank, world_size = group.rank, group.world_size
    sizes = (3, 30_001, 60_001)  # with the call, with frames, in pieces

    def called(op: str, count: int) -> tuple[torch.Tensor, ...]:
        """Call ``op`` with tensors that depend on ``count``; those that it would write."""
        tensor, parts = _full(count * world_size, rank), ()
        if op in ("gather", "scatter") and rank == 0:
            parts = tuple(_full(count * world_size, rank) for _ in range(world_size))
        arguments: dict[str, tuple[Any, ...]] = {
            "all_reduce": (tensor, "sum"),
            "broadcast": (tensor, 0),
            "all_to_all": (tensor, tensor.clone()),
            "gather": (parts or None, tensor, 0),
            "scatter": (tensor, parts or None, 0),
        }
        call = Call(op, (("size", count),), match=lambda parts: None, equal_fits=True)
        try:
            _run(group, call, *arguments[op])
        except ValueError as error:
            texts.append(str(error))
        return tensor, *parts

    for odd in (0, world_size - 1):
        for of_odd in sizes:
            for of_others in sizes:
                if of_odd == of_others:
                    continue
                case = f"rank {odd} with {of_odd}, others with {of_others}"
                for op in ("all_reduce", "broadcast", "all_to_all", "gather", "scatter"):
                    texts: list[str] = []
                    with small_pieces(200_000 * world_size):
                        called(op, of_others)
                        wrong += [f"{op}, {case}: {text} before" for text in texts]
                        texts.clear()
                        tensors = called(op, of_odd if rank == odd else of_others)
                    if [f"{op}: size differs between ranks" in text for text in texts] != [True]:
                        wrong.append(f"{op}, {case}: {texts}")
                    if any((tensor != rank).any() for tensor in tensors):
                        wrong.append(f"{op}, {case}: rank {rank}'s tensor has changed")
                ranks = torch.tensor([float(rank)])
                _run(group, Call("all_reduce"), ranks, "sum")
                if ranks.item() != sum(range(world_size)):
                    wrong.append(f"after {case}: {ranks}")
    return wrong
