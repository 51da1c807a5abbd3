"""Every functional op with arguments, and what single-process torch makes of the inputs of all ranks."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import interlace
from interlace import functional
from interlace.functional import AsyncTensor, wait
from interlace.reference import split

Tensors = list[torch.Tensor]
Shapes = Callable[[int, int], dict[str, tuple[int, ...]]]
EPS = 0.1


class Case(NamedTuple):
    """A call of an op with ``options`` and tensors; ``shapes`` depend on a rank and the number of ranks."""

    op: str
    shapes: Shapes
    options: dict[str, Any] = {}  # noqa: RUF012
    same: tuple[str, ...] = ()
    """The names of tensors that all ranks have alike."""
    uneven: bool = False

    @property
    def name(self) -> str:
        uneven = ["uneven"] * self.uneven
        said = {name: getattr(value, "__name__", value) for name, value in self.options.items()}
        return ", ".join([self.op, *(f"{k}={v}" for k, v in said.items()), *uneven])

    def inputs(self, rank: int, size: int) -> Tensors:
        found = []
        for seed, (name, shape) in enumerate(self.shapes(rank, size).items()):
            of = 0 if name in self.same else rank
            generator = torch.Generator().manual_seed(1000 * seed + of)
            if self.op in ("all_reduce", "reduce_scatter"):  # ties between ranks and zeros
                found.append(torch.randint(-1, 3, shape, generator=generator).double())
            else:
                found.append(torch.randn(shape, generator=generator, dtype=torch.float64))
        return found

    def bound(self, *, size: int | None = None, group: Any = None) -> Callable[..., Any]:
        """Return the call on this rank's tensors, without a rank in it, for compilers.

        With a ``size`` it is the call of any rank.
        """
        rank = interlace.get_rank() if size is None else 0
        size = size or interlace.get_world_size()
        names, op = tuple(self.shapes(rank, size)), getattr(functional, self.op)
        options = {k: v(rank, size) if callable(v) else v for k, v in self.options.items()}

        def call(*tensors: torch.Tensor) -> Any:
            given = dict(zip(names, tensors, strict=True))
            arguments: dict[str, Any] = {k: v for k, v in given.items() if k in ARGUMENTS}
            if "second" in given:
                arguments["weight"] = [given["weight"], given["second"]]
                arguments["bias"] = [given["bias"], None]
            if "norm_bias" in given:
                vectors = given["norm_weight"], given["norm_bias"]
                arguments["norm"] = interlace.LayerNorm(*vectors, EPS)
            elif "norm_weight" in given:
                arguments["norm"] = interlace.RMSNorm(given["norm_weight"], EPS)
            return op(**arguments, **options, group=group)

        return call


ARGUMENTS = ("input", "weight", "bias", "residual")
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "product": lambda stack: stack.prod(0),
}


def only(root: int, whole: torch.Tensor, size: int) -> Tensors:
    """``whole`` on one rank, and zeros on others."""
    return [whole * float(rank == root) for rank in range(size)]


def reference(case: Case, every: list[Tensors]) -> list[Any]:
    """The outputs of all ranks."""
    size, how = len(every), case.options
    given = [dict(zip(case.shapes(r, size), x, strict=True)) for r, x in enumerate(every)]
    inputs = [each["input"] for each in given]
    if case.op in ("broadcast", "scatter"):
        root = inputs[1]
        return [root] * size if case.op == "broadcast" else split(root, size, how["scatter_dim"])
    if case.op == "permute":
        return [inputs[rank - 1] for rank in range(size)]
    if case.op == "all_to_all":
        rows = [
            x.split(sent(r, size)) if "input_split_sizes" in how else x.chunk(size)
            for r, x in enumerate(inputs)
        ]
        return [torch.cat([parts[rank] for parts in rows]) for rank in range(size)]
    if case.op == "matmul_all_to_all":
        products = [(each["input"] @ each["weight"]).chunk(size, 1) for each in given]
        return [torch.cat([parts[rank] for parts in products]) for rank in range(size)]
    if case.op == "all_to_all_matmul":
        rows = [x.chunk(size) for x in inputs]
        wide = [torch.cat([parts[rank] for parts in rows], 1) for rank in range(size)]
        return [x @ each["weight"] for x, each in zip(wide, given, strict=True)]
    if "gather" in case.op:
        return gathered(case, given)
    return reduced(case, given)


def gathered(case: Case, given: list[dict[str, torch.Tensor]]) -> list[Any]:
    inputs = [each["input"] for each in given]
    dim = case.options.get("gather_dim", 0)
    whole = torch.cat(inputs, dim) if inputs[0].dim() else torch.stack(inputs)
    if case.op == "gather":
        return only(case.options["dst"], whole, len(given))
    made: list[Any] = [whole] * len(given)
    if "weight" in given[0]:
        made = [whole @ each["weight"] + each.get("bias", 0) for each in given]
    if "second" in given[0]:
        made = [[whole, y, whole @ each["second"]] for y, each in zip(made, given, strict=True)]
    return made


def reduced(case: Case, given: list[dict[str, torch.Tensor]]) -> list[Any]:
    size, dim = len(given), case.options.get("scatter_dim", 0)
    terms = [
        each["input"] @ each["weight"] if "weight" in each else each["input"] for each in given
    ]
    whole = REDUCTIONS[case.options.get("reduce_op", "sum")](torch.stack(terms))
    if case.op == "reduce":
        return only(case.options["dst"], whole, size)
    made = split(whole, size, dim) if "scatter" in case.op else [whole] * size
    for rank, each in enumerate(given):
        if "bias" in each:
            made[rank] = made[rank] + (
                split(each["bias"], size)[rank] if dim == -1 else each["bias"]
            )
        if "residual" in each:
            made[rank] = made[rank] + each["residual"]
    if "norm_weight" not in given[0]:
        return made
    rows = [normed(h, each) for h, each in zip(made, given, strict=True)]
    if case.options.get("gather_normed"):
        rows = [torch.cat(rows, dim)] * size
    return list(zip(rows, made, strict=True))


def normed(h: torch.Tensor, each: dict[str, torch.Tensor]) -> torch.Tensor:
    if "norm_bias" not in each:
        return torch.nn.functional.rms_norm(h, h.shape[-1:], each["norm_weight"], EPS)
    vectors = each["norm_weight"], each["norm_bias"]
    return torch.nn.functional.layer_norm(h, h.shape[-1:], *vectors, EPS)


# -- the table -----------------------------------------------------------------------------------------


def sent(rank: int, size: int) -> list[int]:
    """Return the number of rows from ``rank`` to each rank."""
    return [(rank + 2 * other) % 3 for other in range(size)]


UNEVEN = {
    "output_split_sizes": lambda rank, size: [sent(other, size)[rank] for other in range(size)],
    "input_split_sizes": sent,
}


def next_rank(_: int, size: int) -> list[int]:
    return [(rank + 1) % size for rank in range(size)]


def of(*shape: int) -> Shapes:
    return lambda rank, size: {"input": shape}


def divisible(rank: int, size: int) -> dict[str, tuple[int, ...]]:
    return {"input": (2 * size, size, 3 * size)}


def uneven_rows(rank: int, size: int) -> dict[str, tuple[int, ...]]:
    return {"input": (sum(sent(rank, size)), 3)}


def gather_matmuls(dim: int) -> list[Case]:
    def shapes(*names: str) -> Shapes:
        def made(rank: int, size: int) -> dict[str, tuple[int, ...]]:
            k = 4 * size if dim == -1 else 4
            every = {"weight": (k, 5), "bias": (5,), "second": (k, 2)}
            return {"input": (2, 3, 4), **{name: every[name] for name in names}}

        return made

    how, op = {"gather_dim": dim}, "all_gather_matmul"
    return [
        Case(op, shapes("weight", "bias"), how),
        Case(op, shapes("weight"), {**how, "save_gathered": False}),
        Case(op, shapes("weight"), {**how, "save_gathered": True}),
        Case(op, shapes("weight", "bias", "second"), {**how, "return_gathered": True}),
    ]


def products(less: int) -> Shapes:
    """With one row less, no rank has a whole part, or the last rank has none."""

    def made(rank: int, size: int) -> dict[str, tuple[int, ...]]:
        rows = 2 * size - less
        return {"input": (rows, size - less, 3), "weight": (3, rows), "bias": (rows,)}

    return made


def normed_parts(dim: int, less: int, *norm: str) -> Shapes:
    def made(rank: int, size: int) -> dict[str, tuple[int, ...]]:
        rows = 2 * size - less
        own = len(split(torch.empty(rows), size)[rank])
        whole, part = ((2, rows, 4), (2, own, 5)) if dim else ((rows, 2, 4), (own, 2, 5))
        vectors = dict.fromkeys(norm, (5,))
        return {"input": whole, "weight": (4, 5), "residual": part, **vectors}

    return made


def vectors(rank: int, size: int) -> dict[str, tuple[int, ...]]:
    return {"input": (2, 3, 5), "residual": (2, 3, 5), "norm_weight": (5,), "norm_bias": (5,)}


def vectors_of_products(rank: int, size: int) -> dict[str, tuple[int, ...]]:
    return {**vectors(rank, size), "input": (2, 3, 4), "weight": (4, 5)}


def normed_rows(rows: int) -> Shapes:
    return lambda rank, size: {"input": (rows, 5), "norm_weight": (5,)}


DIMS = (0, 1, -1)
LAYER, RMS = ("norm_weight", "norm_bias"), ("norm_weight",)
SAME = ("residual", *LAYER)
TABLE = [
    *(Case("all_reduce", of(3, 4), {"reduce_op": op}) for op in REDUCTIONS),
    Case("all_reduce", of()),
    *(Case("reduce_scatter", divisible, {"reduce_op": op, "scatter_dim": 1}) for op in REDUCTIONS),
    *(Case("reduce_scatter", divisible, {"scatter_dim": dim}) for dim in (0, -1)),
    *(Case("reduce", of(3, 4), {"reduce_op": op, "dst": 1}) for op in ("sum", "avg")),
    *(Case("all_gather", of(2, 3, 4), {"gather_dim": dim}) for dim in DIMS),
    Case("all_gather", of()),
    *(Case("gather", of(2, 3), {"dst": 1, "gather_dim": dim}) for dim in (0, -1)),
    Case("gather", of(), {"dst": 0}),
    *(Case("scatter", divisible, {"src": 1, "scatter_dim": dim}) for dim in (0, 1)),
    Case("all_to_all", divisible),
    Case("all_to_all", uneven_rows, UNEVEN, uneven=True),
    Case("matmul_all_to_all", lambda rank, size: {"input": (4, 6), "weight": (6, 2 * size)}),
    Case("all_to_all_matmul", lambda rank, size: {"input": (4 * size, 3), "weight": (3 * size, 5)}),
    Case("broadcast", of(3, 2), {"src": 1}),
    Case("permute", of(3, 2), {"src_dst": next_rank}),
    *gather_matmuls(0),
    *(case for dim in (1, -1) for case in gather_matmuls(dim)[::3]),
    *(
        Case(
            "matmul_reduce_scatter",
            products(less),
            {"reduce_op": op, "scatter_dim": dim},
            uneven=bool(less),
        )
        for op, dim, less in (*itertools.product(["sum"], DIMS, (0, 1)), ("avg", 0, 0))
    ),
    *(
        Case(
            "matmul_all_reduce",
            lambda rank, size: {"input": (2, 3, 4), "weight": (4, 5), "bias": (5,)},
            {"reduce_op": op},
            ("bias",),
        )
        for op in ("sum", "avg")
    ),
    *(
        Case(
            "matmul_reduce_scatter",
            normed_parts(int(gathers), less, *norm),
            {"reduce_op": "avg", "scatter_dim": int(gathers), "gather_normed": gathers},
            uneven=bool(less),
        )
        for gathers, less, norm in (
            (False, 0, RMS), (False, 1, LAYER), (True, 0, LAYER), (True, 1, RMS),
        )
    ),
    Case("matmul_all_reduce", vectors_of_products, same=SAME),
    Case("all_reduce_norm", vectors, same=SAME),
    *(
        Case("reduce_scatter_norm", normed_rows(rows), {"gather_normed": True}, uneven=True)
        for rows in (1, 6)
    ),
]  # fmt: skip


# -- comparison ----------------------------------------------------------------------------------------


def flat(result: Any) -> Tensors:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for each in result for tensor in flat(each)]


def expected(
    case: Case, wanted: Callable[[int], bool] = lambda index: True
) -> tuple[Tensors, list[torch.Tensor | None], Tensors]:
    """This rank's outputs, the gradients of its inputs, and the output gradients that give them."""
    rank, size = interlace.get_rank(), interlace.get_world_size()
    every = [
        [each.requires_grad_(wanted(i)) for i, each in enumerate(case.inputs(r, size))]
        for r in range(size)
    ]
    outputs = [flat(result) for result in reference(case, every)]
    weights = [
        [torch.linspace(0.5, 1.5 + r + i, out.numel()).double().view(out.shape)
         for i, out in enumerate(outs)]
        for r, outs in enumerate(outputs)
    ]  # fmt: skip
    pairs = zip(itertools.chain(*outputs), itertools.chain(*weights), strict=True)
    loss = torch.stack([(out * weight).sum() for out, weight in pairs]).sum()
    own = [each for each in every[rank] if each.requires_grad]
    found = iter(torch.autograd.grad(loss, own, allow_unused=True))
    grads = [next(found) if each.requires_grad else None for each in every[rank]]
    return [out.detach() for out in outputs[rank]], grads, weights[rank]


