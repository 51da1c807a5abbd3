"""The ranks' side of the API's tests. The reference of sums is ``fold`` (sim/core/test_reductions.py)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import interlace
import torch_names
from cases import support_table
from interlace.runtime.numerics import reductions

LENGTHS = (3, 0, 5, 1)  # lengths of uneven parts along dim 0, by rank
FEW = (torch.float32, torch.bool, torch.complex64)
"""Of these dtypes every shape and form is tried; of the others one of each op."""


def bits(rank: int, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return bytes of any dtype that differ for each rank and call."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    count = math.prod(shape) * dtype.itemsize
    flat = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator)
    return flat.to(torch.uint8).view(dtype).view(shape)


def unlike(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a result, every byte of which differs from ``tensor``; most floats are NaN."""
    flip = 1 if tensor.dtype == torch.bool else 255
    return (raw(tensor) ^ flip).view(tensor.dtype).view(tensor.shape)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate parts of any dtype along dim 0."""
    flat = torch.cat([raw(part) for part in parts]).view(parts[0].dtype)
    return flat.view(-1, *parts[0].shape[1:])


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(raw(got), raw(expected)), f"{got} is not {expected}"


def done(result: Any, async_op: bool) -> None:
    if async_op:
        assert isinstance(result, interlace.Work)
        assert result.wait() is True and result.is_success()
    else:
        assert result is None


def fills(
    expected: Any, async_op: bool, call: Callable[..., Any], compare: Callable[..., None] = check
) -> None:
    """Check that ``call`` fills outputs that it gets with ``expected``: a tensor, or lists of tensors."""
    out = tree_map(unlike, expected)
    done(call(out, async_op=async_op), async_op)
    for got, each in zip(tree_leaves(out), tree_leaves(expected), strict=True):
        compare(got, each)


def numbers_of_ranks() -> tuple[int, int]:
    return interlace.get_rank(), interlace.get_world_size()


# -- moving -------------------------------------------------------------------------------------------


def all_gather(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    shapes: list[tuple[int, ...]] = [(2, 3), (0, 2), (5,), ()]
    for call, shape in enumerate(shapes if dtype in FEW else shapes[:1]):
        parts = [bits(r, call, shape, dtype) for r in range(world)]
        own, stack = parts[rank], torch.cat([raw(p) for p in parts]).view(dtype).view(world, *shape)

        def gather(out: Any, own: torch.Tensor = own, **options: Any) -> Any:
            return interlace.all_gather(out, own, **options)

        def in_place(out: Any, own: torch.Tensor = own, **options: Any) -> Any:
            raw(out[rank]).copy_(raw(own))
            return interlace.all_gather(out, out[rank], **options)

        for expected in (stack, parts, *([joined(parts)] if shape else [])):
            fills(expected, async_op, gather)
        fills(stack, async_op, in_place)


def uneven(call: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the part of each rank."""
    world = interlace.get_world_size()
    return [bits(r, call, (LENGTHS[r], 2), dtype) for r in range(world)]


def all_gather_v(dtype: torch.dtype, async_op: bool) -> None:
    parts = uneven(3, dtype)
    own, sizes = parts[interlace.get_rank()], list(LENGTHS[: len(parts)])
    fills(joined(parts), async_op, lambda out, **o: interlace.all_gather_v(out, own, sizes, **o))
    fills(parts, async_op, lambda outs, **o: interlace.all_gather_v(outs, own, **o))


