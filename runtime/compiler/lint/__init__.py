"""Rules over the text of compiled kernels (Triton IR, PTX, SASS), see docs/reference/lint.md."""
