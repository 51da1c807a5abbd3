"""A model of time on GPUs that are not here: ``benchmarks/predict.py`` prints what it predicts."""