def gather(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    for root in {0, world - 1}:
        parts = uneven(root, dtype)

        def call(outs: Any, root: int = root, parts: Any = parts, **options: Any) -> Any:
            return interlace.gather(parts[rank], outs or None, dst=root, **options)

        fills(parts if rank == root else [], async_op, call)


def gather_v(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    root, parts = world - 1, uneven(7, dtype)

    def call(out: Any, **options: Any) -> Any:
        of_root = (out, LENGTHS[:world]) if rank == root else (None, None)
        return interlace.gather_v(parts[rank], *of_root, dst=root, **options)

    fills(joined(parts) if rank == root else [], async_op, call)


def scatter(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    for root in {0, world - 1}:
        parts = uneven(root, dtype)

        def call(out: Any, root: int = root, parts: Any = parts, **options: Any) -> Any:
            return interlace.scatter(out, parts if rank == root else None, src=root, **options)

        fills(parts[rank], async_op, call)


def scatter_v(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    root, parts = world - 1, uneven(5, dtype)
    given = (joined(parts), LENGTHS[:world]) if rank == root else (None, None)
    fills(parts[rank], async_op, lambda out, **o: interlace.scatter_v(out, *given, src=root, **o))


def broadcast(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    shapes: list[tuple[int, ...]] = [(4, 3), (), (0,)]
    for call, shape in enumerate(shapes if dtype in FEW else shapes[:1]):
        for root in {0, world - 1}:
            expected = bits(root, call, shape, dtype)
            x = bits(root, call, shape, dtype) if rank == root else unlike(expected)
            done(interlace.broadcast(x, root, async_op=async_op), async_op)
            check(x, expected)


def between(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what this rank sends to each rank, and what it receives from each."""
    rank, world = numbers_of_ranks()

    def message(sender: int, receiver: int) -> torch.Tensor:
        return bits(sender, 20 + receiver, ((2 * sender + 3 * receiver) % 4, 2), dtype)

    return [message(rank, r) for r in range(world)], [message(s, rank) for s in range(world)]


def all_to_all(dtype: torch.dtype, async_op: bool) -> None:
    sent, received = between(dtype)
    fills(received, async_op, lambda outs, **o: interlace.all_to_all(outs, sent, **o))


def all_to_all_v(
    dtype: torch.dtype, async_op: bool, function: Callable[..., Any] = interlace.all_to_all_v
) -> None:
    sent, received = between(dtype)
    whole, sizes = joined(sent), [[len(part) for part in parts] for parts in (received, sent)]
    fills(joined(received), async_op, lambda out, **o: function(out, whole, *sizes, **o))


def all_to_all_single(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    all_to_all_v(dtype, async_op, interlace.all_to_all_single)
    even = [bits(r, 9, (2 * world,), dtype) for r in range(world)]
    expected = joined([each[2 * rank : 2 * rank + 2] for each in even])
    fills(expected, async_op, lambda out, **o: interlace.all_to_all_single(out, even[rank], **o))


def all_gather_coalesced(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    shapes = [(2,), (3, 2)]
    parts = [[bits(r, call, s, dtype) for r in range(world)] for call, s in enumerate(shapes)]
    own = [each[rank] for each in parts]
    fills(parts, async_op, lambda outs, **o: interlace.all_gather_coalesced(outs, own, **o))


def all_gather_into_tensor_coalesced(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    parts = [[bits(r, call, (4,), dtype) for r in range(world)] for call in range(2)]
    own, gather = [each[rank] for each in parts], interlace.all_gather_into_tensor_coalesced
    fills([joined(each) for each in parts], async_op, lambda outs, **o: gather(outs, own, **o))


# -- between two ranks --------------------------------------------------------------------------------


def send(dtype: torch.dtype, async_op: bool) -> None:
    """A ring, in an order that cannot block, of send and recv."""
    rank, world = numbers_of_ranks()
    if world == 1:
        return
    left, right = (rank - 1) % world, (rank + 1) % world
    expected = bits(left, 1, (3, 2), dtype)
    x = unlike(expected)
    if rank == 0:
        interlace.send(bits(rank, 1, (3, 2), dtype), right)
        assert interlace.recv(x, left) == left
    else:
        assert interlace.recv(x) == left  # from any rank: only this one sends
        interlace.send(bits(rank, 1, (3, 2), dtype), right)
    check(x, expected)


recv = send


def isend(dtype: torch.dtype, async_op: bool) -> None:
    """Send from each rank to each, itself included; the order of tags differs from the order of sends."""
    rank, world = numbers_of_ranks()
    works, pairs = [], []
    for tag in (0, 5):
        for peer in range(world):
            works.append(interlace.isend(bits(rank, 50 + tag, (4,), dtype), peer, tag=tag))
    for tag in (5, 0):
        for peer in range(world):
            expected = bits(peer, 50 + tag, (4,), dtype)
            x = unlike(expected)
            work = interlace.irecv(x, peer, tag=tag)
            works.append(work)
            pairs.append((x, expected, work, peer))
    for work in reversed(works):
        done(work, True)
    for x, expected, work, peer in pairs:
        check(x, expected)
        assert work.source_rank() == peer


irecv = isend


def batch_isend_irecv(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    left, right = (rank - 1) % world, (rank + 1) % world
    expected = bits(left, 2, (5,), dtype)
    x = unlike(expected)
    works = interlace.batch_isend_irecv(
        [
            interlace.P2POp(interlace.irecv, x, left),
            interlace.P2POp(interlace.isend, bits(rank, 2, (5,), dtype), group_peer=right),
        ]
    )
    for work in works:
        done(work, True)
    check(x, expected)


# -- reducing -----------------------------------------------------------------------------------------


def numbers(rank: int, call: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers that every dtype has; sums and products of a few of them are exact in most dtypes."""
    generator = torch.Generator().manual_seed(1000 * call + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_complex:
        whole = torch.randint(-4, 5, (count, 2), generator=generator).float()
        return torch.view_as_complex(whole).to(dtype)
    if dtype.is_floating_point:
        if dtype == torch.float8_e8m0fnu:  # powers of two only
            return (2.0 ** torch.randint(-2, 3, (count,), generator=generator)).to(dtype)
        return torch.randint(-3, 4, (count,), generator=generator).float().to(dtype)
    least = 0 if torch.iinfo(dtype).min == 0 else -50
    return torch.randint(least, 100, (count,), generator=generator).to(dtype)


FACTOR = 0.5


def reduced(op: str, terms: list[torch.Tensor]) -> torch.Tensor:
    if op == "premul_sum":
        wide = torch.complex64 if terms[0].is_complex() else torch.float32
        op, terms = "sum", [(term.to(wide) * FACTOR).to(term.dtype) for term in terms]
    total = torch.empty_like(terms[0])
    reductions.fold(op, terms, total)
    return total


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare: only averages, and products that do not fit, may differ by roundings of the dtype."""
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        check(got, expected)
        return
    assert got.dtype == expected.dtype
    info, wide = torch.finfo(got.dtype), torch.complex128 if got.is_complex() else torch.float64
    bound = {"rtol": 2 * info.eps, "atol": info.tiny}
    torch.testing.assert_close(got.to(wide), expected.to(wide), **bound)


def reduce_op(op: str) -> Any:
    return torch_names.premul_sum(FACTOR) if op == "premul_sum" else op


def all_reduce(dtype: torch.dtype, op: str, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    terms = [numbers(r, 1, 7, dtype) for r in range(world)]
    x = terms[rank].clone()
    done(interlace.all_reduce(x, reduce_op(op), async_op=async_op), async_op)
    near(x, reduced(op, terms))
    on_ranks = [torch.empty_like(x) for _ in range(world)]
    interlace.all_gather(on_ranks, x)
    for other in on_ranks:  # all ranks have the same bits
        check(other, x)


def reduce(dtype: torch.dtype, op: str, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    root = world - 1
    terms = [numbers(r, 2, 5, dtype) for r in range(world)]
    x = terms[rank].clone()
    done(interlace.reduce(x, root, reduce_op(op), async_op=async_op), async_op)
    if rank == root:
        near(x, reduced(op, terms))
    else:
        check(x, terms[rank])


def reduce_scatter(dtype: torch.dtype, op: str, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    wholes = [numbers(r, 3, 4 * world, dtype).view(world, 2, 2) for r in range(world)]
    expected, own = reduced(op, [whole[rank] for whole in wholes]), wholes[rank]
    forms = (own, own.view(world * 2, 2), list(own.unbind(0)))
    for given in forms if dtype in FEW else forms[:1]:

        def call(out: torch.Tensor, given: Any = given, **options: Any) -> Any:
            return interlace.reduce_scatter(out, given, reduce_op(op), **options)

        fills(expected, async_op, call, near)


def reduce_scatter_v(dtype: torch.dtype, op: str, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    sizes = LENGTHS[:world]
    wholes = [numbers(r, 4, sum(sizes), dtype) for r in range(world)]
    given, expected = wholes[rank], reduced(op, [w.split(sizes)[rank] for w in wholes])

    def call(out: torch.Tensor, **options: Any) -> Any:
        return interlace.reduce_scatter_v(out, given, sizes, reduce_op(op), **options)

    fills(expected, async_op, call, near)


def all_reduce_coalesced(dtype: torch.dtype, op: str, async_op: bool) -> None:
    """The second call has tensors that share memory."""
    rank, world = numbers_of_ranks()
    terms = [[numbers(r, call, 2 + call, dtype) for r in range(world)] for call in range(3)]
    own = [each[rank].clone() for each in terms]
    whole = own[2].clone()
    for tensors in (own, [whole, whole[1:]]):
        work = interlace.all_reduce_coalesced(tensors, reduce_op(op), async_op=async_op)
        done(work, async_op)
    for got, each in zip((*own, whole), (*terms, terms[2]), strict=True):
        near(got, reduced(op, each))


def reduce_scatter_tensor_coalesced(dtype: torch.dtype, op: str, async_op: bool) -> None:
    rank, world = numbers_of_ranks()
    wholes = [[numbers(r, c, 2 * world, dtype) for r in range(world)] for c in range(2)]
    given = [each[rank] for each in wholes]

    def call(outs: list[torch.Tensor], **options: Any) -> Any:
        return interlace.reduce_scatter_tensor_coalesced(outs, given, reduce_op(op), **options)

    expected = [reduced(op, [w[2 * rank : 2 * rank + 2] for w in each]) for each in wholes]
    fills(expected, async_op, call, near)


# -- all of an operation ------------------------------------------------------------------------------


def serve(name: str, dtypes: tuple[torch.dtype, ...], *async_ops: bool) -> int:
    """Run operation ``name`` in all forms of its line in the table, and return the number of calls."""
    operation = next(each for each in support_table.OPERATIONS if each.name == name)
    ops: tuple[str, ...] = support_table.REDUCE_OPS
    if operation.payload == support_table.ANY:
        ops = ("",)
    runs = 0
    for async_op in async_ops if operation.async_op else (False,):
        for dtype in dtypes:
            for op in ops:
                if not op or support_table.defined(op, dtype):
                    globals()[name](dtype, *([op] if op else []), async_op)
                    runs += 1
    return runs
