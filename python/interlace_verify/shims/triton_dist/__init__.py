"""``triton_dist`` on a CPU: only the decorator, because its device functions need no special compiler here.

``import`` looks for modules without a shim, such as ``triton_dist.kernels``, in the real package, if it is
installed.
"""

from interlace_verify.shims.triton_dist import tune
from interlace_verify.shims.triton_dist.decorator import jit

__all__ = ["jit", "tune"]
