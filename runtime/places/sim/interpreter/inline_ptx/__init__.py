"""Inline PTX for the interpreter: operands of an asm text, and the threads that run it."""
