"""``interlace verify``: targets and jobs."""
