"""Pictures of docs/images that follow from the code, one function each; ``docs/draw.py`` writes them."""
