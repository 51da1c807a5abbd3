"""Ops with a norm whose rows come in a block-scaled format have the bits of the definition."""

import itertools
import math
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import interlace
from interlace import functional, reference
from interlace.ops.matmul import launch_norms, norms
from interlace.ops.matmul.formats import FORMATS, BlockFormat, Scaled, packed_rows, quantize
from interlace.runtime.numerics.norms import RowNorm
from ops.contracts import FORMAT_KINDS as KINDS
from ranks import ranks
from sim.algorithms.node_support import TWO, on_nodes
from sim.norms.counted import launches
from support import poisoned
from tiers import few

OPS = ("matmul_reduce_scatter", "matmul_all_reduce", "reduce_scatter_norm", "all_reduce_norm")
ALGORITHMS = ("fused", "pipelined", "unfused")
ROWS = 5
WHOLE = torch.ones(())


def weight_of(columns: int) -> torch.Tensor:
    """Return numbers of many magnitudes, zeros, infinities and nan."""
    generator = torch.Generator().manual_seed(columns)
    powers = torch.randint(-9, 9, (columns,), generator=generator)
    weight = torch.randn(columns, generator=generator) * 2.0**powers
    weight[:32] = 0.0
    weight[3] = 1.0
    weight[4] = -0.0
    if columns > 128:
        special = torch.tensor([math.inf, 1.0, 1e-39, -1e-45, 3e38, math.nan, 448.0, 6.0])
        weight[64:128:8] = special
        weight[128:160] = 2.0**-140
        weight[160:200:8] = torch.tensor([3.4e38, 3.2e38, 3e38, -3.4e38, 2.6e38])
    if columns > 1024:  # between two numbers of few bits, each half as often as not
        fives = 1.0 + torch.randint(0, 32, (columns - 1024,), generator=generator) / 32
        weight[1024:] = fives * 2.0 ** powers[1024:]
        weight[1024::16] = 6.0 * 2.0 ** powers[1024::16]
    return weight


def signs(columns: int) -> torch.Tensor:
    """Return rows whose norm is exactly the weight, up to the sign."""
    generator = torch.Generator().manual_seed(1)
    return 1.0 - 2.0 * torch.randint(0, 2, (ROWS, columns), generator=generator)


def right(name: str, columns: int) -> Scaled:
    """Return the right norms of all rows."""
    numbers = signs(columns) * weight_of(columns)
    return quantize(numbers, name, whole=WHOLE if FORMATS[name].whole else None)  # type: ignore[arg-type]


def same(found: Any, wanted: torch.Tensor, name: str) -> None:
    """Compare all bytes of the op's memory; nan may have any bits."""
    assert isinstance(found, Scaled) and found.format == name
    every = torch.empty(0, dtype=torch.uint8).set_(found.values.untyped_storage())  # type: ignore[call-overload]
    rows = every[: wanted.numel()].view(wanted.shape)
    assert torch.equal(*(without_nan(each, FORMATS[name]) for each in (rows, wanted)))


def without_nan(rows: torch.Tensor, kind: BlockFormat) -> torch.Tensor:
    """Replace packed rows that have a nan."""
    made = rows.clone()
    steps = kind.steps(made.shape[1])
    of_values, of_scales = (steps * each for each in kind.step_bytes)
    if kind.packed == 1:
        values = made[:, :of_values]
        values.masked_fill_(values.view(kind.values).float().isnan(), 0x7F)
    if kind.scale == torch.float32:
        scales = made[:, of_values : of_values + of_scales].view(torch.float32)
        scales.masked_fill_(scales.isnan(), math.nan)
    return made


def call(form: Any, op: str, columns: int, **how: Any) -> Any:
    """Call the op on this rank; the sum over ranks is the signs times the number of ranks."""
    x = signs(columns)
    operands = (x, torch.eye(columns)) if op.startswith("matmul") else (x,)
    norm = interlace.RMSNorm(weight_of(columns), eps=0.0)
    return getattr(form, op)(*operands, norm=norm, **how)


def every_form(op: str, name: str, columns: int, algorithms: tuple[str, ...], **how: Any) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    every = packed_rows(right(name, columns))
    scatters = "scatter" in op
    own = (*every.chunk(size), *[every[:0]] * size)[rank] if scatters else every
    for algorithm in algorithms:
        for gather in (False, True) if scatters else (False,):
            more: dict[str, Any] = {"gather_normed": gather} if scatters else {}
            more |= {"algorithm": algorithm, "quantize": name, **how}
            normed, total = call(interlace, op, columns, **more)
            same(normed, every if gather else own, name)
            assert torch.all(total.abs() == size)
    if not how:
        normed, total = call(functional, op, columns, quantize=name)
        same(normed, own, name)
        assert torch.all(functional.wait(total).abs() == size)


