"""Run many interleavings of one function, and shorten the first that fails."""
