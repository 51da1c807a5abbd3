"""The machine that runs the PTX of a whole kernel: threads, warps, memory. See docs/how-to/check/ptx.md."""
