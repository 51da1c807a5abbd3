"""Mutants of the reductions whose rows are normed."""

from mutants.mutations import Case, mutant_of

_ROWS, _SIGNAL = "kernels/matmul/row_norms.py", "kernels/signal.py"
_LOW = "kernels/matmul/row_norms.py"
_SCATTER, _ALL = "matmul_reduce_scatter_norm fused", "reduce_scatter_norm fused"
_STORE = "        store_normed(workspace, norm, gathered, output_ptr, first_row, slice_m"
_PUBLISH = (
    "            if free:\n                publish_slice(workspace, gathered, slice_m, epoch)\n"
)

CASES = [
    Case(mutant_of(_ROWS, "rows summed when their first tile has come",
     ("valid = source < workspace.world_size", "valid = (source < workspace.world_size) & (tile_n == 0)")),
     "races", _SCATTER),
    Case(mutant_of(_ROWS, "rows of the first rank alone waited for", ("valid = source < workspace.world_size",
     "valid = source < 1")), "races", _SCATTER),
    Case(mutant_of(_ROWS, "slice published before its rows", (_PUBLISH, "            pass\n"), (_STORE,
     f'        if TAIL.GATHER != "":\n{_PUBLISH}{_STORE}')), "races", _ALL),
    Case(mutant_of(_ROWS, "one slot for all slices", ("rank * gathered.slices + slice_m",
     "rank * gathered.slices")), "schedules", _ALL),
    Case(mutant_of(_ROWS, "rows collected unasked", ("            wait(workspace, owner, workspace",
     "            (workspace, owner, workspace")), "races", _ALL),
    Case(mutant_of(_ROWS, "the first slice of several waited for", ("range(first, min(first + SLICES, slices))",
     "range(first, first + 1)")), "races", _ALL),
    Case(mutant_of(_SIGNAL, "slots looked at relaxed", ('nothing, mask=valid, sem="acquire"',
     'nothing, mask=valid, sem="relaxed"')), "races", _SCATTER),
    Case(mutant_of(_LOW, "all blocks of a row in the same words", ("row * blocks + number", "row")),
     "schedules", "all_reduce_norm low_latency"),
]  # fmt: skip
