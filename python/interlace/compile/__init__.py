"""torch.compile with interlace: the backend, the fusion pass, and what it did and why."""
