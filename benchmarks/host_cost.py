"""What a call on a GPU costs the host, once calls like it were made: ``python benchmarks/host_cost.py``.

Without a GPU a stub stands in for the driver: streams, events and launches that do nothing, for rank 0 of
two whose peer always says the same at once. So this is the Python and C++ of torch and interlace up to the
driver, and neither what CUDA and Triton's launcher take nor any waiting for a peer's host. ``--gpu`` runs
on one, with processes as ranks, all of them on it if there are more than GPUs; the device is idle at the
start of every block, and a block is so short that no queue fills up.

Protocol: blocks of CALLS calls, candidates alternate block by block; medians over blocks. ``launches`` and
``events`` are what one call asks of the driver.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

CALLS = 50
RESULTS = Path(__file__).parent / "results"
BUDGET_US = 30.0

driver: Counter[str] = Counter()


# -- the stub ------------------------------------------------------------------------------------


class _Stream:
    handles = itertools.count(1)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.cuda_stream = next(self.handles)

    def wait_event(self, event: Any) -> None:
        driver["waits"] += 1

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        driver["events"] += 1

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Kernel:
    metadata = SimpleNamespace(global_scratch_size=0, num_ctas=1)
    function = packed_metadata = None

    def run(self, *arguments: Any) -> None:
        driver["launches"] += 1


class _Words:
    def write(self, stream: int, address: int, value: int) -> None:
        driver["words"] += 1

    wait = write


class _Host:
    """A host's place whose peers say what this rank says."""

    name, direct_access, linger = "shm", False, 0.0
    rank, world_size = 0, 2

    def exchange(self, payload: bytes, doing: str) -> list[bytes]:
        return [payload] * self.world_size

    def check(self) -> None: ...
    def close(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def trouble(self, doing: str) -> None: ...


@contextlib.contextmanager
def stubbed() -> Iterator[None]:
    """A process that is rank 0 of two, with the stub in place of the driver."""
    import triton

    from interlace import groups
    from interlace.runtime import cuda_driver
    from interlace.runtime.cuda_watchdog import Watchdog
    from interlace.runtime.launch import KernelLaunch
    from interlace.runtime.memory import SymmetricBuffer
    from interlace.runtime.place_cuda import CudaPlace

    def allocate(self: CudaPlace, nbytes: int) -> SymmetricBuffer:
        parts = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self.world_size)]
        table = torch.tensor([part.data_ptr() for part in parts])
        return SymmetricBuffer(self.rank, nbytes, table, parts)

    current, words = _Stream(), _Words()
    properties = SimpleNamespace(multi_processor_count=132, uuid="stub")
    patches = [
        mock.patch.object(torch.cuda, "Stream", _Stream),
        mock.patch.object(torch.cuda, "Event", _Event),
        mock.patch.object(torch.cuda, "ExternalStream", _Stream),
        mock.patch.object(torch.cuda, "current_stream", lambda device=None: current),
        mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        mock.patch.object(cuda_driver, "current_stream", lambda device: current.cuda_stream),
        mock.patch.object(cuda_driver, "capture_of", lambda stream: 0),
        mock.patch.object(cuda_driver, "stream_words", lambda device: words),
        mock.patch.object(cuda_driver, "pinned", lambda words: torch.tensor(words)),
        mock.patch.object(KernelLaunch, "compiled", lambda launch: _Kernel()),
        mock.patch.object(Watchdog, "look_after", lambda watchdog: None),
        mock.patch.object(CudaPlace, "_allocate", allocate),
        mock.patch.object(triton.knobs.runtime, "interpret", False),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        place = CudaPlace(_Host(), torch.device("cpu"), timeout=300.0)  # type: ignore[arg-type]
        groups.install(place)
        yield


# -- what is measured ----------------------------------------------------------------------------


def candidates(device: torch.device) -> dict[str, Callable[[], object]]:
    """The calls, by name. Shapes are of one token step: the host has the least time there."""
    import interlace

    x = torch.zeros(128, 512, dtype=torch.bfloat16, device=device)
    w = torch.zeros(512, 1024, dtype=torch.bfloat16, device=device)
    flat = torch.zeros(4096, device=device)
    out = torch.zeros(interlace.get_world_size() * 4096, device=device)
    fused: dict[str, Any] = {"algorithm": "fused"}
    return {
        "all_gather_matmul": lambda: interlace.all_gather_matmul(x, w, **fused),
        "matmul_reduce_scatter": lambda: interlace.matmul_reduce_scatter(x, w, **fused),
        "matmul_all_reduce": lambda: interlace.matmul_all_reduce(x, w, **fused),
        "all_gather_matmul, asynchronous": lambda: interlace.all_gather_matmul(
            x, w, async_op=True, **fused
        ).wait(),
        "all_reduce": lambda: interlace.all_reduce(flat),
        "all_gather": lambda: interlace.all_gather(out, flat),
    }


def _block(call: Callable[[], object], finish: Callable[[], None]) -> float:
    finish()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def measured(device: torch.device, repetitions: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds, and what a call asks of the driver."""
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    calls = candidates(device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    asked: dict[str, Counter[str]] = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        driver.clear()
        call()
        asked[name] = Counter(driver)
    for _ in range(repetitions):
        for name, call in calls.items():
            times[name].append(_block(call, finish))
    return {
        name: {"us": median(values), "least_us": min(values), **asked[name]}
        for name, values in times.items()
    }


def on_rank(repetitions: int) -> dict[str, dict[str, float]]:
    """On a GPU."""
    import interlace

    return measured(interlace.device(), repetitions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gpu", action="store_true", help="on a GPU, not with the stub")
    parser.add_argument("--ranks", type=int, default=2, help="with --gpu: processes")
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="write the result to results/")
    options = parser.parse_args()
    if options.gpu:
        import interlace

        table = interlace.run(
            on_rank, options.ranks, options.repetitions, place="cuda", processes=True
        )[0]
    else:
        with stubbed():
            table = measured(torch.device("cpu"), options.repetitions)
    for name, row in table.items():
        asked = ", ".join(f"{value:g} {key}" for key, value in row.items() if "us" not in key)
        mark = "" if row["us"] <= BUDGET_US else f"   over {BUDGET_US:g}"
        print(f"{name:34} {row['us']:7.1f} us  ({asked}){mark}")
    if options.json:
        from run import circumstances

        kind = torch.cuda.get_device_name() if options.gpu else "stub driver"
        record = {**circumstances(), "device": kind, "protocol": __doc__, "host_us": table}
        path = RESULTS / f"host-cost-{record['date']}-{str(record['commit'])[:8]}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
