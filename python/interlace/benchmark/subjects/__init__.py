"""The measured ops: each through interlace, torch and gloo."""
