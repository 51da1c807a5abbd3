"""The plugin for pytest, which imports interlace, and so torch, only when a test asks for it."""
