"""Triton's interpreter as a library: one patched session, exact bf16 and fp8, shortcuts."""
