"""What torch keeps per thread, kept per task: ranks of a simulation share a thread, but not its modes.

A rank that gives way inside ``torch.no_grad()``, or while an AsyncTensor waits within torch's dispatcher,
would leave its grad mode and its excluded dispatch keys to the rank that goes on, and in the end to the
caller, whose tensors would have no gradients any more.
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.runtime.task import Task

_C: Any = torch._C


def switch(task: Task) -> None:
    """Let ``task`` go on as it was; afterwards torch is as it was before."""
    grad_enabled = torch.is_grad_enabled()
    keys, own_grad_enabled = task.torch_state or (_keys(), grad_enabled)
    with _C._ForceDispatchKeyGuard(*keys):
        _C._set_grad_enabled(own_grad_enabled)
        try:
            task.greenlet.switch()
        finally:
            task.torch_state = (_keys(), torch.is_grad_enabled())
            _C._set_grad_enabled(grad_enabled)


def _keys() -> tuple[Any, Any]:
    return _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
