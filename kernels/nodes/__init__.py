"""Collectives and fused ops between nodes, where memory is reached by puts."""
