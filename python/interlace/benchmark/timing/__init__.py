"""Time: how it is taken, of which sizes and inputs, and the figures made of it."""
