"""``torch.ops.symm_mem`` without a GPU: as torch's own fallbacks, and for torch's own callers."""

import contextlib
import functools
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as torch_symm_mem

import interlace
from interlace.ops.matmul import torch_ops
from ranks import ranks
from support import SCALES_BY_ROW, TORCH, compiled_anew
from tiers import thorough

Case = tuple[str, str, tuple[Any, ...], dict[str, Any]]
Makers = Callable[[str], Iterator[Case]]
FP8 = torch.float8_e4m3fn
new = hasattr(funcol, "all_gather_single")  # the names since torch 2.13
all_gather: Any = funcol.all_gather_single if new else funcol.all_gather_tensor
reduce_scatter: Any = funcol.reduce_scatter_single if new else funcol.reduce_scatter_tensor
REFERENCES: dict[str, Callable[..., Any]] = {
    name: getattr(torch_symm_mem, f"_{name}_fallback")
    for name in (
        "fused_all_gather_matmul",
        "fused_all_gather_scaled_matmul",
        "fused_matmul_reduce_scatter",
        "fused_scaled_matmul_reduce_scatter",
    )
}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return small whole numbers that differ between ranks: sums of products of them are exact."""
    generator = torch.Generator().manual_seed(100 * interlace.get_rank() + seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def scales(*shape: int, seed: int = 0) -> torch.Tensor:
    return numbers(*shape, seed=seed).abs().add(1).exp2().div(8)


# -- against torch's own fallbacks ---------------------------------------------------------------------


def gathering(group: str) -> Iterator[Case]:
    name = "fused_all_gather_matmul"
    x, w, w2 = numbers(4, 6), numbers(6, 5, seed=1), numbers(6, 3, seed=2)
    size = interlace.get_world_size()
    yield name, "2-D", (x, [w], 0, group), {}
    yield name, "two weights", (x, [w, w2], 0, group), {"return_A": False}
    yield name, "no weights", (x, [], 0, group), {}
    for dim in (0, 1):
        yield name, f"3-D {dim}", (numbers(2, 3, 6), [w], dim, group), {}
    yield name, "4-D 1", (numbers(2, 3, 2, 6), [w, w2], 1, group), {"return_A": True}
    yield name, "k", (numbers(4, 2), [numbers(2 * size, 5)], 1, group), {}
    yield name, "3-D k", (numbers(4, 3, 2), [numbers(2 * size, 5)], 2, group), {}
    yield name, "-1", (numbers(4, 2), [numbers(2 * size, 5)], -1, group), {"return_A": False}
    yield name, "strided", (numbers(6, 4).t(), [numbers(5, 6).t()], 0, group), {}
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        yield name, str(dtype), (numbers(4, 2, 6, dtype=dtype), [w.to(dtype)], 1, group), {}


def reducing(group: str) -> Iterator[Case]:
    name = "fused_matmul_reduce_scatter"
    size = interlace.get_world_size()
    w = numbers(6, 4 * size, seed=1)
    for dim in (0, 1):
        yield name, f"2-D {dim}", (numbers(2 * size, 6), w, "sum", dim, group), {}
    for dim in (0, 1, 2):
        x = numbers(2 * size, 3 * size, 6)
        yield name, f"3-D {dim}", (x, w, "avg", dim, group), {}
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        x = numbers(2 * size, 6, dtype=dtype)
        yield name, str(dtype), (x, w.to(dtype), "sum", 0, group), {}
    yield name, "max", (numbers(2 * size, 6), w, "max", 0, group), {}


def scaled_gathering(group: str) -> Iterator[Case]:
    name = "fused_all_gather_scaled_matmul"
    size = interlace.get_world_size()
    half = torch.tensor(0.5)
    one = [None], [None], [torch.float32], [False]
    w = numbers(32, 16, dtype=FP8, seed=1).t()
    x = numbers(4, 16, dtype=FP8)
    by_column = scales(1, 32)
    yield name, "tensor-wise", (x, [w], half, [half], 0, group, *one), {}
    yield name, "by row", (x, [w], scales(4, 1), [by_column], 0, group, *one), {}
    yield name, "replicated", (x, [w], torch.ones(4 * size, 1), [by_column], 0, group, *one), {}
    for dim in (0, 1):
        x3 = numbers(2, 3, 16, dtype=FP8)
        yield name, f"3-D {dim}", (x3, [w], scales(2, 3, 1), [by_column], dim, group, *one), {}
    bias = numbers(32, dtype=torch.bfloat16)
    many = [bias, None], [None, None], [torch.bfloat16, torch.float32], [True, False]
    yield name, "several", (x, [w, w], half, [half, half], 0, group, *many), {}
    result = [None], [torch.tensor(0.25)], [FP8], [False]
    yield name, "result scale", (x, [w], half, [half], 0, group, *result), {}


def scaled_reducing(group: str) -> Iterator[Case]:
    name = "fused_scaled_matmul_reduce_scatter"
    size = interlace.get_world_size()
    half = torch.tensor(0.5)
    w = numbers(16 * size, 16, dtype=FP8, seed=1).t()
    x = numbers(2 * size, 16, dtype=FP8)
    n = 16 * size
    options: dict[str, Any] = {"out_dtype": torch.float32}
    yield name, "tensor-wise", (x, w, half, half, "sum", 0, 0, group, [2 * size, n]), options
    rows = (x, w, scales(2 * size, 1), scales(1, n))
    yield name, "by row", (*rows, "avg", 0, 0, group, [2 * size, n]), options
    bias = numbers(n, dtype=torch.float32)
    with_bias = {**options, "bias": bias, "use_fast_accum": True}
    yield name, "bias", (x, w, half, half, "sum", 0, 0, group, [2 * size, n]), with_bias
    x3 = numbers(3, 2 * size, 16, dtype=FP8)
    shape = [3, 2 * size, n]
    by_row = scales(*shape[:2], 1), scales(1, n)
    yield name, "3-D", (x3, w, *by_row, "sum", 1, 1, group, shape), options
    flat = numbers(6 * size, 16, dtype=FP8)
    yield name, "reshaped", (flat, w, half, half, "sum", 1, 0, group, shape), options


def leaves(made: Any) -> list[Any]:
    if isinstance(made, (list, tuple)):
        return [leaf for each in made for leaf in leaves(each)]
    return [made]


def check(
    got: Any,
    expected: Any,
    about: str,
    *,
    values: bool = True,
    compared: Sequence[str] = ("shape", "dtype", "stride"),
) -> None:
    """Outputs must agree in shapes, strides, dtypes and numbers."""
    for number, (mine, theirs) in enumerate(zip(leaves(got), leaves(expected), strict=True)):
        here = f"{about}, output {number}: {mine} instead of {theirs}"
        if mine is None or theirs is None:
            assert mine is theirs, here
            continue
        for what in compared:
            a, b = getattr(mine, what), getattr(theirs, what)
            assert a() == b() if what == "stride" else a == b, f"{what} of {here}"
        assert not values or torch.equal(mine.float(), theirs.float()), here


def on_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([on_meta(each) for each in value])
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def check_against_torch(makers: Sequence[Makers]) -> int:
    """Compare with torch's fallbacks, and with torch's fake kernels; return the number of cases."""
    group: Any = dist.group.WORLD
    cases = [case for maker in makers for case in maker(group.group_name)]
    for op, title, args, options in cases:
        copied = [list(each) if isinstance(each, list) else each for each in args]
        expected = REFERENCES[op](*copied, **options)
        got = getattr(torch.ops.symm_mem, op)(*args, **options)
        check(got, expected, f"{op} {title}")
        if title not in ("torch.int64", "result scale"):  # which torch's do not take
            fake = getattr(torch.ops.symm_mem, op)(*on_meta(args), **on_meta(options))
            check(got, fake, f"{op} {title} meta", values=False)
    return len(cases)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("backend", ["interlace", "gloo"])
@ranks()
def test_as_torch(backend: str, world_size: int) -> None:
    assert check_against_torch([gathering, reducing]) == 22


@pytest.mark.skipif(
    not SCALES_BY_ROW, reason="before torch 2.12 a CPU multiplies no rows with scales"
)
@pytest.mark.parametrize("world_size", [2, 4])
@ranks(backend="interlace")
def test_scaled_as_torch(world_size: int) -> None:
    assert check_against_torch([scaled_gathering, scaled_reducing]) == 12


# -- the others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["interlace", "gloo"])
@ranks(4)
def test_collectives(backend: str) -> None:
    ops, wait = torch.ops.symm_mem, torch.ops._c10d_functional.wait_tensor
    group: Any = dist.group.WORLD
    rank, size, name = dist.get_rank(), dist.get_world_size(), group.group_name
    some = dist.new_group(list(range(1, size)), backend=backend)
    shards = [torch.arange(4.0).view(2, 2) + 10 * source for source in range(size)]
    x, total, nothing = shards[rank], sum(shards), torch.full((2, 2), -1.0)
    rows, columns = x.repeat(size, 1), x.repeat(1, size)

    def empty() -> torch.Tensor:
        return nothing.clone()

    started = ops._low_contention_all_gather(x, name)
    assert torch.equal(wait(started), torch.cat(shards))
    gathered = ops.multimem_all_gather_out(x, name, torch.full((2 * size, 2), -1.0))
    assert torch.equal(gathered, torch.cat(shards))
    scattered = ops._low_contention_reduce_scatter(rows, "avg", name)
    assert torch.equal(wait(scattered), total / size)
    of_root = ops.multimem_one_shot_reduce_out(x, "sum", 1, name, empty())
    assert torch.equal(of_root, total if rank == 1 else nothing)
    summed = {
        "one shot": ops.one_shot_all_reduce(x, "sum", name),
        "copy": ops.one_shot_all_reduce_copy(empty(), x, "sum", name),
        "out": ops.one_shot_all_reduce_out(x, "sum", name, empty()),
        "copy out": ops.one_shot_all_reduce_copy_out(empty(), x, "sum", name, empty()),
        "multimem": ops.multimem_one_shot_all_reduce(x, "sum", name),
        "two shot out": ops.two_shot_all_reduce_out(x.clone(), "sum", name, empty()),
        "scattered": ops.reduce_scatter_out(rows, name, False, empty()),
        "scattered by columns": ops.reduce_scatter_out(columns, name, True, empty()),
    }
    for op in ("two_shot_all_reduce_", "multimem_all_reduce_"):
        summed[op] = x.clone()
        assert getattr(ops, op)(summed[op], "sum", name) is summed[op]
    for title, found in summed.items():
        assert torch.equal(found, total), title
    if rank > 0:
        assert torch.equal(ops.one_shot_all_reduce(x, "sum", some.group_name), sum(shards[1:]))
        products = ops.fused_all_gather_matmul(x, [torch.ones(2, 1)], 0, some.group_name)
        assert torch.equal(products[1][0], torch.cat(shards[1:]).sum(1, keepdim=True))
    dist.barrier()


# -- callers -------------------------------------------------------------------------------------------


def counted(calls: list[str], name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return kernel(*args, **kwargs)

    return counting


@contextlib.contextmanager
def inductors_pass() -> Iterator[list[str]]:
    """Enable Inductor's pass as on a machine with NCCL, and return a list of the called ops.

    From torch 2.15 on a group needs no enabling; the pass looks for an accelerator instead.
    """
    calls: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiled_anew(_micro_pipeline_tp=True, compile_threads=1))
        stack.enter_context(mock.patch.object(dist, "is_nccl_available", return_value=True))
        if TORCH >= (2, 15):
            asked = "is_symm_mem_enabled_for_group"
            stack.enter_context(mock.patch.object(torch_symm_mem, asked, return_value=True))
        for name in REFERENCES:
            kernel = counted(calls, name, getattr(torch_ops, name))
            stack.enter_context(mock.patch.object(torch_ops, name, kernel))
        yield calls


@thorough
@ranks(2, backend="interlace")
def test_inductors_own_pass() -> None:
    """``_micro_pipeline_tp`` replaces collective and matmul by torch's ops, which call interlace here."""
    group: Any = dist.group.WORLD
    with inductors_pass() as calls:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch_symm_mem.enable_symm_mem_for_group(group.group_name)

        def layers(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
            # a layer between the two: the pass of torch 2.13 fails where its ops meet
            h = all_gather(x, 0, group) @ w1 @ between
            return reduce_scatter(h @ w2, "sum", 0, group)

        def scaled(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
            whole = all_gather(x, 0, group)
            return torch._scaled_mm(whole, w, s, s, out_dtype=torch.float32)

        w1, w2, between = numbers(6, 4, seed=1), numbers(4, 6, seed=2), numbers(4, 4, seed=3)
        fp8 = numbers(16, 16, dtype=FP8), numbers(16, 16, dtype=FP8).t(), torch.tensor(0.5)
        for function, inputs in ((layers, (numbers(4, 6), w1, w2)), (scaled, fp8)):
            got = torch.compile(function, fullgraph=True)(*inputs)
            assert torch.equal(funcol.wait_tensor(got), funcol.wait_tensor(function(*inputs)))
        pair = ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]
        assert calls == [*pair, "fused_all_gather_scaled_matmul"]


# -- graphs of Inductor's pass, with the patterns of torch's own tests of it ----------------------------


@thorough
@pytest.mark.parametrize("first", ["interlace", "torch.distributed._symmetric_memory"])
def test_order_of_imports(first: str) -> None:
    second = {"interlace": "torch.distributed._symmetric_memory"}.get(first, "interlace")
    program = f"""
import torch, sys, warnings
warnings.simplefilter("error")
import {first}
import {second}
from interlace.symmetric_memory.functions import NAMES
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(sum(has("symm_mem::" + name, "CPU") for name in NAMES), len(NAMES))
print(has("symm_mem::fused_all_gather_matmul", "CUDA"), "interlace.ops.library" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["18", "18", "True", "False"], done.stderr
