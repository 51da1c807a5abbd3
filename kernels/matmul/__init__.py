"""Kernels of matmuls that gather their input or reduce their output over ranks.

A user's kernel takes the product of a tile from here; it stands in ``products.py``, for all families.
"""

from interlace.kernels.products import (
    add_product as add_product,
    columns_operand as columns_operand,
    multiply_tile as multiply_tile,
    part_of_rows as part_of_rows,
    rows_operand as rows_operand,
    tile_offsets as tile_offsets,
)
