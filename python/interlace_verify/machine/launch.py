"""``interlace.verify.launch_ptx``: PTX of any origin on a rank of the place ``ptx``."""

import math
from collections.abc import Iterable, Mapping

import torch

from interlace.groups.groups import default_group
from interlace.runtime.places.sim.place import SimPlace
from interlace_verify.machine.compiled import PtxSource
from interlace_verify.machine.module import MOST_THREADS


def launch_ptx(
    ptx: str,
    grid: int | tuple[int, ...],
    *values: object,
    kernel: str | None = None,
    threads: int | tuple[int, ...] | None = None,
    shared_bytes: int = 0,
    variables: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Run a kernel of the text ``ptx`` over ``grid``, as a rank of ``interlace.run(place="ptx")``.

    ``values`` are tensors and numbers in the order of the parameters; a structure is passed as bytes.
    Missing last parameters are 0. ``kernel`` names one of several kernels. ``threads`` of a program, up to
    three extents, may be left out if the text says them. ``shared_bytes`` is the dynamic shared memory of a
    program. ``variables`` maps names of the module's variables to tensors of any shape, with at least as
    many bytes. Other variables begin with the values in the text, and stay from launch to launch of the
    same text on a rank. Returns when all programs have ended.

    Raises NotImplementedError naming an instruction that is not known. Raises TypeError for too many values
    and for a value that its parameter does not take, OverflowError for a number that does not fit. Raises
    ValueError for threads that the text does not allow, for more shared memory than the architecture has,
    and for variables that the kernel does not use.

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
    if not isinstance(ptx, str):
        raise TypeError(f"ptx must be a str, got {ptx!r:.60}")
    extents = grid if isinstance(grid, Iterable) else (grid,)
    block = None if threads is None else _block(threads)
    if not isinstance(shared_bytes, int) or shared_bytes < 0:
        raise ValueError(f"shared_bytes must be a whole number >= 0, got {shared_bytes!r}")
    if not isinstance(variables or {}, Mapping):
        raise TypeError(f"variables must map names to tensors, got {variables!r:.60}")
    for name, tensor in (variables or {}).items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"variable {name!r} must be a tensor, got {tensor!r:.60}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"variable {name!r} must be contiguous, got strides {tuple(tensor.stride())}"
            )
    source = PtxSource(ptx, kernel=kernel, block=block, shared_bytes=shared_bytes)
    place.launch_ptx(source, extents, values, variables or {})


def _block(threads: int | tuple[int, ...]) -> tuple[int, int, int]:
    given = tuple(threads) if isinstance(threads, Iterable) else (threads,)
    whole = all(isinstance(each, int) and each >= 1 for each in given)
    if not whole or not 1 <= len(given) <= 3 or math.prod(given) > MOST_THREADS:
        raise ValueError(
            f"threads must be 1 to 3 whole numbers >= 1, at most {MOST_THREADS} in all, got {threads}"
        )
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z
