"""Calls that are repeated from a plan, on the fake GPU: as right as those that go the long way."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import interlace
from interlace.groups.groups import default_group
from interlace.runtime.places.gpu import plans as gpu_plans
from interlace.runtime.places.gpu.plans import Signalled, _Where
from interlace.runtime.places.gpu.stream import DeviceStream
from interlace.runtime.tuning import configuration, tuning as auto
from stand_ins import fake_host
from stand_ins.fake_cuda import FakeGpu, end_current_stream
from stand_ins.fake_host import gpu_ranks, own_plans
from stand_ins.replaced import Replacement

ROWS, INNER, COLUMNS = 24, 16, 8
LENGTH, CALLS = 12, 9

WITH_FEW_QUEUES_TOO = pytest.mark.usefixtures("connections")


def data(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float()


def inputs(call: int) -> list[torch.Tensor]:
    return [data(1000 * call + r, ROWS, INNER) for r in range(interlace.get_world_size())]


def fused(op: str, *, async_op: bool = False, **options: Any) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        result = getattr(interlace, op)(*operands, algorithm="fused", async_op=async_op, **options)
        return result.wait() if async_op else result

    return call


GATHER, SCATTER, PRODUCT = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
gather, product = fused(GATHER), fused(PRODUCT)
Tensors = list[torch.Tensor]


def gathered(xs: Tensors, w: torch.Tensor) -> Tensors:
    return [torch.cat(xs) @ w]


def summed(xs: Tensors, w: torch.Tensor) -> Tensors:
    return [torch.stack(xs).sum(0) @ w]


def scattered(xs: Tensors, w: torch.Tensor) -> Tensors:
    return [own_rows(*summed(xs, w))]


def own_rows(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(interlace.get_world_size())[interlace.get_rank()]


OPS: dict[str, tuple[Callable[..., Any], Callable[[Tensors, torch.Tensor], Tensors]]] = {
    "gather": (gather, gathered),
    "gather_and_keep": (
        fused(GATHER, return_gathered=True),
        lambda xs, w: [torch.cat(xs), torch.cat(xs) @ w],
    ),
    "gather_for_two": (
        lambda x, w: gather(x, [w, w.T.contiguous().T]),
        lambda xs, w: gathered(xs, w) * 2,
    ),
    "gather_transposed": (lambda x, w: gather(x, w.T.contiguous().T), gathered),
    "scatter": (fused(SCATTER), scattered),
    "gather_asynchronously": (fused(GATHER, async_op=True), gathered),
    "scatter_asynchronously": (fused(SCATTER, async_op=True), scattered),
    "product": (product, summed),
}


def normed(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(rows, (COLUMNS,), torch.full((COLUMNS,), 2.0), 0.5)


def with_norm(op: str, *operands: torch.Tensor, **options: Any) -> Any:
    norm = interlace.RMSNorm(torch.full((COLUMNS,), 2.0), eps=0.5)
    return getattr(interlace, op)(*operands, norm=norm, algorithm="fused", **options)


def scattered_and_normed(x: torch.Tensor, w: torch.Tensor) -> Any:
    residual = torch.ones(ROWS // interlace.get_world_size(), COLUMNS)
    return with_norm(SCATTER, x, w, residual=residual, gather_normed=True)


def normed_of(xs: Tensors, w: torch.Tensor) -> Tensors:
    (total,) = summed(xs, w)
    return [normed(total), total]


NORMED: dict[str, tuple[Callable[..., Any], Callable[[Tensors, torch.Tensor], Tensors]]] = {
    "scatter": (
        scattered_and_normed,
        lambda xs, w: [normed(summed(xs, w)[0] + 1), own_rows(summed(xs, w)[0] + 1)],
    ),
    "product": (lambda x, w: with_norm(PRODUCT, x, w), normed_of),
    "quantized": (lambda x, w: with_norm("all_reduce_norm", x @ w, quantize="fp8"), normed_of),
}


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


@WITH_FEW_QUEUES_TOO
@pytest.mark.parametrize(
    ("op", "world_size"), [*((op, 2) for op in OPS), ("gather", 1), ("gather", 3), ("scatter", 3)]
)
def test_repeated_calls_are_right(op: str, world_size: int) -> None:
    repeated_calls(op, world_size)


def repeated_calls(op: str, world_size: int, *faults: Replacement) -> None:
    """All calls are right; all but the first two, which make the plans of both workspaces, are planned."""
    # alone, the copy engine sends, and is not planned
    planned = CALLS - 2 if world_size > 1 or "gather" not in op else 0
    call_op, right_results = OPS[op]

    def on_rank() -> None:
        for call in range(CALLS):
            w, xs = data(7 + call, INNER, COLUMNS), inputs(call)
            results = flat(call_op(xs[interlace.get_rank()], w))
            end_current_stream()
            for result, right in zip(results, right_results(xs, w), strict=True):
                assert torch.equal(result, right), call
        assert own_plans().hits == planned

    fake_host.run(on_rank, world_size, FakeGpu(3), *faults)


@pytest.mark.parametrize("op", NORMED)
@gpu_ranks(2, seed=3)
def test_repeated_norms_are_right(op: str) -> None:
    """The sums are exact; fp8 keeps 4 bits."""
    call_op, right_results = NORMED[op]
    for call in range(7):
        w, xs = data(7 + call, INNER, COLUMNS), inputs(call)
        rows, total = call_op(xs[interlace.get_rank()], w)
        end_current_stream()
        close = 2.0**-20
        if op == "quantized":
            rows, close = rows[0].float() * rows[1], 2.0**-4
        right, sums = right_results(xs, w)
        assert torch.equal(total, sums), call
        torch.testing.assert_close(rows, right, rtol=close, atol=close / 4)
    assert own_plans().hits == 5


@gpu_ranks(2, seed=3)
def test_results_are_new_and_nothing_of_the_callers_is_kept() -> None:
    w = data(7, INNER, COLUMNS)
    seen = []
    for call in range(6):
        x = inputs(call)[interlace.get_rank()]
        out = gather(x, w)
        seen += [StorageWeakRef(x.untyped_storage()), StorageWeakRef(out.untyped_storage())]
        before = out.data_ptr()
        assert fused(GATHER, async_op=True)(x, w).data_ptr() != before
        end_current_stream()
        del x, out
    gc.collect()
    assert own_plans().hits > 6 and all(reference.expired() for reference in seen)


@gpu_ranks(2, seed=3)
def test_another_kind_of_call_is_not_taken_for_a_known_one() -> None:
    configured = configuration.override(block_m=16)(gather)
    rank, w = interlace.get_rank(), data(7, INNER, COLUMNS)
    xs = inputs(1)
    whole = torch.cat(xs) @ w
    bias = data(9, COLUMNS)
    for _ in range(3):
        gather(xs[rank], w)
    known = own_plans().hits
    variants: list[tuple[Callable[[], Any], torch.Tensor]] = [
        (lambda: gather(xs[rank][: ROWS // 2], w), torch.cat([x[: ROWS // 2] for x in xs]) @ w),
        (lambda: gather(xs[rank], w[:, :4].contiguous()), whole[:, :4]),
        (lambda: gather(xs[rank].double().float(), w.T.contiguous().T), whole),
        (lambda: interlace.all_gather_matmul(xs[rank], w, algorithm="unfused"), whole),
        # the model of the kernel adds no bias
        (lambda: interlace.all_gather_matmul(xs[rank], w, bias=bias, algorithm="fused"), whole),
        (lambda: configured(xs[rank], w), whole),
    ]
    for call, right in variants:
        result = call()
        end_current_stream()
        assert torch.equal(result, right)
    assert own_plans().hits == known


@gpu_ranks(2, seed=3)
def test_arguments_that_share_memory_are_told_apart() -> None:
    """A plan of a call with one tensor twice does not fit a call with two tensors."""
    rank = interlace.get_rank()
    squares = [data(50 + r, INNER, INNER) for r in range(2)]
    other, pool = data(60, INNER, INNER), data(61, 8 * INNER, INNER)
    for _ in range(3):
        for w in (squares[rank], other):
            out = gather(squares[rank], w)
            end_current_stream()
            assert torch.equal(out, torch.cat(squares) @ w)
    for first, second in ((0, 1), (0, 3), (5, 2), (2, 5), (4, 4), (1, 0)):
        x, w = (pool[at * INNER : (at + 1) * INNER] for at in (first, second))
        out = gather(x, w)
        end_current_stream()
        assert torch.equal(out, torch.cat([x, x]) @ w)


@gpu_ranks(2, seed=3)
def test_plans_go_when_workspaces_grow() -> None:
    rank, w, hits = interlace.get_rank(), data(7, INNER, COLUMNS), []
    for rows in (ROWS, ROWS, ROWS, 4096, ROWS, ROWS, ROWS, ROWS):
        xs = [data(rows + r, rows, INNER) for r in range(2)]
        out = gather(xs[rank], w)
        end_current_stream()
        assert torch.equal(out, torch.cat(xs) @ w)
        hits.append(own_plans().hits)
    assert hits == [0, 0, 1, 1, 1, 1, 2, 3]


@gpu_ranks(2, seed=3)
def test_what_cannot_be_repeated_is_not_planned() -> None:
    x, w = inputs(1)[interlace.get_rank()], data(7, INNER, COLUMNS)
    for _ in range(4):
        interlace.all_gather_matmul(x, w, algorithm="pipelined")
        interlace.all_gather_matmul(x, w, algorithm="unfused")
        gather(x.T.contiguous().T[:, ::1].t().t()[::2], w)
        interlace.matmul_reduce_scatter(x.expand(2, ROWS, INNER), w, scatter_dim=1)
    assert len(own_plans()._plans) <= 4


@WITH_FEW_QUEUES_TOO
def test_plans_after_pulled_ops_wait_for_all_readers() -> None:
    """No call may push into a workspace that peers may still read."""

    def on_rank() -> None:
        rank, w = interlace.get_rank(), data(7, INNER, COLUMNS)
        for call in range(8):
            xs = inputs(call)
            out = gather(xs[rank], w)
            parts = torch.empty(3 * ROWS, INNER)
            interlace.all_gather(parts, xs[rank], algorithm="copy")
            again = gather(xs[rank], w)
            last = torch.empty(3 * ROWS, INNER)
            interlace.all_gather(last, xs[rank], algorithm="copy")
            end_current_stream()
            assert torch.equal(out, torch.cat(xs) @ w) and torch.equal(again, out)
            assert torch.equal(parts, torch.cat(xs)) and torch.equal(last, parts)
        assert own_plans().hits > 0

    for seed in range(3):
        fake_host.run(on_rank, 3, FakeGpu(seed, eager=0.05))


def _no_patch(self: _Where, tensor: torch.Tensor) -> Any:
    """The mutant: the addresses of the first call stay in the plan."""
    return None


def test_an_address_that_stays_is_found() -> None:
    with pytest.raises((AssertionError, interlace.InterlaceError, RuntimeError)):
        repeated_calls("gather", 2, (_Where, "_address", _no_patch))


@gpu_ranks(2, (gpu_plans, "MOST_PLANS", 8), seed=3, eager=1.0)
def test_the_number_of_plans_is_bounded() -> None:
    rank, w = interlace.get_rank(), data(7, INNER, COLUMNS)
    for rows in range(1, 30):
        product(data(rank, rows, INNER), w)
    assert 0 < len(own_plans()._plans) <= 8


@gpu_ranks(seed=3, eager=1.0)
def test_a_closed_group_says_so() -> None:
    x, w = inputs(1)[interlace.get_rank()], data(7, INNER, COLUMNS)
    for _ in range(4):
        product(x, w)
    torch.cuda.synchronize()
    default_group().place.exchange(b"", "all are here")
    default_group().close()
    with pytest.raises(interlace.InterlaceError, match="on a group that was closed"):
        product(x, w)


# -- plain collectives ------------------------------------------------------------------------------


def of_rank(call: int, rank: int, size: int = LENGTH) -> torch.Tensor:
    return data(1000 * call + rank, size)


def all_of(call: int, size: int = LENGTH) -> list[torch.Tensor]:
    return [of_rank(call, rank, size) for rank in range(interlace.get_world_size())]


def done(work: Any) -> None:
    if work is not None:
        assert work.wait() is True


Op = Callable[..., tuple[Any, torch.Tensor]]
"""(call, async_op) -> the result, or its parts, and what is right."""


def reduced(call: int, async_op: bool = False, average: bool = False) -> Any:
    x, size = of_rank(call, interlace.get_rank()), interlace.get_world_size()
    op = torch.distributed.ReduceOp.AVG if average else "sum"
    done(interlace.all_reduce(x, op, async_op=async_op))
    return x, torch.stack(all_of(call)).sum(0) / (size if average else 1)


def gathered(call: int, async_op: bool = False, form: str = "") -> Any:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    out, own = torch.full((size * LENGTH,), float("nan")), of_rank(call, rank)
    if form == "in place":
        own = out[rank * LENGTH : (rank + 1) * LENGTH].copy_(own)
    output = list(out.chunk(size)) if "list" in form else out
    if form == "in a list of memories":
        output = [part.clone() for part in output]
    done(interlace.all_gather(output, own, async_op=async_op))
    return output, torch.cat(all_of(call))


def scattered(call: int, async_op: bool = False) -> Any:
    rank, size = interlace.get_rank(), interlace.get_world_size() * LENGTH
    out = torch.full((LENGTH,), float("nan"))
    done(interlace.reduce_scatter(out, of_rank(call, rank, size), async_op=async_op))
    return out, torch.stack(all_of(call, size)).sum(0)[rank * LENGTH : (rank + 1) * LENGTH]


def broadcast(call: int, async_op: bool = False) -> Any:
    root = interlace.get_world_size() - 1
    x = of_rank(call, interlace.get_rank()).long()
    done(interlace.broadcast(x, root, async_op=async_op))
    return x, of_rank(call, root).long()


gathered_in_place = functools.partial(gathered, form="in place")
gathered_in_a_list = functools.partial(gathered, form="in a list")
gathered_in_memories = functools.partial(gathered, form="in a list of memories")
PLAIN: dict[str, Op] = {
    "reduced": reduced,
    "averaged": functools.partial(reduced, average=True),
    "gathered": gathered,
    "gathered in a list": gathered_in_a_list,
    "gathered in place": gathered_in_place,
    "scattered": scattered,
    "broadcast": broadcast,
}


def small(most: int) -> Replacement:
    """Messages of at most this many bytes use words with flags, others use workspaces."""
    return auto, "LARGEST_LOW_LATENCY_BYTES", most


IN_WORKSPACES = small(0)


def is_right(op: Op, call: int, *, async_op: bool = False) -> None:
    result, right = op(call, async_op)
    end_current_stream()
    result = torch.cat(result) if isinstance(result, list) else result
    assert torch.equal(result, right), (op, call, result, right)


@WITH_FEW_QUEUES_TOO
@pytest.mark.parametrize(
    ("world_size", "async_op", "words"), [(2, True, False), (3, False, True), (2, True, True)]
)
@pytest.mark.parametrize("op", PLAIN)
def test_repeated_plain_calls_are_right(
    op: str, world_size: int, async_op: bool, words: bool
) -> None:
    # the first two make the plans of both workspaces; words that carry their flag need none
    planned = CALLS - 1 if words and op != "scattered" else CALLS - 2

    def on_rank() -> None:
        for call in range(CALLS):
            is_right(PLAIN[op], call, async_op=async_op)
        assert own_plans().hits == planned

    fake_host.run(on_rank, world_size, FakeGpu(3), small(LENGTH * 8 if words else 0))


@gpu_ranks(2, small(32 << 10), seed=3)
def test_words_that_have_grown_are_planned_anew() -> None:
    """A plan with the old words would meet peers that use the new words."""
    hits = []
    for call, length in enumerate((8, 8, 4096, 8, 8, 4096)):
        x = of_rank(call, interlace.get_rank(), length)
        interlace.all_reduce(x)
        end_current_stream()
        assert torch.equal(x, torch.stack(all_of(call, length)).sum(0)), call
        hits.append(own_plans().hits)
    assert hits == [0, 1, 1, 1, 2, 3]


def in_place_and_apart() -> None:
    """Calls with equal shapes: in place, not in place, and with other overlaps."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    for call in range(4):
        for op in (gathered_in_place, gathered, gathered_in_place):
            is_right(op, call)
    before = own_plans().hits
    for call in range(4):
        pool = torch.zeros(size * LENGTH)
        pool[2 : 2 + LENGTH] = of_rank(call, rank)  # within the output, and no rank's part
        with pytest.raises(ValueError):
            interlace.all_gather(pool, pool[2 : 2 + LENGTH])
    assert own_plans().hits == before


