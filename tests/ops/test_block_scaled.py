"""Fused ops on block-scaled operands: right in every place, and equal bit by bit between algorithms."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import interlace
from interlace import functional
from interlace.groups.groups import resolve
from interlace.groups.specs import describe
from interlace.ops.matmul import formats
from interlace.ops.matmul.formats import E4M3, E8M0, FORMATS, OPERAND_FORMATS, Scaled, quantize
from interlace.runtime.places.hosts.place import HostsPlace
from ops.contracts import FORMAT_KINDS as KINDS
from ops.test_scales_apart import (
    functional_gather,
    functional_scatter,
    fused_gather,
    fused_scatter,
)
from ranks import ranks
from tiers import few

ROWS = (5, 2, 0, 3, 1)  # in each rank's shard
INNER, COLUMNS = 160, 18
DIVIDED = 20  # rows that all numbers of ranks here divide
ALGORITHMS = ("fused", "pipelined", "unfused")
BETWEEN_HOSTS = ALGORITHMS[2:]
ERROR = 2.0**-20  # for sums in fp32, relative to the sum of sizes


def made(name: str, rows: int, seed: int, *, weight: bool = False, inner: int = INNER) -> Scaled:
    """Return numbers in ``name``, a key of OPERAND_FORMATS."""
    generator = torch.Generator().manual_seed(seed)
    format: Any = name.split(" x ")[-1 if weight else 0]
    return quantize(torch.randn(rows, inner, generator=generator), format, weight=weight)


def product(left: Scaled, right: Scaled) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product in float64, and the bound of an error."""
    a, b = left.dequantize(torch.float64), right.dequantize(torch.float64)
    return a @ b, ERROR * (a.abs() @ b.abs())


def total(products: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    values, bounds = zip(*products, strict=True)
    return sum(values), sum(bounds)  # type: ignore[return-value]


def own_host() -> bool:
    """Whether all ranks are on one host, as most algorithms need."""
    return not isinstance(resolve(None).place, HostsPlace)


def all_algorithms(
    op: Any, right: tuple[torch.Tensor, torch.Tensor], *operands: Any, **how: Any
) -> None:
    algorithms = ALGORITHMS if own_host() else BETWEEN_HOSTS
    found = [op(*operands, algorithm=a, out_dtype=torch.float32, **how) for a in algorithms]
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
    outputs = interlace.all_gather_matmul(shards[rank], [weight, weight], bias=[None, bias])
    for output, more in zip(outputs, (0.0, bias), strict=True):
        value = every[0] + more
        assert output.dtype == torch.bfloat16
        assert torch.all((output - value).abs() <= every[1] + 2.0**-8 * value.abs())


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


def odd_shapes(name: str) -> None:
    """Test one row, one column, and a k that is not a multiple of a block; also a rank without rows."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    least = OPERAND_FORMATS[name].packed
    for inner, rows, columns in ((0, 2, 2), (least, 1, 1), (34, 1, 3), (130, 3, 1)):
        shards = [made(name, rows if r != 1 else 0, r, inner=inner) for r in range(size)]
        weight = made(name, columns, 9, weight=True, inner=inner).t()
        every = [
            torch.cat(each) for each in zip(*(product(s, weight) for s in shards), strict=True)
        ]
        all_algorithms(interlace.all_gather_matmul, tuple(every), shards[rank], weight)
        inputs = [made(name, rows, r, inner=inner) for r in range(size)]
        sums = total([product(x, weight) for x in inputs])
        parts = tuple((*each.chunk(size), *[each[:0]] * size)[rank] for each in sums)
        all_algorithms(interlace.matmul_reduce_scatter, parts, inputs[rank], weight)
        all_algorithms(interlace.matmul_all_reduce, sums, inputs[rank], weight)


def experts(name: str) -> None:
    """Every token has two experts; ranks have other numbers of tokens, with bounds and without."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    experts, tokens = 2 * size, (5, 3, 0, 2, 1)[rank]
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
        for algorithm in ALGORITHMS if own_host() else BETWEEN_HOSTS:
            how: Any = {"algorithm": algorithm, "out_dtype": torch.float32}
            rows: Any = received.x
            found = interlace.grouped_matmul_combine(rows, weights(rank), handle, **how)
            assert torch.all((found - right).abs() <= bound)
    there: Any
    there, sent = interlace.experts.permute(x, chosen, experts)
    outputs = [
        interlace.all_to_all_grouped_matmul(there, weights(rank), sent, algorithm=a)[0]  # type: ignore[arg-type]
        for a in (ALGORITHMS if own_host() else BETWEEN_HOSTS)
    ]
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other)
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


