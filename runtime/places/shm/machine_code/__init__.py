"""Lists of steps, run by machine code for this processor. Knows nothing of collectives."""
