"""Interpreted programs, streams and host code as coroutines, switched, observed and recorded."""
