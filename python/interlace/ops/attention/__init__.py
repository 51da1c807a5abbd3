"""Attention over keys that other ranks have, decoding, and the exchange of heads."""
