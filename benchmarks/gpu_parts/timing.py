"""Time on one GPU: events around many calls, medians with spread, inputs that rotate past the L2 cache.

On a place without a GPU the same functions run, to check that they are correct. The times are then an
interpreter's, mean nothing, and are not written down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from circumstances import in_turn

import interlace
from interlace.runtime.core.launch import KernelLaunch

WARM_UP = 3

Record = dict[str, Any]  # a line of the results


@dataclass(frozen=True)
class Time:
    """The time of one call, in microseconds: median, and the quartiles of the repetitions."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Time:
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[last // 4], ordered[last - last // 4])


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def launch_now(launch: KernelLaunch, stream: Any) -> None:
    """On the current CUDA stream; elsewhere on ``stream``, a stream of the place."""
    if torch.cuda.is_available():
        import triton  # after interlace, which may have it interpret

        triton.set_allocator(_scratch)
        launch.kernel[launch.extents](
            **launch.arguments,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            **launch.options,
        )
    else:
        stream.launch(launch)


def times_in_turn(
    names: Iterable[str], repetitions: int, warm_up: int, measure: Callable[[str], float]
) -> dict[str, Time]:
    values = in_turn(names, repetitions, warm_up, measure)
    return {name: Time.of(counted) for name, counted in values.items()}


def alternating(
    candidates: Mapping[str, Sequence[Callable[[], object]]],
    repetitions: int,
    *,
    graph: bool = True,
) -> dict[str, Time]:
    """Time candidates in turn; each is a list of the same call on different inputs."""
    on_gpu = torch.cuda.is_available()
    make = _captured if graph and on_gpu else _all_of
    runs = {name: make(calls) for name, calls in candidates.items()}

    def microseconds(name: str) -> float:
        if not on_gpu:
            start = time.perf_counter()
            runs[name]()
            return (time.perf_counter() - start) * 1e6 / len(candidates[name])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        runs[name]()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / len(candidates[name])

    return times_in_turn(candidates, max(1, repetitions), WARM_UP if on_gpu else 0, microseconds)


def _all_of(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    run = _all_of(calls)
    run()  # compiles, and fills caches of the launcher
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def inputs_past_cache(nbytes: int, device: torch.device) -> int:
    """How many sets of inputs of ``nbytes`` do not fit in the L2 cache together, twice over."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(8, -(-2 * cache // nbytes)))


def dtype_here() -> torch.dtype:
    return torch.bfloat16 if interlace.device().type == "cuda" else torch.float32


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal but for the rounding of a product in another order."""
    difference = (found.double() - wanted.double()).norm() / wanted.double().norm()
    return bool(difference < (1e-5 if found.dtype == torch.float32 else 1e-2))


def record(times: dict[str, Time], correct: bool, **derived: float) -> Record:
    """Return the results of a case. A wrong result has no times."""
    shown = {name: asdict(value) for name, value in times.items()} if correct else {}
    return {"correct": correct, "microseconds": shown, "derived": derived if correct else {}}


def on_ranks(
    part: str,
    case: str,
    measure: Callable[..., Record],
    *arguments: Any,
    world_size: int = 1,
    **where: Any,
) -> Record:
    """Return one line of results: from ``measure`` on its own ranks, or why there are none."""
    try:
        found = interlace.run(measure, world_size, *arguments, **where)[0]
        torch.cuda.empty_cache()  # the next case has another stream, which could not use it
    except Exception as error:  # the other cases are still worth their time
        found = record({}, False) | {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"part": part, "case": case, **found}
