"""Misuse of calls with a norm: an error on every rank, which names what is wrong."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace import functional
from support import failure

RMS = interlace.RMSNorm(torch.ones(8))
F64 = torch.float64


def scatter(**how: Any) -> Any:
    return interlace.matmul_reduce_scatter(torch.ones(4, 6), torch.ones(6, 8), **how)


def gather(**how: Any) -> Any:
    return interlace.matmul_all_reduce(torch.ones(4, 6), torch.ones(6, 8), **how)


def rows(**how: Any) -> Any:
    return interlace.all_reduce_norm(torch.ones(4, 8), **how)


def parts(**how: Any) -> Any:
    return interlace.reduce_scatter_norm(torch.ones(4, 8), **how)


CASES: tuple[tuple[Callable[..., Any], dict[str, Any], type[Exception], str], ...] = (
    (scatter, {"residual": torch.ones(2, 8)}, ValueError, "for a call with norm, which is None"),
    (gather, {"quantize": "fp8"}, ValueError, "for a call with norm, which is None"),
    (scatter, {"norm": torch.nn.RMSNorm(8)}, TypeError, "norm must be an interlace.RMSNorm or"),
    (rows, {"norm": None}, TypeError, "norm must be an interlace.RMSNorm or .* got NoneType"),
    (scatter, {"norm": RMS, "scatter_dim": 1}, ValueError, "is the last dimension"),
    (parts, {"norm": RMS, "scatter_dim": -1}, ValueError, "is the last dimension"),
    (scatter, {"norm": RMS, "residual": torch.ones(4, 8)}, ValueError, r"\(2, 8\), got \(4, 8\)"),
    (gather, {"norm": RMS, "residual": torch.ones(2, 8)}, ValueError, r"\(4, 8\), got \(2, 8\)"),
    (rows, {"norm": RMS, "residual": torch.ones(4, 8).half()}, TypeError, "residual is torch.float16"),
    (rows, {"norm": interlace.RMSNorm(torch.ones(7))}, ValueError, r"weight of norm .*\(8,\), got \(7,\)"),
    (rows, {"norm": interlace.RMSNorm(torch.ones(8).half())}, TypeError, "weight of norm is torch.float16"),
    (rows, {"norm": interlace.LayerNorm(None, torch.ones(7))}, ValueError, "bias of norm"),
    (rows, {"norm": interlace.RMSNorm(None, -1.0)}, ValueError, "eps of norm must be 0 or more"),
    (rows, {"norm": interlace.RMSNorm(None, None)}, TypeError, "eps of norm must be a number"),  # type: ignore[arg-type]
    (rows, {"norm": RMS, "quantize": "int8"}, ValueError, "None or one of fp8, fp8_static, got 'int8'"),
    (scatter, {"norm": RMS, "gather_normed": 1}, TypeError, "gather_normed must be a bool, got 1"),
    (rows, {"norm": RMS, "algorithm": "kernel"}, ValueError, "algorithm must be one of auto, fused"),
    (parts, {"norm": RMS, "algorithm": "low_latency"}, ValueError, "use all_reduce_norm"),
    (rows, {"norm": RMS, "bias": torch.ones(4)}, ValueError, r"bias must have shape \(8,\)"),
    (rows, {"norm": RMS, "reduce_op": "max"}, ValueError, "reduce_op must be one of sum, avg"),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__} {list(case[1])[-1]}")
def test_every_rank_raises(
    case: tuple[Callable[..., Any], dict[str, Any], type[Exception], str],
) -> None:
    call, how, kind, text = case

    def on_rank() -> str:
        try:
            call(**how)
        except kind as error:
            interlace.all_reduce(torch.ones(1))  # the group goes on
            return str(error)
        return "nothing was raised"

    for said in interlace.run(on_rank, 2):
        assert re.search(text, said), said


@pytest.mark.parametrize("call", [scatter, gather, rows, parts])
@pytest.mark.parametrize(
    "differing",
    [
        {"norm": (RMS, interlace.LayerNorm(torch.ones(8)))},
        {"norm": (RMS, interlace.RMSNorm(torch.ones(8), 0.5))},
        {"norm": (RMS, interlace.RMSNorm(None))},
        {"quantize": (None, "fp8")},
    ],
    ids=["norm", "eps", "weight", "quantize"],
)
def test_ranks_that_differ(call: Callable[..., Any], differing: dict[str, tuple[Any, Any]]) -> None:
    def on_rank() -> str:
        own = {name: values[interlace.get_rank()] for name, values in differing.items()}
        with pytest.raises((ValueError, TypeError), match="differs between ranks") as caught:
            call(**{"norm": RMS, **own})
        return str(caught.value)

    first, second = interlace.run(on_rank, 2)
    assert first == second


def test_a_rank_alone_that_is_wrong() -> None:
    """What one rank refuses, the others hear of."""

    def on_rank() -> str:
        weight = torch.ones(7 if interlace.get_rank() else 8)
        with pytest.raises(ValueError) as caught:
            rows(norm=interlace.RMSNorm(weight))
        return str(caught.value)

    first, second = interlace.run(on_rank, 2)
    assert "rank 1 cannot take part" in first and "(on rank 1)" in second


def test_too_much_for_words() -> None:
    def on_rank() -> Any:
        x, norm = torch.ones(65, 16), interlace.RMSNorm()  # a block for every row
        return interlace.all_reduce_norm(x, norm=norm, algorithm="low_latency")

    error = failure(on_rank, 2)
    assert "at most 65536 bytes" in str(error) and "got 66560" in str(error)


def test_no_fused_float64() -> None:
    def on_rank() -> Any:
        norm = interlace.RMSNorm()
        return interlace.all_reduce_norm(torch.ones(1, 8, dtype=F64), norm=norm, algorithm="fused")

    assert "supports float32, float16 and bfloat16" in str(failure(on_rank, 2))


def test_with_an_activation_and_gradients_the_norm_is_checked_too() -> None:
    """Where torch norms what the op has summed."""

    def on_rank() -> None:
        x, one = torch.ones(4, 6, requires_grad=True), interlace.get_rank() == 1
        for how, text in (
            ({"residual": torch.ones(8)}, r"residual must have .* \(2, 8\), got \(8,\)"),
            ({"scatter_dim": 1}, "is the last dimension"),
            ({"norm": interlace.RMSNorm(None, 0.5 if one else 0.1)}, "eps of norm differs"),
        ):
            with pytest.raises(ValueError, match=text):
                interlace.matmul_reduce_scatter(
                    x, torch.ones(6, 8), activation="relu", **{"norm": RMS, **how}
                )  # type: ignore[call-overload]

    interlace.run(on_rank, 2)


def test_fp8_has_no_gradient() -> None:
    """The sum beside it has one."""

    def on_rank() -> None:
        x = torch.ones(2, 8, requires_grad=True)
        _, total = interlace.all_reduce_norm(x, norm=RMS, quantize="fp8")
        total.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and x.grad.tolist() == [[2.0] * 8] * 2
        (values, _), _ = interlace.all_reduce_norm(x, norm=RMS, quantize="fp8")
        with pytest.raises(RuntimeError, match="with quantize='fp8' has no gradient"):
            values.float().sum().backward()

    interlace.run(on_rank, 2)


def test_functional_forms_refuse_too() -> None:
    def on_rank() -> None:
        for call in (
            lambda: functional.all_reduce_norm(torch.ones(2, 8), norm=1),  # type: ignore[call-overload]
            lambda: functional.all_reduce_norm(torch.ones(2, 8), norm=RMS, residual=3),  # type: ignore[call-overload]
        ):
            with pytest.raises(TypeError):
                call()
        for given, text in (
            ({"norm": interlace.RMSNorm(None, True)}, "eps of norm must be a number, got True"),
            ({"norm": RMS, "residual": torch.ones(2, 8, device="meta")}, "residual is on meta"),
            ({"norm": RMS, "residual": torch.ones(2, 8).to_sparse()}, "residual must be a strided"),
        ):
            with pytest.raises(TypeError, match=text):
                functional.all_reduce_norm(torch.ones(2, 8), **given)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="for a call with norm"):
            functional.matmul_all_reduce(
                torch.ones(3, 8), torch.ones(8, 8), residual=torch.ones(3, 8)
            )  # type: ignore[call-overload]

    interlace.run(on_rank, 2)
