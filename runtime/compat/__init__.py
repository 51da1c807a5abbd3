"""Internals of torch and Triton: what is taken from each, and what differs by release."""
