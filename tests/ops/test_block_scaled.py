"""Fused ops on block-scaled operands: right in every place, and equal bit by bit between algorithms."""

import dataclasses
from typing import Any

import pytest
import torch

import interlace
from interlace import functional
from interlace.groups.specs import describe
from interlace.ops.matmul import formats
from interlace.ops.matmul.formats import E4M3, FORMATS, Scaled, quantize
from tiers import few

ROWS = (5, 2, 0, 3)  # of each rank's shard
INNER, COLUMNS = 160, 18
ALGORITHMS = ("fused", "pipelined", "unfused", "auto")
ERROR = 2.0**-20  # of sums in fp32, relative to the sum of sizes


def made(name: str, rows: int, seed: int, *, weight: bool = False) -> Scaled:
    generator = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(rows, INNER, generator=generator), name, weight=weight)  # type: ignore[arg-type]


def product(left: Scaled, right: Scaled) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, and the bound of an error."""
    a, b = left.dequantize(torch.float64), right.dequantize(torch.float64)
    return a @ b, ERROR * (a.abs() @ b.abs())


def total(products: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    values, bounds = zip(*products, strict=True)
    return sum(values), sum(bounds)  # type: ignore[return-value]


def all_algorithms(
    op: Any, right: tuple[torch.Tensor, torch.Tensor], *operands: Any, **how: Any
) -> None:
    found = [op(*operands, algorithm=a, out_dtype=torch.float32, **how) for a in ALGORITHMS]
    assert torch.all((found[0] - right[0]).abs() <= right[1])
    for other in found[1:]:
        assert torch.equal(found[0], other)


def gathers(name: str) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    shards = [made(name, ROWS[r], r) for r in range(size)]
    weight = made(name, COLUMNS, 9, weight=True).t()
    every = [torch.cat(each) for each in zip(*(product(s, weight) for s in shards), strict=True)]
    all_algorithms(interlace.all_gather_matmul, tuple(every), shards[rank], weight)
    bias = torch.arange(COLUMNS).bfloat16()
    plain, biased = interlace.all_gather_matmul(shards[rank], [weight, weight], bias=[None, bias])
    assert plain.dtype == biased.dtype == torch.bfloat16
    assert torch.all((plain - every[0]).abs() <= every[1] + 2.0**-8 * every[0].abs())


def reduces(name: str) -> None:
    rank, size = interlace.get_rank(), interlace.get_world_size()
    rows = 4 * size - 3  # the last part is shorter
    inputs = [made(name, rows, r) for r in range(size)]
    weights = [made(name, COLUMNS, 9 + r, weight=True).t() for r in range(size)]
    every = total([product(x, w) for x, w in zip(inputs, weights, strict=True)])
    mine = inputs[rank], weights[rank]
    part = tuple(each.chunk(size)[rank] for each in every)
    all_algorithms(interlace.matmul_reduce_scatter, part, *mine)
    columns = tuple(each.chunk(size, 1)[rank] for each in every)
    all_algorithms(interlace.matmul_reduce_scatter, columns, *mine, scatter_dim=1)
    all_algorithms(interlace.matmul_all_reduce, every, *mine)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", few((1, 2, 4), 4))
def test_gathers_in_sim(name: str, ranks: int) -> None:
    interlace.run(gathers, ranks, name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", few((1, 2, 4), 2))
def test_reductions_in_sim(name: str, ranks: int) -> None:
    interlace.run(reduces, ranks, name)


def experts(name: str) -> None:
    """Two of the experts for every token; ranks have other numbers of tokens, and bounds or none."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    experts, tokens = 2 * size, (5, 3, 0, 2)[rank]
    x: Any = made(name, tokens, rank)
    chosen = (torch.arange(tokens)[:, None] + torch.tensor([rank, rank + size])) % experts
    share = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(rank))

    def weights(of: int) -> Any:
        generator = torch.Generator().manual_seed(20 + of)
        numbers = torch.randn(2, COLUMNS, INNER, generator=generator)
        return quantize(numbers, name, weight=True).t()  # type: ignore[arg-type]

    every = torch.cat([weights(r).dequantize(torch.float64) for r in range(size)])
    numbers = x.dequantize(torch.float64)
    right = bound = torch.zeros(tokens, COLUMNS, dtype=torch.float64)
    for slot in (0, 1):
        factors = every[chosen[:, slot]]
        right = right + (numbers[:, None] @ factors)[:, 0] * share[:, slot, None]
        bound = bound + ERROR * (numbers.abs()[:, None] @ factors.abs())[:, 0]
    for most in (None, 5):
        received, handle = interlace.experts.dispatch(
            x, chosen, share, experts, num_max_dispatch_tokens_per_rank=most
        )
        for algorithm in ("fused", "pipelined", "unfused"):
            how: Any = {"algorithm": algorithm, "out_dtype": torch.float32}
            rows: Any = received.x
            found = interlace.grouped_matmul_combine(rows, weights(rank), handle, **how)
            assert torch.all((found - right).abs() <= bound)
    rows, sent = interlace.experts.permute(numbers.float(), chosen, experts)
    there: Any = quantize(rows, name)  # type: ignore[arg-type]
    outputs = [
        interlace.all_to_all_grouped_matmul(there, weights(rank), sent, algorithm=a)[0]  # type: ignore[arg-type]
        for a in ("fused", "pipelined", "unfused")
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    works: Any = [
        interlace.all_to_all_grouped_matmul(
            there, weights(rank), sent, return_received=True, async_op=True
        )
        for _ in range(2)
    ]
    for received, output, _ in (work.wait() for work in works):
        assert received.format == name
        assert received.shape == (len(output), INNER)
        assert torch.equal(output, outputs[0])
    gathered, _ = interlace.all_gather_grouped_matmul(x, weights(0), [tokens, 0])
    alone = interlace.all_gather_matmul(x, quantize(weights(0).t().dequantize()[0], name).t())  # type: ignore[arg-type]
    assert gathered.shape == alone.shape


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", few((2, 4), 2))
def test_experts_in_sim(name: str, ranks: int) -> None:
    interlace.run(experts, ranks, name)


def both(names: tuple[str, ...]) -> None:
    for name in names:
        gathers(name)
        reduces(name)
        experts(name)


def test_in_processes() -> None:
    interlace.run(both, 2, tuple(FORMATS), place="shm")


def compiled_code(name: str) -> None:
    """The PTX of sm_90, where fp8 and bf16 factors are for wgmma."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    shards = [made(name, ROWS[r], r) for r in range(size)]
    weight = made(name, COLUMNS, 9, weight=True).t()
    right, bound = (torch.cat(e) for e in zip(*(product(s, weight) for s in shards), strict=True))
    with interlace.configured(block_m=32, block_n=32, num_warps=4, programs=2):
        how: dict[str, Any] = {"algorithm": "fused", "out_dtype": torch.float32}
        found = interlace.all_gather_matmul(shards[rank], weight, **how)
    assert torch.all((found - right).abs() <= bound)


@pytest.mark.parametrize("name", few(tuple(FORMATS), "mxfp4"))
def test_as_ptx(name: str) -> None:
    interlace.run(compiled_code, 2, name, place="ptx", arch=90, timeout=600)


def functional_forms(name: str) -> None:
    rank = interlace.get_rank()
    weight = made(name, COLUMNS, 9, weight=True).t()
    x = torch.randn(4, INNER, generator=torch.Generator().manual_seed(rank))

    def gathered(x: torch.Tensor) -> torch.Tensor:
        made: Any = functional.all_gather_matmul(quantize(x, name), weight)  # type: ignore[arg-type]
        return functional.wait(made)

    eager = interlace.all_gather_matmul(quantize(x, name), weight)  # type: ignore[arg-type]
    assert torch.equal(gathered(x), eager)
    if interlace.get_world_size() == 1:  # simulated ranks cannot all trace at once
        assert torch.equal(torch.compile(gathered, backend="aot_eager", fullgraph=True)(x), eager)
    bias = torch.arange(COLUMNS).bfloat16()
    given: Any = made(name, 4, rank), [weight, weight]
    eager_ones: Any = interlace.all_gather_matmul(*given, bias=[None, bias])
    for found, right in zip(
        functional.all_gather_matmul(*given, bias=[None, bias]), eager_ones, strict=True
    ):
        assert torch.equal(functional.wait(found), right)
    for form in (functional.matmul_reduce_scatter, functional.matmul_all_reduce):
        plain = getattr(interlace, form.__name__)(made(name, 4, 1), weight)
        assert torch.equal(functional.wait(form(made(name, 4, 1), weight)), plain)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_functional_forms(name: str, ranks: int) -> None:
    interlace.run(functional_forms, ranks, name)


X, W = made("mxfp8", 4, 0), made("mxfp8", COLUMNS, 1).t()
ZERO = Scaled(torch.ones(4, INNER).to(E4M3), torch.zeros(4, 2), "fp8_block128")


@pytest.mark.parametrize(
    ("input", "weight", "error", "words"),
    [
        (X, made("mxfp4", 4, 1).t(), ValueError, "input is in mxfp8, weight in mxfp4"),
        (
            X,
            torch.ones(INNER, 4),
            TypeError,
            "weight must be an interlace.Scaled as the other operands are",
        ),
        (
            torch.ones(4, INNER),
            W,
            TypeError,
            "input must be an interlace.Scaled as the other operands are",
        ),
        (X, X, ValueError, r"weight must be \(k, n\), its blocks along k"),
        (W, W, ValueError, r"input must be \[..., k\], its blocks along k"),
        (
            X,
            quantize(torch.ones(4, 64), "mxfp8").t(),
            ValueError,
            "weight has 64 rows, input has k = 160",
        ),
        (
            ZERO,
            made("fp8_block128", 4, 1).t(),
            ValueError,
            "scales of fp8_block128 must be finite and greater than 0",
        ),
    ],
)
@pytest.mark.parametrize("form", [interlace.all_gather_matmul, functional.matmul_all_reduce])
def test_wrong_operands_are_refused_on_all_ranks(
    form: Any, input: Any, weight: Any, error: type[Exception], words: str
) -> None:
    def call() -> None:
        other = interlace.get_rank() == 1
        with pytest.raises(error, match=words):
            form(*((X, W) if other and error is ValueError else (input, weight)))

    interlace.run(call, 2)


def gathers_of_torch(x: Any) -> Any:
    scales = formats.swizzled(x.scales)
    (left, right), group = ((x.values, scales), (x.t().values, scales)), describe(None, "")[0]
    none = [None]
    return torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        left[0], [right[0]], left[1], [right[1]], 0, group, none, none, none, [False]
    )


def dispatches(x: Any) -> Any:
    chosen = torch.zeros(x.shape[0], 1, dtype=torch.int64)
    return interlace.experts.dispatch(x, chosen, None, 2)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: interlace.all_gather_matmul(x, x.t()),
        lambda x: functional.all_gather_matmul(x, x.t()),
        gathers_of_torch,
        dispatches,
    ],
)
def test_ranks_compare_k_and_format(form: Any) -> None:
    def call() -> None:
        rank = interlace.get_rank()
        for shapes, names, words in (
            (
                (160, 170),
                ("mxfp8", "mxfp8"),
                "k differs between ranks: 160 on rank 0, 170 on rank 1",
            ),
            ((160, 160), ("mxfp8", "mxfp8_e5m2"), "format differs between ranks: mxfp8 on rank 0"),
        ):
            x = quantize(torch.ones(4, shapes[rank]), names[rank])  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=words):
                form(x)

    interlace.run(call, 2)


def test_there_is_no_gradient() -> None:
    def call() -> None:
        bias = torch.ones(COLUMNS, dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(RuntimeError, match="block-scaled operands have no gradients"):
            interlace.all_gather_matmul(X, W, bias=bias)
        learning = bias if interlace.get_rank() else bias.detach()
        with pytest.raises((RuntimeError, ValueError), match="operands have no gradients"):
            functional.all_gather_matmul(X, W, bias=learning)
        values, scales = torch.ones(4, INNER).to(E4M3), torch.ones(4, 2, requires_grad=True)
        taught, weight = Scaled(values, scales, "fp8_block128"), made("fp8_block128", 4, 1).t()
        with pytest.raises(RuntimeError, match="block-scaled operands have no gradients"):
            interlace.matmul_all_reduce(taught, weight)

    interlace.run(call, 2)


def test_values_and_scales_apart_are_refused_on_all_ranks() -> None:
    """One scale for two weights, and a Scaled where values and scales are apart."""

    def call() -> None:
        gather: Any = functional.all_gather_scaled_matmul
        scales = X.scales, W.scales
        with pytest.raises(ValueError, match="weight_scale has 1 entries, weight has 2"):
            gather(X.values, [W.values, W.values], scales[0], [scales[1]])
        with pytest.raises(TypeError, match="must be tensors with scales beside them"):
            gather(X if interlace.get_rank() else X.values, W.values, *scales)

    interlace.run(call, 2)


def tensors_of_torch(name: str) -> None:
    """Values and scales apart, as ``torch.nn.functional.scaled_mm`` takes them; also swizzled."""
    rank, group = interlace.get_rank(), describe(None, "")[0]
    left = dataclasses.replace(made(name, 4, rank), whole=None)
    right = dataclasses.replace(made(name, COLUMNS, 9, weight=True), whole=None)
    gathered, plain = interlace.all_gather_matmul(left, right.t(), return_gathered=True)  # type: ignore[misc, arg-type]
    pairs = [(left.scales, right.scales.t())]
    if left.scales.element_size() == 1:
        pairs.append((formats.swizzled(left.scales), formats.swizzled(right.scales)))
    for scales in pairs:
        mine, theirs = (left.values, scales[0]), (right.values.t(), scales[1])
        factors = mine[0], theirs[0], mine[1], theirs[1]
        assert torch.equal(functional.wait(functional.all_gather_scaled_matmul(*factors)), plain)  # type: ignore[arg-type]
        part = functional.wait(functional.scaled_matmul_reduce_scatter(*factors))
        assert torch.equal(part, interlace.matmul_reduce_scatter(left, right.t()))
        gather = torch.ops.symm_mem.fused_all_gather_scaled_matmul
        given = mine[0], [theirs[0]], mine[1], [theirs[1]], 0, group
        how: Any = [None], [None], [None], [False]
        if scales is pairs[0] and len(pairs) > 1:
            with pytest.raises(ValueError, match=r"in the layout SWIZZLE_32_4_4, as torch\._"):
                gather(*given, *how)
            continue
        whole, (product,) = gather(*given, *how)
        assert torch.equal(product, plain)
        assert torch.equal(whole.view(torch.uint8), gathered.values.view(torch.uint8))
        shape = [4, COLUMNS]
        about = (*factors, "sum", 0, 0, group, shape)
        reduced = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(*about)
        assert reduced.shape == part.shape
        assert torch.all((reduced - part).abs() <= 2.0**-6 * (1 + part.abs()))


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_as_torch_has_them(name: str) -> None:
    interlace.run(tensors_of_torch, 2, name)


def test_a_dispatch_does_not_quantize_again() -> None:
    def call() -> None:
        tokens: Any = made("mxfp8", 2, 0)
        chosen = torch.tensor([[0], [1]])
        words = "use_fp8 quantizes x, which has scales already"
        with pytest.raises(ValueError, match=words):
            interlace.experts.dispatch(tokens, chosen, None, 2, use_fp8=True)
        with pytest.raises(ValueError, match=words):
            interlace.experts.low_latency_dispatch(tokens, chosen, 2, 2)
        turned: Any = tokens.t()
        with pytest.raises(
            ValueError, match=r"x must be \(tokens, hidden\), its blocks along hidden"
        ):
            interlace.experts.dispatch(turned, chosen, None, 2)

    interlace.run(call, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_weight_is_copied_no_more(name: str) -> None:
    """It is in memory as ops read it, and what is written there later counts."""

    def call() -> None:
        x, weight = made(name, 3, 0), made(name, COLUMNS, 1, weight=True).t()
        packed = weight.packed()
        assert formats.packed_rows(packed).data_ptr() == formats.packed_rows(packed).data_ptr()
        assert torch.equal(packed.dequantize(), weight.dequantize())
        plain: Any = interlace.all_gather_matmul(x, weight)
        assert torch.equal(interlace.all_gather_matmul(x, packed), plain)  # type: ignore[arg-type]
        packed.values.view(torch.uint8).zero_()
        assert not interlace.all_gather_matmul(x, packed).any()  # type: ignore[union-attr]

    interlace.run(call, 2)
