"""The ops when they run: start the collective; what it fills, and what to wait for."""
