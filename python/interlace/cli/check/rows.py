"""Cases of the ops that ``interlace bench`` knows, with its payloads and its references.

Every rank judges its own result, against float64 or, where sums are exact, bit by bit.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import interlace
from interlace.benchmark.subjects.expert_rows import AllToAllGroupedRows
from interlace.benchmark.subjects.requests import OPS
from interlace.benchmark.timing import protocol
from interlace.cli.check.case import DTYPES, CheckCase, Sizes
from interlace.groups.groups import default_group


class _CountedRows(AllToAllGroupedRows):
    """Counts that stay on the device, under a bound of every rank's rows."""

    def ours(self, algorithm: str) -> Callable[..., Any]:
        splits = torch.full((self.world_size,), self.rows, device=self.device)

        def run(input: torch.Tensor, weight: torch.Tensor, buffer: object) -> torch.Tensor:
            output, _ = interlace.all_to_all_grouped_matmul(
                input, weight.unsqueeze(0), splits, num_max_rows_per_rank=self.m
            )
            return output[: self.m]

        return run


COUNTED = "counts on the device"


@dataclass
class RowsCase(CheckCase):
    """``variant`` is the algorithm, behind a comma what the op is besides; ``settings`` ask for that."""

    settings: tuple[tuple[str, int | str], ...] = ()

    @property
    def algorithm(self) -> str:
        return self.variant.partition(",")[0]

    def subject(self) -> Any:
        kind: Any = _CountedRows if self.variant == COUNTED else OPS[self.op]
        place = default_group().place
        return kind(place, DTYPES[self.dtype], *self.sizes, **dict(self.settings))

    def on_rank(self, seed: int) -> float:
        op, call = self.subject(), seed % 1000
        result = op.ours(self.algorithm)(*op.inputs(call))
        protocol.finish(virtual=op.device.type == "cuda")
        return float(op.check(result, call))


class _CheckedOp(NamedTuple):
    """``sizes``: the sizes in ``sim`` and on a GPU."""

    op: str
    algorithms: dict[str, tuple[str, ...]]  # with the kernels that they run
    sizes: tuple[Sizes, Sizes]


_MERGE = "merge_attention_kernel"
_BACKWARD = ("attention_queries_backward_kernel", "attention_keys_backward_kernel")
_GATHERED, _HEADS = ("all_gather_attention_kernel", _MERGE), ("attention_kernel", _MERGE)
_DECODE = ("decode_attention_kernel", _MERGE, "decode_exchange_kernel")
_TOKENS = (48, 4, 16), (1024, 8, 128)
_PRODUCTS = (48, 48, 24), (1024, 1024, 512)
_SMALL = (48, 48, 24), (128, 1024, 512)  # for which all-reduce is one kernel
_MOVED = (48, 40), (1024, 2048)
_WORDS = (48, 32), (8, 1024)
_ROWS = (
    _CheckedOp(
        "context_parallel_attention",
        {"all_gather fused": _GATHERED, "ring fused": _HEADS, "ulysses fused": _HEADS},
        _TOKENS,
    ),
    _CheckedOp(
        "context_parallel_attention_backward",
        {"all_gather fused": (*_GATHERED, *_BACKWARD), "ring fused": (*_HEADS, *_BACKWARD)},
        _TOKENS,
    ),
    _CheckedOp("distributed_decode", {"fused": _DECODE}, _TOKENS),
    _CheckedOp(
        "matmul_reduce_scatter_norm", {"fused": ("matmul_reduce_scatter_norm_kernel",)}, _PRODUCTS
    ),
    _CheckedOp("matmul_all_reduce_norm", {"fused": ("matmul_all_reduce_norm_kernel",)}, _SMALL),
    _CheckedOp("reduce_scatter_norm", {"fused": ("reduce_norm_kernel",)}, _MOVED),
    _CheckedOp("gather_normed", {"fused": ("reduce_norm_kernel",)}, _MOVED),
    _CheckedOp("all_reduce_norm", {"low_latency": ("low_latency_norm_kernel",)}, _WORDS),
    _CheckedOp("dispatch", {"fused": ("dispatch_send_kernel", "dispatch_receive_kernel")}, _MOVED),
    _CheckedOp("combine", {"fused": ("combine_kernel",)}, _MOVED),
    _CheckedOp(
        "all_to_all_grouped_matmul",
        {"fused": ("grouped_matmul_kernel",), COUNTED: ("counted_grouped_matmul_kernel",)},
        _PRODUCTS,
    ),
    _CheckedOp("all_gather_grouped_matmul", {"fused": ("grouped_matmul_kernel",)}, _PRODUCTS),
    _CheckedOp("grouped_matmul_combine", {"fused": ("grouped_matmul_combine_kernel",)}, _PRODUCTS),
    _CheckedOp("matmul_all_to_all", {"fused": ("matmul_all_to_all_kernel",)}, _PRODUCTS),
    _CheckedOp("all_to_all_matmul", {"fused": ("all_to_all_matmul_kernel",)}, _PRODUCTS),
    *(
        _CheckedOp(op, {"multimem": (f"multimem_{op}_kernel",)}, ((4096,), (1 << 20,)))
        for op in ("all_gather", "reduce_scatter", "all_reduce")
    ),
    _CheckedOp(
        "broadcast", {"low_latency": ("low_latency_broadcast_kernel",)}, ((4096,), (1 << 14,))
    ),
)

