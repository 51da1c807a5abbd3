"""Every operation of the published table, for every dtype and reduce op that it says; and the table."""

import pathlib

import pytest

import interlace
from cases import api_cases, support_table
from cases.api_cases import FEW
from cases.support_table import ANY, REDUCED
from tiers import few

DOCUMENT = pathlib.Path(__file__).parents[3] / "docs" / "collectives.md"
MOVING = [each.name for each in support_table.OPERATIONS if each.payload == ANY]
REDUCING = [each.name for each in support_table.OPERATIONS if each.payload == REDUCED]
OTHERS = [name for name in REDUCING if name not in ("reduce_scatter", "all_reduce_coalesced")]


def _on_others(name: str) -> None:
    for world, async_ops in ((1, (False, True)), (2, (True,)), (4, (True,))):
        interlace.run(api_cases.serve, world, name, FEW, *async_ops, seed=world)


@pytest.mark.parametrize(
    "name", few(MOVING, "broadcast", "gather_v", "scatter", "all_to_all_v", "isend")
)
def test_every_dtype_is_moved(name: str) -> None:
    """All dtypes on 3 ranks, a few on other numbers of ranks."""
    assert min(interlace.run(api_cases.serve, 3, name, support_table.MOVED_DTYPES, False)) > 20
    _on_others(name)


@pytest.mark.parametrize("name", few(REDUCING, *OTHERS))
def test_every_op_reduces_every_dtype(name: str) -> None:
    """All dtypes on 3 ranks; the coalesced forms are made of the others."""
    dtypes = FEW if name.endswith("coalesced") else support_table.REDUCED_DTYPES
    assert min(interlace.run(api_cases.serve, 3, name, dtypes, False)) >= (
        18 if dtypes is FEW else 100
    )
    _on_others(name)


def test_every_function_is_in_the_table() -> None:
    """And the other way round: what the table lists is public."""
    listed = {each.name for each in support_table.OPERATIONS}
    aliases = {
        "all_gather_into_tensor", "all_gather_single", "_all_gather_base", "reduce_scatter_tensor",
        "reduce_scatter_single", "_reduce_scatter_base",
    }  # fmt: skip
    starts = ("all_", "reduce", "gather", "scatter", "broadcast", "send", "recv", "isend", "irecv")
    public = {name for name in interlace.__all__ if name.startswith(starts)} - aliases
    fused = {name for name in public if name.endswith(("matmul", "_norm"))}
    assert public - fused <= listed
    assert listed <= set(interlace.__all__)


@pytest.mark.parametrize("table", [support_table.operation_table, support_table.reduce_table])
def test_the_document_has_the_tables(table: object) -> None:
    """After a change: python tests/cases/support_table.py, and paste."""
    assert callable(table) and table() in DOCUMENT.read_text()
