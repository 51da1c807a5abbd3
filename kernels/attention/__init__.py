"""Attention over a sequence that is spread over ranks: forward, backward, decode."""
