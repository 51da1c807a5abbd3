"""Functional collectives: ``f(input, ..., group=...) -> AsyncTensor``, eager and traced alike.

An op starts and returns at once. Its result waits on its first use, or in :func:`wait`. The input must not
change before that. Every function works eagerly, under ``torch.compile(fullgraph=True)``, ``make_fx``,
``torch.export`` and on fake and meta tensors. A graph gets an op of ``torch.ops.interlace`` at the call,
and a ``wait_tensor`` at the first use. All functions are differentiable, see ``ops/op/op.py``.

``group`` is anything that :func:`interlace.groups.resolve` takes, or a :class:`interlace.GroupSpec`, which
needs no process group until the op runs. ``tag`` distinguishes groups over the same list of ranks. Ranks
(``src``, ``dst``) are ranks of the group. Misuse raises ValueError or TypeError on every rank of the group,
before any data moves.

>>> def doubled():
...     y = functional.all_gather(torch.tensor([1.0 + interlace.get_rank()]), group="0")
...     return y * 2  # waits here
>>> interlace.run(doubled, 2)
[tensor([2., 4.]), tensor([2., 4.])]
"""

from interlace.groups.specs import GroupSpec
from interlace.ops import library as library, local_tensor as local_tensor
from interlace.ops.attention.functional import (
    all_to_all_matmul,
    distributed_decode,
    matmul_all_to_all,
)
from interlace.ops.collectives.functional import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    permute,
    reduce,
    reduce_scatter,
    scatter,
)
from interlace.ops.experts.functional import (
    all_gather_grouped_matmul,
    all_to_all_grouped_matmul,
    combine,
    dispatch,
    grouped_matmul_combine,
)
from interlace.ops.matmul.functional import (
    all_gather_matmul,
    all_gather_scaled_matmul,
    all_reduce_norm,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter_norm,
    scaled_matmul_reduce_scatter,
)
from interlace.ops.op.async_tensor import AsyncTensor, wait

__all__ = [
    "AsyncTensor",
    "GroupSpec",
    "all_gather",
    "all_gather_grouped_matmul",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "all_reduce",
    "all_reduce_norm",
    "all_to_all",
    "all_to_all_grouped_matmul",
    "all_to_all_matmul",
    "broadcast",
    "combine",
    "dispatch",
    "distributed_decode",
    "gather",
    "grouped_matmul_combine",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "permute",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_norm",
    "scaled_matmul_reduce_scatter",
    "scatter",
    "wait",
]
