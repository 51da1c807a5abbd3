"""PTX: its text, its types, and the effects of its instructions, with one file per kind."""
