"""The tools that each public op has (verify, bench, tune, bundles) or why not: for docs/reference/ops.md.

``python tests/cases/op_tools.py`` prints the table. The ops are found in the code: all public functions
that take a group or an algorithm. A new one has its tools under its own name, or an entry here.
"""

import inspect
from collections.abc import Callable
from typing import Any

import interlace
from interlace.benchmark.requests import OPS as MEASURED, TUNED
from interlace.tools.bundle import OPS as BUNDLES
from interlace.tools.targets import TARGETS

TOOLS: dict[str, Any] = {"verify": TARGETS, "bench": MEASURED, "tune": TUNED, "bundle": BUNDLES}
MODULES: tuple[Any, ...] = (
    interlace,
    interlace.functional,
    interlace.experts,
    interlace.nn.functional,
)

NO_OPS = (
    "get_rank", "get_world_size", "new_group", "new_subgroups",
    "rebuild", "shrink", "check_numerics", "shard_sequence",
)  # fmt: skip
"""About groups or about one rank's tensors: nothing is sent, or nothing that takes time."""

SAME = {
    "_all_gather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_object": "all_gather",
    "all_gather_v": "all_gather",
    "unshard_sequence": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_v": "reduce_scatter",
    "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all",
    "all_to_all_v": "all_to_all",
    "permute": "all_to_all",
    "broadcast_object_list": "broadcast",
    "gather_object": "gather",
    "gather_v": "gather",
    "scatter_object_list": "scatter",
    "scatter_v": "scatter",
    "send": "send_recv",
    "recv": "send_recv",
    "isend": "send_recv",
    "irecv": "send_recv",
    "send_object_list": "send_recv",
    "recv_object_list": "send_recv",
    "monitored_barrier": "barrier",
    "low_latency_dispatch": "dispatch",
    "low_latency_combine": "combine",
    "all_gather_scaled_matmul": "all_gather_matmul",
    "scaled_matmul_reduce_scatter": "matmul_reduce_scatter",
    "attention_of_heads": "context_parallel_attention",
}
"""Other names and forms of an op, which it stands for: the same kernels, or made of it."""

NAMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("context_parallel_attention", "verify"): ("attention", "attention_backward"),
    ("context_parallel_attention", "bundle"): (
        "context_parallel_attention",
        "attention_of_heads",
        "attention_of_heads_backward",
    ),
    ("distributed_decode", "verify"): ("decode",),
    ("all_reduce_norm", "bundle"): ("low_latency_norm", "reduce_norm"),
    ("reduce_scatter_norm", "bundle"): ("reduce_norm",),
    ("all_to_all", "verify"): ("nodes.all_to_all",),
    **{
        ("context_parallel_attention", tool): (
            "context_parallel_attention",
            "context_parallel_attention_backward",
        )
        for tool in ("bench", "tune")
    },
    **{
        (op, tool): (op, f"{op}_norm")
        for op in ("matmul_reduce_scatter", "matmul_all_reduce")
        for tool in TOOLS
    },
    **{
        ("reduce_scatter_norm", tool): ("reduce_scatter_norm", "gather_normed")
        for tool in ("bench", "tune")
    },
}
"""Where a tool calls an op otherwise, or knows more of it than one form."""

_PLAIN = ("all_to_all", "gather", "scatter", "reduce", "send_recv", "barrier")
WHY_NOT: dict[tuple[str, str], str] = {
    **{(op, "tune"): "one way" for op in _PLAIN},
    **{(op, "bundle"): "copies and torch's sums: no kernel" for op in _PLAIN},
    **{(op, "verify"): "waits as `all_gather` does" for op in _PLAIN[1:]},
    **{
        (op, "tune"): "thresholds of its size"
        for op in ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
    },
}


def public_ops() -> dict[str, Callable[..., Any]]:
    """Return the functions with a parameter ``group`` or ``algorithm``."""
    found = {}
    for module in MODULES:
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function):
                parameters = inspect.signature(function).parameters
                if "group" in parameters or "algorithm" in parameters:
                    found[name] = function
    return found


def stood_for() -> list[str]:
    return list(dict.fromkeys(SAME.get(name, name) for name in public_ops() if name not in NO_OPS))


def names_of(op: str, tool: str) -> tuple[str, ...]:
    """Return the names of an op in a tool; () if the tool does not have the op."""
    named = NAMES.get((op, tool), (op,))
    return named if all(name in TOOLS[tool] for name in named) else ()


def table() -> str:
    """Return lines of Markdown with the names of each op in its tools."""
    lines = ["| op | " + " | ".join(TOOLS) + " |", "|---" * (1 + len(TOOLS)) + "|"]
    for op in stood_for():
        cells = [f"`{op}`"]
        for tool in TOOLS:
            names = ", ".join(f"`{name}`" for name in names_of(op, tool))
            cells.append(names or WHY_NOT[op, tool])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
