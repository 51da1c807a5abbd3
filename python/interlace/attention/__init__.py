"""Attention over a sequence that is spread over ranks: checks, agreement, and the choice of a method."""
