"""PTX: its text, its types, and what its instructions compute and do; one file per kind."""
