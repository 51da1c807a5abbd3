"""Device meshes: collectives along a dimension, costs, parallel styles."""
