"""Torch's state of a thread, kept per task: ranks of a simulation share a thread, but not its modes.

A rank that gives way inside ``torch.no_grad()`` or ``torch.inference_mode()``, or while an AsyncTensor
waits within torch's dispatcher, would leave its modes and its excluded dispatch keys to the rank that
goes on, and in the end to the caller, whose tensors would have no gradients any more. So would one that
gives way under hooks on saved tensors, as torch.utils.checkpoint sets them: others would save their tensors
in its checkpoint.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from interlace.runtime.scheduler.task import Task

_C: Any = torch._C


def switch(task: Task, *, ended_by: type[BaseException] | None = None) -> None:
    """Let ``task`` go on as it was, or end; afterwards torch is as it was before.

    Also one that ends needs its hooks: torch crashes where it takes away one that is not there.
    """
    resume = task.greenlet.switch
    if ended_by is not None:
        resume = functools.partial(task.greenlet.throw, ended_by)
    if task.program is not None:  # kernels have no use for torch's state
        resume()
        return
    before = _take_state()
    keys, grad_enabled, hooks, inference = task.torch_state or before
    with _C._InferenceMode(inference), _C._ForceDispatchKeyGuard(*keys):
        _C._set_grad_enabled(grad_enabled)
        _put_hooks(hooks)
        try:
            resume()
        finally:
            task.torch_state = _take_state()
            _, grad_enabled, hooks, _ = before
            _put_hooks(hooks)
            _C._set_grad_enabled(grad_enabled)


def _take_state() -> tuple[Any, bool, list[Any], bool]:
    """(dispatch keys, whether gradients are on, hooks, inference mode); the hooks are gone afterwards."""
    keys = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    hooks = _taken_hooks()
    return keys, torch.is_grad_enabled(), hooks, torch.is_inference_mode_enabled()


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
