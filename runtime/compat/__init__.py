"""All that hangs on internals of torch and Triton: what is taken from each, and what differs by release."""
