"""Choice of algorithm, tiles and chunks: table, caches, calibrations, cost model."""
