"""``python -m interlace verify``, see docs/how-to/check/tests-and-ci.md."""
