"""Many interleavings of one function, and the shortest that fails."""
