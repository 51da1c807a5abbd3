"""Places: how ranks exist, and how they reach each other's memory."""
