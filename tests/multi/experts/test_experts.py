"""Dispatch, combine, grouped matmul + combine across processes: gradients, graphs, first calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import interlace
from interlace import experts, functional
from ranks import ranks
from tiers import few

HIDDEN, COLUMNS, TOPK, MOST = 8, 12, 2, 9
TOKENS = [6, 0, 9]
Tensor = torch.Tensor


def tokens(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(TOKENS[rank], HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def chosen(rank: int, world_size: int) -> Tensor:
    """Each token has different experts, two for each rank, and sometimes none."""
    generator = torch.Generator().manual_seed(50 + rank)
    chance = torch.rand(TOKENS[rank], 2 * world_size + 1, generator=generator)
    return chance.argsort(1)[:, :TOPK] - 1


def weights(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(90 + rank)
    return torch.rand(TOKENS[rank], TOPK, generator=generator)


def matrices(world_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = 2 * world_size, HIDDEN, COLUMNS
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def expected(rank: int, world_size: int, x: Tensor, w: Tensor, m: Tensor) -> Any:
    """Every token through its experts."""
    idx = chosen(rank, world_size)
    rows = torch.einsum("th,tkhn->tkn", x, m[idx.clamp(min=0)])
    return (rows * (w * (idx >= 0)).unsqueeze(-1)).sum(1)


def own(rank: int) -> slice:
    return slice(2 * rank, 2 * rank + 2)


def _rows(x: Tensor, idx: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """Rows have places that do not depend on the routing."""
    received, handle = functional.dispatch(
        x, idx, w, 4, num_max_dispatch_tokens_per_rank=MOST, low_latency=True
    )
    return functional.combine(torch.bmm(received.x, m), handle)


def _handled(x: Tensor, idx: Tensor, w: Tensor, m: Tensor) -> Tensor:
    received, handle = functional.dispatch(
        x, idx, w, 4, num_max_dispatch_tokens_per_rank=MOST, low_latency=True
    )
    return functional.grouped_matmul_combine(received.x, m, handle)


def _dropless(x: Tensor, idx: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """In a graph the number of rows has no value. ``combine`` and its fused form take half of them each."""
    received, handle = functional.dispatch(x, idx, w, 4)
    rows = received.x
    expert = torch.searchsorted(received.offsets, torch.arange(rows.shape[0]), right=True)
    y = torch.bmm(rows.unsqueeze(1), m[expert]).squeeze(1)
    one, other = functional.combine(y, handle), functional.grouped_matmul_combine(rows, m, handle)
    return (one + other) / 2


def _compiled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


FORMS: dict[str, Callable[..., Tensor]] = {
    "rows": _rows,
    "handle": _handled,
    "dropless": _dropless,
    "handle compiled": lambda *args: _compiled(_handled)(*args),
    "dropless compiled": lambda *args: _compiled(_dropless)(*args),
    "dropless by inductor": lambda *args: torch.compile(_dropless, fullgraph=True)(*args),
    "rows compiled": lambda *args: _compiled(_rows)(*args),
    "rows by inductor": lambda *args: torch.compile(_rows, fullgraph=True)(*args),
}


def check_gradients(how: str) -> None:
    """Against autograd of all ranks' computation in one process."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    xs = [tokens(r).requires_grad_() for r in range(world_size)]
    ws = [weights(r).requires_grad_() for r in range(world_size)]
    ms = matrices(world_size).requires_grad_()
    outputs = [expected(r, world_size, xs[r], ws[r], ms) for r in range(world_size)]
    sum((y * y).sum() for y in outputs).backward()  # type: ignore[union-attr]
    idx = chosen(rank, world_size)
    x, w = xs[rank].detach().requires_grad_(), ws[rank].detach().requires_grad_()
    m = ms[own(rank)].detach().requires_grad_()
    output = FORMS[how](x, idx, w, m)
    (output * output).sum().backward()
    assert ms.grad is not None
    pairs = (
        (output, outputs[rank]), (x.grad, xs[rank].grad), (w.grad, ws[rank].grad),
        (m.grad, ms.grad[own(rank)]),
    )  # fmt: skip
    for mine, exact in pairs:
        torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", few(FORMS, *(how for how in FORMS if "inductor" not in how)))
@ranks(2)
def test_gradients(how: str) -> None:
    check_gradients(how)


@pytest.mark.parametrize(
    ("most", "fullgraph"), few([(None, False), (None, True), (MOST, True)], (None, False))
)
@ranks(2)
def test_a_layer_is_compiled_whole_and_with_graph_breaks(most: int | None, fullgraph: bool) -> None:
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    torch.manual_seed(0)
    how: Any = {"gated": True, "shared_size": 8, "capacity_factor": 1.0, "expert_bias": True}
    bound: Any = {"num_max_dispatch_tokens_per_rank": most}
    layer = interlace.nn.MoE(HIDDEN, COLUMNS, 2 * world_size, TOPK, **how, **bound)
    compiled = torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")
    for shift in range(1 if most is None else 2):
        found = []
        for run in (layer, compiled):
            layer.zero_grad()
            x = tokens((rank + shift) % world_size, torch.float32).requires_grad_()
            output = run(x)
            output.square().sum().backward()
            of = {name: each.grad for name, each in layer.named_parameters()}
            balance = layer.load_balance()
            found.append({"output": output, "x": x.grad, "loss": balance.loss, **of})
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@ranks(2)
def test_a_first_call_that_one_rank_refuses_is_told_to_all() -> None:
    """The rank raises before the ranks compare their caches."""
    group, rank = interlace.new_group(), interlace.get_rank()
    world_size = interlace.get_world_size()
    how: Any = {"num_max_dispatch_tokens_per_rank": MOST, "group": group}
    x, idx = tokens(rank), chosen(rank, world_size)
    received, handle = experts.dispatch(x, idx, None, 2 * world_size, **how)
    m: Any = matrices(world_size)[own(rank)] if rank == 0 else None
    with pytest.raises(TypeError) as caught:
        interlace.grouped_matmul_combine(received.x, m, handle)
    said = "weight must be a tensor, got NoneType"
    others = f"grouped_matmul_combine: rank 1 cannot take part: {said}"
    assert str(caught.value) == (f"{said} (on rank 1)" if rank else others)
