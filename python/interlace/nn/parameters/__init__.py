"""Parameters that are parts of unsharded ones: sharding, modules, state dicts, optimizer state."""
