"""The linear functions on ranks that are processes, where torch runs every rank's backward by itself."""

import torch

import interlace
from cases import linear_cases


def test_values_and_gradients() -> None:
    interlace.run(every_case, 2, place="shm")


def every_case() -> None:
    for sharded in (True, False):
        linear_cases.column_case(torch.float32, 3, 1, 3, True, sharded)
        linear_cases.row_case(torch.float32, 3, 1, True, sharded)
    linear_cases.autocast()


def test_layers_side_by_side() -> None:
    interlace.run(linear_cases.side_by_side, 2, place="shm")
