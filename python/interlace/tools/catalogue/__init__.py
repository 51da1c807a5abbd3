"""The catalogue of all kernels, compiled for a GPU that need not be here, and bundles of them."""
