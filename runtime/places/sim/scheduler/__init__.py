"""Interpreted programs, streams and user code as coroutines, switched, observed and recorded."""
