"""The launch side of every kernel algorithm: workspace, tables, grid, launches."""
