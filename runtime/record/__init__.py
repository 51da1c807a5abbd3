"""The flight recorder: the last ops of every rank of a host, in memory that outlives its process."""
