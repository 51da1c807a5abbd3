"""From a caller's arguments to what the runtime takes: checks, dense tensors, forms, reduce ops, roots."""
