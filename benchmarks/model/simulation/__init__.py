"""Discrete-event simulation: machines, links, SMs, and the algorithms that run on them."""
