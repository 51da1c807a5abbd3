"""The steps of a matmul with its all-gather, for a picture: ``python benchmarks/timeline.py [CALLS]``.

Two ranks in the place ``shm`` call ``all_gather_matmul``, as ``pipelined`` and as ``unfused``. Beside them
they gather through gloo and call ``torch.mm``. torch.profiler records the copies and matmuls of each call.
The three ways alternate, and each call begins with a barrier. Other processes may take the cores during a
call, so of each way the fastest of all calls is written to ``benchmarks/results``.

``docs/drawings/timeline.py`` draws the file.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from circumstances import circumstances, new_result

import interlace

RANKS, M, N, K = 2, 512, 128, 1024
STEPS = {"aten::mm": "matmul", "aten::copy_": "copy", "gather": "gather"}
RANGE = "way "  # begins the name of the range of a call

Step = tuple[str, float, float]  # kind, begin and end in microseconds of a clock of the host
Call = tuple[str, float, float, list[Step]]  # way, begin, end, steps


def calls_of(profile: torch.profiler.profile) -> list[Call]:
    results: Any = profile.profiler
    start = results.kineto_results.trace_start_ns() / 1e3
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    calls: list[Call] = []
    for event in events:
        begin, end = start + event.time_range.start, start + event.time_range.end
        if event.name.startswith(RANGE):
            calls.append((event.name.removeprefix(RANGE), begin, end, []))
        elif event.name in STEPS and calls and end <= calls[-1][2]:
            calls[-1][3].append((STEPS[event.name], begin, end))
    return calls


def on_rank(repetitions: int, meeting: str) -> list[Call]:
    rank = interlace.get_rank()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
    x, w = torch.randn(M // RANKS, K), torch.randn(K, N)

    def gloo() -> None:
        whole = torch.empty(M, K)
        with torch.profiler.record_function("gather"):
            dist.all_gather_into_tensor(whole, x)  # torch 2.11 has no all_gather_single
        whole @ w

    def fused(algorithm: str) -> Callable[[], Any]:
        return lambda: interlace.all_gather_matmul(x, w, algorithm=algorithm)  # type: ignore[arg-type]

    ways = {"gloo": gloo, "unfused": fused("unfused"), "pipelined": fused("pipelined")}
    for call in [*ways.values()] * 3:
        call()
    with torch.profiler.profile() as profile:
        for _ in range(repetitions):
            for name, call in ways.items():
                interlace.barrier()
                with torch.profiler.record_function(RANGE + name):
                    call()
    dist.destroy_process_group()
    return calls_of(profile)


def fastest(ranks: list[list[Call]], way: str) -> dict[str, Any]:
    """Return the call with the least time from the first rank's begin to the last rank's end."""
    calls = zip(*([call for call in rank if call[0] == way] for rank in ranks), strict=True)

    def begin(call: tuple[Call, ...]) -> float:
        return min(of_rank[1] for of_rank in call)

    def time(call: tuple[Call, ...]) -> float:
        return max(of_rank[2] for of_rank in call) - begin(call)

    best = min(calls, key=time)
    steps = [
        [
            (kind, round(first - begin(best), 1), round(last - begin(best), 1))
            for kind, first, last in part
        ]
        for _, _, _, part in best
    ]
    return {"microseconds": round(time(best), 1), "steps": steps}


def main(repetitions: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = interlace.run(on_rank, RANKS, repetitions, f"{folder}/meeting", place="shm")
    facts = circumstances() | {
        "protocol": f"the fastest of {repetitions} calls of each way, which alternate"
    }
    shape = {"ranks": RANKS, "m": M, "n": N, "k": K, "dtype": "float32"}
    ways = {way: fastest(ranks, way) for way in ("gloo", "unfused", "pipelined")}
    path = new_result("timeline", facts)
    path.write_text(json.dumps({**facts, "shape": shape, "ways": ways}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
