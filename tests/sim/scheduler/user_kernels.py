"""A kernel that is not interlace's, for test_user_code.py."""

import triton
import triton.language as tl


@triton.jit
def add_program_id(x_ptr, n, BLOCK: tl.constexpr):
    """Add the program's number to its block; reads the number on both sides of a load."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(x_ptr + offsets, values + tl.program_id(0), mask=offsets < n)
