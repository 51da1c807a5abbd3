"""The targets and jobs of ``interlace verify``, see docs/how-to/check/tests-and-ci.md."""
