"""Mutants of block-scaled operands: values and scales that do not belong together, or do not come together."""

from mutants.mutations import Case, Mutant, mutant_of

_SCALES, _TRANSFER = "kernels/block_scales.py", "kernels/transfer.py"
_GATHER, _SCATTER = (
    "block_scaled_all_gather_matmul fused",
    "block_scaled_matmul_reduce_scatter fused",
)
_COPY = """\
                copy_chunk(to_ptr, from_ptr, input.stride, rows, columns,
                           COPIES.COPY_ROWS, COPIES.COPY_COLUMNS)  # fmt: skip
"""
_PUBLISH = (
    "            publish(peer_pointer(workspace, peer, workspace.slot_offset + slot * 8), epoch)\n"
)


def _copies(between: str, to: str) -> str:
    """Return the two copies of packed rows in mxfp8: the values, and the scales, which go to ``to``."""
    return f"""\
                values = columns // 132 * 128
                copy_rows(to_ptr, columns, from_ptr, input.stride, rows, values,
                          COPIES.COPY_ROWS, COPIES.COPY_COLUMNS)
{between}\
                copy_rows({to} + values, columns, from_ptr + values, input.stride, rows,
                          columns - values, COPIES.COPY_ROWS, COPIES.COPY_COLUMNS)
"""


def _sent(name: str, to: str) -> Mutant:
    return mutant_of(_TRANSFER, name, (_COPY, _copies("", to)))


CASES = [
    Case(mutant_of(_SCALES, "scales of the first 128 numbers for all", ("passed = SCALES", "passed = 0")),
     "schedules", _SCATTER),
    Case(mutant_of(_SCALES, "scales of the next block", ("offs_scale = tl.arange(0, SCALES)",
     "offs_scale = (tl.arange(0, SCALES) + 1) % SCALES")), "schedules", _SCATTER),
    Case(mutant_of(_SCALES, "scales of the first row for all", ("a_scales = (a_rows + value_bytes)",
     "a_scales = (a_ptr + offs_m * 0 + value_bytes)")), "schedules", _GATHER),
    Case(mutant_of(_SCALES, "columns of nvfp4 without their whole", ("other=0.0)[None, :]",
     "other=0.0)[None, :] * 0 + 1")), "schedules", _SCATTER),
    Case(mutant_of(_TRANSFER, "signal before the scales",
     (_COPY, _copies(f"    {_PUBLISH}", "to_ptr")), (f"rows, 128)\n{_PUBLISH}", "rows, 128)\n")),
     "races", _GATHER),
    Case(_sent("scales sent to another rank", "data_pointer(workspace, (peer + 1) % workspace.world_size, "
     "input.ptr) + gathered_row * columns"), "races", _GATHER),
    Case(_sent("scales of all ranks in the rows of the first", "data_pointer(workspace, peer, input.ptr)"),
     "races", _GATHER),
]  # fmt: skip
