"""The machine that runs the PTX of a whole kernel: threads of a program, warps, shared memory."""
