"""Places: how ranks exist, and how they reach each other's memory; and how groups of them start."""
