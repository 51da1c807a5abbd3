"""All ops. The import of this file registers them with torch, once per process."""

from interlace.ops.attention import context_parallel, decode, head_exchange
from interlace.ops.collectives import records
from interlace.ops.experts import combine, dispatch, grouped, grouped_combine
from interlace.ops.matmul import block_scaled, gather, norms, reduce, scaled
from interlace.ops.op import calls, op as registry, torch_library
from interlace.ops.op.torch_library import IN_PLACE as IN_PLACE, WITH_OUT as WITH_OUT

OPS = (
    *records.OPS,
    gather.ALL_GATHER_MATMUL,
    *reduce.OPS,
    *map(
        block_scaled.with_format,
        (
            gather.ALL_GATHER_MATMUL,
            *reduce.OPS,
            *norms.OPS[:2],
            *grouped.OPS,
            *grouped_combine.OPS[:2],
        ),
    ),
    *grouped.OPS,
    *dispatch.OPS,
    *combine.OPS,
    *grouped_combine.OPS,
    *context_parallel.OPS,
    decode.DISTRIBUTED_DECODE,
    *head_exchange.OPS,
    *scaled.OPS,
    *norms.OPS,
)

BY_NAME = registry.OPS

torch_library.register_group_size()
for op in OPS:
    torch_library.register(op)
    calls.define(op)
