"""The table of the contract matrix: arguments of every op, right results, and the cells that do not apply.

An op of the registry is in the matrix without being named: an argument is made by its name, of which
``EXAMPLES`` has one for all ops, and ``Op.reference`` is what is right. ``OF_OP`` has arguments of one op
that are others, and ``REASONS`` says why a cell is left out. Numbers are small and whole, so sums are exact
in every dtype and in every order, and results are compared bit for bit. Where an op divides or takes a
root, or computes with what its reference computes with, ``REFERENCES`` has another formula, in float64.

=============  ===================================================================================
legend
=============  ===================================================================================
rows           by rank: how many rows of the whole are a rank's; the others' are before and behind
``WIDTH``      of all matrices, k and n alike; groups of 2 and of 3 ranks share it evenly
=============  ===================================================================================
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from cases.support_table import defined
from interlace import reference
from interlace.arguments.checks import RowNorm
from interlace.ops.attention.reference import AttentionReference, visible
from interlace.ops.experts.dispatch import DispatchArguments
from interlace.ops.library import BY_NAME, WITH_OUT
from interlace.ops.op.op import Op

WIDTH, SLOTS, EXPERTS, HEADS, HEAD, FP8_WIDTH = 6, 2, 2, 6, 4, 16
ATTENTION_SCALE = 0.5
FP8 = torch.float8_e4m3fn
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = {
    str(each).removeprefix("torch."): each
    for each in (*FLOATS, torch.complex64, torch.complex128, torch.int32, torch.bool, FP8)
}
CONTRACTS = (
    "values", "asynchronous", "out", "out_dtype", "empty_on_all", "empty_on_one", "layouts",
    "poisoned", "subgroups", "misuse_on_one", "misuse_on_all", "gradients", "gradients_complex",
    "compiled", "local_tensor",
)  # fmt: skip
Tensor = torch.Tensor
Bounded = reference.Bounded
Right = list[list[Any]]
"""By rank and output: a tensor, or a value with a bound."""


@dataclass(frozen=True)
class Setting:
    """What the arguments of a rank are made for; no two calls have the same numbers."""

    rank: int
    size: int
    dtype: torch.dtype = torch.float32
    call: int = 0
    rows: tuple[int, ...] = ()
    argument: str = ""

    @property
    def own(self) -> int:
        return self.rows[self.rank]

    @property
    def uneven(self) -> bool:
        return len(set(self.rows)) > 1

    @property
    def total(self) -> int:
        return sum(self.rows)

    def numbers(self, *shape: int, same: bool = False) -> Tensor:
        """Whole ones from -2 to 2; of ``same`` ones all ranks have the same."""
        seed = zlib.crc32(self.argument.encode()) + 1000 * self.call + (0 if same else self.rank)
        generator = torch.Generator().manual_seed(seed)
        made = torch.randint(-2, 3, shape, generator=generator)
        if self.dtype.is_complex:
            return torch.complex(made.float(), made.flip(0).float()).to(self.dtype)
        return made.to(self.dtype)

    def of(self, rank: int) -> "Setting":
        return replace(self, rank=rank)

    def everyone(self) -> list["Setting"]:
        return [self.of(rank) for rank in range(self.size)]


def evenly(size: int, rows: int = 2) -> tuple[int, ...]:
    return (rows,) * size


def last_has_none(size: int) -> tuple[int, ...]:
    """As ``torch.chunk`` cuts a whole that has a row less than there are ranks."""
    return (*evenly(size - 1, 1), 0)


# -- who goes to whom, of the ops of experts -------------------------------------------------------


def choices(setting: Setting) -> Tensor:
    """The experts of a rank's tokens: ``(tokens, SLOTS)``, two of each token."""
    tokens = torch.arange(setting.own).unsqueeze(1)
    slots = torch.arange(SLOTS) * setting.size
    return (2 * setting.rank + 3 * tokens + slots + setting.call) % (EXPERTS * setting.size)


def slot_weights(setting: Setting) -> Tensor:
    return setting.numbers(setting.own, SLOTS).float() / 2


