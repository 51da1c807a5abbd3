"""Plain collectives: one file per way of doing them."""
