"""The targets and jobs of ``interlace verify``."""