class Routes:
    """Of the choices of all ranks: by rank the slots of its rows, in the order that ``routing.py`` says."""

    def __init__(self, chosen: Sequence[Tensor]) -> None:
        self.chosen, self.size = [each.reshape(-1) for each in chosen], len(chosen)
        self.orders = [each.argsort(stable=True) for each in self.chosen]

    def slots(self, expert: int, source: int) -> Tensor:
        order = self.orders[source]
        return order[self.chosen[source][order] == expert]

    def arriving(self, rank: int) -> list[tuple[int, Tensor]]:
        """The source and its slots, by own expert and source."""
        own = range(rank * EXPERTS, (rank + 1) * EXPERTS)
        return [(source, self.slots(e, source)) for e in own for source in range(self.size)]

    def counts(self, source: int) -> list[int]:
        """A rank's rows by expert of all ranks'."""
        return torch.bincount(self.chosen[source], minlength=EXPERTS * self.size).tolist()

    def splits(self, rank: int) -> list[int]:
        return [len(slots) for _, slots in self.arriving(rank)]

    def segments(self, rank: int) -> Tensor:
        found, begin = [], 0
        for index, (source, slots) in enumerate(self.arriving(rank)):
            before = sum(self.counts(source)[: rank * EXPERTS + index // self.size])
            found.append([begin, len(slots), before])
            begin += len(slots)
        return torch.tensor(found).view(EXPERTS, self.size, 3)


def routes(setting: Setting) -> Routes:
    return Routes([choices(each) for each in setting.everyone()])


def most_tokens(setting: Setting) -> int:
    return max(1, *setting.rows)


def experts_rows(setting: Setting) -> Tensor:
    return setting.numbers(sum(routes(setting).splits(setting.rank)), WIDTH)


def gathered_splits(setting: Setting) -> list[int]:
    """By expert of one rank and source: all get the rows for all experts, of which there are EXPERTS."""
    return [setting.of(s).own for _ in range(EXPERTS) for s in range(setting.size)]


# -- arguments by name -----------------------------------------------------------------------------

Example = Callable[[Setting], Any]


def constant(value: Any) -> Example:
    return lambda setting: value


def square(setting: Setting) -> Tensor:
    return setting.numbers(WIDTH, WIDTH)


def vector(setting: Setting) -> Tensor:
    return setting.numbers(WIDTH, same=True)


def wide(setting: Setting) -> Setting:
    return replace(setting, dtype=max(setting.dtype, torch.float32, key=lambda each: each.itemsize))


def own_rows(setting: Setting) -> Tensor:
    return setting.numbers(setting.own, WIDTH)


def own_length(setting: Setting) -> int | None:
    return setting.own if setting.uneven else None


def tokens_of(setting: Setting) -> Tensor:
    return setting.numbers(1, setting.own, HEADS, HEAD)


def attention(settings: Sequence[Setting]) -> AttentionReference:
    """Of all ranks' tokens, which are in the order of the ranks, each seeing those before it."""
    query, key, value = (
        torch.cat([tokens_of(replace(each, argument=name)) for each in settings], 1).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    mask = visible(query.shape[2], causal=True)
    return AttentionReference(query, key, value, mask, ATTENTION_SCALE)


def output_of(setting: Setting) -> Tensor:
    if not setting.total:
        return tokens_of(setting)
    value = attention(setting.everyone()).output()[0].transpose(1, 2)
    return value.split(list(setting.rows), 1)[setting.rank].to(setting.dtype)


def sums_of(setting: Setting) -> Tensor:
    dtype = wide(setting).dtype
    if not setting.total:
        return torch.empty(1, HEADS, 0, dtype=dtype)
    value = attention(setting.everyone()).lse
    return value.split(list(setting.rows), 2)[setting.rank].to(dtype)


EXAMPLES: dict[str, Example] = {
    "input": lambda setting: setting.numbers(setting.total, WIDTH),
    "weight": square,
    "weights": lambda setting: [square(setting), square(setting).flip(0)],
    "bias": vector,
    "biases": lambda setting: [vector(setting), torch.zeros(WIDTH, dtype=setting.dtype)],
    "norm_weight": lambda setting: vector(wide(setting)),
    "norm_bias": constant(None),
    "residual": lambda setting: setting.numbers(setting.total, WIDTH, same=True),
    "reduce_op": constant("sum"),
    "gather_dim": constant(0),
    "scatter_dim": constant(0),
    "src": constant(1),
    "dst": constant(1),
    "src_dst": lambda setting: [(rank + 1) % setting.size for rank in range(setting.size)],
    "output_split_sizes": constant(None),
    "input_split_sizes": constant(None),
    "length": own_length,
    "algorithm": constant("auto"),
    "out_dtype": constant(None),
    "kind": constant("rms"),
    "eps": constant(0.5),
    "quantize": constant(""),
    "gather_normed": constant(False),
    "return_gathered": constant(True),
    "return_received": constant(True),
    "return_rows": constant(True),
    "use_fast_accum": constant(False),
    "scales": constant(None),
    "topk_idx": choices,
    "topk_weights": slot_weights,
    "num_experts": lambda setting: EXPERTS * setting.size,
    "capacity": constant(0),
    "max_tokens": most_tokens,
    "packed": constant(False),
    "segments": lambda setting: routes(setting).segments(setting.rank),
    "splits": lambda setting: routes(setting).splits(setting.rank),
    "home_splits": lambda setting: routes(setting).counts(setting.rank),
    "query": tokens_of,
    "key": tokens_of,
    "value": tokens_of,
    "cu_seqlens": constant(None),
    "lengths": constant(None),
    "block_table": constant(None),
    "method": constant("auto"),
    "causal": constant(True),
    "scale": constant(ATTENTION_SCALE),
    "window": constant(None),
    "layout": constant("bshd"),
    "balance": constant("contiguous"),
}
"""By the name of an argument; a new op with these arguments needs nothing here."""

SQUARES: Example = lambda setting: setting.numbers(EXPERTS, WIDTH, WIDTH)  # noqa: E731
BIASES: Example = lambda setting: setting.numbers(EXPERTS, WIDTH)  # noqa: E731
ROUTED = ("routed_matmul_combine", "routed_matmul_combine_backward", "grouped_matmul_combine")


def _scaled(setting: Setting, *shape: int) -> Tensor:
    return replace(setting, dtype=FP8).numbers(*shape)


def _scales(setting: Setting, *shape: int) -> Tensor:
    return replace(setting, dtype=torch.float32).numbers(*shape).abs() + 1


OF_OP: dict[str, Example] = {
    **{
        f"{op}.input": own_rows
        for op in ("all_gather", "gather", "all_gather_matmul", "matmul_all_to_all", "dispatch")
    },
    **{
        f"{op}.residual": own_rows for op in ("matmul_reduce_scatter_norm", "reduce_scatter_norm")
    },
    "all_to_all.input_split_sizes": lambda setting: list(setting.rows) if setting.uneven else None,
    "all_to_all.output_split_sizes": lambda setting: (
        [setting.own] * setting.size if setting.uneven else None
    ),
    "matmul_all_to_all.length": lambda setting: setting.total if setting.uneven else None,
    "all_to_all_matmul.weight": lambda setting: setting.numbers(WIDTH * setting.size, WIDTH),
    # experts
    **{f"{op}.weight": SQUARES for op in ROUTED},
    **{f"{op}.bias": BIASES for op in ROUTED},
    **{f"{op}.input": experts_rows for op in (*ROUTED, "combine")},
    "routed_matmul_combine_backward.grad": own_rows,
    "all_to_all_grouped_matmul.weight": SQUARES,
    "all_to_all_grouped_matmul.bias": BIASES,
    "all_to_all_grouped_matmul.input": lambda setting: setting.numbers(SLOTS * setting.own, WIDTH),
    "all_to_all_grouped_matmul.input_splits": lambda setting: routes(setting).counts(setting.rank),
    "all_to_all_grouped_matmul.output_splits": lambda setting: routes(setting).splits(setting.rank),
    "all_gather_grouped_matmul.weight": SQUARES,
    "all_gather_grouped_matmul.bias": BIASES,
    "all_gather_grouped_matmul.input": lambda setting: setting.numbers(EXPERTS * setting.own, WIDTH),
    "all_gather_grouped_matmul.input_splits": lambda setting: [setting.own] * EXPERTS,
    "all_gather_grouped_matmul.output_splits": gathered_splits,
    # attention
    "context_parallel_attention_backward.grad": tokens_of,
    "context_parallel_attention_backward.lse_grad": constant(None),
    "context_parallel_attention_backward.output": output_of,
    "context_parallel_attention_backward.lse": sums_of,
    "distributed_decode.q": lambda setting: setting.numbers(1, HEADS, HEAD, same=True),
    # fp8, whose matrices are of 16 columns at least, the right one column by column
    **{
        f"{op}.bias": constant(None) for op in ("scaled_matmul_reduce_scatter",)
    },
    "scaled_matmul_reduce_scatter.input": lambda setting: _scaled(setting, setting.total, FP8_WIDTH),
    "scaled_matmul_reduce_scatter.weight": lambda setting: _scaled(setting, FP8_WIDTH, FP8_WIDTH).t(),
    "scaled_matmul_reduce_scatter.input_scale": lambda setting: _scales(setting, setting.total, 1),
    "scaled_matmul_reduce_scatter.weight_scale": lambda setting: _scales(setting, 1, FP8_WIDTH),
    "scaled_matmul_reduce_scatter.out_dtype": lambda setting: setting.dtype,
    "all_gather_scaled_matmul.input": lambda setting: _scaled(setting, setting.own, FP8_WIDTH),
    "all_gather_scaled_matmul.weights": lambda setting: [_scaled(setting, FP8_WIDTH, FP8_WIDTH).t()],
    "all_gather_scaled_matmul.input_scale": lambda setting: _scales(setting, setting.own, 1),
    "all_gather_scaled_matmul.weight_scales": lambda setting: [_scales(setting, 1, FP8_WIDTH)],
    "all_gather_scaled_matmul.biases": constant([None]),
    "all_gather_scaled_matmul.out_dtype": lambda setting: setting.dtype,
}  # fmt: skip
"""By ``op.argument``: where an op's argument of a name is another than other ops'."""


def missing(op: Op) -> list[str]:
    """The arguments of an op that no example is of."""
    return [name for name in op.kinds if not (name in EXAMPLES or f"{op.name}.{name}" in OF_OP)]


def arguments(op: Op, setting: Setting, **others: Any) -> dict[str, Any]:
    """Those of a rank, by name; ``others`` instead of the examples."""
    made = {}
    for name in op.kinds:
        example = OF_OP.get(f"{op.name}.{name}") or EXAMPLES[name]
        made[name] = others[name] if name in others else example(replace(setting, argument=name))
    return made


# -- right results of ops that round in an order of their own ---------------------------------------


def products_backward(given: Sequence[Any], size: int) -> Right:
    sent = [DispatchArguments(g.grad, None, g.topk_idx, g.topk_weights, *g.routing) for g in given]
    brought, made = BY_NAME["dispatch"].reference(sent, size), []
    for each, (grads, weights, segments) in zip(given, brought, strict=True):
        lengths = segments[..., 1].sum(1).tolist()
        rows = (grads.double() * weights.double().unsqueeze(1))[: sum(lengths)].split(lengths)
        inputs, dtype = each.input.double().split(lengths), each.input.dtype
        found = [
            torch.cat([part @ each.weight[e].double().t() for e, part in enumerate(rows)]),
            torch.stack([x.t() @ part for x, part in zip(inputs, rows, strict=True)]),
            torch.stack([part.sum(0) for part in rows]),
        ]
        made.append([every.to(dtype) for every in found])
    return made


def _of_tokens(whole: Bounded, lengths: Sequence[int], dim: int) -> list[Bounded]:
    parts = (each.split(list(lengths), dim) for each in whole)
    return list(zip(*parts, strict=True))


def _whole(given: Sequence[Any], name: str) -> Tensor:
    return torch.cat([getattr(each, name) for each in given], 1).transpose(1, 2)


def _attention(given: Sequence[Any]) -> tuple[AttentionReference, list[int]]:
    query, key, value = (_whole(given, name) for name in ("query", "key", "value"))
    mask = visible(query.shape[2], causal=True)
    known = AttentionReference(query, key, value, mask, given[0].scale)
    return known, [each.query.shape[1] for each in given]


def _tokens_first(whole: Bounded) -> Bounded:
    return whole[0].transpose(1, 2), whole[1].transpose(1, 2)


def attended(given: Sequence[Any], size: int) -> Right:
    if not sum(each.query.shape[1] for each in given):
        return [[torch.empty(1, 0, HEADS, HEAD), torch.empty(1, HEADS, 0)]] * size
    known, lengths = _attention(given)
    outputs = _of_tokens(_tokens_first(known.output()), lengths, 1)
    return [list(each) for each in zip(outputs, _of_tokens(known.sums(), lengths, 2), strict=True)]


def attended_backward(given: Sequence[Any], size: int) -> Right:
    if not sum(each.query.shape[1] for each in given):
        return [[torch.empty(1, 0, HEADS, HEAD)] * 3] * size
    known, lengths = _attention(given)
    grads = known.gradients(_whole(given, "grad"))
    by_input = [_of_tokens(_tokens_first(each), lengths, 1) for each in grads]
    return [list(each) for each in zip(*by_input, strict=True)]


def decoded(given: Sequence[Any], size: int) -> Right:
    """The query stands in for as many as there are keys, of whose sums the bounds are."""
    key, value = _whole(given, "key"), _whole(given, "value")
    count = key.shape[2]
    if not count:
        return [[torch.zeros(1, HEADS, HEAD), torch.full((1, HEADS), -torch.inf)]] * size
    query = given[0].q.unsqueeze(2).expand(-1, -1, count, -1)
    known = AttentionReference(query, key, value, visible(count), given[0].scale)
    output, sums = known.output(), known.sums()
    made = [(output[0][:, :, 0], output[1][:, :, 0]), (sums[0][..., 0], sums[1][..., 0])]
    return [made] * size


def normed(given: Sequence[Any], size: int) -> Right:
    """The sums are exact, and are normed within bounds."""
    name = next(n for n in NORMED if BY_NAME[n].arguments is type(given[0]))
    made, first = BY_NAME[name].reference(given, size), given[0]
    kind = RowNorm(first.kind, first.eps, first.norm_weight, first.norm_bias)
    bounds = [reference.norm(total, kind, total.dtype) for _, total in made]
    if first.gather_normed:
        bounds = [tuple(torch.cat(each) for each in zip(*bounds, strict=True))] * size  # type: ignore[list-item]
    return [[bound, total] for bound, (_, total) in zip(bounds, made, strict=True)]


NORMED = tuple(name for name, op in BY_NAME.items() if "kind" in op.kinds)
REFERENCES: dict[str, Callable[[Sequence[Any], int], Right]] = {
    "routed_matmul_combine_backward": products_backward,
    "context_parallel_attention": attended,
    "context_parallel_attention_backward": attended_backward,
    "distributed_decode": decoded,
    **dict.fromkeys(NORMED, normed),
}


# -- arguments that are none -----------------------------------------------------------------------


CHECKED_BEFORE = (
    *("kind", "quantize", "eps"),  # of a norm object
    *("num_experts", "capacity", "max_tokens", "packed"),  # of a handle, which a dispatch has given
    "home_splits",  # for a backward; an eager call has none
)
"""Arguments that the public functions make themselves."""


def wrong_of(op: Op, name: str) -> Any:
    """What the argument may not be; None of one that has no wrong value."""
    kind = op.kinds[name]
    if name in CHECKED_BEFORE:
        return None
    if kind.startswith("Tensor"):
        wrong: Any = torch.ones(1, 1, 1, 1, 1, dtype=torch.int16)
        if is_plain(op):
            wrong = torch.quantize_per_tensor(wrong.float(), 1.0, 0, torch.qint8)
    elif kind.startswith(("int", "SymInt")):
        wrong = 99 if name == "length" and "method" not in op.kinds else -7
    else:
        return {"str": "nobody", "ScalarType?": torch.int8}.get(kind)
    return [wrong] if "[]" in kind else wrong


# -- cells that do not apply -----------------------------------------------------------------------


class Reason(NamedTuple):
    """Why no op for which ``holds`` says so has a cell of ``contract``."""

    contract: str
    holds: Callable[[Op], bool]
    text: str


def _tensors(op: Op) -> list[str]:
    return [name for name, kind in op.kinds.items() if kind.startswith("Tensor")]


def is_plain(op: Op) -> bool:
    """Whether it only moves or reduces its input."""
    return _tensors(op) == ["input"]


LENGTHS = {"length", "input_split_sizes", "splits", "input_splits", "topk_idx", "query", "key"}
"""An op with one of these arguments knows that ranks may have parts of other lengths."""
TWO_WAYS = ("distributed_decode", *(name for name in BY_NAME if "scaled_matmul" in name))
"""They have no "pipelined" algorithm."""
NO_GRADIENTS = (*TWO_WAYS, "context_parallel_attention_backward")
"""Their backward raises."""
BACKWARDS = {name for name in BY_NAME if name.endswith("_backward")}
SCALED = {name for name in BY_NAME if "scaled_matmul" in name}
REASONS = (
    Reason("out", lambda op: op.name not in WITH_OUT, "its schema has no out"),
    Reason("out_dtype", lambda op: "out_dtype" not in op.kinds, "it has no such argument"),
    Reason("out_dtype", lambda op: op.name in SCALED, "all of its cells ask for a dtype"),
    Reason("empty_on_one", lambda op: LENGTHS.isdisjoint(op.kinds), "parts are of equal shapes"),
    Reason("gradients", lambda op: op.gradient is None, "it has none"),
    Reason("gradients_complex", lambda op: op.gradient is None, "it has none"),
    Reason("gradients_complex", lambda op: not is_plain(op), "it refuses complex numbers"),
    Reason("misuse_on_one", lambda op: op.name == "rank", "it takes any tensor, and reads none"),
    Reason("misuse_on_all", lambda op: op.name == "rank", "it takes any tensor, and reads none"),
    Reason(
        "misuse_on_one", lambda op: op.name in BACKWARDS, "its forward has checked what it gets"
    ),
    Reason(
        "misuse_on_all", lambda op: op.name in BACKWARDS, "its forward has checked what it gets"
    ),
)


def reason(op: Op, contract: str) -> str:
    """Why the op has no such cell; "" if it has one."""
    for each in REASONS:
        if each.contract == contract and each.holds(op):
            return each.text
    return ""


def gaps(ops: Mapping[str, Op]) -> list[str]:
    """What the table lacks for some op: an example of an argument."""
    return [f"{name}: no example of {each}" for name, op in ops.items() for each in missing(op)]


def takes(op: Op, dtype: torch.dtype) -> bool:
    """Whether the op has results for such inputs; else all ranks raise."""
    if is_plain(op):
        return "reduce_op" not in op.kinds or defined("sum", dtype)
    return dtype in FLOATS or (op.name == "dispatch" and dtype is FP8)


def right_results(op: Op, given: Sequence[Mapping[str, Any]], size: int) -> Right:
    """What all ranks must get for the arguments of all."""
    find = REFERENCES.get(op.name) or op.reference
    return find([op.record(list(each.values())) for each in given], size)


def may_expand(op: Op, name: str) -> bool:
    """Whether rows of an argument may all be its first one, and the other arguments still fit to it."""
    fixed = ("query", "key", "value", "output", "lse") if "lse" in op.kinds else ()
    return name not in ("topk_idx", "segments", *fixed)


def is_shared(op: Op, name: str) -> bool:
    """Whether an argument is one and the same on all ranks, because all have the whole result."""
    whole = "reduce_op" in op.kinds and "scatter_dim" not in op.kinds
    return whole and name in ("bias", "residual", "norm_weight", "norm_bias")
