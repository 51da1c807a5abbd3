"""Tools for who builds on interlace."""
