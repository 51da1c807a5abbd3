"""Numbers: reductions over ranks, activations, float formats as bits."""
