"""``triton_dist`` on a CPU: the decorator, as its device functions need no compiler of their own here.

``import`` finds what nothing here stands for, as ``triton_dist.kernels``, in the real package, if there is
one.
"""

from interlace_verify.shims.triton_dist import tune
from interlace_verify.shims.triton_dist.decorator import jit

__all__ = ["jit", "tune"]
