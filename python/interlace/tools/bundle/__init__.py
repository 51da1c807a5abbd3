"""One op ahead of time: kernels, formulas and contracts in a manifest."""
