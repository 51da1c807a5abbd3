"""float64 references of every op, and bounds on the error of a correct result.

They are defined in ``ops/matmul/reference.py``, which explains the bounds; the references of attention are
in ``ops/attention/problem.py``.
"""

from interlace.ops.matmul.reference import (
    Bounded as Bounded,
    accumulation_unit as accumulation_unit,
    all_gather_matmul as all_gather_matmul,
    block_scaled as block_scaled,
    combine as combine,
    dequantized as dequantized,
    gamma as gamma,
    half_denormal as half_denormal,
    matmul as matmul,
    matmul_all_reduce as matmul_all_reduce,
    norm as norm,
    reduce as reduce,
    rounded as rounded,
    scaled_matmul as scaled_matmul,
    split as split,
    sum_of_rounded as sum_of_rounded,
    unit_roundoff as unit_roundoff,
    with_residual as with_residual,
    worst_ratio as worst_ratio,
)
