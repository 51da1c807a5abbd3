"""The pytest plugin. It imports interlace, and so torch, only if a test uses it.

See docs/how-to/check/tests-and-ci.md.
"""
