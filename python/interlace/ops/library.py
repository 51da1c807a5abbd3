"""All ops. The import of this file registers them with torch, once per process."""

from interlace.ops.attention import context_parallel, decode, head_exchange
from interlace.ops.collectives import records
from interlace.ops.experts import combine, dispatch, grouped, grouped_combine
from interlace.ops.matmul import block_scaled, gather, norms, reduce, scaled
from interlace.ops.op import calls, op as registry, torch_library
from interlace.ops.op.torch_library import IN_PLACE as IN_PLACE, WITH_OUT as WITH_OUT

FAMILIES = (
    (records,),
    (gather, reduce, norms, scaled),
    (grouped, dispatch, combine, grouped_combine),
    (context_parallel, decode, head_exchange),
)
"""The files with ops, by family. The import of a file adds its ops to the registry."""

BY_NAME = registry.OPS

for op in list(BY_NAME.values()):
    if "format" in op.without and "weight" not in op.without:
        block_scaled.with_format(op)
OPS = tuple(BY_NAME.values())

torch_library.register_group_size()
for op in OPS:
    torch_library.register(op)
    calls.define(op)
