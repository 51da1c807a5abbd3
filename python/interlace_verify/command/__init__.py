"""``python -m interlace verify``."""
