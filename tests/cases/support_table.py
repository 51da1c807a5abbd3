"""The table of collectives and what they serve: the data of docs/reference/collectives.md and its tests.

``python tests/cases/support_table.py`` prints the tables.
"""

from dataclasses import dataclass

import torch

from interlace.runtime.numerics import reductions

ANY, REDUCED, OBJECTS, NOTHING = "any", "reduced", "objects", "-"


@dataclass(frozen=True)
class Operation:
    """One function of the API.

    Attributes
    ----------
    name : the function's.
    payload : ANY dtype, dtypes that can be REDUCED (see :func:`reduce_table`), OBJECTS, NOTHING.
    forms : for the argument with one part per rank: "cat", "stack", "list".
    uneven : parts may differ between ranks.
    in_place : no copy where output and input are the same memory.
    async_op : takes ``async_op``, or always gives a Work.
    dims : parts may lie along any dim.
    """

    name: str
    payload: str = ANY
    forms: tuple[str, ...] = ()
    uneven: bool = False
    in_place: bool = False
    async_op: bool = True
    dims: bool = False


_SINGLE = ("cat", "stack", "list")

OPERATIONS = (
    Operation("all_reduce", REDUCED, in_place=True),
    Operation("reduce", REDUCED, in_place=True),
    Operation("reduce_scatter", REDUCED, _SINGLE, uneven=True, in_place=True),
    Operation("reduce_scatter_v", REDUCED, ("cat", "list"), uneven=True, in_place=True, dims=True),
    Operation("broadcast", in_place=True),
    Operation("all_gather", ANY, _SINGLE, uneven=True, in_place=True),
    Operation("all_gather_v", ANY, ("cat", "list"), uneven=True, in_place=True, dims=True),
    Operation("gather", ANY, ("list",), uneven=True, in_place=True),
    Operation("gather_v", ANY, ("cat", "list"), uneven=True, in_place=True, dims=True),
    Operation("scatter", ANY, ("list",), uneven=True, in_place=True),
    Operation("scatter_v", ANY, ("cat", "list"), uneven=True, in_place=True, dims=True),
    Operation("all_to_all", ANY, ("list",), uneven=True),
    Operation("all_to_all_single", ANY, ("cat",), uneven=True),
    Operation("all_to_all_v", ANY, ("cat", "list"), uneven=True, dims=True),
    Operation("send", async_op=False),
    Operation("recv", async_op=False),
    Operation("isend"),
    Operation("irecv"),
    Operation("batch_isend_irecv"),
    Operation("all_reduce_coalesced", REDUCED, in_place=True),
    Operation("all_gather_coalesced", ANY, _SINGLE, uneven=True, in_place=True),
    Operation("all_gather_into_tensor_coalesced", ANY, _SINGLE, uneven=True, in_place=True),
    Operation("reduce_scatter_tensor_coalesced", REDUCED, _SINGLE, uneven=True, in_place=True),
    Operation("barrier", NOTHING),
    Operation("monitored_barrier", NOTHING, async_op=False),
    Operation("all_gather_object", OBJECTS, async_op=False),
    Operation("gather_object", OBJECTS, async_op=False),
    Operation("broadcast_object_list", OBJECTS, async_op=False),
    Operation("scatter_object_list", OBJECTS, async_op=False),
    Operation("send_object_list", OBJECTS, async_op=False),
    Operation("recv_object_list", OBJECTS, async_op=False),
)

_SUB_BYTE = tuple(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)
)  # one byte per element in torch, and no operators yet
MOVED_DTYPES = (
    *reductions.DTYPES,
    torch.float4_e2m1fn_x2,
    torch.bits8,
    torch.bits16,
    torch.bits1x8,
    torch.bits2x4,
    torch.bits4x2,
    *_SUB_BYTE,
    *([torch.bcomplex32] if hasattr(torch, "bcomplex32") else []),  # since torch 2.15
)
"""Every dtype whose elements are bytes that mean the same on all ranks: all but the quantized ones."""
REDUCED_DTYPES = reductions.DTYPES
REDUCE_OPS = (*reductions.REDUCE_OPS, "premul_sum")


def defined(op: str, dtype: torch.dtype) -> bool:
    """Return whether an op reduces ``dtype``; premul_sum reduces floats and complex numbers."""
    if op == "premul_sum":
        return (dtype.is_floating_point or dtype.is_complex) and defined("sum", dtype)
    return (op, dtype) in reductions._FOLDS


def operation_table() -> str:
    """Markdown: one line per operation."""
    names = {ANY: "any", REDUCED: "see below", OBJECTS: "objects", NOTHING: "-"}
    lines = [
        "| operation | dtypes | parts as | uneven | any dim | in place | async |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in OPERATIONS:
        flags = (each.uneven, each.dims, each.in_place, each.async_op)
        cells = [
            f"`{each.name}`",
            names[each.payload],
            ", ".join(each.forms) or "-",
            *["yes" if flag else "-" for flag in flags],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def reduce_table() -> str:
    """Markdown: which op reduces which dtype; dtypes with the same ops share a line."""
    served: dict[tuple[str, ...], list[str]] = {}
    for dtype in REDUCED_DTYPES:
        ops = tuple(op for op in REDUCE_OPS if defined(op, dtype))
        served.setdefault(ops, []).append(str(dtype).removeprefix("torch."))
    lines = [f"| dtype | {' | '.join(REDUCE_OPS)} |", "|---" * (len(REDUCE_OPS) + 1) + "|"]
    for ops, dtypes in served.items():
        marks = ["yes" if op in ops else "-" for op in REDUCE_OPS]
        lines.append(f"| {', '.join(dtypes)} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(operation_table())
    print(reduce_table())
