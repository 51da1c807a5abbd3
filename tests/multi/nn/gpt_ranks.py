"""Ranks of test_tiny_gpt.py: the example's training, which is not on their path."""

import pathlib
import sys
from typing import Any

EXAMPLES = str(pathlib.Path(__file__).parents[3] / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)


def train(*arguments: Any) -> dict[int, float]:
    import train_tiny_gpt

    return train_tiny_gpt.train(*arguments)


def train_without_moments(*arguments: Any) -> dict[int, float]:
    """As if the optimizer were new when the training resumes."""
    from unittest import mock

    import train_tiny_gpt

    nothing = {"sharded_optimizer_state_dict": mock.Mock(return_value={})}
    with mock.patch.multiple(train_tiny_gpt.nn, **nothing, load_optimizer_state_dict=mock.DEFAULT):
        return train_tiny_gpt.train(*arguments)
