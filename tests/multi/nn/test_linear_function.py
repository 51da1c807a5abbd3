"""The linear functions on ranks that are processes, where torch runs every rank's backward by itself."""

import torch

from cases import linear_cases
from ranks import ranks


@ranks()
def test_values_and_gradients() -> None:
    for sharded in (True, False):
        linear_cases.column_case(torch.float32, 3, 1, 3, True, sharded)
        linear_cases.row_case(torch.float32, 3, 1, True, sharded)
    linear_cases.autocast()
    linear_cases.side_by_side()
