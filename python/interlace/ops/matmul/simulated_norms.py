"""The reductions whose rows are normed, done to all ranks at once; see ``simulated.py``."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.ops.matmul import eager_norms as norms
from interlace.ops.matmul import simulated
from interlace.runtime.numerics.norms import NormTail, RowNorm


def _normed(op: str, ranks: Sequence[Any], size: int) -> simulated.Outputs:
    """Sums in fp32, in the order of the ranks, rounded once with the bias and the residual."""
    matmul, inputs = op in norms.MATMULS, simulated.inputs(ranks)
    first = list(vars(ranks[0]).values())
    call = norms.call_of(op, *first[6 if matmul else 5 :])
    residuals = [each.residual for each in ranks]
    simulated.alike(op, "input", inputs, but=-1 if matmul else None)
    checks.equal_on_all(op, "whether there is a residual", [each is None for each in residuals])
    partials = [each if each.dtype is torch.float64 else each.float() for each in inputs]
    if matmul:
        partials = simulated.partial_products(ranks)
    columns = partials[0].shape[-1]
    total = simulated.reduced("all_reduce", partials, call.reduce_op)
    dim, made = call.scatter_dim, []
    for rank in range(size):
        outputs = [each.view for each in norms.outputs(inputs[rank], columns, call, size)]
        own = total if dim is None else total.tensor_split(size, dim)[rank]
        for each in (ranks[rank].bias, residuals[rank]):
            own = own if each is None else own + each
        outputs[1].copy_(own)
        made.append(outputs)
    for rank, outputs in enumerate(made):
        norm = RowNorm(
            call.norm.kind, call.norm.eps, ranks[rank].norm_weight, ranks[rank].norm_bias
        )
        for reader in made if call.norm.gather_normed else [outputs]:
            places = [reader[0], *reader[2:]]
            if call.norm.gather_normed:
                places = [each.tensor_split(size, dim or 0)[rank] for each in places]
            NormTail(norm, None, *places).finish(outputs[1])
    return made


RULES = {op: functools.partial(_normed, op) for op in norms.START}
