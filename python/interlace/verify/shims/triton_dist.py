"""``triton_dist`` on a CPU: the decorator, as its device functions need no compiler of their own here."""

from triton import jit

__all__ = ["jit"]
