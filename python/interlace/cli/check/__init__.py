"""``python -m interlace check``: every kernel of the catalogue on real inputs, against float64."""
