"""``interlace.verify.launch_ptx``: PTX of any origin on a rank of the place ``ptx``."""

from typing import Any

from interlace.groups.groups import default_group
from interlace.runtime.places.sim.place import SimPlace
from interlace.runtime.programs.compiled import PtxSource


def launch_ptx(ptx: str, grid: int | tuple[int, ...], *values: Any, shared_bytes: int = 0) -> None:
    """Run the one kernel of the text ``ptx`` over ``grid``, as a rank of ``interlace.run(place="ptx")``.

    ``values`` are tensors and numbers in the order of the parameters; parameters behind them are 0.
    ``shared_bytes`` is the dynamic shared memory of a program. Returns when all programs have ended.

    Raises NotImplementedError naming an instruction that is not known, TypeError for too many values.

    >>> import interlace, torch
    >>> ptx = '''
    ... .version 8.0
    ... .target sm_80
    ... .address_size 64
    ... .visible .entry double(.param .u64 double_param_0)
    ... .reqntid 32
    ... {
    ...     .reg .b32 %r<4>;
    ...     .reg .b64 %rd<4>;
    ...     ld.param.u64 %rd1, [double_param_0];
    ...     mov.u32 %r1, %tid.x;
    ...     mad.wide.u32 %rd2, %r1, 4, %rd1;
    ...     ld.global.u32 %r2, [%rd2];
    ...     shl.b32 %r3, %r2, 1;
    ...     st.global.u32 [%rd2], %r3;
    ...     ret;
    ... }
    ... '''
    >>> def step():
    ...     numbers = torch.arange(32, dtype=torch.int32)
    ...     interlace.verify.launch_ptx(ptx, 1, numbers)
    ...     return int(numbers.sum())
    >>> interlace.run(step, 1, place="ptx")
    [992]
    """
    place = default_group().place
    if not isinstance(place, SimPlace):
        raise ValueError(f'launch_ptx is for place="ptx"; this rank is in place={place.name!r}')
    extents = (grid,) if isinstance(grid, int) else grid
    place.launch_ptx(PtxSource(ptx, shared_bytes=shared_bytes), extents, values)
