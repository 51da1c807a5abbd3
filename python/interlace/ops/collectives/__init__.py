"""Plain collectives: what users call, the engine of streams, and how kernels are launched."""
