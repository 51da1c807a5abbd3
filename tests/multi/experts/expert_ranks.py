"""Ranks of test_experts.py. A module of its own, because new processes import it."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import interlace
from interlace import experts, functional
from interlace.runtime.core.communicator import Communicator

HIDDEN, COLUMNS, TOPK, MOST = 8, 12, 2, 9
TOKENS = [6, 0, 9]


def tokens(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(TOKENS[rank], HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def chosen(rank: int, world_size: int) -> torch.Tensor:
    """Different experts of each token, of two for each rank; now and then none."""
    generator = torch.Generator().manual_seed(50 + rank)
    chance = torch.rand(TOKENS[rank], 2 * world_size + 1, generator=generator)
    return chance.argsort(1)[:, :TOPK] - 1


def weights(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(90 + rank)
    return torch.rand(TOKENS[rank], TOPK, generator=generator)


def matrices(world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = 2 * world_size, HIDDEN, COLUMNS
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def expected(rank: int, world_size: int, x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> Any:
    """Every token through its experts."""
    idx = chosen(rank, world_size)
    rows = torch.einsum("th,tkhn->tkn", x, m[idx.clamp(min=0)])
    return (rows * (w * (idx >= 0)).unsqueeze(-1)).sum(1)


def own(rank: int) -> slice:
    return slice(2 * rank, 2 * rank + 2)


def results() -> list[str]:
    """What is wrong on this rank, by every algorithm; two calls each, in flight together."""
    wrong = []
    for algorithm, dtype in (
        ("auto", torch.float64),
        ("fused", torch.float32),
        ("unfused", torch.bfloat16),
    ):
        found = moved(algorithm, dtype)
        wrong += [f"{algorithm}: {what}" for what in found]
    for algorithm in ("auto", "fused", "pipelined", "unfused"):
        if not multiplied(algorithm):
            wrong.append(f"{algorithm}: product")
    return wrong


def moved(algorithm: str, dtype: torch.dtype) -> list[str]:
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    idx, w, x = chosen(rank, world_size), weights(rank), tokens(rank, dtype)
    given = {"algorithm": algorithm, "async_op": True}
    first = experts.dispatch(x, idx, w, 2 * world_size, **given)
    second = experts.low_latency_dispatch(x, idx, MOST, 2 * world_size, use_fp8=False, **given)
    wrong = []
    for name, work in (("dispatch", first), ("low latency", second)):
        received, handle = work.wait()
        handle = handle._replace(topk_weights=w)
        output = experts.combine(received.x * 2, handle, **given).wait()
        kept = (w * (idx >= 0)).unsqueeze(-1)
        exact = (2 * x.double().unsqueeze(1) * kept).sum(1)
        bound = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
        if output.dtype != dtype or not torch.allclose(output.double(), exact, bound, bound):
            wrong.append(name)
    return wrong


def multiplied(algorithm: str) -> bool:
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    x, idx, w = tokens(rank, torch.float32), chosen(rank, world_size), weights(rank)
    m, eye = matrices(world_size).float()[own(rank)], torch.eye(HIDDEN).expand(2, HIDDEN, HIDDEN)
    rows, sent = experts.permute(x, idx, 2 * world_size)
    hidden, splits = interlace.all_to_all_grouped_matmul(rows, eye, sent)
    work = interlace.grouped_matmul_combine(
        hidden, m, splits, idx, w, algorithm=algorithm, async_op=True
    )  # type: ignore[call-overload]
    exact = expected(rank, world_size, x.double(), w.double(), matrices(world_size))
    return torch.allclose(work.wait().double(), exact, rtol=1e-4, atol=1e-4)


READS = "item", "tolist", "cpu", "numpy", "__int__", "__bool__", "__float__", "__index__"


@contextlib.contextmanager
def noted_reads() -> Iterator[set[str]]:
    """Within it, the functions of ops and tests that read a tensor on the host."""
    seen: set[str] = set()

    def noting(name: str) -> Any:
        known = getattr(torch.Tensor, name)

        def read(*args: Any, **more: Any) -> Any:
            code = sys._getframe(1).f_code
            if any(part in code.co_filename for part in ("/ops/", "/tests/")):
                seen.add(code.co_name)
            return known(*args, **more)

        return mock.patch.object(torch.Tensor, name, read)

    with contextlib.ExitStack() as patches:
        for name in READS:
            patches.enter_context(noting(name))
        yield seen


def counted_layer(algorithm: str) -> bool:
    """Two ops whose counts are on the device; whether the result is right."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    x, idx, w = tokens(rank, torch.float32), chosen(rank, world_size), weights(rank)
    m, eye = matrices(world_size).float()[own(rank)], torch.eye(HIDDEN).expand(2, HIDDEN, HIDDEN)
    rows, sent = experts.permute(x, idx, 2 * world_size, num_out_tokens=idx.numel())
    given: Any = {"num_max_rows_per_rank": MOST * TOPK, "algorithm": algorithm}
    hidden, handle = interlace.all_to_all_grouped_matmul(rows, eye, sent, **given)
    y = interlace.grouped_matmul_combine(hidden, m, handle, idx, w, algorithm=algorithm)  # type: ignore[call-overload]
    exact = expected(rank, world_size, x.double(), w.double(), matrices(world_size))
    return torch.allclose(y.double(), exact, rtol=1e-4, atol=1e-4)


