"""The ranks' side of the API's tests, with plain torch and Python numbers as the reference."""

import math
from collections.abc import Callable
from typing import Any

import torch

import interlace
import torch_names
from cases import support_table

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


def check(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, what
    assert torch.equal(raw(got), raw(expected)), f"{what}: {got} is not {expected}"


def done(result: Any, async_op: bool) -> None:
    if async_op:
        assert isinstance(result, interlace.Work)
        assert result.wait() is True and result.is_success()
    else:
        assert result is None


# -- moving -------------------------------------------------------------------------------------------


def parts_of(rank: int, world: int, call: int, tail: tuple[int, ...], dtype: Any) -> list[Any]:
    """Return the parts of ``rank`` for each of the others; they are uneven along dim 0."""
    return [bits(rank, 10 * call + r, (LENGTHS[r], *tail), dtype) for r in range(world)]


def all_gather(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    shapes: list[tuple[int, ...]] = [(2, 3), (0, 2), (5,), ()]
    for call, shape in enumerate(shapes if dtype in FEW else shapes[:1]):
        parts = [bits(r, call, shape, dtype) for r in range(world)]
        stack = torch.cat([raw(p) for p in parts]).view(dtype).view(world, *shape)
        forms = [stack]
        if shape:
            forms.append(stack.view(world * shape[0], *shape[1:]))
        for expected in forms:
            out = unlike(expected)
            done(interlace.all_gather(out, parts[rank], async_op=async_op), async_op)
            check(out, expected, f"all_gather {dtype} {expected.shape}")
        outs = [unlike(p) for p in parts]
        done(interlace.all_gather(outs, parts[rank], async_op=async_op), async_op)
        for out, expected in zip(outs, parts, strict=True):
            check(out, expected, f"all_gather list {dtype}")
        out = unlike(stack)
        mine, nbytes = out[rank], stack.nbytes // world
        raw(out)[rank * nbytes :][:nbytes].copy_(raw(parts[rank]))
        done(interlace.all_gather(out, mine, async_op=async_op), async_op)
        check(out, stack, f"all_gather in place {dtype}")


def all_gather_v(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    parts = [bits(r, 3, (LENGTHS[r], 2), dtype) for r in range(world)]
    sizes = list(LENGTHS[:world])
    expected = torch.cat([raw(p) for p in parts]).view(dtype).view(-1, 2)
    out = unlike(expected)
    done(interlace.all_gather_v(out, parts[rank], sizes, async_op=async_op), async_op)
    check(out, expected, "all_gather_v")
    outs = [unlike(p) for p in parts]
    done(interlace.all_gather_v(outs, parts[rank], async_op=async_op), async_op)
    for got, want in zip(outs, parts, strict=True):
        check(got, want, "all_gather_v list")


def gather(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    for root in {0, world - 1}:
        parts = [bits(r, root, (LENGTHS[r], 2), dtype) for r in range(world)]
        outs = [unlike(p) for p in parts] if rank == root else None
        work = interlace.gather(parts[rank], outs, dst=root, async_op=async_op)
        done(work, async_op)
        for out, part in zip(outs or [], parts, strict=False):
            check(out, part, "gather")


def gather_v(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    root = world - 1
    parts = [bits(r, 7, (LENGTHS[r], 2), dtype) for r in range(world)]
    expected = torch.cat([raw(p) for p in parts]).view(dtype).view(-1, 2)
    out, sizes = (unlike(expected), LENGTHS[:world]) if rank == root else (None, None)
    done(interlace.gather_v(parts[rank], out, sizes, dst=root, async_op=async_op), async_op)
    if out is not None:
        check(out, expected, "gather_v")


def scatter(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    for root in {0, world - 1}:
        parts = parts_of(root, world, root, (2,), dtype)
        out = unlike(parts[rank])
        given = parts if rank == root else None
        done(interlace.scatter(out, given, src=root, async_op=async_op), async_op)
        check(out, parts[rank], "scatter")


def scatter_v(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    root = world - 1
    parts = parts_of(root, world, 5, (2,), dtype)
    whole = torch.cat([raw(p) for p in parts]).view(dtype).view(-1, 2)
    out = unlike(parts[rank])
    given = (whole, LENGTHS[:world]) if rank == root else (None, None)
    done(interlace.scatter_v(out, *given, src=root, async_op=async_op), async_op)
    check(out, parts[rank], "scatter_v")


def broadcast(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    shapes: list[tuple[int, ...]] = [(4, 3), (), (0,)]
    for call, shape in enumerate(shapes if dtype in FEW else shapes[:1]):
        for root in {0, world - 1}:
            expected = bits(root, call, shape, dtype)
            x = bits(root, call, shape, dtype) if rank == root else unlike(expected)
            done(interlace.broadcast(x, root, async_op=async_op), async_op)
            check(x, expected, "broadcast")


def lengths_between(sender: int, receiver: int) -> int:
    return (2 * sender + 3 * receiver) % 4


def _between(world: int, sender: int, receiver: int, dtype: torch.dtype) -> torch.Tensor:
    shape = (lengths_between(sender, receiver), 2)
    return bits(sender, 20 + receiver, shape, dtype)


def all_to_all(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    expected = [_between(world, s, rank, dtype) for s in range(world)]
    outs = [unlike(e) for e in expected]
    ins = [_between(world, rank, r, dtype) for r in range(world)]
    done(interlace.all_to_all(outs, ins, async_op=async_op), async_op)
    for out, each in zip(outs, expected, strict=True):
        check(out, each, "all_to_all")


def _single(function: Callable[..., Any], dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    expected = [_between(world, s, rank, dtype) for s in range(world)]
    ins = [_between(world, rank, r, dtype) for r in range(world)]
    want = torch.cat([raw(e) for e in expected]).view(dtype).view(-1, 2)
    given = torch.cat([raw(e) for e in ins]).view(dtype).view(-1, 2)
    out = unlike(want)
    received, sent = [len(e) for e in expected], [len(e) for e in ins]
    done(function(out, given, received, sent, async_op=async_op), async_op)
    check(out, want, function.__name__)


def all_to_all_single(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    _single(interlace.all_to_all_single, dtype, async_op)
    even = [bits(r, 9, (2 * world,), dtype) for r in range(world)]
    want = torch.cat([raw(e)[rank * 2 * dtype.itemsize :][: 2 * dtype.itemsize] for e in even])
    out = unlike(want.view(dtype))
    done(interlace.all_to_all_single(out, even[rank], async_op=async_op), async_op)
    check(out, want.view(dtype), "all_to_all_single even")


def all_to_all_v(dtype: torch.dtype, async_op: bool) -> None:
    _single(interlace.all_to_all_v, dtype, async_op)


def all_gather_coalesced(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    shapes = [(2,), (3, 2)]
    parts = [[bits(r, call, s, dtype) for r in range(world)] for call, s in enumerate(shapes)]
    outs = [[unlike(p) for p in each] for each in parts]
    work = interlace.all_gather_coalesced(outs, [each[rank] for each in parts], async_op=async_op)
    done(work, async_op)
    for out, each in zip(outs, parts, strict=True):
        for got, want in zip(out, each, strict=True):
            check(got, want, "all_gather_coalesced")


def all_gather_into_tensor_coalesced(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    parts = [[bits(r, call, (4,), dtype) for r in range(world)] for call in range(2)]
    wholes = [torch.cat([raw(p) for p in each]).view(dtype) for each in parts]
    outs = [unlike(whole) for whole in wholes]
    inputs = [each[rank] for each in parts]
    done(interlace.all_gather_into_tensor_coalesced(outs, inputs, async_op=async_op), async_op)
    for got, want in zip(outs, wholes, strict=True):
        check(got, want, "all_gather_into_tensor_coalesced")


# -- between two ranks --------------------------------------------------------------------------------


def send(dtype: torch.dtype, async_op: bool) -> None:
    """A ring, in an order that cannot block, of send and recv."""
    rank, world = interlace.get_rank(), interlace.get_world_size()
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
    check(x, expected, "send")


recv = send


def isend(dtype: torch.dtype, async_op: bool) -> None:
    """Send from each rank to each, itself included; the order of tags differs from the order of sends."""
    rank, world = interlace.get_rank(), interlace.get_world_size()
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
        check(x, expected, "isend")
        assert work.source_rank() == peer


irecv = isend


def batch_isend_irecv(dtype: torch.dtype, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
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
    check(x, expected, "batch_isend_irecv")


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


_OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "avg": lambda a, b: a + b,
    "premul_sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "min": min,
    "max": max,
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
}
_OF_BOOLS: dict[str, Callable[[list[bool]], bool]] = {
    **{op: any for op in ("sum", "max", "bor")},
    **{op: all for op in ("product", "min", "band", "avg")},
    "bxor": lambda values: sum(values) % 2 == 1,
}
FACTOR = 0.5


def reduced(op: str, terms: list[torch.Tensor]) -> torch.Tensor:
    """The reduction in Python's numbers, wrapped or rounded into the dtype once."""
    dtype, count = terms[0].dtype, len(terms)
    if dtype == torch.complex32:
        columns = zip(*[t.to(torch.complex64).tolist() for t in terms], strict=True)
    elif dtype.is_floating_point:
        columns = zip(*[t.double().tolist() for t in terms], strict=True)
    else:
        columns = zip(*[t.tolist() for t in terms], strict=True)
    results: list[Any] = []
    for column in columns:
        if dtype == torch.bool:
            results.append(_OF_BOOLS[op](list(column)) if count > 1 else column[0])
            continue
        if op == "premul_sum":
            column = [value * FACTOR for value in column]
        total = column[0]
        for value in column[1:]:
            total = _OF_TWO[op](total, value)
        if op == "avg":
            whole = not (dtype.is_floating_point or dtype.is_complex)
            total = int(total / count) if whole else total / count
        if not (dtype.is_floating_point or dtype.is_complex):
            info = torch.iinfo(dtype)
            total = (total - info.min) % (1 << info.bits) + info.min
        results.append(total)
    if dtype.is_complex:
        return torch.tensor(results, dtype=torch.complex128).to(dtype)
    if dtype.is_floating_point:
        wide = torch.tensor(results, dtype=torch.float64)
        return wide if dtype == torch.float64 else wide.float().to(dtype)
    return torch.tensor(results, dtype=dtype)


def near(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare: only averages, and products that do not fit, may differ by roundings of the dtype."""
    assert got.dtype == expected.dtype and got.shape == expected.shape, what
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        assert got.tolist() == expected.tolist(), f"{what}: {got} is not {expected}"
        return
    wide = torch.complex128 if got.dtype.is_complex else torch.float64
    a, b = got.to(wide), expected.to(wide)
    part = {torch.complex32: torch.float16, torch.complex64: torch.float32}.get(
        got.dtype, got.dtype
    )
    part = torch.float64 if part == torch.complex128 else part
    bound = 2 * torch.finfo(part).eps * b.abs() + torch.finfo(part).tiny
    assert bool(((a - b).abs() <= bound).all()), f"{what}: {got} is not {expected}"


def reduce_op(op: str) -> Any:
    return torch_names.premul_sum(FACTOR) if op == "premul_sum" else op


def all_reduce(dtype: torch.dtype, op: str, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    terms = [numbers(r, 1, 7, dtype) for r in range(world)]
    x = terms[rank].clone()
    done(interlace.all_reduce(x, reduce_op(op), async_op=async_op), async_op)
    near(x, reduced(op, terms), f"all_reduce {op} {dtype}")
    if not (dtype.is_floating_point or dtype.is_complex):
        return  # equal to one and so to each other
    everyone = [torch.empty_like(x) for _ in range(world)]
    interlace.all_gather(everyone, x)
    for other in everyone:
        check(other, x, "all_reduce: bits on all ranks")


def reduce(dtype: torch.dtype, op: str, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    root = world - 1
    terms = [numbers(r, 2, 5, dtype) for r in range(world)]
    x = terms[rank].clone()
    done(interlace.reduce(x, root, reduce_op(op), async_op=async_op), async_op)
    if rank == root:
        near(x, reduced(op, terms), f"reduce {op} {dtype}")
    else:
        check(x, terms[rank], "reduce leaves other ranks' tensors")


def reduce_scatter(dtype: torch.dtype, op: str, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    wholes = [numbers(r, 3, 4 * world, dtype).view(world, 2, 2) for r in range(world)]
    expected = reduced(op, [w[rank].reshape(-1) for w in wholes]).view(2, 2)
    mine = wholes[rank]
    forms = (mine, mine.view(world * 2, 2), list(mine.unbind(0)))
    for given in forms if dtype in FEW else forms[:1]:
        out = unlike(mine[rank])
        work = interlace.reduce_scatter(out, given, reduce_op(op), async_op=async_op)
        done(work, async_op)
        near(out, expected, f"reduce_scatter {op} {dtype}")


def reduce_scatter_v(dtype: torch.dtype, op: str, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    sizes = LENGTHS[:world]
    wholes = [numbers(r, 4, sum(sizes), dtype) for r in range(world)]
    first = sum(sizes[:rank])
    terms = [w[first : first + sizes[rank]] for w in wholes]
    out = unlike(terms[rank].clone())
    work = interlace.reduce_scatter_v(out, wholes[rank], sizes, reduce_op(op), async_op=async_op)
    done(work, async_op)
    near(out, reduced(op, terms), f"reduce_scatter_v {op} {dtype}")


def all_reduce_coalesced(dtype: torch.dtype, op: str, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    terms = [[numbers(r, call, 2 + call, dtype) for r in range(world)] for call in range(3)]
    xs = [each[rank].clone() for each in terms]
    done(interlace.all_reduce_coalesced(xs, reduce_op(op), async_op=async_op), async_op)
    for x, each in zip(xs, terms, strict=True):
        near(x, reduced(op, each), f"all_reduce_coalesced {op} {dtype}")
    whole = terms[2][rank].clone()
    done(
        interlace.all_reduce_coalesced([whole, whole[1:]], reduce_op(op), async_op=async_op),
        async_op,
    )
    near(whole, reduced(op, terms[2]), f"all_reduce_coalesced of shared memory {op} {dtype}")


def reduce_scatter_tensor_coalesced(dtype: torch.dtype, op: str, async_op: bool) -> None:
    rank, world = interlace.get_rank(), interlace.get_world_size()
    wholes = [[numbers(r, c, 2 * world, dtype) for r in range(world)] for c in range(2)]
    outs = [unlike(each[rank][:2].clone()) for each in wholes]
    work = interlace.reduce_scatter_tensor_coalesced(
        outs, [each[rank] for each in wholes], reduce_op(op), async_op=async_op
    )
    done(work, async_op)
    for out, each in zip(outs, wholes, strict=True):
        expected = reduced(op, [w[2 * rank : 2 * rank + 2] for w in each])
        near(out, expected, f"reduce_scatter_tensor_coalesced {op} {dtype}")


# -- all of an operation ------------------------------------------------------------------------------


def serve(name: str, dtypes: tuple[torch.dtype, ...], *async_ops: bool) -> int:
    """Run operation ``name`` in all forms of its line in the table, and return the number of calls."""
    operation = next(each for each in support_table.OPERATIONS if each.name == name)
    runs = 0
    for async_op in async_ops:
        if async_op and not operation.async_op:
            continue
        for dtype in dtypes:
            if operation.payload == support_table.ANY:
                globals()[name](dtype, async_op)
                runs += 1
                continue
            for op in support_table.REDUCE_OPS:
                if support_table.defined(op, dtype):
                    globals()[name](dtype, op, async_op)
                    runs += 1
    return runs
