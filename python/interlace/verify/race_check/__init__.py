"""Accesses that nothing orders, by vector clocks."""
