"""Lint requests of launches that were seen: the signatures that Triton would compile."""

from __future__ import annotations

from collections.abc import Sequence

from interlace.runtime.core.kernel_arguments import specialised
from interlace.runtime.core.launch import KernelLaunch
from interlace.verify.lint_check.check import LintRequest

ANY_ARCH = 90


def lint_request(launch: KernelLaunch, arch: int, ignore: Sequence[str] = ()) -> LintRequest:
    """Lint what ``launch`` runs, for ``arch``, with its types, alignments and constants.

    Raises TypeError for an argument that lint has no type for.
    """
    types, constexprs, divisible = specialised(launch.kernel, launch.arguments)
    return LintRequest(
        launch.kernel,
        types,
        constexprs,
        arch,
        divisible,
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
