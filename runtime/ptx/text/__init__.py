"""PTX as text: what a module declares, and the instructions of a kernel with what it calls."""
