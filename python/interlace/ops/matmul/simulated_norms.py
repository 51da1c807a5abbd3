"""The reductions whose rows are normed, done to all ranks at once; see ``simulated.py``."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from interlace.arguments import checks
from interlace.ops.matmul import eager_norms as norms
from interlace.ops.matmul import simulated
from interlace.ops.matmul.operands import multiply, rows_of
from interlace.runtime.numerics.norms import NormTail, RowNorm

Tensors = list[torch.Tensor]
Vectors = Sequence[torch.Tensor | None]


def _normed(op: str, inputs: Tensors, *rest: Any) -> simulated.Outputs:
    """Sums in fp32, in the order of the ranks, rounded once with the bias and the residual."""
    matmul = op in norms.MATMULS
    weights: Tensors | None = rest[0] if matmul else None
    biases, residuals, gains, shifts, *given, size = rest[1 if matmul else 0 :]
    call = norms.call_of(op, *given)
    simulated.alike(op, "input", inputs, but=-1 if matmul else None)
    checks.equal_on_all(op, "whether there is a residual", [each is None for each in residuals])
    columns = inputs[0].shape[-1] if weights is None else weights[0].shape[1]
    dtype = checks.output_dtype(call.out_dtype, inputs[0])
    partials = []
    for rank, input in enumerate(inputs):
        partial = input
        if weights is not None:
            partial = input.new_empty([*input.shape[:-1], columns], dtype=dtype)
            multiply(partial.flatten(0, -2), rows_of(input, 0), weights[rank], None)
        partials.append(partial if dtype is torch.float64 else partial.float())
    total = simulated.all_reduce(partials, call.reduce_op, size)[0][0]
    dim, made = call.scatter_dim, []
    for rank in range(size):
        outputs = [each.view for each in norms.outputs(inputs[rank], columns, call, size)]
        own = total if dim is None else total.tensor_split(size, dim)[rank]
        for each in (biases[rank], residuals[rank]):
            own = own if each is None else own + each
        outputs[1].copy_(own)
        made.append(outputs)
    for rank, outputs in enumerate(made):
        norm = RowNorm(call.norm.kind, call.norm.eps, gains[rank], shifts[rank])
        for reader in made if call.norm.gather_normed else [outputs]:
            places = [reader[0], *reader[2:]]
            if call.norm.gather_normed:
                places = [each.tensor_split(size, dim or 0)[rank] for each in places]
            NormTail(norm, None, *places).finish(outputs[1])
    return made


RULES = {op: functools.partial(_normed, op) for op in norms.START}