def test_in_place_is_another_kind_of_call() -> None:
    fake_host.run(in_place_and_apart, 2, FakeGpu(3), IN_WORKSPACES)


def test_a_plan_that_forgets_where_tensors_lie_is_found() -> None:
    forgetful = (gpu_plans, "_where_they_lie", lambda key, *rest: True)
    errors = (AssertionError, interlace.InterlaceError, RuntimeError, pytest.fail.Exception)
    with pytest.raises(errors):
        fake_host.run(in_place_and_apart, 2, FakeGpu(3), IN_WORKSPACES, forgetful)


@gpu_ranks(2, IN_WORKSPACES, seed=3)
def test_lists_that_are_not_one_memory_are_right() -> None:
    for call in range(4):
        for op in (gathered_in_a_list, gathered_in_memories):
            is_right(op, call)


def test_a_signal_that_is_not_repeated_is_found() -> None:
    def silent(self: Signalled, stream: DeviceStream, workspace: Any) -> None:
        if self.method != "wait":
            getattr(stream, self.method)(workspace, *self.arguments)

    def on_rank() -> None:
        for call in range(CALLS):
            is_right(broadcast, call)

    fault = (Signalled, "again", silent)
    with pytest.raises((AssertionError, interlace.InterlaceError)):
        for seed in range(8):
            fake_host.run(on_rank, 3, FakeGpu(seed, eager=0.05), IN_WORKSPACES, fault)


@gpu_ranks(2, IN_WORKSPACES, seed=3)
def test_a_call_that_failed_leaves_no_plan_to_another() -> None:
    for call in range(4):
        with pytest.raises(ValueError):
            interlace.all_reduce(torch.zeros(LENGTH), "no such op")
        interlace.barrier()
        is_right(reduced, call)
    assert not any("no such op" in kind[2] for kind in own_plans()._plans)


@gpu_ranks(2, IN_WORKSPACES, seed=3)
def test_hooks_see_calls_that_are_planned() -> None:
    """A plan runs before the hooks look at its results."""
    rank, group, sums = interlace.get_rank(), default_group(), []
    behind = own_plans()

    def after(call: interlace.HookedOp) -> None:
        end_current_stream()
        sums.append(call.outputs["tensor"].clone())

    with group.register_hook(after=after):
        for call in range(CALLS):
            work = interlace.all_reduce(of_rank(call, rank), async_op=bool(call % 2))
            if work is not None:
                work.wait()
    right = [torch.stack(all_of(call)).sum(0) for call in range(CALLS)]
    assert all(torch.equal(*pair) for pair in zip(sums, right, strict=True))
    interlace.barrier()
    assert group.plans is behind and behind.hits == CALLS - 2
