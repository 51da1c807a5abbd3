"""Tables of ``python benchmarks/run.py``, as they are printed."""

import io
from typing import Any

import pytest
from rich.console import Console

from sim.benchmark.model_support import module


@pytest.fixture
def runner() -> Any:
    return module("run")


@pytest.fixture
def wide(runner: Any) -> Any:
    times = {"gloo": 123456.0, "interlace": 104851.0, "copy_": 99999.0, "streamed copy": 87654.0}
    times["OpenMPI"] = 54321.0
    shape = {"bytes": 1 << 30, "dtype": "float32"}
    return runner.Measurement("all_reduce", 2, shape, "gloo", times, 3)


def test_a_table_in_a_pipe_is_whole(runner: Any, wide: Any) -> None:
    out = io.StringIO()
    runner.show(Console(file=out, width=80), [wide])
    printed = out.getvalue()
    assert max(map(len, printed.splitlines())) > 80
    cells = [
        f"{wide.microseconds[name]:,.0f} ({wide.ratio(name):.2f})" for name in wide.microseconds
    ]
    for text in [*cells[1:], *wide.microseconds, "10.24", "1073741824"]:
        assert text in printed
    assert "\u2026" not in printed


def test_control_on_a_terminal_a_table_is_as_wide_as_that(runner: Any, wide: Any) -> None:
    out = io.StringIO()
    runner.show(Console(file=out, width=80, force_terminal=True, color_system=None), [wide])
    assert max(map(len, out.getvalue().splitlines())) == 80


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_every_message_that_is_sent_is_received(runner: Any, world_size: int) -> None:
    cells = module("cpu.message_cells").cells(world_size, [1, 1 << 30], 16 << 30)
    assert {cell.op for cell in cells} >= {"exchange", "send", "ping-pong", "batch"}
    assert all(world_size * (1 + cell.in_flight) * cell.nbytes <= 16 << 30 for cell in cells)
    assert any(cell.nbytes == 1 << 30 for cell in cells) and any(
        cell.in_flight > 1 for cell in cells
    )
    for cell in cells:
        ends = [cell.peers(rank, world_size) for rank in range(world_size)]
        sent = {(rank, to) for rank, (to, _) in enumerate(ends) if to is not None}
        assert sent == {
            (source, rank) for rank, (_, source) in enumerate(ends) if source is not None
        }
        assert sent and len({cell.key for cell in cells}) == len(cells)