def reads_of_a_layer(algorithm: str) -> set[str]:
    with noted_reads() as seen:
        assert counted_layer(algorithm)
    return seen


# Functions that check numbers where reading them costs nothing, which is not on a GPU.
CHECKS = {"check_numbers", "checked_segments", "check_experts", "assigned"}


def gradients(how: str) -> list[str]:
    """What is wrong on this rank, against autograd of all ranks' computation in one process."""
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
    pairs = {
        "output": (output, outputs[rank]),
        "x": (x.grad, xs[rank].grad),
        "weights": (w.grad, ws[rank].grad),
        "matrices": (m.grad, ms.grad[own(rank)]),
    }
    return [
        name
        for name, (mine, exact) in pairs.items()
        if mine is None or exact is None or not torch.allclose(mine, exact, 1e-5, 1e-5)
    ]


def _rows(x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """On two ranks, in a graph: rows in places that do not depend on the routing."""
    received, handle = functional.dispatch(
        x, idx, w, 4, num_max_dispatch_tokens_per_rank=MOST, low_latency=True
    )
    return functional.combine(torch.bmm(received.x, m), handle)


def _handled(x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    received, handle = functional.dispatch(
        x, idx, w, 4, num_max_dispatch_tokens_per_rank=MOST, low_latency=True
    )
    return functional.grouped_matmul_combine(received.x, m, handle)


def _dropless(x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """In a graph the number of rows has no value. Half by combine, half by its fused form."""
    received, handle = functional.dispatch(x, idx, w, 4)
    rows = received.x
    expert = torch.searchsorted(received.offsets, torch.arange(rows.shape[0]), right=True)
    y = torch.bmm(rows.unsqueeze(1), m[expert]).squeeze(1)
    one, other = functional.combine(y, handle), functional.grouped_matmul_combine(rows, m, handle)
    return (one + other) / 2


def _products(x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    world_size, rank = interlace.get_world_size(), interlace.get_rank()
    rows, sent = experts.permute(x, idx, 2 * world_size)
    splits = [
        int((chosen(r, world_size) == e).sum())
        for e in (2 * rank, 2 * rank + 1)
        for r in range(world_size)
    ]
    eye = torch.eye(HIDDEN, dtype=x.dtype).expand(2, HIDDEN, HIDDEN)
    home = sent.tolist()
    hidden = functional.all_to_all_grouped_matmul(rows, eye, home, splits)
    return functional.grouped_matmul_combine(hidden, m, splits, idx, w, home_splits=home)


def _compiled(
    fn: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor]:
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def _eager(x: torch.Tensor, idx: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    world_size = interlace.get_world_size()
    rows, sent = experts.permute(x, idx, 2 * world_size)
    eye = torch.eye(HIDDEN, dtype=x.dtype).expand(2, HIDDEN, HIDDEN)
    hidden, splits = interlace.all_to_all_grouped_matmul(rows, eye, sent)
    return interlace.grouped_matmul_combine(hidden, m, splits, idx, w)


FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "eager": _eager,
    "rows": _rows,
    "products": _products,
    "handle": _handled,
    "dropless": _dropless,
    "handle compiled": lambda *args: _compiled(_handled)(*args),
    "dropless compiled": lambda *args: _compiled(_dropless)(*args),
    "dropless by inductor": lambda *args: torch.compile(_dropless, fullgraph=True)(*args),
    "rows compiled": lambda *args: _compiled(_rows)(*args),
    "rows by inductor": lambda *args: torch.compile(_rows, fullgraph=True)(*args),
}


def layer_compiled(most: int | None) -> list[str]:
    """What differs between nn.MoE and its graph, of unequally many tokens; with a bound of two numbers."""
    rank, world_size = interlace.get_rank(), interlace.get_world_size()
    torch.manual_seed(0)
    how: Any = {"gated": True, "shared_size": 8, "capacity_factor": 1.0, "expert_bias": True}
    bound: Any = {"num_max_dispatch_tokens_per_rank": most}
    layer = interlace.nn.MoE(HIDDEN, COLUMNS, 2 * world_size, TOPK, **how, **bound)
    compiled, wrong = torch.compile(layer, fullgraph=True, backend="aot_eager"), []
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
        wrong += [
            name
            for name, each in found[0].items()
            if not torch.allclose(each, found[1][name], 1e-5, 1e-6)
        ]
    return wrong


def refused_at_first() -> list[str]:
    """What a rank says of another's misuse in a group's first call, before which ranks compare caches."""
    group, rank = interlace.new_group(), interlace.get_rank()
    world_size = interlace.get_world_size()
    how: Any = {"num_max_dispatch_tokens_per_rank": MOST, "group": group}
    x, idx = tokens(rank), chosen(rank, world_size)
    received, handle = experts.dispatch(x, idx, None, 2 * world_size, **how)
    m, said = matrices(world_size)[own(rank)], []
    for weight in (None if rank else m, m):
        try:
            interlace.grouped_matmul_combine(received.x, weight, handle)  # type: ignore[arg-type]
        except TypeError as error:
            said.append(str(error))
    return said


def called(how: str) -> list[str]:
    """The ops of a forward and its backward, as ranks agree on them."""
    seen: list[str] = []
    parts = Communicator.parts

    def noting(self: Communicator, call: Any, *how: Any) -> list[Any]:
        seen.append(call.op)
        return parts(self, call, *how)

    with mock.patch.object(Communicator, "parts", noting):
        assert gradients(how) == []
    return seen


def faked() -> list[tuple[int, ...]]:
    """Shapes on fake tensors, from a group that is only a name."""
    spec = interlace.GroupSpec("pretended", 4)
    with FakeTensorMode():
        x, idx, w = torch.empty(6, 8), torch.zeros(6, 2, dtype=torch.int64), torch.empty(6, 2)
        how = {"num_max_dispatch_tokens_per_rank": 10, "group": spec}
        received, handle = functional.dispatch(x, idx, w, 8, **how)
        packed, _ = functional.dispatch(x, idx, None, 8, **how, low_latency=True)
        few, _ = functional.dispatch(x, idx, None, 8, **how, capacity=3)
        y = functional.combine(torch.empty(80, 5), handle)
        z = functional.grouped_matmul_combine(
            torch.empty(8, 8), torch.empty(2, 8, 3), [1] * 8, idx, w,
            home_splits=[2, 2, 2, 2, 1, 1, 1, 1], group=spec,
        )  # fmt: skip
        v = functional.grouped_matmul_combine(received.x, torch.empty(2, 8, 7), handle)
        made = (received.x, packed.x, few.x, handle.inverse, y, z, v)
        return [tuple(each.shape) for each in made]
