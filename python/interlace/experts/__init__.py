"""Mixtures of experts: send tokens to their experts and back, with calls like DeepEP's.

``dispatch`` and ``combine``, their low-latency forms, and their helpers. The fused ops for whole
layers are :func:`interlace.all_to_all_grouped_matmul` and :func:`interlace.grouped_matmul_combine`. See
docs/how-to/train/experts.md.

>>> def on_rank():
...     tokens = torch.full((1, 2), 1.0 + interlace.get_rank())
...     received, handle = interlace.experts.dispatch(tokens, torch.tensor([[1, 0]]), None, 2)
...     return interlace.experts.combine(received.x * 10, handle).tolist()
>>> interlace.run(on_rank, 2)
[[[20.0, 20.0]], [[40.0, 40.0]]]
"""

from interlace.ops.experts.api import (
    combine,
    dequantize,
    dispatch,
    low_latency_combine,
    low_latency_dispatch,
    permute,
    quantize,
)
from interlace.ops.experts.products import multiply
from interlace.ops.experts.routing import DispatchHandle, Received

__all__ = [
    "DispatchHandle",
    "Received",
    "combine",
    "dequantize",
    "dispatch",
    "low_latency_combine",
    "low_latency_dispatch",
    "multiply",
    "permute",
    "quantize",
]