EVERY = list(itertools.product(FORMATS, OPS, (128, 200, 34), (1, 2, 4)))
OFTEN = [
    (name, op, 34 if (name, op) == ("nvfp4", "all_reduce_norm") else 200, 2)
    for name, op in itertools.product(KINDS, OPS)
]


@pytest.mark.parametrize(("name", "op", "columns", "ranks"), few(EVERY, *OFTEN))
def test_rows_in_sim(name: str, op: str, columns: int, ranks: int) -> None:
    with poisoned():
        interlace.run(every_form, ranks, op, name, columns, ALGORITHMS)


@pytest.mark.parametrize("name", few(FORMATS, "nvfp4"))
def test_rows_of_many_columns(name: str) -> None:
    def on_rank() -> None:
        with interlace.configured(block_elements=256, programs=2):
            every_form("all_reduce_norm", name, 1100, ("fused",))
        every_form("all_reduce_norm", name, 2048, ("low_latency",))

    with poisoned(), launches() as seen:
        interlace.run(on_rank, 2)
    assert set(seen) == {"reduce_norm_kernel", "low_latency_norm_kernel"}


@pytest.mark.parametrize("name", few(("fp8_block128", "nvfp4"), "nvfp4"))
@pytest.mark.parametrize("op", ["matmul_all_reduce", "all_reduce_norm"])
def test_in_two_shots(name: str, op: str) -> None:
    patched = mock.patch.object(launch_norms, "ONE_SHOT_BYTES", 0)
    by_op = mock.patch.object(norms, "ONE_SHOT_BYTES", 0)
    with patched, by_op, poisoned(), launches() as seen:
        interlace.run(every_form, 4, op, name, 200, ("fused",))
    kernel = "reduce_norm" if op == "all_reduce_norm" else "matmul_reduce_scatter_norm"
    assert seen[f"{kernel}_kernel"] >= 4


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("op", OPS[2:])
@ranks(2, place="sim")
def test_numbers_are_within_half_a_step_of_the_norm(name: str, op: str) -> None:
    numbers = torch.randn(9, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight, bias = numbers[7].clone(), numbers[8].clone()
    how: Any = {"norm": interlace.LayerNorm(weight, bias, eps=1e-5), "algorithm": "fused"}
    made, total = getattr(interlace, op)(numbers, quantize=name, **how)
    value, bound = reference.norm(total, RowNorm("layer", 1e-5, weight, bias), torch.float32)
    value, bound = reference.block_scaled(made, (value, bound))
    assert torch.all((made.dequantize(torch.float64) - value).abs() <= bound)


def part_of(whole: torch.Tensor, parts: int, part: int) -> torch.Tensor:
    return whole.chunk(parts)[part]


@pytest.mark.parametrize("name", KINDS)
@ranks(2, place="sim")
def test_from_operands_to_rows(name: str) -> None:
    """Norm the rows of a product of block-scaled operands in the same format."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    generator = torch.Generator().manual_seed(2)
    x = [quantize(torch.randn(7, 160, generator=generator), name) for _ in range(size)]  # type: ignore[arg-type]
    weight = quantize(torch.randn(64, 160, generator=generator), name, weight=True).t()  # type: ignore[arg-type]
    norm, residual = interlace.RMSNorm(eps=1e-5), torch.randn(7, 64, generator=generator)
    value = sum(each.dequantize(torch.float64) for each in x) @ weight.dequantize(torch.float64)
    value = value + residual
    how: Any = {"norm": norm, "out_dtype": torch.float32, "quantize": name}
    for op in OPS[:2]:
        parts = size if "scatter" in op else 1
        own = partial(part_of, parts=parts, part=rank % parts)
        found = [
            getattr(interlace, op)(x[rank], weight, residual=own(residual), algorithm=each, **how)
            for each in ALGORITHMS
        ]
        found.append(getattr(functional, op)(x[rank], weight, residual=own(residual), **how))
        for made, total in found:
            assert torch.allclose(functional.wait(total).double(), own(value), rtol=0.0, atol=1e-4)
            assert torch.equal(total, found[0][1])
            right, bound = reference.norm(total, RowNorm("rms", 1e-5), torch.float32)
            right, bound = reference.block_scaled(made, (right, bound))
            assert torch.all((made.dequantize(torch.float64) - right).abs() <= bound)


def compiled_code(name: str) -> None:
    """The PTX of sm_80, which has no fp8."""
    every_form("all_reduce_norm", name, 200, ("fused",), residual=None)


@pytest.mark.parametrize("name", few(tuple(FORMATS), "nvfp4"))
def test_as_ptx(name: str) -> None:
    interlace.run(compiled_code, 2, name, place="ptx", arch=80, timeout=600)


@pytest.mark.parametrize("name", few(FORMATS, "nvfp4"))
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("algorithm", ["fused", "unfused"])
def test_empty_parts_and_no_numbers(name: str, op: str, algorithm: str) -> None:
    def on_rank(rows: int, columns: int) -> None:
        x = torch.ones(rows, columns)
        operands = (torch.ones(rows, 4), torch.ones(4, columns)) if "matmul" in op else (x,)
        for form in (interlace, functional):
            for more in ({}, {"gather_normed": True}) if "scatter" in op else ({},):
                how: dict[str, Any] = {"quantize": name, "algorithm": algorithm, **more}
                made, total = getattr(form, op)(*operands, norm=interlace.RMSNorm(eps=0.0), **how)
                own = rows if more else total.shape[0]
                assert made.shape == (own, columns)
                if FORMATS[name].whole:
                    assert made.whole.shape == (own, 1)
                    assert torch.all(made.whole == 1.0)
                whole = WHOLE if FORMATS[name].whole else None
                right = quantize(torch.ones(own, columns), name, whole=whole)  # type: ignore[arg-type]
                assert torch.equal(made.dequantize(), right.dequantize())

    for shape in ((2, 8), (0, 8), (3, 0)):
        with poisoned():
            interlace.run(on_rank, 3, *shape)


@pytest.mark.parametrize("op", few(OPS, "matmul_reduce_scatter", "all_reduce_norm"))
@ranks(4, place="sim")
def test_on_several_nodes(op: str) -> None:
    every_form(op, "nvfp4", 200, ("auto",), group=on_nodes(TWO, "late"))


@pytest.mark.parametrize(("name", "world_size"), [("nvfp4", 1), ("fp8_block128", 2)])
@ranks(place="sim")
def test_other_calls(name: str, world_size: int) -> None:
    """Call later, compiled, with another scattered dimension, and with a gradient of the sum."""
    wanted = packed_rows(right(name, 200))
    work = call(interlace, "all_reduce_norm", 200, quantize=name, async_op=True)
    same(work.wait()[0], wanted, name)
    x, norm = signs(200)[None].requires_grad_(), interlace.RMSNorm(weight_of(200), eps=0.0)
    normed, total = interlace.reduce_scatter_norm(
        x, norm=norm, scatter_dim=1, gather_normed=True, quantize=name, algorithm="unfused"
    )  # type: ignore[call-overload]
    assert normed.shape == x.shape
    same(normed, wanted, name)
    total.sum().backward()
    assert x.grad is not None and torch.all(x.grad == 1.0)
    assert not normed.values.requires_grad
    if world_size == 1:  # simulated ranks cannot all trace at once
        compiled = torch.compile(numbers, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(name), numbers(name))


def numbers(name: str) -> torch.Tensor:
    made: Any = functional.all_reduce_norm(
        torch.ones(3, 64), norm=interlace.RMSNorm(), quantize=name
    )  # type: ignore[call-overload]
    return made[0].dequantize()  # type: ignore[no-any-return]


@ranks(2)
def test_in_processes() -> None:
    for name in KINDS:
        for op in OPS:
            every_form(op, name, 200, ("fused",))


@pytest.mark.parametrize("form", [interlace, functional])
@ranks(2, place="sim")
def test_what_has_no_such_rows_is_refused_on_all_ranks(form: Any) -> None:
    for shape, words in (
        (
            (3, 33),
            r"nvfp4 has two numbers in a byte.*the normed tensor must be even, got \(3, 33\)",
        ),
        ((32,), r"the normed tensor must have at least 2 dimensions, got shape \(32,\)"),
    ):
        x = torch.ones((3, 32) if interlace.get_rank() else shape)
        with pytest.raises(ValueError, match=words):
            form.all_reduce_norm(x, norm=interlace.RMSNorm(), quantize="nvfp4")


def test_scales_are_as_the_page_defines() -> None:
    """The table of docs/reference/formats.md: a block of zeros, one of ones, and one with a NaN."""
    x = torch.zeros(3, 128)
    x[1] = 1.0
    x[2, 0] = math.nan
    wanted = {
        "fp8_block128": (2.0**-126, torch.tensor(1.0) / 448.0),
        "mxfp8": (2.0**-127, 2.0**-8),
        "mxfp8_e5m2": (2.0**-127, 2.0**-15),
        "mxfp4": (2.0**-127, 0.25),
        "nvfp4": (2.0**-9, 0.171875),
    }
    for name, (zeros, ones) in wanted.items():
        scaled = quantize(x, name, whole=WHOLE if FORMATS[name].whole else None)  # type: ignore[arg-type]
        first = scaled.scales[:, 0].float()
        assert (float(first[0]), float(first[1])) == (zeros, float(ones)), name
        numbers, size = scaled.dequantize(), FORMATS[name].block
        assert numbers[2, :size].isnan().all() and torch.all(numbers[2, size:] == 0.0)
