"""The processes of one host: joining, waiting, shared memory, the end of a process, the flight recorder."""
