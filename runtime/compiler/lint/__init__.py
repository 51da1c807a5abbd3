"""Rules over the text of compiled kernels: parsers of Triton IR, PTX and SASS."""
