"""Lint requests of launches that were seen: the signatures that Triton would compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton.runtime.jit import mangle_type

from interlace.runtime.core.launch import KernelLaunch
from interlace.verify.lint_check.check import LintRequest

ALIGNMENT = 16
ANY_ARCH = 90


def lint_request(launch: KernelLaunch, arch: int, ignore: Sequence[str] = ()) -> LintRequest:
    """Lint what ``launch`` runs, for ``arch``, with its types, alignments and constants.

    Raises TypeError for an argument that lint has no type for.
    """
    annotations = launch.kernel.fn.__annotations__
    options = getattr(launch.kernel, "kwargs", {})  # of @triton.jit
    unspecialised = options.get("do_not_specialize") or ()
    names = list(launch.arguments)
    fixed = {names[each] if isinstance(each, int) else each for each in unspecialised}
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    divisible = []
    for name, value in launch.arguments.items():
        if "constexpr" in str(annotations.get(name, "")) or value is None:
            constexprs[name] = value
            continue
        if type(value) is int and value == 1 and name not in fixed:
            constexprs[name] = 1  # Triton compiles the number 1 in
            continue
        signature[name] = str(mangle_type(value))
        size = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if type(size) is int and size % ALIGNMENT == 0 and name not in fixed:
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


def specialisation(launch: KernelLaunch) -> str:
    """Equal for launches that Triton compiles to the same code."""
    try:
        request = lint_request(launch, ANY_ARCH)
    except TypeError as error:  # an argument without a type for lint, which says so later
        return f"{launch.kernel.fn.__module__}.{launch.name}: {error}"
    parts = (request.signature, request.constexprs, request.divisible)
    compiled = (*parts, request.num_warps, request.num_stages)
    return f"{launch.kernel.fn.__module__}.{launch.name}: {compiled!r}"