_HEADS_OF = (
    "context_parallel_attention",
    "context_parallel_attention_backward",
    "distributed_decode",
)
_NORMS = ("reduce_scatter_norm", "matmul_reduce_scatter_norm", "all_reduce_norm")


class _Branch(NamedTuple):
    """``op`` so that it does ``what``, which ``settings`` ask for; ``sizes``: if others than above."""

    op: str
    what: str
    settings: Mapping[str, int | str]
    sizes: tuple[Sizes, Sizes] | None = None


_BRANCHES = (
    *(
        _Branch(op, f"heads of {size}", {}, ((24, 4, size), (512, 4, size)))
        for size in (64, 256)
        for op in _HEADS_OF
    ),
    _Branch("distributed_decode", "pages", {"paged": True}),
    *(_Branch(op, "fp8", {"quantize": "fp8"}) for op in _NORMS),
    *(_Branch(op, "layer norm", {"norm": "layer"}) for op in _NORMS),
    _Branch("dispatch", "fp8", {"use_fp8": True}, ((48, 128), (1024, 2048))),
)


def branches(device: str, world_size: int) -> Iterator[CheckCase]:
    """What kernels do for some calls only; heads have tiles by their size and dtype."""
    on_gpu, by_op = device == "cuda", {each.op: each for each in _ROWS}
    for op, what, settings, sizes in _BRANCHES:
        algorithm, kernels = next(iter(by_op[op].algorithms.items()))
        heads = (("key_heads", 2),) if op in _HEADS_OF else ()
        tiles = what.startswith("heads") and on_gpu
        for dtype in ("bf16", "fp32") if tiles else ("bf16",):
            yield RowsCase(
                *(op, f"{algorithm}, {what}", world_size, (sizes or by_op[op].sizes)[on_gpu]),
                *(dtype, kernels),
                branch=what,
                settings=(*heads, *settings.items()),
            )


def rows(device: str, world_size: int) -> Iterator[CheckCase]:
    """Each op in the dtype of models; on a GPU attention in the others too."""
    on_gpu = device == "cuda"
    for each in _ROWS:
        heads = each.sizes == _TOKENS
        for variant, kernels in each.algorithms.items():
            about = each.op, variant, world_size, each.sizes[on_gpu]
            settings = (("key_heads", 2),) if heads else ()
            for dtype in ("bf16", "fp16", "fp32") if heads and on_gpu else ("bf16",):
                yield RowsCase(
                    *(*about, dtype, kernels), by_switch=variant == "multimem", settings=settings
                )
