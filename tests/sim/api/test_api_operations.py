"""Every operation of the published table, for every dtype and reduce op that it says; and the table."""

import pathlib

import pytest
import torch

import interlace
from cases import api_cases, support_table
from cases.api_cases import FEW
from cases.support_table import ANY, REDUCED
from interlace import functional
from interlace.runtime.core.memory import bytes_of, contiguous
from ranks import ranks
from tiers import few

DOCUMENT = pathlib.Path(__file__).parents[3] / "docs/reference/collectives.md"
MOVING = [each.name for each in support_table.OPERATIONS if each.payload == ANY]
MOVING = [name for name in MOVING if name not in ("recv", "irecv")]  # they are tested with sends
REDUCING = [each.name for each in support_table.OPERATIONS if each.payload == REDUCED]
OTHERS = [name for name in REDUCING if name not in ("reduce_scatter", "all_reduce_coalesced")]


def _on_others(name: str) -> None:
    for world, async_ops in ((1, (False, True)), (2, (True,)), (4, (True,))):
        interlace.run(api_cases.serve, world, name, FEW, *async_ops, seed=world)


@pytest.mark.parametrize(
    "name", few(MOVING, "broadcast", "gather_v", "scatter", "all_to_all_v", "isend")
)
def test_every_dtype_is_moved(name: str) -> None:
    assert min(interlace.run(api_cases.serve, 3, name, support_table.MOVED_DTYPES, False)) > 20
    _on_others(name)


def _move_transposed(dtype: torch.dtype) -> None:
    rank = interlace.get_rank()

    def of(number: int) -> torch.Tensor:
        return (
            torch.full((6 * dtype.itemsize,), number, dtype=torch.uint8).view(dtype).view(3, 2).t()
        )

    def numbers(tensor: torch.Tensor) -> set[int]:
        return set(bytes_of(contiguous(tensor)).tolist())

    tensor, parts = of(rank), [of(1), of(1)]
    interlace.broadcast(tensor, 1)
    assert numbers(tensor) == {1}
    interlace.all_gather(parts, of(rank))
    assert [numbers(part) for part in parts] == [{0}, {1}]
    interlace.all_to_all(parts, parts[::-1])  # read before it is written
    assert [numbers(part) for part in parts] == [{1 - rank}] * 2
    interlace.scatter(tensor, [of(1), of(0)] if rank == 0 else None, 0)
    assert numbers(tensor) == {1 - rank}
    interlace.gather(tensor, parts if rank == 0 else None, 0)
    assert rank or [numbers(part) for part in parts] == [{1}, {0}]
    interlace.send(of(1), 1) if rank == 0 else interlace.recv(tensor, 0)
    assert numbers(tensor) == {1}
    for result, expected in (
        (functional.all_gather(of(rank), 1), {0, 1}),
        (functional.all_to_all(of(rank)), {0, 1}),
        (functional.broadcast(of(rank), 0), {0}),
        (functional.permute(of(rank), [1, 0]), {1 - rank}),
        (functional.gather(of(rank), 0, 1), {0} if rank else {0, 1}),
        (functional.scatter(of(rank), 1), {1}),
    ):
        assert numbers(functional.wait(result)) == expected


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(
    "dtype", few(support_table.MOVED_DTYPES, *FEW, torch.bfloat16, torch.complex128), ids=str
)
def test_what_is_not_contiguous_is_moved(dtype: torch.dtype) -> None:
    interlace.run(_move_transposed, 2, dtype)


@ranks(2, place="sim")
def test_what_is_lazily_conjugated_or_negated_is_moved_as_it_reads() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    for lazy in (x.conj(), x.conj().imag):
        plain = lazy.resolve_conj().resolve_neg()
        for result, expected in (
            (functional.all_reduce(lazy), 2 * plain),
            (functional.all_gather(lazy), torch.cat([plain, plain])),
            (functional.broadcast(lazy, 0), plain),
        ):
            assert torch.equal(functional.wait(result), expected)


@pytest.mark.parametrize("name", few(REDUCING, *OTHERS))
def test_every_op_reduces_every_dtype(name: str) -> None:
    dtypes = FEW if name.endswith("coalesced") else support_table.REDUCED_DTYPES
    assert min(interlace.run(api_cases.serve, 3, name, dtypes, False)) >= (
        18 if dtypes is FEW else 100
    )
    _on_others(name)


def test_every_function_is_in_the_table() -> None:
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
    """After a change run python tests/cases/support_table.py and paste its output."""
    assert callable(table) and table() in DOCUMENT.read_text()
