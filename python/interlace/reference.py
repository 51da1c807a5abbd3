"""float64 references of every op, and how far a correct result may be from them.

They are those of ``ops/matmul/reference.py``, which says where the bounds come from; those of attention
stand in ``ops/attention/reference.py``.
"""

from interlace.ops.matmul.reference import (
    Bounded as Bounded,
)
from interlace.ops.matmul.reference import (
    accumulation_unit as accumulation_unit,
)
from interlace.ops.matmul.reference import (
    all_gather_matmul as all_gather_matmul,
)
from interlace.ops.matmul.reference import (
    combine as combine,
)
from interlace.ops.matmul.reference import (
    dequantized as dequantized,
)
from interlace.ops.matmul.reference import (
    gamma as gamma,
)
from interlace.ops.matmul.reference import (
    half_denormal as half_denormal,
)
from interlace.ops.matmul.reference import (
    matmul as matmul,
)
from interlace.ops.matmul.reference import (
    matmul_all_reduce as matmul_all_reduce,
)
from interlace.ops.matmul.reference import (
    norm as norm,
)
from interlace.ops.matmul.reference import (
    reduce as reduce,
)
from interlace.ops.matmul.reference import (
    rounded as rounded,
)
from interlace.ops.matmul.reference import (
    scaled_matmul as scaled_matmul,
)
from interlace.ops.matmul.reference import (
    split as split,
)
from interlace.ops.matmul.reference import (
    sum_of_rounded as sum_of_rounded,
)
from interlace.ops.matmul.reference import (
    unit_roundoff as unit_roundoff,
)
from interlace.ops.matmul.reference import (
    with_residual as with_residual,
)
from interlace.ops.matmul.reference import (
    worst_ratio as worst_ratio,
)
