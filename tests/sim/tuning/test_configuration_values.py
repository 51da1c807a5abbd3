"""Values of a configuration's fields: refused before anything runs, wherever they come from."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy
import pytest
import torch

import interlace
from interlace.runtime.core.context import current
from interlace.runtime.tuning import table
from interlace.runtime.tuning.configuration import Configuration, check_values, gpu_default
from interlace.runtime.tuning.table import GROUPED, INTERPRETED, SHAPES, TILES
from ranks import ranks

FIELDS = asdict(Configuration())
NUMBERS = [name for name, value in FIELDS.items() if type(value) is int]
BOOLS = [name for name, value in FIELDS.items() if type(value) is bool]
POWERS = [name for name in NUMBERS if name.startswith(("block_", "copy_"))]
SMALLEST = {
    "block_m": 16, "block_n": 16, "block_k": 16, "group_m": 1, "num_warps": 1, "num_stages": 1,
    "copiers": 0, "copy_rows": 1, "copy_columns": 16, "chunks": 1, "programs": 0, "block_elements": 1,
    "epilogue_subtile": 1,
}  # fmt: skip

WRONG: list[tuple[str, Any, type[Exception]]] = [
    *[(name, value, TypeError) for name in NUMBERS for value in ("64", 64.0, None, [1], True)],
    *[(name, numpy.int64(16), TypeError) for name in NUMBERS],
    *[(name, value, TypeError) for name in BOOLS for value in (1, 0, "yes", None)],
    *[(name, SMALLEST[name] - 1, ValueError) for name in NUMBERS],
    *[(name, value, ValueError) for name in NUMBERS for value in (-512, 1 << 40)],
    *[(name, 48, ValueError) for name in POWERS],
    *[("num_warps", value, ValueError) for value in (3, 32)],
    *[("epilogue_subtile", value, ValueError) for value in (3, 8)],
]


def test_all_fields_are_here() -> None:
    assert set(NUMBERS) == set(SMALLEST) and set(NUMBERS) | set(BOOLS) == set(FIELDS)


@pytest.mark.parametrize(("name", "value", "error"), WRONG)
def test_a_value_that_cannot_be_is_named(name: str, value: Any, error: type[Exception]) -> None:
    entered = False
    with pytest.raises(error) as said:  # noqa: SIM117 - of entering, not of what is in it
        with interlace.configured(**{name: value}):
            entered = True
    assert not entered and current().overrides == ()
    text = str(said.value)
    assert text.startswith(f"{name} is {value!r}") and "must be" in text


def test_a_generator_s_block_may_end_within_another() -> None:
    def configured() -> Iterator[None]:
        with interlace.configured(block_m=64):
            yield

    generator = configured()
    next(generator)
    with interlace.timeout(5):
        assert current().overrides == (("block_m", 64),)
        assert next(generator, None) is None
        assert (current().overrides, current().bound_seconds) == ((), 5)
    assert (current().overrides, current().bound_seconds) == ((), None)


def test_a_name_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"'block_q' is no field .* block_m, block_n"):
        check_values({"block_q": 16})


@pytest.mark.parametrize("op", ["all_reduce", "all_gather_matmul"])
@ranks(2, place="sim")
def test_nothing_moves_with_a_value_that_cannot_be(op: str) -> None:
    x, said = torch.ones(4, 16), r"chunks is -1; it must be within 1\.\."
    with pytest.raises(ValueError, match=said), interlace.configured(chunks=-1):
        if op == "all_reduce":
            interlace.all_reduce(x)
        else:
            interlace.all_gather_matmul(x, x.T)
    assert torch.equal(x, torch.ones(4, 16))


@pytest.mark.parametrize("name", NUMBERS)
@ranks(2, place="sim")
def test_the_smallest_value_is_right(name: str) -> None:
    x, w = torch.ones(5, 19) * (interlace.get_rank() + 1), torch.ones(19, 33)
    summed = torch.ones(50)
    with interlace.configured(**{name: SMALLEST[name]}):
        gathered = interlace.all_gather_matmul(x, w, algorithm="fused")
        scattered = interlace.matmul_reduce_scatter(torch.ones(4, 19), w, algorithm="fused")
        interlace.all_reduce(summed, algorithm="kernel")
    expected = torch.tensor([19.0, 38.0]).repeat_interleave(5)[:, None].expand(10, 33)
    assert gathered.eq(expected).all() and scattered.eq(38).all() and summed.eq(2).all()


def test_the_table_has_only_values_that_can_be() -> None:
    for row in (*TILES, *SHAPES):
        check_values(row.values)
    for values in (*GROUPED.values(), table.SENDING, table.SENDING_FP32):
        check_values(values)
    check_values(table.INTERPRETED_VALUES)
    for name, bounds in INTERPRETED.items():
        for value in bounds:
            check_values({name: value})
    check_values(FIELDS)


def test_a_part_of_a_tile_has_columns_enough() -> None:
    """An override of one field may not make another field impossible."""
    made = replace(gpu_default(100, torch.bfloat16, 4096), block_n=16)
    assert made.epilogue_subtile == 4 and made.stored_parts == 1
    assert replace(made, block_n=32).stored_parts == 2
    assert replace(made, block_n=256).stored_parts == 4


def test_an_activation_has_few_numbers_alive() -> None:
    made = gpu_default(90, torch.bfloat16, 4096)
    assert (made.stored_parts, made.activated_parts) == (1, 4)
    assert replace(made, block_n=128).activated_parts == 2
    assert replace(made, block_n=128, num_warps=4).activated_parts == 4
    assert replace(made, block_m=16, block_n=16).activated_parts == 1
    assert gpu_default(90, torch.float32, 4096).activated_parts == 1
