"""Triton's interpreter, as far as interlace uses its internals. Tried with Triton 3.6, 3.7, 3.8 and 3.9.

Sessions (``interpreter/session.py``) replace attributes of ``builder`` and of the module itself, so these
are looked up at every use. The releases differ::

    loads, stores    3.6 to 3.8 pass a cache modifier and an eviction policy, 3.9 one policy that combines
                     both: hooks pass on what they receive, and :data:`NO_POLICY` is the default
    masks            of descriptors' accesses are arrays in 3.6 to 3.8, handles in 3.9: :func:`bare`
    block pointers   exist in 3.6 and 3.7; their overrides are left out in later releases
    atomic loads     and stores and polls exist in 3.9
"""

import functools
from typing import Any

import numpy as np

from interlace.runtime.compat.releases import requiring

BUILDER = (
    *("binary_op", "unary_op", "cast_impl", "create_fp_to_fp", "create_dot", "create_fma"),
    *("create_load", "create_store", "create_masked_load", "create_masked_store"),
    *("create_descriptor_load", "create_atomic_rmw", "create_atomic_cas", "create_barrier"),
    *("create_get_program_id", "set_grid_idx", "set_grid_dim", "options"),
)
MODULE = ("_get_np_dtype", "_implicit_cvt", "_patch_lang", "_ir", "ReduceOps", "ScanOps")

with requiring("Triton", "Triton's interpreter"):
    import triton.language as tl
    from triton._C.libtriton import interpreter as atomics
    from triton.runtime import interpreter as triton_interpreter
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import (
        InterpretedFunction,
        TensorHandle,
        interpreter_builder as builder,
    )
    from triton.runtime.jit import JITFunction, KernelInterface

    for _name in BUILDER:
        getattr(builder, _name)
    for _name in MODULE:
        getattr(triton_interpreter, _name)
    ir = triton_interpreter._ir
    _usual = ir.CACHE_MODIFIER.NONE, ir.EVICTION_POLICY.NORMAL
    _ = Autotuner.do_bench
    _made = getattr(builder, "get_cache_policy", None)
    NO_POLICY: tuple[object, ...] = _usual if _made is None else (_made(*_usual),)

__all__ = [
    "Autotuner",
    "InterpretedFunction",
    "JITFunction",
    "KernelInterface",
    "TensorHandle",
    "atomics",
    "builder",
    "triton_interpreter",
]


def bare(mask: Any) -> Any:
    return mask if isinstance(mask, np.ndarray) else mask.data


def unchecked_handle(data: object, dtype: object) -> Any:
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    return handle


@functools.cache
def everywhere(shape: tuple[int, ...]) -> Any:
    """Return the mask of all elements, which must not be written."""
    mask = np.ones(shape, np.bool_)
    mask.flags.writeable = False
    return unchecked_handle(mask, tl.int1)
