"""Places: where ranks live, how they reach each other's memory, and how groups of them start."""
