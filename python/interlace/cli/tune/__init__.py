"""``interlace tune``."""
