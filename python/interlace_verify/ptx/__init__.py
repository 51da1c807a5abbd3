"""PTX: its text, its types, the effects of its instructions. See docs/how-to/check/ptx.md."""