def close_gradients(inputs: Tensors, grads: list[torch.Tensor | None], factor: float = 1) -> None:
    """None counts as zeros."""
    for each, grad in zip(inputs, grads, strict=True):
        if not each.requires_grad:
            assert each.grad is None
            continue
        zeros = torch.zeros_like(each)
        found = zeros if each.grad is None else each.grad
        torch.testing.assert_close(found, zeros if grad is None else factor * grad)


def compare(
    case: Case, backend: str | None = None, wanted: Callable[[int], bool] = lambda index: True
) -> None:
    """Compare outputs and gradients of one op with torch in one process, eager or compiled."""
    rank, size, run = interlace.get_rank(), interlace.get_world_size(), case.bound()
    if backend is not None:
        torch._dynamo.reset()
        run = torch.compile(run, backend=backend, fullgraph=True)
    outputs, grads, weights = expected(case, wanted)
    inputs = [x.requires_grad_(wanted(i)) for i, x in enumerate(case.inputs(rank, size))]
    try:
        got = flat(run(*inputs))
        assert [type(each) for each in got] == [AsyncTensor] * len(got)
        for each, right in zip(got, outputs, strict=True):
            assert each.shape == right.shape and each.stride() == wait(each).stride()
            torch.testing.assert_close(wait(each.detach()), right)
        pairs = zip(got, weights, strict=True)
        loss = torch.stack([(each * weight).sum() for each, weight in pairs]).sum()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        close_gradients(inputs, grads)
    except Exception as error:
        raise AssertionError(f"{case.name}: {error}") from error
