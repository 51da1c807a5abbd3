"""Run many interleavings, and shorten the first that fails. See docs/how-to/check/schedules.md."""
