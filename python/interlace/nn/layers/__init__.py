"""The layers: linear, QKV, MLP, norms, embedding, cross entropy."""
