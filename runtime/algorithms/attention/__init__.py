"""Attention over a sequence that is spread over ranks: who has what, how keys travel, what is computed."""
