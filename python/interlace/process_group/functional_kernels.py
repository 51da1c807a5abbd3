"""CPU kernels of two ``_c10d_functional`` ops that torch's own serve for C++ backends only.

``all_gather_into_tensor_out`` and ``batch_p2p_ops`` ask the group for the C++ backend of a device, which
a group in Python does not have (torch 2.13). These ask the group itself, whatever it is, so groups of other
backends in the same process go on as before.
"""

from typing import Any

import torch

from interlace.runtime.compat.torch_groups import ProcessGroup, _register_work, resolve

_Library: Any = torch.library.Library
_library: Any = None


def register() -> None:
    """Register the kernels, once per process."""
    global _library
    if _library is None:
        _library = _Library("_c10d_functional", "IMPL")
        for name, kernel in (
            ("all_gather_into_tensor_out", _all_gather_into_tensor_out),
            ("batch_p2p_ops", _batch_p2p_ops),
        ):
            if hasattr(torch.ops._c10d_functional, name):
                _library.impl(name, kernel, "CPU")


def _group(name_or_group: Any) -> Any:
    """The process group itself; ops may be given its name, or the object that C++ made of it."""
    if isinstance(name_or_group, str):
        return resolve(name_or_group)
    if isinstance(name_or_group, torch._C.ScriptObject):
        return ProcessGroup.unbox(name_or_group)
    return name_or_group


def _all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    group = _group(group_name)
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    _register_work(out, gather(out, input))
    return out


def _batch_p2p_ops(
    op_list: list[str],
    peer_list: list[int],
    tag_list: list[int],
    tensors: list[torch.Tensor],
    group_name: Any,
) -> list[torch.Tensor]:
    """For every op its tensor, which is complete after ``wait_tensor``; for sends an empty one."""
    group, results = _group(group_name), []
    for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
        if op == "isend":
            result, work = tensor.new_empty(0), group.send([tensor], peer, tag)
        else:
            result, work = tensor, group.recv([tensor], peer, tag)
        _register_work(result, work)
        results.append(result)
    return results
