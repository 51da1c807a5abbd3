"""Ops with a norm whose rows come in a block-scaled format: bit by bit those of the definition."""

import math
from typing import Any

import pytest
import torch

import interlace
from interlace import functional
from interlace.ops.matmul.formats import FORMATS, Scaled, packed_rows, quantize
from sim.algorithms.node_support import TWO, on_nodes
from support import poisoned
from tiers import few

OPS = ("matmul_reduce_scatter", "matmul_all_reduce", "reduce_scatter_norm", "all_reduce_norm")
ALGORITHMS = ("fused", "pipelined", "unfused", "auto")
LENGTHS = (128, 200, 34)
ROWS = 5
WHOLE = torch.ones(())


def weight_of(columns: int) -> torch.Tensor:
    """Numbers of many magnitudes, zeros, and what is no number."""
    generator = torch.Generator().manual_seed(columns)
    powers = torch.randint(-9, 9, (columns,), generator=generator)
    weight = torch.randn(columns, generator=generator) * 2.0**powers
    weight[:32] = 0.0
    weight[3] = 1.0
    weight[4] = -0.0
    if columns > 128:
        special = torch.tensor([math.inf, 1.0, 1e-39, -1e-45, 3e38, math.nan, 448.0, 6.0])
        weight[64:192:16] = special
        weight[128:160] = 2.0**-140
    return weight


def signs(columns: int) -> torch.Tensor:
    """Rows whose norm has the numbers of the weight, exactly."""
    generator = torch.Generator().manual_seed(1)
    return 1.0 - 2.0 * torch.randint(0, 2, (ROWS, columns), generator=generator)


def right(name: str, columns: int) -> Scaled:
    """Of all rows."""
    numbers = signs(columns) * weight_of(columns)
    return quantize(numbers, name, whole=WHOLE if FORMATS[name].whole else None)  # type: ignore[arg-type]


def same(found: Any, wanted: torch.Tensor, name: str) -> None:
    """Bits and shape; of a scale in fp32 that is no number the bits are any."""
    assert isinstance(found, Scaled) and found.format == name
    rows = packed_rows(found)
    if FORMATS[name].scale == torch.float32:
        numbers = [each.contiguous().view(torch.float32) for each in (rows, wanted)]
        assert torch.equal(*(each.isnan() for each in numbers))
        rows, wanted = (each.masked_fill(each.isnan(), 0.0).view(torch.uint8) for each in numbers)
    assert torch.equal(rows, wanted)


def call(form: Any, op: str, columns: int, **how: Any) -> Any:
    """The op on this rank; the sum over ranks has the signs, times the number of ranks."""
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


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("ranks", few((1, 2, 4), 2))
def test_rows_in_sim(name: str, op: str, columns: int, ranks: int) -> None:
    with poisoned():
        interlace.run(every_form, ranks, op, name, columns, ALGORITHMS)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("algorithm", ["auto", "pipelined"])
def test_on_several_nodes(op: str, algorithm: str) -> None:
    def on_rank() -> None:
        every_form(op, "nvfp4", 200, (algorithm,), group=on_nodes(TWO, "late"))

    interlace.run(on_rank, 4)


def other_calls(name: str) -> None:
    """Later, compiled, with another dimension scattered, and where the sum has a gradient."""
    wanted = packed_rows(right(name, 200))
    work = call(interlace, "all_reduce_norm", 200, quantize=name, async_op=True)
    same(work.wait()[0], wanted, name)
    x, norm = signs(200)[None].requires_grad_(), interlace.RMSNorm(weight_of(200), eps=0.0)
    normed, total = interlace.reduce_scatter_norm(
        x, norm=norm, scatter_dim=1, gather_normed=True, quantize=name, algorithm="unfused"
    )  # type: ignore[call-overload]
    assert normed.shape == x.shape
    first = Scaled(normed.values[0], normed.scales[0], name)
    same(first, wanted, name)
    total.sum().backward()
    assert x.grad is not None and torch.all(x.grad == 1.0)
    assert not normed.values.requires_grad
    if interlace.get_world_size() == 1:  # simulated ranks cannot all trace at once
        compiled = torch.compile(numbers, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(name), numbers(name))


def numbers(name: str) -> torch.Tensor:
    made: Any = functional.all_reduce_norm(
        torch.ones(3, 64), norm=interlace.RMSNorm(), quantize=name
    )  # type: ignore[call-overload]
    return made[0].dequantize()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_other_calls(name: str, ranks: int) -> None:
    interlace.run(other_calls, ranks, name)


def in_process() -> None:
    for name in FORMATS:
        for op in OPS:
            every_form(op, name, 200, ALGORITHMS)


def test_in_processes() -> None:
    interlace.run(in_process, 2, place="shm")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 33), r"nvfp4 has two numbers in a byte.*what is normed must be even, got \(3, 33\)"),
        ((32,), r"what is normed must have at least 2 dimensions, got shape \(32,\)"),
    ],
)
@pytest.mark.parametrize("form", [interlace, functional])
def test_what_has_no_such_rows_is_refused_on_all_ranks(
    form: Any, shape: tuple[int, ...], words: str
) -> None:
    def on_rank() -> None:
        other = interlace.get_rank() == 1
        with pytest.raises(ValueError, match=words):
            form.all_reduce_norm(
                torch.ones((3, 32) if other else shape), norm=interlace.RMSNorm(), quantize="nvfp4"
            )

    interlace.run(on_rank, 2)
