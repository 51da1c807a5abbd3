"""Ranks that pass different kinds of operands: all ranks raise an error that names each rank's kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import interlace
from interlace import experts, functional, nn
from interlace.ops.matmul.formats import quantize
from ranks import ranks

X, W = torch.ones(4, 64), torch.ones(1, 64, 8)
CHOSEN = torch.tensor([[0], [1], [0], [1]])
Form = Callable[[Any, Any], Any]


def product(op: Any) -> Form:
    return lambda x, w: op(x, w[0])


PRODUCTS = {
    f"{module.__name__}.{name}": product(getattr(module, name))
    for module in (interlace, functional)
    for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
}
EXPERTS: dict[str, Form] = {
    "eager gather": lambda x, w: interlace.all_gather_grouped_matmul(x, w, [4]),
    "gather": lambda x, w: functional.all_gather_grouped_matmul(x, w, [4], [4, 4]),
    "eager exchange": lambda x, w: interlace.all_to_all_grouped_matmul(x, w, [2, 2]),
    "exchange": lambda x, w: functional.all_to_all_grouped_matmul(x, w, [2, 2], [2, 2]),
    "eager combine": lambda x, w: interlace.grouped_matmul_combine(x, w, [2, 2], CHOSEN),
    "combine": lambda x, w: functional.grouped_matmul_combine(
        x, w, [2, 2], CHOSEN, home_splits=[2, 2]
    ),
}
MOVES: dict[str, Form] = {
    "eager dispatch": lambda x, _: experts.dispatch(x, CHOSEN, None, 2),
    "dispatch": lambda x, _: functional.dispatch(x, CHOSEN, None, 2),
    "low latency": lambda x, _: experts.low_latency_dispatch(x, CHOSEN, 4, 2, use_fp8=False),
}
LINEAR: dict[str, Form] = {
    "column": lambda _, w: nn.column_parallel_linear(X, [w[0].t()], group=None),
    "row": lambda _, w: nn.row_parallel_linear(X, w[0].t(), group=None),
    "norm": lambda x, w: interlace.matmul_reduce_scatter(x, w[0], norm=interlace.RMSNorm()),
}
FORMS = {**PRODUCTS, **EXPERTS, **MOVES, **LINEAR}


class Weights:
    """Block-scaled weights, of which a matrix is a weight too."""

    def __init__(self, format: Any) -> None:
        self.all = quantize(W.mT, format, weight=True).t()

    def __getitem__(self, index: int) -> Any:
        values, scales = self.all.values[index], self.all.scales[index]
        return interlace.Scaled(values, scales, self.all.format, self.all.whole, inner=-2)


def operands(form: str, format: str) -> tuple[Any, Any]:
    if not format:
        return X, W
    weights: Any = Weights(format)
    return quantize(X, format), weights.all if form in EXPERTS else weights  # type: ignore[arg-type]


@pytest.mark.parametrize("formats", [("mxfp8", ""), ("", "nvfp4"), ("mxfp8", "nvfp4")])
@pytest.mark.parametrize("form", FORMS)
@ranks(2, place="sim")
def test_all_ranks_raise_an_error_that_names_both_kinds(
    form: str, formats: tuple[str, str]
) -> None:
    kinds = [format or r"None \(plain tensors\)" for format in formats]
    words = (
        f"format of the operands differs between ranks: {kinds[0]} on rank 0, {kinds[1]} on rank 1"
    )
    with pytest.raises(ValueError, match=words):
        FORMS[form](*operands(form, formats[interlace.get_rank()]))
    FORMS[form](*operands(form, "mxfp8"))


@pytest.mark.parametrize("form", [*PRODUCTS, *EXPERTS])
@ranks(2, place="sim")
def test_one_scaled_operand_on_one_rank_is_an_error_on_all(form: str) -> None:
    scaled, plain = operands(form, "mxfp8"), (X, W)
    rank, words = interlace.get_rank(), "must be an interlace.Scaled as the other operands are"
    for pair in ((scaled[0], plain[1]), (plain[0], scaled[1])):
        for other in (scaled, plain):
            with pytest.raises(TypeError, match=f"rank 1.* {words}" if rank == 0 else words):
                FORMS[form](*(pair if rank else other))


def distributed(tensor: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=interlace.get_rank())
    return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)


@pytest.mark.parametrize("form", [*PRODUCTS, "eager dispatch", "dispatch"])
@ranks(2, place="sim")
def test_a_dtensor_on_one_rank_is_an_error_on_all(form: str) -> None:
    words = r"is a DTensor; pass \w+.to_local\(\), this rank's part"
    x = X if interlace.get_rank() else distributed(X)
    with pytest.raises(TypeError, match=words):
        FORMS[form](x, W)
    if form in PRODUCTS:
        with pytest.raises(TypeError, match=words):
            in_format(form, x)
    FORMS[form](X, W)


def in_format(form: str, x: torch.Tensor) -> Any:
    module = functional if "functional" in form else interlace
    op: Any = getattr(module, form.rpartition(".")[2])
    return op(x, W[0], format="mxfp8")


@ranks(2, place="sim")
def test_dtensors_are_not_quantized() -> None:
    words = r"is a DTensor; pass \w+.to_local\(\), this rank's part"
    with pytest.raises(TypeError, match=f"x {words}"):
        quantize(distributed(X), "mxfp8")
    scaled = quantize(X, "mxfp8")
    for values, scales in (
        (distributed(scaled.values), scaled.scales),
        (scaled.values, distributed(scaled.scales)),
    ):
        with pytest.raises(TypeError, match=words):
            interlace.Scaled(values, scales, "mxfp8")


@pytest.mark.parametrize("form", PRODUCTS)
@ranks(2, place="sim")
def test_an_error_about_another_rank_names_the_op(form: str) -> None:
    op = form.rpartition(".")[2]
    first = interlace.get_rank() == 0
    words = (
        rf"^{op}: rank 1 cannot take part: " if first else "strided tensor, got torch.sparse_coo"
    )
    with pytest.raises(TypeError, match=words):
        in_format(form, X if first else X.to_sparse())


@ranks(2, place="sim")
def test_a_scaled_among_values_and_scales_on_one_rank_is_an_error_on_all() -> None:
    x, w = quantize(X, "mxfp8"), quantize(W[0].t(), "mxfp8").t()
    for form in (functional.all_gather_scaled_matmul, functional.scaled_matmul_reduce_scatter):
        with pytest.raises(
            TypeError, match="pass that to the op of the same name without 'scaled'"
        ):
            weight: Any = w.values if interlace.get_rank() else w
            form(x.values, weight, x.scales, w.scales)


@pytest.mark.parametrize(
    ("x", "w", "error", "words"),
    [
        (X, W.int(), TypeError, "^weight must be a float tensor .*, got torch.int32"),
        (X[:, :63], W[:, :63], ValueError, r"dimension of received.x must be even, got \(.*63\)"),
        (X, W[..., :7].clone().requires_grad_(), ValueError, r"of weight must be even, got .*7\)"),
    ],
)
@ranks(2, place="sim")
def test_products_of_rows_refuse_in_forward(
    x: torch.Tensor, w: torch.Tensor, error: type[Exception], words: str
) -> None:
    received, _ = experts.dispatch(x, CHOSEN, None, 2)  # type: ignore[misc]
    with pytest.raises(error, match=words):
        experts.multiply(received, w, format="nvfp4")
