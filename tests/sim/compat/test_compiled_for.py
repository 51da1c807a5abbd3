"""The GPU for which ``sim`` compiles kernels, Triton's new atomics, and ops in Python."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import interlace
from interlace.runtime.core.errors import InlineAssemblyError
from interlace.runtime.places.sim import user_code
from interlace.runtime.places.sim.choice import compiled_for
from interlace.verify import races, schedules
from interlace_verify import shims
from stand_ins.replaced import replaced


@triton.jit
def to_fp8_and_back(x_ptr, y_ptr, FP8: tl.constexpr):
    thread = tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1
    )
    elements = tl.arange(0, 32)
    numbers = tl.load(x_ptr + elements)
    if FP8:
        numbers = numbers.to(tl.float8e4nv).to(tl.float32)
    tl.store(y_ptr + elements, numbers, mask=thread < 32)


@triton.jit
def plain(x_ptr, y_ptr):
    tl.store(y_ptr + tl.arange(0, 32), tl.load(x_ptr + tl.arange(0, 32)))


def rounded(fp8: bool = True) -> None:
    y = torch.zeros(32)
    to_fp8_and_back[(1,)](torch.full((32,), 1.06), y, fp8, num_warps=1)
    assert torch.all(y == (1.0 if fp8 else 1.06))


def copied() -> None:
    plain[(1,)](torch.ones(32), torch.zeros(32))


def test_the_next_gpu_is_taken_where_the_compiler_refuses() -> None:
    assert races(rounded, 1, seeds=1).clean
    assert not schedules(rounded, 1, n=1, workers=1).failing
    interlace.run(rounded, 1)


@pytest.mark.parametrize(
    ("arches", "fp8", "used"),
    [
        ((80, 90, 100), False, {80}),
        ((90,), False, {90}),
        ((100,), False, {80}),
        ((90, 80), True, {90}),
    ],
)
def test_the_first_that_can_be_run_is_taken(
    arches: tuple[int, ...], fp8: bool, used: set[int]
) -> None:
    with compiled_for(arches) as found:
        assert races(rounded, 1, fp8, seeds=1).clean
        assert found == used
        assert races(copied, 1, seeds=1).clean
    assert found == used  # everything else is interpreted


def test_where_all_refuse_the_error_says_all() -> None:
    with compiled_for((80,)), pytest.raises(InlineAssemblyError, match=r"for sm_80: .*fp8e4nv"):
        interlace.run(rounded, 1)
    assert races(broken, 1, seeds=1).refusals[0][1].count("does_not_compile for sm_") == 2


@triton.jit
def does_not_compile(x_ptr):
    tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], tl.int32, False, 1)
    tl.static_assert(False, "no GPU has it")


def broken() -> None:
    does_not_compile[(1,)](torch.zeros(1))


@triton.jit
def hand_on(peers, rank, out_ptr, MINE: tl.constexpr):
    """Rank 0 publishes 7, rank 1 polls for it and then loads what was stored before."""
    data = tl.load(peers).to(tl.pointer_type(tl.int64))
    if MINE == 0:
        tl.store(data + 1, 40)
        tl.debug_barrier()
        tl.atomic_store(data, 7, sem="release", scope="sys")
    else:
        tl.atomic_poll(data, 7, sem="acquire", scope="sys")
        seen = tl.atomic_load(data, sem="acquire", scope="sys")
        tl.store(out_ptr, seen + tl.load(data + 1))


def exchange() -> int:
    rank = interlace.get_rank()
    handle = interlace.symmetric_memory.rendezvous(
        interlace.symmetric_memory.empty(2, dtype=torch.int64)
    )
    table = torch.tensor([handle.buffer_ptrs[0]], dtype=torch.int64)
    handle.barrier()
    out = torch.zeros(1, dtype=torch.int64)
    hand_on[(1,)](table, rank, out, MINE=rank)
    return int(out)


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="this Triton has no such atomics")
@pytest.mark.parametrize("seed", range(4))
def test_a_poll_lets_others_go_on(seed: int) -> None:
    assert interlace.run(exchange, 2, seed=seed) == [0, 47]


def test_the_host_does_not_wait_for_an_op_of_torch() -> None:
    """Meta tensors give the shape, so the op runs on a stream."""
    found, stock = [], user_code._allocate_results

    def allocated(func: Any, args: Any, kwargs: Any) -> Any:
        found.append((func.name(), stock(func, args, kwargs)))
        return found[-1][1]

    def on_rank() -> list[float]:
        return (torch.ones(2, device="cuda") * 3 + 1.0).tolist()

    with shims.installed("torch"), replaced((user_code, "_allocate_results", allocated)):
        assert interlace.run(on_rank, 1) == [[4.0, 4.0]]
    results = dict(found)
    assert results["aten::mul.Tensor"] is not None and results["aten::add.Tensor"] is not None
