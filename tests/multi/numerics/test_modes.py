"""Ranks with other floating-point modes: sums have equal bits on all of them, and their modes stay."""

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl

import interlace
from interlace.runtime.core.launch import KernelLaunch
from interlace.runtime.numerics import reductions
from interlace.runtime.places.shm import machine_code
from interlace.runtime.places.sim.scheduler.scheduler import run_interpreted
from ranks import ranks
from tiers import few

UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}.get(machine_code.PROCESSOR)
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
MODES = ["no denormals", "upward"]
SIZES = [64, 16 << 10, 240 << 10, 320 << 10]  # bytes: with the message, beside it, through rings

needs_modes = pytest.mark.skipif(UPWARD is None, reason="its modes are not known here")


@contextmanager
def in_mode(mode: str) -> Iterator[None]:
    """Set ``mode`` in this thread, and in torch's threads that start here."""
    if mode == "upward":
        assert ctypes.CDLL(None).fesetround(UPWARD) == 0
    elif mode == "no denormals":
        assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        ctypes.CDLL(None).fesetround(0)
        torch.set_flush_denormal(False)


def payload(rank: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return denormal numbers, and numbers whose sums are rounded."""
    real = torch.float32 if dtype.is_complex else dtype
    generator = torch.Generator().manual_seed(rank)
    made = torch.rand(nbytes // real.itemsize, generator=generator).to(real)
    made[::3] *= torch.finfo(real).smallest_normal / 4
    return made.view(dtype)


def wrong_sums(mode: str, dtype: torch.dtype, threads: int, *, seen: bool = True) -> list[str]:
    """Reduce while rank 1 is in ``mode``; return the cases that have other bits than in the usual mode.

    ``seen``: whether ranks notice their modes.
    """
    rank, cases = interlace.get_rank(), []
    # a complex product depends on where in the range its factors are
    ops = ["sum", "avg", *([] if dtype.is_complex else ["product", "min", "max"])]
    torch.set_num_threads(1)
    parts = {nbytes: [payload(peer, nbytes, dtype) for peer in range(2)] for nbytes in SIZES}
    expected = {}
    for op, nbytes in itertools.product(ops, SIZES):
        expected[op, nbytes] = torch.empty_like(parts[nbytes][0])
        reductions.fold(op, parts[nbytes], expected[op, nbytes])
    with in_mode(mode if rank else ""):
        torch.set_num_threads(threads)
        assert reductions.is_usual() == (rank == 0 or not seen)
        for (op, nbytes), whole in expected.items():
            half = whole.chunk(2)[rank]
            summed, scattered = parts[nbytes][rank].clone(), torch.empty_like(half)
            interlace.reduce_scatter_tensor(scattered, summed, op)
            interlace.all_reduce(summed, op)
            if threads > 1 and nbytes > reductions.EVERYWHERE:
                whole, half = summed.clone(), scattered
                interlace.broadcast(whole, 0)
            for found, meant in ((summed, whole), (scattered, half)):
                if not torch.equal(found.view(torch.uint8), meant.view(torch.uint8)):
                    cases.append(f"{mode}, {threads} threads, {op} of {nbytes} bytes")
            assert reductions.is_usual() == (rank == 0 or not seen)
    return cases


@needs_modes
@pytest.mark.parametrize("dtype", few(FLOATS, torch.float32, torch.bfloat16))
@ranks(2)
def test_sums_have_equal_bits(dtype: torch.dtype) -> None:
    for mode, threads in itertools.product(MODES, (1, 2)):
        assert wrong_sums(mode, dtype, threads) == []


@triton.jit
def add(left, right, total, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, COUNT)
    tl.store(total + at, tl.load(left + at) + tl.load(right + at))


@needs_modes
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATS[:4])
def test_interpreted_kernels_compute_in_the_usual_mode(dtype: torch.dtype, mode: str) -> None:
    parts = [payload(rank, 256 * dtype.itemsize, dtype) for rank in range(2)]
    totals = [torch.empty_like(parts[0]) for _ in range(2)]
    for total, where in zip(totals, ("", mode), strict=True):
        arguments = {"left": parts[0], "right": parts[1], "total": total, "COUNT": 256}
        launch = KernelLaunch(add, (1,), arguments, "add")
        with in_mode(where):
            run_interpreted(launch, 0, lambda wait: None)
            assert reductions.is_usual() == (not where)
    assert torch.equal(*[total.view(torch.uint8) for total in totals])
