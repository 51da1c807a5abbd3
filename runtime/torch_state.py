"""What torch keeps per thread, kept per task: ranks of a simulation share a thread, but not its modes.

A rank that gives way inside ``torch.no_grad()``, or while an AsyncTensor waits within torch's dispatcher,
would leave its grad mode and its excluded dispatch keys to the rank that goes on, and in the end to the
caller, whose tensors would have no gradients any more. So would one that gives way under hooks on saved
tensors, as torch.utils.checkpoint sets them: others would save their tensors in its checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.runtime.task import Task

_C: Any = torch._C


def switch(task: Task) -> None:
    """Let ``task`` go on as it was; afterwards torch is as it was before."""
    grad_enabled = torch.is_grad_enabled()
    hooks = _taken_hooks()
    keys, own_grad_enabled, own_hooks = task.torch_state or (_keys(), grad_enabled, hooks)
    with _C._ForceDispatchKeyGuard(*keys):
        _C._set_grad_enabled(own_grad_enabled)
        _put_hooks(own_hooks)
        try:
            task.greenlet.switch()
        finally:
            task.torch_state = (_keys(), torch.is_grad_enabled(), _taken_hooks())
            _put_hooks(hooks)
            _C._set_grad_enabled(grad_enabled)


def _taken_hooks() -> list[Any]:
    """The hooks on saved tensors, the innermost last; there are none afterwards."""
    found: list[Any] = []
    while (pair := _C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.insert(0, pair)
        _C._autograd._pop_saved_tensors_default_hooks()
    return found


def _put_hooks(hooks: list[Any]) -> None:
    for pack, unpack in hooks:
        _C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _keys() -> tuple[Any, Any]:
    return _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
