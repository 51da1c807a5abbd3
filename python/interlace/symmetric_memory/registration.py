"""interlace's kernels for ops of torch's namespace ``symm_mem``: on CPUs, and on GPUs for who asks.

torch has these ops for GPUs only. :func:`register` gives them a kernel for CPUs. ``import interlace`` calls
it, in 0.3 ms (Xeon, November 2026): the first call of an op loads ``torch_ops.py``, which has the kernels.
torch defines some of the ops as ``torch.distributed._symmetric_memory`` is imported. That takes 27 ms, so
it happens when somebody first asks ``torch.ops.symm_mem`` for one of them. torch's own fake kernels
("Meta") stay.

:func:`take_over_symm_mem` is for the ops to which compilers lower a collective and a matmul: interlace's
kernels take the place of torch's there, on GPUs too.
"""

import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from interlace.arguments import checks
from interlace.runtime.compat import stand_ins

# so begin the names of the ops that torch defines in Python
IN_PYTHON = ("fused_", "_low_contention_", "get_remote_tensors")
TAKEN_OVER = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
    "_low_contention_all_gather",
    "_low_contention_reduce_scatter",
)
NAMES = (
    *TAKEN_OVER,
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
DEFINITIONS = "torch.distributed._symmetric_memory"

_Library: Any = torch.library.Library
_library: Any = None
_taken: Any = None
_on_cpu: list[str] = []  # what has no kernel of torch's there


class _Namespace(type(torch.ops.symm_mem)):  # type: ignore[misc]
    """``torch.ops.symm_mem``, which has torch define its ops when one of them is asked for."""

    # by it, the code that Inductor writes names the ops
    __module__ = type(torch.ops.symm_mem).__module__

    def __getattr__(self, name: str) -> Any:
        if name.startswith(IN_PYTHON):
            importlib.import_module(DEFINITIONS)
        return super().__getattr__(name)


def register() -> None:
    """Once per process; leaves alone what has a kernel already, unless ``INTERLACE_SYMM_MEM`` is 1."""
    global _library
    if _library is not None:
        return
    torch.ops.symm_mem.__class__ = _Namespace
    _library = _Library("symm_mem", "IMPL")
    for name in NAMES:
        if not _has_kernel(f"symm_mem::{name}"):
            _library.impl(name, _loading(name), "CPU")
            _on_cpu.append(name)
    stand_ins.on_simulated_ranks.append(_called_directly)
    if os.environ.get("INTERLACE_SYMM_MEM", "") == "1":
        take_over_symm_mem()


def take_over_symm_mem(taken: bool = True) -> None:
    """Make interlace the implementation of torch's fused ops, on GPUs and on CPUs; or, if False, no longer.

    Compilers replace a collective beside a matmul by these ops of ``torch.ops.symm_mem``, and programs call
    them: ``fused_all_gather_matmul`` with any number of weights, ``fused_matmul_reduce_scatter``, the two
    with ``scaled`` in their names, ``_low_contention_all_gather`` and ``_low_contention_reduce_scatter``.
    Such a program (Inductor's ``_micro_pipeline_tp``, torchtitan, vLLM) then runs on interlace, unchanged.
    It holds for this process: call it on all ranks or on none, before the ops run. ``INTERLACE_SYMM_MEM=1``
    in the environment does it at ``import interlace``. Without it torch's own kernels serve GPUs.

    Raises TypeError if ``taken`` is no bool. Semantics: torch's ops.

    >>> interlace.take_over_symm_mem()
    >>> interlace.take_over_symm_mem(False)  # GPUs have torch's again
    """
    global _taken
    checks.flag("taken", taken)
    if _taken is not None and not taken:
        _taken._destroy()  # then the kernel that was there before counts
        _taken = None
    elif _taken is None and taken:
        importlib.import_module(DEFINITIONS)  # what is registered last counts
        _taken = _Library("symm_mem", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
            for name in TAKEN_OVER:
                for device in ("CUDA",) if name in _on_cpu else ("CUDA", "CPU"):
                    _taken.impl(name, _loading(name), device, allow_override=True)


def _called_directly() -> tuple[dict[str, Any], dict[str, Any]]:
    """By simulated ranks: as ops they wait within pybind11, where taking turns ends the process."""
    direct = {name: _loading(name) for name in NAMES}
    for name, function in direct.items():
        # the overload, and what torch asks for when it defines the op during the run, or when its compiler
        # looks through all ops that were used: the names of overloads, or, as of 2.13, overloads
        own = {"default": function, "_qualified_op_name": f"symm_mem::{name}", "_op": function}
        vars(function).update(own, overloads=list, op_overloads=list)
    return vars(torch.ops.symm_mem), direct


def _has_kernel(op: str) -> bool:
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU")
    except RuntimeError:  # not defined yet
        return False


def _loading(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        from interlace.ops.matmul import torch_ops

        return getattr(torch_ops, name)(*args, **kwargs)

    kernel.__name__ = kernel.__qualname__ = name
    return kernel
