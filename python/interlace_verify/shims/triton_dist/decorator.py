"""The module ``triton_dist.jit``. The package's function of that name hides it."""

from typing import Any

import triton.language as tl
from triton import constexpr_function, jit

from interlace_verify.shims.triton_dist import missing

__all__ = ["jit"]
__getattr__ = missing.of("triton_dist.jit")

_language: Any = tl
if not hasattr(_language, "constexpr_function"):  # the package's own Triton has it
    _language.constexpr_function = constexpr_function