OFTEN = (
    *((odd_shapes, 3, name) for name in ("fp8_block128", "mxfp8 x mxfp8_e5m2", "nvfp4")),
    (gathers, 3, "fp8_block128"),
    (reduces, 2, "nvfp4"),
)
EVERY = itertools.product((odd_shapes, gathers, reduces), (1, 2, 3), OPERAND_FORMATS)


@pytest.mark.parametrize(("check", "world_size", "name"), few(EVERY, *OFTEN))
@ranks(place="sim")
def test_in_sim(check: Any, world_size: int, name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", few(FORMATS, "nvfp4"))
@ranks(2, place="sim")
def test_experts_in_sim(name: str) -> None:
    experts(name)


@pytest.mark.parametrize("name", few(FORMATS, "fp8_block128", "nvfp4"))
@ranks(2, place="sim")
def test_by_pointers(name: str) -> None:
    """Run as on a GPU without descriptors, or with values that cannot use them."""
    with interlace.configured(descriptors=False):
        gathers(name)
        reduces(name)
        experts(name)


def every_op(names: tuple[str, ...]) -> None:
    for name in names:
        odd_shapes(name)
        experts(name)
        refusals(name)


@pytest.mark.parametrize("name", few(KINDS, "nvfp4"))
def test_in_processes(name: str) -> None:
    interlace.run(every_op, 2, (name,), place="shm")


def compiled_code(name: str, inner: int, columns: int, **configuration: int) -> None:
    """Run compiled PTX with this k and number of columns."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    shards = [made(name, ROWS[r + 1], r, inner=inner) for r in range(size)]
    weight = made(name, columns, 9, weight=True, inner=inner).t()
    parts = zip(*(product(s, weight) for s in shards), strict=True)
    right, bound = (torch.cat(each) for each in parts)
    sums, sum_bound = product(shards[0], weight)
    with interlace.configured(block_m=32, block_n=32, num_warps=4, programs=2, **configuration):
        how: dict[str, Any] = {"algorithm": "fused", "out_dtype": torch.float32}
        found = interlace.all_gather_matmul(shards[rank], weight, **how)
        reduced: Any = interlace.matmul_reduce_scatter(shards[0], weight, **how)
    assert torch.all((found - right).abs() <= bound)
    assert torch.all((reduced - size * sums[rank]).abs() <= size * sum_bound[rank])


@pytest.mark.parametrize("name", few(tuple(OPERAND_FORMATS), "mxfp4"))
def test_as_ptx(name: str) -> None:
    """On sm_90 fp8 and bf16 factors use wgmma. LEAST_PACKED is about sm_80."""
    interlace.run(compiled_code, 2, name, INNER, COLUMNS, place="ptx", arch=90, timeout=600)
    if name in FORMATS:
        small = functools.partial(compiled_code, block_k=16)
        interlace.run(small, 2, name, 34, 1, place="ptx", arch=80, timeout=600)


X, W = made("mxfp8", 4, 0), made("mxfp8", COLUMNS, 1).t()


def gathers_of_torch(x: Any) -> Any:
    scales = formats.swizzled(x.scales)
    return fused_gather(x.values, x.t().values, (scales, scales))


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
@ranks(2, place="sim")
def test_ranks_compare_k_and_format(form: Any) -> None:
    for k, name, words in (
        (170, "mxfp8", "k differs between ranks: 160 on rank 0, 170 on rank 1"),
        (160, "mxfp8_e5m2", "format of the operands differs between ranks: mxfp8 on rank 0"),
    ):
        k, name = (k, name) if interlace.get_rank() else (160, "mxfp8")
        with pytest.raises(ValueError, match=words):
            form(quantize(torch.ones(4, k), name))  # type: ignore[arg-type]


OF_TENSORS = (functional_gather, functional_scatter, fused_gather, fused_scatter)


def filled_with(scales: torch.Tensor, number: float) -> torch.Tensor:
    """Return the scales with ``number`` at the end of the first row."""
    wide = scales.float().clone()
    wide[0, -1] = number
    return wide.to(scales.dtype)


def wrong_tensors(name: str) -> list[tuple[str, tuple[torch.Tensor, ...]]]:
    """Return wrong values and scales, also of the weight, with parts of their errors."""
    left, right = made(name, DIVIDED, 0), made(name, COLUMNS, 1)
    kind, (values, scales), weight = left.kind, (left.values, left.scales), right.values.t()
    of_weight, blocks = right.scales.t(), scales.shape[1]
    layout = rf"input: scales of {name} must be \({DIVIDED}, {blocks}\).*; got "
    dtype = rf"input: scales of {name} must be {kind.scale}.*, got "
    bad = rf"scales of {name} must be finite and greater than 0, got"
    plain = "mxfp8" if name.startswith("mx") else name
    short = torch.ones(500).to(kind.scale)
    cases = [
        (dtype + "torch.float16", (values, scales.float().half(), weight, of_weight)),
        (dtype + "torch.int32", (values, scales.float().int(), weight, of_weight)),
        (layout + rf"\({DIVIDED}, {blocks - 1}\)", (values, scales[:, :-1], weight, of_weight)),
        (layout + rf"\(3, {blocks}\)", (values, scales[:3], weight, of_weight)),
        (layout + rf"\({blocks}, {DIVIDED}\)", (values, scales.t(), weight, of_weight)),
        (layout + rf"\(1, {DIVIDED}, {blocks}\)", (values, scales[None], weight, of_weight)),
        (layout + rf"\({DIVIDED * blocks},\)", (values, scales.flatten(), weight, of_weight)),
        (layout + r"\(500,\)", (values, short, weight, of_weight)),
        (rf"weight: scales of {name} must be \({blocks}, {COLUMNS}\).*; got \({COLUMNS}, {blocks}",
         (values, scales, weight, right.scales)),
        (rf"input: values of {plain} must be .*, got torch.int8",
         (values.view(torch.uint8).to(torch.int8), scales, weight, of_weight)),
        (rf"input: {bad} nan at \(0, {blocks - 1}\)",
         (values, filled_with(scales, math.nan), weight, of_weight)),
        (rf"weight(\[0\])?: {bad} nan at \(0, {COLUMNS - 1}\)",
         (values, scales, weight, filled_with(of_weight, math.nan))),
    ]  # fmt: skip
    numbers = (0.0, -2.0, math.inf) if kind.scale == torch.float32 else (0.0, -2.0)
    if kind.scale != E8M0:  # which has no such numbers
        for number in numbers:
            text = rf"input: {bad} {number} at \(0, {blocks - 1}\)"
            cases.append((text, (values, filled_with(scales, number), weight, of_weight)))
    return cases


def wrong_operands(name: str) -> list[tuple[str, tuple[Any, Any]]]:
    """Return the same as Scaled."""
    left, weight = made(name, DIVIDED, 0), made(name, COLUMNS, 1).t()
    other = "mxfp4" if name.startswith("mxfp8") else "mxfp8"
    bad = rf"input: scales of {name} must be finite and greater than 0, got nan"
    cases: list[tuple[str, tuple[Any, Any]]] = [
        ("weight must be an interlace.Scaled or a non-empty sequence", (left, [])),
        (f"input is in {other}, weight in {name}; all operands", (made(other, DIVIDED, 0), weight)),
        ("weight has 160 rows, input has k = 128", (made(name, DIVIDED, 0, inner=128), weight)),
        (r"input must be \[..., k\], its blocks along k", (left.t(), weight)),
        (r"weight must be \(k, n\), its blocks along k", (left, weight.t())),
        (bad, (dataclasses.replace(left, scales=filled_with(left.scales, math.nan)), weight)),
    ]
    for number in (0.0, -1.0, math.nan, math.inf) if left.whole is not None else ():
        whole = dataclasses.replace(left, whole=torch.tensor(number))
        words = f"input: whole of nvfp4 must be finite and greater than 0, got {number}"
        cases.append((words, (whole, weight)))
    if name == "mxfp8":
        both = weight, made("mxfp8_e5m2", COLUMNS, 1).t()
        words = r"weight\[0\] is in mxfp8, weight\[1\] in mxfp8_e5m2; all weights must be in one"
        cases.append((words, (left, both)))
    return cases


def refusals(name: str) -> None:
    """Wrong arguments on all ranks, or on the last alone, raise on all; then all ranks continue."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    left, right = made(name, DIVIDED, 0), made(name, COLUMNS, 1)
    fine = left.values, left.scales, right.values.t(), right.scales.t()
    # Torch's own ops take scales of one byte swizzled: test_scales_apart.py.
    forms = OF_TENSORS if left.scales.dtype == torch.float32 else OF_TENSORS[:2]
    for words, tensors in wrong_tensors(name):
        for form in forms:
            for first in (0, size - 1):
                with pytest.raises((ValueError, TypeError), match=words):
                    values, scales, weight, of_weight = tensors if rank >= first else fine
                    form(values, weight, (scales, of_weight))
    eager = interlace.all_gather_matmul, interlace.matmul_reduce_scatter
    lazy = functional.all_gather_matmul, functional.matmul_all_reduce
    for words, operands in wrong_operands(name):
        for op in (*eager, *lazy):
            for first in (0, size - 1):
                taken: Any = operands if rank >= first else (left, right.t())
                with pytest.raises((ValueError, TypeError), match=words):
                    functional.wait(op(*taken))  # type: ignore[arg-type]
    assert interlace.all_gather_matmul(left, right.t()).shape == (DIVIDED * size, COLUMNS)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", KINDS)
def test_wrong_scales_are_refused_on_all_ranks(name: str) -> None:
    interlace.run(refusals, 2, name)


def tensors_only(x: Any) -> dict[str, Any]:
    """Call ops that take no Scaled."""
    plain, norm, chosen = torch.ones(4, INNER), interlace.RMSNorm(), torch.zeros(4, 1).long()
    heads = torch.ones(1, 2, 8)
    out = torch.empty(4 * interlace.get_world_size(), INNER)
    return {
        "input": lambda: interlace.all_reduce_norm(x, norm=norm),
        "input of a scatter": lambda: interlace.reduce_scatter_norm(x, norm=norm),
        "input in a graph": lambda: functional.reduce_scatter_norm(x, norm=norm),
        "residual": lambda: interlace.all_reduce_norm(plain, norm=norm, residual=x),
        "bias": lambda: interlace.matmul_all_reduce(plain, plain.t(), bias=x),
        "tensor": lambda: interlace.all_gather(out, x),
        "tensor of a sum": lambda: interlace.all_reduce(x),
        "input in_parts": lambda: interlace.reduce_scatter(out[:4], x),
        "input of one": lambda: interlace.all_to_all_single(out, x),
        "input to gather": lambda: functional.all_gather(x),
        "y": lambda: interlace.experts.combine(
            x, interlace.experts.dispatch(plain, chosen, None, 2)[1]
        ),
        "q": lambda: interlace.distributed_decode(x, (heads, heads)),
        "tensor to shard": lambda: interlace.nn.functional.shard_sequence(x),
    }


@ranks(2, place="sim")
def test_what_takes_no_scaled_says_what_to_pass() -> None:
    rank = interlace.get_rank()
    for name, op in tensors_only(made("mxfp8", 4, 0)).items():
        words = rf"^{name.split()[0]} must be a tensor.*, got Scaled in mxfp8, .*; pass dequantize"
        with pytest.raises(TypeError, match=words):
            op()
    alone = {"input", "input of a scatter", "residual", "tensor of a sum", "y"}
    for name in alone:
        x: Any = torch.ones(4, INNER) if rank else made("mxfp8", 4, 0)
        with pytest.raises(
            TypeError, match="got Scaled in mxfp8, which only dispatches accept, and matmuls"
        ):
            tensors_only(x)[name]()
    with pytest.raises(TypeError, match="x must be a tensor, got Scaled in mxfp8"):
        interlace.experts.quantize(made("mxfp8", 4, 0))  # type: ignore[arg-type]
    received, _ = interlace.experts.dispatch(made("mxfp8", 4, 0), torch.zeros(4, 1).long(), None, 2)
    with pytest.raises(TypeError, match=r"received\.x must be a tensor, got Scaled in mxfp8"):
        interlace.experts.multiply(received, torch.ones(1, INNER, 2))


@pytest.mark.parametrize("name", KINDS)
@ranks(2, place="sim")
def test_tensors_that_stand_for_others(name: str) -> None:
    def operands() -> Any:
        return made(name, 4, 0), made(name, COLUMNS, 1).t()

    real = operands()
    with FakeTensorMode(allow_non_fake_inputs=True):
        for x, weight in (operands(), real):
            with pytest.raises(TypeError, match="input is a FakeTensor, which has no memory"):
                interlace.all_gather_matmul(x, weight)
            with pytest.raises(TypeError, match="is a FakeTensor, which has no memory"):
                interlace.experts.dispatch(x, torch.zeros(4, 1).long(), None, 2)
            assert functional.all_gather_matmul(x, weight).shape == (8, COLUMNS)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", KINDS)
@ranks(2, place="sim")
def test_what_ops_return_is_packed(name: str) -> None:
    rank = interlace.get_rank()
    x, weight = made(name, 4, rank), made(name, COLUMNS, 9).t()
    found: list[Any] = [
        interlace.all_gather_matmul(x, weight, return_gathered=True)[0],  # type: ignore[arg-type]
        functional.all_gather_matmul(x, weight, return_gathered=True)[0],
        interlace.all_reduce_norm(torch.ones(8, INNER), norm=interlace.RMSNorm(), quantize=name)[0],  # type: ignore[call-overload]
    ]  # fmt: skip
    for each in found:
        rows = formats.packed_rows(each)
        assert rows.data_ptr() == each.values.data_ptr() and rows.shape[0] == 8
        again = interlace.matmul_all_reduce(each, weight, out_dtype=torch.float32)
        right, bound = product(each, weight)
        assert torch.all((again - 2 * right).abs() <= 2 * bound)


@pytest.mark.parametrize("name", KINDS)
@ranks(2, place="sim")
def test_a_dispatch_into_places(name: str) -> None:
    """Places without a row have zeros, and the grouped matmul takes all places."""
    rank = interlace.get_rank()
    x, chosen = made(name, 4, rank), torch.tensor([[0], [1], [-1], [0]])
    weights = [made(name, COLUMNS, 9 + e) for e in range(2)]
    received, handle = interlace.experts.low_latency_dispatch(x, chosen, 5, 2, use_fp8=False)
    rows: Any = received.x
    assert rows.shape == (1, 10, INNER)
    rows.check_scales()
    came = int(received.num_tokens_per_expert)
    assert not rows.dequantize()[0, came:].any()
    own = weights[rank]
    weight: Any = Scaled(own.values[None], own.scales[None], name, own.whole).t()
    handle = handle._replace(topk_weights=torch.ones(4, 1))
    made_of = interlace.grouped_matmul_combine(rows, weight, handle, out_dtype=torch.float32)
    for token, expert in enumerate(chosen.flatten().tolist()):
        right, bound = product(x, weights[expert].t())
        if expert < 0:
            right, bound = 0 * right, 0 * bound
        assert torch.all((made_of[token] - right[token]).abs() <= bound[token])


@ranks(2, place="sim")
def test_there_is_no_gradient() -> None:
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


@ranks(2, place="sim")
def test_values_and_scales_apart_are_refused_on_all_ranks() -> None:
    gather: Any = functional.all_gather_scaled_matmul
    scales = X.scales, W.scales
    with pytest.raises(ValueError, match="weight_scale has 1 entries, weight has 2"):
        gather(X.values, [W.values, W.values], scales[0], [scales[1]])


@pytest.mark.parametrize("name", [*KINDS, "mxfp8 x mxfp8_e5m2"])
@ranks(2, place="sim")
def test_tensors_as_torch_has_them(name: str) -> None:
    """Pass values and scales separately, like ``torch.nn.functional.scaled_mm``; also swizzled."""
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


@ranks(2, place="sim")
def test_a_dispatch_does_not_quantize_again() -> None:
    tokens: Any = made("mxfp8", 2, 0)
    chosen = torch.tensor([[0], [1]])
    words = "use_fp8 quantizes x, which has scales already"
    with pytest.raises(ValueError, match=words):
        interlace.experts.dispatch(tokens, chosen, None, 2, use_fp8=True)
    with pytest.raises(ValueError, match=words):
        interlace.experts.low_latency_dispatch(tokens, chosen, 2, 2)
    turned: Any = tokens.t()
    with pytest.raises(ValueError, match=r"x must be \(tokens, hidden\), its blocks along hidden"):
        interlace.experts.dispatch(turned, chosen, None, 2)


@pytest.mark.parametrize("name", KINDS)
@ranks(2, place="sim")
def test_a_packed_weight_is_copied_no_more(name: str) -> None:
    x, weight = made(name, 3, 0), made(name, COLUMNS, 1, weight=True).t()
    packed = weight.packed()
    assert formats.packed_rows(packed).data_ptr() == formats.packed_rows(packed).data_ptr()
    assert torch.equal(packed.dequantize(), weight.dequantize())
    plain: Any = interlace.all_gather_matmul(x, weight)
    assert torch.equal(interlace.all_gather_matmul(x, packed), plain)  # type: ignore[arg-type]
    packed.values.view(torch.uint8).zero_()
    assert not interlace.all_gather_matmul(x, packed).any()  # type: ignore[union-attr]
