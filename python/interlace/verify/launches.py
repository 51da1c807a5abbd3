"""From a launch that was seen to a lint of its kernel: the signature that Triton would compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton.runtime.jit import mangle_type

from interlace.runtime.launch import KernelLaunch
from interlace.verify.lint_check import LintRequest

ALIGNMENT = 16


def lint_request(launch: KernelLaunch, arch: int, ignore: Sequence[str] = ()) -> LintRequest:
    """Lint what ``launch`` runs, for ``arch``, with its types, alignments and constants.

    Raises TypeError for an argument that lint has no type for.
    """
    annotations = launch.kernel.fn.__annotations__
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    divisible = []
    for name, value in launch.arguments.items():
        if "constexpr" in str(annotations.get(name, "")) or value is None:
            constexprs[name] = value
            continue
        signature[name] = str(mangle_type(value))
        size = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(size, int) and not isinstance(value, bool) and size % ALIGNMENT == 0:
            divisible.append(name)
    return LintRequest(
        launch.kernel,
        signature,
        constexprs,
        arch,
        tuple(divisible),
        launch.num_warps,
        launch.num_stages,
        tuple(ignore),
    )
