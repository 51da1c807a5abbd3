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
_files = [file.__name__ for family in FAMILIES for file in family]
# an op of a format has the arguments of the op that it was made from
OPS = tuple(sorted(BY_NAME.values(), key=lambda op: _files.index(op.arguments.__module__)))
"""All ops, in the order of the families, whichever file was imported first."""

torch_library.register_group_size()
for op in OPS:
    torch_library.register(op)
    calls.define(op)
