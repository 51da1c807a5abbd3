"""interlace: collectives that run inside the matmuls they feed, on Triton and symmetric memory.

Examples in docstrings begin after ``import interlace, torch`` and ``from interlace import functional, nn``.

>>> interlace.run(lambda: interlace.get_rank(), 2)
[0, 1]
"""

import gc as _gc
import importlib as _importlib
import os as _os
import signal as _signal
import sys as _sys
import typing as _typing

import interlace_command as _interlace_command

if (_called := _interlace_command.arguments()) is not None:
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        # Ctrl-C during the imports ends the command without a traceback; run() takes this back.
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    _cli = _importlib.import_module("interlace.cli.main")
    if not _cli.needs_torch(_called):
        _sys.exit(_cli.run(_called))  # without the imports below, which take seconds

from interlace.runtime.compat.environment import check_environment as _check_environment

_check_environment()  # reports a typo before torch is imported, which takes seconds

import torch as _torch  # noqa: E402

if "TRITON_INTERPRET" not in _os.environ and not _torch.cuda.is_available():
    # @triton.jit reads this for our kernels, so it must be set before triton is imported.
    _os.environ["TRITON_INTERPRET"] = "1"

_collected = _gc.isenabled()
_gc.disable()  # a collection would visit all objects of torch, which takes longer than all of this
try:
    import interlace_backend as _interlace_backend
    from interlace import symmetric_memory
    from interlace.arguments.words import ReduceOp
    from interlace.groups.groups import Group, device, get_rank, get_world_size, init, shutdown
    from interlace.groups.new import (
        new_group,
        new_subgroups,
        new_subgroups_by_enumeration,
        rebuild,
        shrink,
        split_group,
    )
    from interlace.launcher import run
    from interlace.numerics import check_numerics
    from interlace.ops.attention.decode import distributed_decode
    from interlace.ops.collectives.all_to_all import (
        all_gather_v,
        all_to_all,
        all_to_all_single,
        all_to_all_v,
        gather_v,
        reduce_scatter_v,
        scatter_v,
    )
    from interlace.ops.collectives.objects import (
        all_gather_object,
        broadcast_object_list,
        gather_object,
        recv_object_list,
        scatter_object_list,
        send_object_list,
    )
    from interlace.ops.collectives.point_to_point import (
        P2POp,
        batch_isend_irecv,
        irecv,
        isend,
        monitored_barrier,
        recv,
        send,
    )
    from interlace.ops.collectives.rooted import broadcast, gather, reduce, scatter
    from interlace.ops.collectives.rootless import (
        _all_gather_base,
        _reduce_scatter_base,
        all_gather,
        all_gather_coalesced,
        all_gather_into_tensor,
        all_gather_into_tensor_coalesced,
        all_gather_single,
        all_reduce,
        all_reduce_coalesced,
        barrier,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor,
        reduce_scatter_tensor_coalesced,
    )
    from interlace.ops.experts.api import (
        all_gather_grouped_matmul,
        all_to_all_grouped_matmul,
        grouped_matmul_combine,
    )
    from interlace.ops.matmul.api import (
        LayerNorm,
        RMSNorm,
        all_gather_matmul,
        all_reduce_norm,
        matmul_all_reduce,
        matmul_reduce_scatter,
        reduce_scatter_norm,
    )
    from interlace.ops.matmul.formats import Scaled, quantize
    from interlace.runtime.compat.environment import write_log as _write_log
    from interlace.runtime.compat.launchers import launched
    from interlace.runtime.compat.releases import (
        INTERLACE_VERSION as _INTERLACE_VERSION,
        warn_of_untried as _warn_of_untried,
    )
    from interlace.runtime.core.errors import (
        AbortedError,
        CollectiveTimeoutError,
        DeadlockError,
        InterlaceError,
        KernelAssertionError,
        MemoryAccessError,
        PeerDiedError,
        PlaceUnavailableError,
        RankError,
        StoreGoneError,
    )
    from interlace.runtime.core.hooks import HookedOp
    from interlace.runtime.core.place import timeout
    from interlace.runtime.core.work import Work
    from interlace.runtime.places import uncaught as _uncaught
    from interlace.runtime.tuning.configuration import override as configured
    from interlace.symmetric_memory import functions as _torch_kernels
    from interlace.symmetric_memory.functions import take_over_symm_mem
    from interlace.tracing import trace
finally:
    if _collected:
        _gc.enable()

__version__ = _INTERLACE_VERSION

_write_log()
_uncaught.install()
_warn_of_untried()
_interlace_backend.register()
_torch_kernels.register()

# Modules that not every process needs; "compile" and "tensor" import torch's compilers.
_ON_FIRST_USE = (
    "aot",
    "compile",
    "experts",
    "functional",
    "integrations",
    "nn",
    "ops",
    "tensor",
    "verify",
)

if _typing.TYPE_CHECKING:
    from interlace import (
        aot as aot,
        compile as compile,
        experts as experts,
        functional as functional,
        integrations as integrations,
        nn as nn,
        ops as ops,
        tensor as tensor,
        verify as verify,
    )
    from interlace.groups.specs import GroupSpec
else:

    def __getattr__(name: str) -> _typing.Any:
        """Return ``interlace.functional``, ``interlace.verify`` and so on, imported on first use."""
        if name in _ON_FIRST_USE:
            return _importlib.import_module(f"interlace.{name}")
        if name == "GroupSpec":
            return _importlib.import_module("interlace.groups.specs").GroupSpec
        raise AttributeError(f"module 'interlace' has no attribute {name!r}")


__all__ = [
    "AbortedError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "Group",
    "GroupSpec",
    "HookedOp",
    "InterlaceError",
    "KernelAssertionError",
    "LayerNorm",
    "MemoryAccessError",
    "P2POp",
    "PeerDiedError",
    "PlaceUnavailableError",
    "RMSNorm",
    "RankError",
    "ReduceOp",
    "Scaled",
    "StoreGoneError",
    "Work",
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_grouped_matmul",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_matmul",
    "all_gather_object",
    "all_gather_single",
    "all_gather_v",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_norm",
    "all_to_all",
    "all_to_all_grouped_matmul",
    "all_to_all_single",
    "all_to_all_v",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "check_numerics",
    "configured",
    "device",
    "distributed_decode",
    "gather",
    "gather_object",
    "gather_v",
    "get_rank",
    "get_world_size",
    "grouped_matmul_combine",
    "init",
    "irecv",
    "isend",
    "launched",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "quantize",
    "rebuild",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_norm",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_v",
    "run",
    "scatter",
    "scatter_object_list",
    "scatter_v",
    "send",
    "send_object_list",
    "shrink",
    "shutdown",
    "split_group",
    "symmetric_memory",
    "take_over_symm_mem",
    "timeout",
    "trace",
]
