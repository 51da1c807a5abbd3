"""Prepare a caller's arguments for the runtime: checks, dense tensors, forms, reduce ops, roots."""
