"""The model of the fused ops: what it must obey on any machine, and that it does what the kernels do."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

import interlace
from interlace.runtime.places.sim.scheduler import recording
from interlace.runtime.places.sim.scheduler.recording import merge
from interlace.runtime.tuning.configuration import override
from sim.benchmark.model_support import (
    BOTH,
    GATHER,
    REDUCE,
    SCATTER,
    configured,
    machine,
    module,
    predict,
    shape,
    usage,
)

# -- conservation ------------------------------------------------------------------------------------

CASES = [
    (GATHER, "fused", "h100x8"), (GATHER, "fused by SMs", "h800x8"), (GATHER, "pipelined", "h100x8"),
    (GATHER, "interlace unfused", "h100x8"), (GATHER, "symm_mem", "h100x8-500w"),
    (GATHER, "Kraken", "h100x8-500w"), (GATHER, "fused", "h200x1"), (GATHER, "fused", "h200-pcie"),
    (SCATTER, "fused", "h100x8"), (SCATTER, "pipelined", "h100x8"), (SCATTER, "symm_mem", "h100x8"),
    (SCATTER, "Triton-distributed", "h800x8"), (SCATTER, "fused", "h200x1"),
    (REDUCE, "fused", "h100x8"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "algorithm", "name"), CASES)
@pytest.mark.parametrize("everyone", [False, True])
def test_nothing_is_busier_than_always(op: str, algorithm: str, name: str, everyone: bool) -> None:
    found = predict(machine(name), shape(op, 1024, 1024, 2048, 4), algorithm, everyone=everyone)
    busy = usage(found)
    assert 0 < busy.sms <= 1 and 0 < busy.clock <= 1 + 1e-9
    assert busy.most_sms <= machine(name).sms
    assert all(0 <= share <= 1 + 1e-9 for share in busy.links.values()), busy.links
    assert busy.links["sends"] > 0


@pytest.mark.parametrize("op", BOTH)
def test_every_peer_gets_every_byte_once(op: str) -> None:
    case = shape(op, 1024, 1024, 2048, 4)
    for name in module("model.predict").INTERLACE:
        if name in module("model.predict").algorithms(op):
            found = predict(machine(), case, name, everyone=True)
            total = usage(found).links["sends"] * found.microseconds * machine().link_gbs * 1e3
            assert total == pytest.approx(case.moved_bytes * 3 / 4, rel=1e-6), name


# -- limits and directions ---------------------------------------------------------------------------


def limit(**values: float) -> Any:
    """A machine without latencies, gaps and interference."""
    names = module("model.simulation.machines").PARAMETERS
    nothing = {name: 0.0 for name in names if name.endswith(("_us", "_us_per_mb"))}
    quick = {"hbm_gbs": math.inf, "sum_gbs": math.inf, "local_copy_gbs": math.inf}
    return machine().with_values("assumed: ideal", **{**nothing, **quick, **values})


@pytest.mark.parametrize("op", BOTH)
def test_with_an_infinite_link_fused_is_the_matmul_alone(op: str) -> None:
    infinite = limit(link_gbs=math.inf, sm_store_gbs=math.inf)
    case = shape(op, 8192)
    alone = predict(infinite, dataclasses.replace(case, world_size=1)).microseconds
    fused = predict(infinite, case).microseconds
    assert fused == pytest.approx(alone, rel=1e-9)
    library = module("model.simulation.kernels").library_us(infinite, case.m, case.n, case.k)
    assert 0.95 * library < fused < 1.15 * library  # 131 programs instead of 132, other tiles


@pytest.mark.parametrize("op", BOTH)
def test_without_arithmetic_fused_is_the_transfer(op: str) -> None:
    case = shape(op, 8192)
    free = limit(clock_tflops=1e12, power_tflops=1e12, sm_store_gbs=math.inf)
    expected = case.moved_bytes * 7 / 8 / (free.link_gbs * 1e3)
    assert predict(free, case).microseconds == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("parameter", ["link_gbs", "power_tflops", "hbm_gbs", "sm_store_gbs"])
def test_a_faster_machine_is_not_slower(op: str, parameter: str) -> None:
    base = machine()
    times = []
    for factor in (0.1, 0.3, 1.0, 3.0, 10.0):
        changed = base.with_values(
            "assumed: test", **{parameter: getattr(base, parameter) * factor}
        )
        times.append(predict(changed, shape(op, 4096, 3584, 8192)).microseconds)
    for slower, faster in itertools.pairwise(times):
        assert faster <= slower * 1.01
    if parameter != "sm_store_gbs":
        assert times[-1] < times[0]


# -- orders -----------------------------------------------------------------------------------------


def test_programs_do_in_the_model_what_they_do_in_the_simulator() -> None:
    """The reference is the order of tiles and copies in a recorded run."""
    tiles: dict[str, Any] = {"block_m": 16, "block_n": 16, "group_m": 2, "chunks": 2}
    tiles |= {"copiers": 2, "programs": 3}

    def gathers() -> None:
        with override(**tiles, block_k=16):
            interlace.all_gather_matmul(torch.ones(64, 16), torch.ones(16, 48), algorithm="fused")

    def scatters() -> None:
        with override(**tiles, block_k=16):
            interlace.matmul_reduce_scatter(
                torch.ones(96, 16), torch.ones(16, 48), algorithm="fused"
            )

    for op, fn, m in ((GATHER, gathers, 192), (SCATTER, scatters, 96)):
        with recording.recording() as recorder:
            interlace.run(fn, 3)
        real: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for span in merge([recorder.recording()]).spans:
            if span.kind in ("tile", "copy") and " program " in span.lane:
                assert span.peer is not None
                program = int(span.lane.rsplit(" ", 1)[1])
                real.setdefault((span.rank, program), []).append((span.kind, span.peer))
        case = shape(op, m, 48, 16, 3)
        log: list[Any] = []
        configuration = configured(case, **tiles)
        predict(machine(), case, "fused", configuration, everyone=True, log=log)
        modelled: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for span in sorted(log, key=lambda span: (span.begin, span.end)):
            if span.kind in ("tile", "copy"):
                modelled.setdefault((span.rank, span.program), []).append((span.kind, span.peer))
        assert modelled == real
        assert sum(map(len, real.values())) > 3 * 12


# -- choices -----------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="has no algorithm 'fast'"):
        predict(machine(), shape(GATHER), "fast")
    with pytest.raises(ValueError, match="order is 'any'"):
        predict(machine(), shape(GATHER), order="any")
    with pytest.raises(ValueError, match="op is 'matmul'"):
        shape("matmul")
    with pytest.raises(ValueError, match="machine 'abacus' is not known"):
        machine("abacus")
    with pytest.raises(ValueError, match="no multiple of nodes 3"):
        shape(GATHER, w=8, nodes=3)


def test_a_wait_that_nobody_ends_is_an_error() -> None:
    engine = module("model.simulation.engine")
    simulation = engine.Simulation()

    def waits() -> Any:
        yield engine.Signal()

    simulation.spawn(waits(), "the reader")
    with pytest.raises(engine.Deadlock, match="the reader"):
        simulation.run()


def test_unequal_shards_are_simulated_rank_by_rank() -> None:
    uneven = shape(GATHER, 1000, 512, 512, 3)
    assert predict(machine(), uneven).microseconds > 0
    with pytest.raises(ValueError, match=r"equal shards only, not \[334, 334, 332\]"):
        predict(machine(), uneven, "symm_mem")
