"""``interlace bench``."""
