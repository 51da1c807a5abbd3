"""Misuse of calls with a norm: an error on every rank, which names what is wrong."""

from typing import Any

import pytest
import torch

import interlace
from interlace import functional
from ranks import ranks
from sim.api.refusals import both, check_refused

RMS = interlace.RMSNorm(torch.ones(8))
SCATTER, REDUCE, PARTS, ROWS = (
    "matmul_reduce_scatter", "matmul_all_reduce", "reduce_scatter_norm", "all_reduce_norm",
)  # fmt: skip


def arguments(op: str) -> dict[str, Any]:
    weight = {"weight": torch.ones(6, 8)} if op.startswith("matmul") else {}
    input = torch.ones(4, 6 if weight else 8)
    return {"input": input, **weight, "norm": RMS, "algorithm": "unfused"}


MISUSE: tuple[tuple[str, dict[str, Any], str], ...] = (
    (SCATTER, {"residual": torch.ones(2, 8), "norm": None}, "need a norm, but norm is None"),
    (REDUCE, {"quantize": "fp8", "norm": None}, "need a norm, but norm is None"),
    (SCATTER, {"norm": torch.nn.RMSNorm(8)}, "TypeError: norm must be an interlace.RMSNorm or"),
    (ROWS, {"norm": None}, "TypeError: norm must be an interlace.RMSNorm or"),
    (SCATTER, {"scatter_dim": 1}, "is the last dimension"),
    (PARTS, {"scatter_dim": -1}, "is the last dimension"),
    (SCATTER, {"residual": torch.ones(4, 8)}, "(2, 8), got (4, 8)"),
    (REDUCE, {"residual": torch.ones(2, 8)}, "(4, 8), got (2, 8)"),
    (ROWS, {"residual": torch.ones(4, 8).half()}, "TypeError: residual is torch.float16"),
    (ROWS, {"norm": interlace.RMSNorm(torch.ones(7))}, "(8,), got (7,)"),
    (ROWS, {"norm": interlace.RMSNorm(torch.ones(8).half())}, "TypeError: weight of norm is torch.float16"),
    (ROWS, {"norm": interlace.LayerNorm(None, torch.ones(7))}, "bias of norm"),
    (ROWS, {"norm": interlace.RMSNorm(None, -1.0)}, "eps of norm must be 0 or more"),
    (ROWS, {"norm": interlace.RMSNorm(None, None)}, "TypeError: eps of norm must be a number"),  # type: ignore[arg-type]
    (ROWS, {"quantize": "int8"}, "mxfp8, mxfp8_e5m2, mxfp4, nvfp4, got 'int8'"),
    (SCATTER, {"gather_normed": 1}, "TypeError: gather_normed must be a bool, got 1"),
    (ROWS, {"algorithm": "kernel"}, "algorithm must be one of auto, fused"),
    (PARTS, {"algorithm": "low_latency"}, "use all_reduce_norm"),
    (ROWS, {"bias": torch.ones(4)}, "bias must have shape (8,)"),
    (ROWS, {"reduce_op": "max"}, "reduce_op must be one of sum, avg"),
    # a block for every row
    (ROWS, {"input": both(torch.ones(65, 16)), "norm": both(interlace.RMSNorm()),
            "algorithm": both("low_latency")}, "each row in whole blocks of 1024, got 66560"),
    (ROWS, {"input": both(torch.ones(1, 8).double()), "norm": both(interlace.RMSNorm()),
            "algorithm": both("fused")}, "TypeError: supports float32, float16 and bfloat16"),
    *(
        (op, changes, text)
        for op in (SCATTER, REDUCE, PARTS, ROWS)
        for changes, text in (
            ({"norm": interlace.LayerNorm(torch.ones(8))}, "differs between ranks"),
            ({"norm": interlace.RMSNorm(torch.ones(8), 0.5)}, "eps of norm differs between ranks"),
            ({"norm": interlace.RMSNorm(None)}, "TypeError: weight of norm differs between ranks"),
            ({"quantize": "fp8"}, "quantize differs between ranks: None on rank 0, fp8 on rank 1"),
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize(("op", "changes", "text"), MISUSE)
@ranks(2, place="sim")
def test_misuse_of_one_rank_is_named_on_all(op: str, changes: dict[str, Any], text: str) -> None:
    check_refused(getattr(interlace, op), arguments(op), changes, text)


@ranks(2, place="sim")
def test_with_an_activation_and_gradients_the_norm_is_checked_too() -> None:
    """In this case torch computes the norm after the op."""
    right = {**arguments(SCATTER), "activation": "relu"}
    right["input"].requires_grad_()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"residual": torch.ones(8)}, "(2, 8), got (8,)"),
        ({"scatter_dim": 1}, "is the last dimension"),
        ({"norm": interlace.RMSNorm(torch.ones(8), 0.5)}, "eps of norm differs"),
    ]
    for changes, text in refused:
        check_refused(interlace.matmul_reduce_scatter, right, changes, text)


@ranks(2, place="sim")
def test_fp8_has_no_gradient() -> None:
    x = torch.ones(2, 8, requires_grad=True)
    _, total = interlace.all_reduce_norm(x, norm=RMS, quantize="fp8")
    total.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and x.grad.tolist() == [[2.0] * 8] * 2
    (values, _), _ = interlace.all_reduce_norm(x, norm=RMS, quantize="fp8")
    with pytest.raises(RuntimeError, match="with quantize='fp8' has no gradient"):
        values.float().sum().backward()


@ranks(2, place="sim")
def test_functional_forms_refuse_too() -> None:
    call: Any = functional.all_reduce_norm
    refused: list[tuple[dict[str, Any], str]] = [
        ({"norm": 1}, "norm must be"),
        ({"residual": 3}, "residual must be"),
        ({"norm": interlace.RMSNorm(None, True)}, "eps of norm must be a number, got True"),
        ({"residual": torch.ones(2, 8, device="meta")}, "residual is on meta"),
        ({"residual": torch.ones(2, 8).to_sparse()}, "residual must be a strided"),
    ]
    for changes, text in refused:
        with pytest.raises(TypeError, match=text):
            call(torch.ones(2, 8), **{"norm": RMS, **changes})
    matmul: Any = functional.matmul_all_reduce
    with pytest.raises(ValueError, match="need a norm"):
        matmul(torch.ones(3, 8), torch.ones(8, 8), residual=torch.ones(3, 8))
