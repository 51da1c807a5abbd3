"""CPU kernels for ops of torch's namespace ``symm_mem``, which has them for GPUs only.

:func:`register` is called by ``import interlace`` and takes 0.3 ms (Xeon, November 2026): the kernels, in
``torch_ops.py``, are loaded by the first call. It may come before torch has defined the ops, which for
some is when ``torch.distributed._symmetric_memory`` is imported. Torch's own fake kernels ("Meta") stay.
"""

from collections.abc import Callable
from typing import Any

import torch

from interlace.runtime.compat import stand_ins

NAMES = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
    "_low_contention_all_gather",
    "_low_contention_reduce_scatter",
    "one_shot_all_reduce",
    "one_shot_all_reduce_copy",
    "one_shot_all_reduce_copy_out",
    "one_shot_all_reduce_out",
    "two_shot_all_reduce_",
    "two_shot_all_reduce_out",
    "multimem_all_reduce_",
    "multimem_one_shot_all_reduce",
    "multimem_one_shot_all_reduce_out",
    "multimem_one_shot_reduce_out",
    "multimem_all_gather_out",
    "reduce_scatter_out",
)

_Library: Any = torch.library.Library
_library: Any = None


def register() -> None:
    """Once per process; leaves alone what has a kernel already."""
    global _library
    if _library is not None:
        return
    _library = _Library("symm_mem", "IMPL")
    for name in NAMES:
        if not _has_kernel(f"symm_mem::{name}"):
            _library.impl(name, _loading(name), "CPU")
    stand_ins.on_simulated_ranks.append(_called_directly)


def _called_directly() -> tuple[dict[str, Any], dict[str, Any]]:
    """By simulated ranks: as ops they wait within pybind11, where taking turns ends the process."""
    direct = {name: _loading(name) for name in NAMES}
    for name, function in direct.items():
        # the overload, and what torch asks for when it defines the op during the run
        own = {"default": function, "_qualified_op_name": f"symm_mem::{name}", "_op": function}
        vars(function).update(own)
    return vars(torch.ops.symm_mem), direct


def _has_kernel(op: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU")
    except RuntimeError:  # not defined yet
        return False


def _loading(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        from interlace.symmetric_memory import torch_ops

        return getattr(torch_ops, name)(*args, **kwargs)

    kernel.__name__ = kernel.__qualname__ = name
    return kernel
