"""The table of the contract matrix: right results, wrong arguments, and the cells that do not apply.

An op of the registry is in the matrix without being named: its arguments are its examples
(``ops/op/op.py``), and ``Op.reference`` is what is right. ``REASONS`` says why a cell is left out.
Numbers are small and whole, so sums are exact in every dtype and in every order, and results are compared
bit for bit. Where an op divides or takes a root, or computes with what its reference computes with,
``REFERENCES`` has another formula, in float64.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cases.attention_cases import visible
from cases.support_table import defined
from interlace import reference
from interlace.arguments.checks import RowNorm
from interlace.ops.attention.problem import HEAD, HEADS, AttentionReference
from interlace.ops.experts.dispatch import DispatchArguments
from interlace.ops.library import BY_NAME, WITH_OUT
from interlace.ops.op.op import Op

FP8 = torch.float8_e4m3fn
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = {
    str(each).removeprefix("torch."): each
    for each in (*FLOATS, torch.complex64, torch.complex128, torch.int32, torch.bool, FP8)
}
CONTRACTS = (
    "values", "asynchronous", "out", "out_dtype", "empty_on_all", "empty_on_one", "layouts",
    "subgroups", "misuse", "gradients", "gradients_complex", "compiled", "local_tensor",
)  # fmt: skip
Tensor = torch.Tensor
Bounded = reference.Bounded
Right = list[list[Any]]
"""By rank and output: a tensor, or a value with a bound."""


def evenly(size: int, rows: int = 2) -> tuple[int, ...]:
    return (rows,) * size


def last_has_none(size: int) -> tuple[int, ...]:
    """``torch.chunk`` cuts a whole like this if it has a row less than there are ranks."""
    return (*evenly(size - 1, 1), 0)


# -- right results of ops that round in another order -----------------------------------------------


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
        return [[each.new_empty(each.shape) for each in (g.query, g.key, g.value)] for g in given]
    known, lengths = _attention(given)
    grads = known.gradients(_whole(given, "grad"))
    by_input = [_of_tokens(_tokens_first(each), lengths, 1) for each in grads]
    return [list(each) for each in zip(*by_input, strict=True)]


def decoded(given: Sequence[Any], size: int) -> Right:
    """The query stands for as many queries as there are keys; the bounds are for their sums."""
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


# -- wrong arguments -------------------------------------------------------------------------------


CHECKED_BEFORE = (
    *("kind", "quantize", "eps"),  # they belong to a norm object
    *("num_experts", "capacity", "max_tokens", "packed"),  # to a handle
    "home_splits",  # for a backward; an eager call has none
)
"""Arguments that the public functions make themselves."""


def wrong_of(op: Op, name: str) -> Any:
    """Return a wrong value for the argument; None if every value is right."""
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
    """The reason why ops with ``holds(op)`` have no cell of ``contract``."""

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
FORMAT_KINDS = ("fp8_block128", "mxfp8", "nvfp4")
"""A format of each kind: with scales in fp32, with powers of two, and with two numbers in a byte."""
SCALED = [name for name in BY_NAME if "scaled_matmul" in name]
TWO_WAYS = (
    "distributed_decode",
    *(name for name in SCALED if "format" not in BY_NAME[name].kinds),
)
"""They have no "pipelined" algorithm."""
NO_GRADIENTS = (
    "distributed_decode", *SCALED, "context_parallel_attention_backward",
    "routed_matmul_combine_backward",
)  # fmt: skip
"""Their backward raises."""
BACKWARDS = {name for name in BY_NAME if name.endswith("_backward")}
REASONS = (
    Reason("out", lambda op: op.name not in WITH_OUT, "its schema has no out"),
    Reason("out_dtype", lambda op: "out_dtype" not in op.kinds, "it has no such argument"),
    Reason("out_dtype", lambda op: op.name in SCALED, "all of its cells ask for a dtype"),
    Reason("empty_on_one", lambda op: LENGTHS.isdisjoint(op.kinds), "parts are of equal shapes"),
    Reason("gradients", lambda op: op.gradient is None, "it has none"),
    Reason("gradients", lambda op: "format" in op.kinds, "what is rounded has no differences"),
    Reason("gradients_complex", lambda op: op.gradient is None, "it has none"),
    Reason("gradients_complex", lambda op: not is_plain(op), "it refuses complex numbers"),
    Reason("misuse", lambda op: op.name == "rank", "it takes any tensor, and reads none"),
    Reason("misuse", lambda op: op.name in BACKWARDS, "its forward has checked what it gets"),
)


def reason(op: Op, contract: str) -> str:
    """Why the op has no such cell; "" if it has one."""
    for each in REASONS:
        if each.contract == contract and each.holds(op):
            return each.text
    return ""


def gaps(ops: Mapping[str, Op]) -> list[str]:
    """Return the arguments without an example, by op."""
    return [
        f"{name}: no example of {each}" for name, op in ops.items() for each in op.without_example()
    ]


def takes(op: Op, dtype: torch.dtype) -> bool:
    """Return whether the op has results for such inputs; otherwise all ranks raise."""
    if is_plain(op):
        return "reduce_op" not in op.kinds or defined("sum", dtype)
    return dtype in FLOATS or (op.name == "dispatch" and dtype is FP8)


def right_results(op: Op, given: Sequence[Mapping[str, Any]], size: int) -> Right:
    """Return the right results of all ranks for their arguments."""
    find = REFERENCES.get(op.name) or op.reference
    return find([op.record(list(each.values())) for each in given], size)


def may_expand(op: Op, name: str) -> bool:
    """Return whether all rows of an argument may be its first row, and still fit the other arguments."""
    fixed = ("query", "key", "value", "output", "lse") if "lse" in op.kinds else ()
    packed = ("weight", "weights") if "format" in op.kinds else ()  # along k there are bytes
    return name not in ("topk_idx", "segments", *fixed, *packed)


def is_shared(op: Op, name: str) -> bool:
    """Return whether all ranks have the same argument because all have the whole result."""
    whole = "reduce_op" in op.kinds and "scatter_dim" not in op.kinds
    return whole and name in ("bias", "residual", "norm_weight", "norm_bias")
