"""``interlace demo``."""
