"""The start of a group: joining through a store, GPUs, the pool of worker processes.

The only folder that names every place.
"""
